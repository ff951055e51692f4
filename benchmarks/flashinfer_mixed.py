"""Mixed steps on a GPU: our mixed wrapper, its halves alone, and FlashInfer's ways in one call.

Every way is captured in a CUDA graph and its replay timed with a cold L2 cache, median; the ways of
a case are checked against each other once, before anything is timed.

    python benchmarks/flashinfer_mixed.py --output benchmarks/results/flashinfer_mixed.csv
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from flashinfer_machine import describe_machine

from pagedattn import PageTable
from pagedattn.backends.flashinfer import (
    FlashInferDecodeWrapper,
    FlashInferMixedWrapper,
    FlashInferPrefillWrapper,
    Workspace,
)

HEADS, KV_HEADS, DIM, PAGE_SIZE = 32, 8, 128, 16
SIZES = (HEADS, KV_HEADS, DIM, PAGE_SIZE)
DEVICE = torch.device("cuda")
Way = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Case:
    name: str
    num_decode: int
    decode_len: int
    num_prompts: int
    prompt_len: int
    context_len: int = 0

    @property
    def qo_lens(self) -> list[int]:
        return [1] * self.num_decode + [self.prompt_len] * self.num_prompts

    @property
    def kv_lens(self) -> list[int]:
        prompt = self.prompt_len + self.context_len
        return [self.decode_len] * self.num_decode + [prompt] * self.num_prompts


CASES = (
    Case("64 x 4k decode + 2 x 2k prompts", 64, 4096, 2, 2048),
    Case("32 x 8k decode + 1 x 8k prompt", 32, 8192, 1, 8192),
    Case("256 x 2k decode + 1 x 512 prompt", 256, 2048, 1, 512),
    Case("128 x 8k decode + 4 x 1k at 8k", 128, 8192, 4, 1024, 8192),
)


@dataclass(frozen=True, eq=False)
class Inputs:
    table: PageTable
    qo_indptr: torch.Tensor
    q: torch.Tensor
    kv_cache: torch.Tensor

    def of(self, rows: slice) -> Inputs:
        """A run of whole requests."""
        begin, end, _ = rows.indices(self.table.batch_size)
        first, last = self.table.kv_indptr[[begin, end]].tolist()
        table = PageTable(
            PAGE_SIZE,
            self.table.kv_indptr[begin : end + 1] - first,
            self.table.kv_indices[first:last].clone(),
            self.table.kv_lens[rows].clone(),
        )
        tokens = self.qo_indptr[[begin, end]].tolist()
        qo_indptr = self.qo_indptr[begin : end + 1] - tokens[0]
        return Inputs(table, qo_indptr, self.q[slice(*tokens)].clone(), self.kv_cache)

    @property
    def kv_arrays(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.table.kv_indptr, self.table.kv_indices, self.table.last_page_len


def make_inputs(case: Case) -> Inputs:
    gen = torch.Generator().manual_seed(0)
    num_pages = sum(-(-n // PAGE_SIZE) for n in case.kv_lens)
    ids = (torch.randperm(num_pages, generator=gen) + 1).int()
    table = PageTable.from_lengths(case.kv_lens, PAGE_SIZE, ids)
    qo_indptr = torch.tensor([0, *case.qo_lens]).cumsum(0).int()
    shape = (num_pages + 1, 2, PAGE_SIZE, KV_HEADS, DIM)
    kv_cache = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
    q = torch.randn(int(qo_indptr[-1]), HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
    return Inputs(table, qo_indptr, q, kv_cache)


def workspace() -> Workspace:
    return Workspace(torch.zeros(1 << 20, dtype=torch.uint8, device=DEVICE), "benchmark")


def ours_mixed(case: Case, inputs: Inputs) -> Way:
    batch, tokens, pages = len(case.qo_lens), inputs.q.shape[0], len(inputs.table.kv_indices)
    wrapper = FlashInferMixedWrapper(
        workspace(), workspace(), *SIZES, batch, tokens, pages, max(case.num_prompts, 1), DEVICE
    )
    wrapper.plan(inputs.qo_indptr, *inputs.kv_arrays)
    return lambda: wrapper.run(inputs.q, inputs.kv_cache)


def ours_mixed_in_one_stream(case: Case, inputs: Inputs) -> Way:
    batch, tokens, pages = len(case.qo_lens), inputs.q.shape[0], len(inputs.table.kv_indices)
    shared = workspace()
    wrapper = FlashInferMixedWrapper(
        shared, shared, *SIZES, batch, tokens, pages, max(case.num_prompts, 1), DEVICE
    )
    wrapper.plan(inputs.qo_indptr, *inputs.kv_arrays)
    return lambda: wrapper.run(inputs.q, inputs.kv_cache)


def ours_decode_half(case: Case, inputs: Inputs) -> Way:
    part = inputs.of(slice(0, case.num_decode))
    wrapper = FlashInferDecodeWrapper(
        workspace(),
        *SIZES,
        batch_size=case.num_decode,
        max_num_pages=len(part.table.kv_indices),
        device=DEVICE,
        accelerator_graph=True,
    )
    wrapper.plan(*part.kv_arrays)
    return lambda: wrapper.run(part.q, part.kv_cache)


def ours_prefill_half(case: Case, inputs: Inputs) -> Way:
    part = inputs.of(slice(case.num_decode, None))
    wrapper = FlashInferPrefillWrapper(
        workspace(),
        *SIZES,
        batch_size=case.num_prompts,
        max_total_tokens=part.q.shape[0],
        max_num_pages=len(part.table.kv_indices),
        device=DEVICE,
        accelerator_graph=True,
    )
    wrapper.plan(part.qo_indptr, *part.kv_arrays)
    return lambda: wrapper.run(part.q, part.kv_cache)


def flashinfer_prefill(kernel: str) -> Callable[[Case, Inputs], Way]:
    def make(case: Case, inputs: Inputs) -> Way:
        import flashinfer

        floats = torch.zeros(1 << 30, dtype=torch.uint8, device=DEVICE)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(floats, backend=kernel)
        types = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
        wrapper.plan(inputs.qo_indptr, *inputs.kv_arrays, *SIZES, causal=True, **types)
        out = torch.empty_like(inputs.q)
        return lambda: wrapper.run(inputs.q, inputs.kv_cache, out=out)

    return make


def flashinfer_batch_attention(case: Case, inputs: Inputs) -> Way:
    import flashinfer

    wrapper = flashinfer.BatchAttention("NHD", "cuda")
    table = inputs.table
    arrays = (inputs.qo_indptr, table.kv_indptr, table.kv_indices, table.kv_lens)
    sizes = (HEADS, KV_HEADS, DIM, DIM, PAGE_SIZE)
    wrapper.plan(*(a.to(DEVICE) for a in arrays), *sizes, causal=True, sm_scale=DIM**-0.5)
    out = torch.empty_like(inputs.q)
    lse = torch.empty(inputs.q.shape[:2], device=DEVICE)
    return lambda: wrapper.run(inputs.q, inputs.kv_cache, out, lse)[0]


WAYS = {
    "mixed wrapper": ours_mixed,
    "mixed wrapper, one stream": ours_mixed_in_one_stream,
    "its decode half": ours_decode_half,
    "its prefill half": ours_prefill_half,
    "BatchAttention": flashinfer_batch_attention,
    "prefill wrapper fa2": flashinfer_prefill("fa2"),
    "prefill wrapper fa3": flashinfer_prefill("fa3"),
}


def check(name: str, out: torch.Tensor, expected: torch.Tensor) -> None:
    error = float((out.float() - expected.float()).abs().max())
    if not error < 0.03:
        raise RuntimeError(f"{name} differs from the fa2 prefill wrapper by {error}")


def capture(way: Way) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        way()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        way()
    return graph


def measure(graph: torch.cuda.CUDAGraph) -> float:
    """Median microseconds of a replay with a cold L2 cache."""
    from triton.testing import do_bench

    return 1000 * float(do_bench(graph.replay, warmup=100, rep=400, return_mode="median"))


def run_case(case: Case) -> dict[str, float]:
    inputs = make_inputs(case)
    tokens = case.num_decode
    parts = {"its decode half": slice(0, tokens), "its prefill half": slice(tokens, None)}
    expected = flashinfer_prefill("fa2")(case, inputs)().clone()
    times: dict[str, float] = {}
    for name, make in WAYS.items():
        if "fa3" in name and torch.cuda.get_device_capability()[0] != 9:
            continue
        try:
            way = make(case, inputs)
            check(name, way(), expected[parts.get(name, slice(None))])
            times[name] = measure(capture(way))
        except Exception as error:  # one way that fails must not hide the others
            print(f"  {name}: {type(error).__name__}: {str(error)[:200]}")
        torch.cuda.empty_cache()
    return times


def ratios(times: dict[str, float]) -> dict[str, float]:
    """The mixed wrapper's time over that of the better single call, and over its halves' sum."""
    single = [times[n] for n in WAYS if n in times and (n == "BatchAttention" or "wrapper fa" in n)]
    halves = times.get("its decode half", 0) + times.get("its prefill half", 0)
    mixed = times.get("mixed wrapper", float("nan"))
    return {
        "mixed / better single call": mixed / min(single, default=float("nan")),
        "mixed / its halves": mixed / halves if halves else float("nan"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, nargs="+", default=list(range(len(CASES))))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = []
    for case in (CASES[i] for i in args.cases):
        print(case.name, flush=True)
        times = run_case(case)
        for name, value in [*times.items(), *ratios(times).items()]:
            unit = "ratio" if "/" in name else "us"
            rows.append({"case": case.name, "what": name, "unit": unit, "value": f"{value:.4g}"})
            print(f"  {name:28} {value:10.4g} {unit}", flush=True)
    print(describe_machine())
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        with args.output.open("w", newline="") as file:
            file.write(f"# {describe_machine()}\n")
            writer = csv.DictWriter(file, ["case", "what", "unit", "value"])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
