"""A wrong answer that a shadow found: in words, as an error, and as a capsule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from pagedattn.checking.arbitration import Answer, host_step
from pagedattn.checking.capsule import Capsule, versions_here
from pagedattn.checking.capsule_metadata import CapsuleMetadata, printable
from pagedattn.checking.compare import Comparison, expected_of
from pagedattn.checking.row_sample import RowStep
from pagedattn.spec import AttentionSpec


class LayerRun(NamedTuple):
    """What one `run` of a step read and wrote. Let go of it before `run` returns."""

    q: Tensor  # dtype[tokens, num_qo_heads, head_dim]
    k_pages: Tensor  # dtype[pages, page_size, num_kv_heads, head_dim]
    v_pages: Tensor  # as k_pages
    out: Tensor  # as q
    lse: Tensor | None  # f32[tokens, num_qo_heads]

    def answer(self, backend: str, rows: Tensor) -> Answer:
        """What was answered for some rows, i64[rows] on the host."""
        index = rows.to(self.out.device)
        lse = None if self.lse is None else self.lse[index]
        return Answer(backend, self.out[index], lse)


@dataclass(frozen=True)
class Mismatch:
    """One sampled row for which the served answer, or the shadow's, or both are wrong.

    Attributes:
        step: Number of the step, the first being 0.
        layer: Number of the `run` in its step, the first being 0.
        row: Row of `q` and `out`.
        request: Whose it is.
        query: Which of its request's queries it is.
        kv_len: Keys of its request, up to the last that it may see.
        served: The backend that serves, with its distance to float64.
        shadow: The other backend, likewise.
    """

    step: int
    layer: int
    row: int
    request: int
    query: int
    kv_len: int
    served: tuple[str, Comparison]
    shadow: tuple[str, Comparison]

    @property
    def wrong(self) -> tuple[str, ...]:
        """Names of the backends that are wrong."""
        return tuple(name for name, comparison in (self.served, self.shadow) if not comparison.ok)

    def __str__(self) -> str:
        lines = []
        for who, (name, comparison) in (("serves", self.served), ("shadow", self.shadow)):
            verdict = "right" if comparison.ok else "WRONG"
            lines.append(f"{name} ({who}) is {verdict}, worst at {self._place(comparison)}")
        return (
            f"step {self.step}, layer {self.layer}, request {self.request}, query {self.query} "
            f"(row {self.row}, {self.kv_len} keys): {'; '.join(lines)}"
        )

    def _place(self, comparison: Comparison) -> str:
        assert comparison.worst is not None  # a row has elements
        return str(replace(comparison.worst, row=self.row))


class ShadowMismatch(RuntimeError):
    """Another backend answered otherwise, and float64 says that one of the two is wrong.

    Attributes:
        mismatch: Which, where, and how far off.
    """

    def __init__(self, mismatch: Mismatch) -> None:
        self.mismatch = mismatch
        super().__init__(str(mismatch))


def capsule_of(
    spec: AttentionSpec, rows: RowStep, run: LayerRun, answer: Answer, problem: str
) -> Capsule:
    """Keep rows with an answer to them, and the float64 answer.

    Args:
        spec: The layer kind.
        rows: The rows.
        run: What to read them from.
        answer: Of the backend that is wrong.
        problem: In words.
    """
    step, page_ids = host_step(spec, rows, run.q, run.k_pages, run.v_pages)
    expected = expected_of(answer.backend, step)
    metadata = CapsuleMetadata(
        spec,
        step.page_size,
        num_pages=run.k_pages.shape[0],
        backend=answer.backend,
        problem=printable(problem),
        versions=versions_here(),
    )
    got = answer.with_lse(expected.lse)
    return Capsule(metadata, step, page_ids, expected, got, has_lse=answer.lse is not None)
