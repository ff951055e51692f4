"""The README's table of speeds, from the newest committed results.

    python -m benchmarks.readme

Results are `benchmarks/results/DATE-GPU/benchmark.csv`; the newest is the last by name.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.results_file import Result, read
from benchmarks.standing import TRITON, Standing, milliseconds, standings

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
BEGIN, END = "<!-- benchmark: begin -->", "<!-- benchmark: end -->"
COLUMNS = (TRITON, "pagedattn-flashinfer", "pagedattn-mixed")
GROUP = "anchors"


def newest_results(root: Path = ROOT) -> Path | None:
    """The newest results file, None where there is none yet."""
    found = sorted(root.glob("benchmarks/results/*/benchmark.csv"))
    return found[-1] if found else None


def section(path: Path | None, root: Path = ROOT) -> str:
    """What stands between the markers."""
    if path is None:
        return "No run of the benchmark is committed yet."
    results = [r for r in read(path) if r.case_group == GROUP]
    found = standings(results)
    if not found:
        return f"`{path.relative_to(root)}` has no case of the table yet."
    header = ["case", *COLUMNS, "fastest peer", "its µs", "triton / peer"]
    lines = [_row(header), _row(["---"] * len(header)), *(_row(_cells(s)) for s in found)]
    return "\n".join([*lines, "", _source(found[-1].best_peer, path, root)])


def _cells(standing: Standing) -> list[str]:
    ours = [_microseconds(standing.time_of(name)) for name in COLUMNS]
    peer, triton = milliseconds(standing.best_peer), standing.time_of(TRITON)
    ratio = "" if triton is None else f"{triton / peer:.2f}"
    return [standing.case, *ours, standing.best_peer.backend, _microseconds(peer), ratio]


def _microseconds(value_ms: float | None) -> str:
    if value_ms is None:
        return ""
    return f"{1e3 * value_ms:.1f}" if value_ms < 1 else f"{1e3 * value_ms:.0f}"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _source(result: Result, path: Path, root: Path) -> str:
    versions = f"FlashInfer {result.flashinfer}, torch {result.torch}, triton {result.triton}"
    return (
        f"µs of one call in a captured graph, cold L2 cache. {result.gpu}, driver {result.driver}, "
        f"{versions}; from [`{path.relative_to(root)}`]({path.relative_to(root)})."
    )


def updated(text: str, content: str) -> str:
    """A README with this between its markers.

    Raises:
        ValueError: It does not have both markers.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"expected {BEGIN} and {END} in the README")
    return f"{before}{BEGIN}\n{content}\n{END}{after}"


def main() -> None:
    """Bring the README in step."""
    README.write_text(updated(README.read_text(), section(newest_results())))


if __name__ == "__main__":
    main()
