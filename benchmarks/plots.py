"""Two pictures of a results file: where the times lie under the roofline, and speed beside peers.

python -m benchmarks.plots results.csv folder
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.results_file import Result, read
from benchmarks.standing import Standing, latest, standings
from benchmarks.work import Ceilings, ceilings_of
from pagedattn.draw.palette import FAINT_LINE, INK, LINE, OWNERS

OURS = {
    "pagedattn-triton": (OWNERS[4], "o"),
    "pagedattn-flashinfer": (OWNERS[2], "s"),
    "pagedattn-mixed": (OWNERS[5], "D"),
}
PEER = (LINE, "x")


def draw_all(results: Sequence[Result], folder: Path) -> list[Path]:
    """Write `roofline.svg`, where the GPU's ceilings are known, and `relative.svg`."""
    usable = [r for r in latest(results) if r.is_usable]
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    ceilings = ceilings_of(usable[-1].gpu) if usable else None
    if ceilings is not None:
        written.append(draw_roofline(usable, ceilings, folder / "roofline.svg"))
    found = standings(usable)
    if found:
        written.append(draw_relative(found, folder / "relative.svg"))
    return written


def draw_roofline(results: Sequence[Result], ceilings: Ceilings, path: Path) -> Path:
    """Rate over intensity, both logarithmic; nothing can lie above the two lines."""
    figure, axes = _figure(8, 5.5)
    intensity = np.geomspace(0.5, 1e4, 200)
    roof = np.minimum(intensity * ceilings.read_gb_per_s / 1e3, ceilings.product_tflops)
    axes.loglog(intensity, roof, color=INK, linewidth=1)
    for name in sorted({r.backend for r in results}, key=lambda n: n in OURS):
        colour, marker = OURS.get(name, PEER)
        own = [r for r in results if r.backend == name]
        axes.plot(
            [r.flops / r.min_bytes for r in own],
            [r.tflops for r in own],
            marker,
            color=colour,
            markersize=4,
            label=_label(name),
        )
    axes.set_xlabel("FLOP per byte that must be moved")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(
        f"{results[-1].gpu}: {ceilings.read_gb_per_s:g} GB/s, {ceilings.product_tflops:g} TFLOP/s"
    )
    return _save(figure, axes, path)


def draw_relative(found: Sequence[Standing], path: Path) -> Path:
    """For each case the speed of everything over that of the fastest peer: right is faster."""
    figure, axes = _figure(9, 1.5 + 0.2 * len(found))
    for y, standing in enumerate(reversed(found)):
        for result in sorted(standing.results, key=lambda r: r.backend in OURS):
            colour, marker = OURS.get(result.backend, PEER)
            label = _label(result.backend)
            axes.plot(standing.speed(result), y, marker, color=colour, markersize=4, label=label)
    axes.axvline(1, color=INK, linewidth=1)
    axes.set_xlim(left=0)
    axes.set_ylim(-0.7, len(found) - 0.3)
    axes.set_yticks(range(len(found)), [s.case for s in reversed(found)], fontsize=7)
    axes.set_xlabel("speed, 1 = fastest that reads pages and is not pagedattn-triton")
    return _save(figure, axes, path)


def _label(backend: str) -> str:
    return backend if backend in OURS else "others"


def _figure(width: float, height: float) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise click.ClickException('plots need matplotlib: pip install "pagedattn[viz]"') from None
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(color=FAINT_LINE, linewidth=0.5)
    axes.set_axisbelow(True)
    return figure, axes


def _save(figure: Any, axes: Any, path: Path) -> Path:
    """Write a figure with one legend entry a label, the same bytes for the same results."""
    import matplotlib

    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    if handles:
        axes.legend(handles.values(), handles.keys(), fontsize=8)
    with matplotlib.rc_context({"svg.hashsalt": path.name}):
        figure.savefig(path, metadata={"Date": None})
    return path


@click.command()
@click.argument("csv_path", type=click.Path(exists=True, path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
def main(csv_path: Path, folder: Path) -> None:
    """Draw the plots of a results file."""
    for path in draw_all(read(csv_path), folder):
        click.echo(path)


if __name__ == "__main__":
    main()
