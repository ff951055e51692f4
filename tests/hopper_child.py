"""Compute cases with the Gluon kernels and say how right they were.

Run as a program: `python hopper_child.py '<json list of cases>'` prints one JSON object for
each case, as soon as it is known. It is a program of its own because a kernel that waits for what
never comes hangs its process for good; the caller ends it.

A case: spec (fields of AttentionSpec), page_size, kv_lens, qo_lens; and where they differ from what
`batch_of` takes, values, garbage; all_nan: true, where every key and value is NaN and some rows of
one request see none; strided ("heads", "pages" or "odd"): how the cache lies; graph: true, where
the run is captured with another step planned and replayed with this one; first_grid: the programs
of a first launch of the kernel for long queries, where there are two, which share the units;
options: of the object.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from attention_steps import batch_of

from pagedattn import AttentionSpec, Capacity, PagedAttention, PageTable
from pagedattn.attention import AttentionOutput
from pagedattn.checking.compare import check_backend
from pagedattn.checking.step import Step


def step_of(case: dict) -> Step:
    fields = dict(case["spec"])
    fields["dtype"] = getattr(torch, fields.get("dtype", "float16"))
    options = {name: case[name] for name in ("values", "garbage") if name in case}
    batch = batch_of(
        AttentionSpec(**fields), case["page_size"], case["kv_lens"], case["qo_lens"], **options
    )
    step = batch.materialise(torch.device("cuda"))
    return replace(step, kv_cache=strided(step.kv_cache, case.get("strided", "")))


def strided(kv_cache: torch.Tensor, how: str) -> torch.Tensor:
    """The same cache among NaN: heads in the middle of more, or pages that no matrix row fits.

    "odd" pages do not begin at multiples of 16 bytes either.
    """
    num_pages, two, page_size, num_heads, head_dim = kv_cache.shape
    if how == "heads":
        shape = (num_pages, two, page_size, num_heads + 2, head_dim)
        place = kv_cache.new_full(shape, torch.nan)[:, :, :, 1:-1]
    elif how in ("pages", "odd"):
        gap = 8 if how == "pages" else 4
        row = kv_cache[0].numel() + gap
        place = kv_cache.new_full((num_pages, row), torch.nan)[:, :-gap].view(kv_cache.shape)
    else:
        return kv_cache
    return place.copy_(kv_cache)


def launch_twice(kernel: Any, first_grid: int) -> None:
    """Let every launch of the Gluon kernel be two."""
    prepare = kernel.prepare

    def prepare_both(*arguments: Any) -> Callable[..., None]:
        launch = prepare(*arguments)

        def launch_both(grid: int, stream: torch.cuda.Stream | None = None) -> None:
            launch(first_grid, stream)
            launch(grid - first_grid, stream)

        return launch_both

    kernel.prepare = prepare_both


def attention(step: Step, plain: bool, first_grid: int = 0, **options: object) -> PagedAttention:
    attn = PagedAttention(step.spec, step.page_size, backend="triton", device="cuda", **options)
    backend = attn._backend
    assert backend._hopper is not None, "the Gluon kernel was not chosen"
    if plain:
        backend._hopper = None
    elif first_grid:
        launch_twice(backend._hopper, first_grid)
    return attn


def eager(plain: bool, first_grid: int = 0, **options: object) -> Callable[[Step], AttentionOutput]:
    def attend(step: Step) -> AttentionOutput:
        attn = attention(step, plain, first_grid, **options)
        attn.plan(step.page_table, step.qo_indptr)
        outputs = []
        for _ in range(2):
            out = torch.full_like(step.q, torch.nan)
            lse = torch.full(step.q.shape[:2], torch.nan, device="cuda")
            outputs.append(attn.run_return_lse(step.q, step.kv_cache, out=out, lse=lse))
        for first, second in zip(*outputs, strict=True):
            assert torch.equal(first.nan_to_num(7), second.nan_to_num(7)), "two runs differ"
        without_lse = attn.run(step.q, step.kv_cache)
        assert torch.equal(without_lse.nan_to_num(7), outputs[0].out.nan_to_num(7))
        assert not attn._backend._buffers.turns.any(), "turns are not reset"
        return outputs[0]

    return attend


def replayed(
    plain: bool, first_grid: int = 0, **options: object
) -> Callable[[Step], AttentionOutput]:
    """Capture with a step of one token planned; replay with the step planned, and padding rows."""

    def attend(step: Step) -> AttentionOutput:
        num_tokens, padding = step.q.shape[0], 300
        num_pages = step.page_table.kv_indices.numel()
        capacity = Capacity(len(step.kv_lens) + 1, num_tokens + padding, num_pages + 2)
        attn = attention(step, plain, first_grid, capacity=capacity, **options)
        q = torch.cat([step.q, step.q.new_full((padding, *step.q.shape[1:]), torch.nan)])
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device="cuda")
        attn.plan(PageTable.from_lengths([1], step.page_size), torch.tensor([0, 1]).int())
        attn.run_return_lse(q, step.kv_cache, out=out, lse=lse)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attn.run_return_lse(q, step.kv_cache, out=out, lse=lse)
        for _ in range(2):
            attn.plan(step.page_table, step.qo_indptr)
            out.fill_(torch.nan)
            graph.replay()
        assert not out[num_tokens:].any(), "padding rows are not 0"
        assert (lse[num_tokens:] == -torch.inf).all(), "padding rows have keys"
        return AttentionOutput(out[:num_tokens], lse[:num_tokens])

    return attend


def check_empty_rows(step: Step, plain: bool) -> dict:
    """Whether the first rows of one request, which see no key, are 0 where all others see NaN."""
    step.kv_cache.fill_(torch.nan)
    out, lse = eager(plain)(step)
    empty = int(step.q.shape[0] - step.kv_lens[0])
    is_zero = bool((out[:empty] == 0).all() and (lse[:empty] == -torch.inf).all())
    is_nan = bool(out[empty:].isnan().all() and lse[empty:].isnan().all())
    return {"ok": is_zero and is_nan, "worst": f"{empty} rows: {is_zero=}, the others: {is_nan=}"}


def check(case: dict) -> dict:
    """Whether the Gluon kernel and the plain one are within the bound of float64."""
    step = step_of(case)
    how = replayed if case.get("graph") else eager
    answer = {}
    for name, plain in (("gluon", False), ("plain", True)):
        if case.get("all_nan"):
            answer[name] = check_empty_rows(step, plain)
            continue
        attend = how(plain, case.get("first_grid", 0), **case.get("options", {}))
        comparison = check_backend("triton", step, attend=attend)
        answer[name] = {"ok": comparison.ok, "worst": str(comparison.worst)}
    return answer


if __name__ == "__main__":
    torch.set_num_threads(1)  # many of these run side by side
    for case in json.loads(sys.argv[1]):
        try:
            answer = check(case)
        except Exception as error:  # the next case has its own say
            answer = {"error": f"{type(error).__name__}: {error}"[:3000]}
        print(json.dumps(answer), flush=True)
