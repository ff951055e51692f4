"""Host time of `plan` and `run`: our wrappers over FlashInfer's own, and a step of 32 layers.

Medians over many steps; the GPU is waited for between steps and never inside one, so nothing but
the host is timed. Both sides get the same host index tensors, and take turns: the host's clock
drifts by more than the two differ, so a difference is taken of neighbours in time and is itself a
median.

    python benchmarks/flashinfer_host_cost.py --output benchmarks/results/flashinfer_host_cost.csv
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from flashinfer_machine import describe_machine

from pagedattn import AttentionSpec, Capacity, PagedAttention, PageTable
from pagedattn.backends.flashinfer import FlashInferDecodeWrapper, FlashInferPrefillWrapper

HEADS, KV_HEADS, DIM, PAGE_SIZE = 32, 8, 128, 16
SIZES = (HEADS, KV_HEADS, DIM, PAGE_SIZE)
DEVICE = torch.device("cuda")
TYPES = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
LAYERS = 32
Call = Callable[[], object]
Calls = tuple[Call, ...]
PARTS = {"plan": slice(0, 1), "run": slice(1, 2), "plan + run": slice(0, 2)}
WHO = ("FlashInfer", "ours", "ours - FlashInfer")


class Step:
    """Host tables of a step, and inputs whose content does not matter."""

    def __init__(self, batch_size: int, qo_len: int) -> None:
        self.batch_size = batch_size
        self.table = PageTable.from_lengths([1024] * batch_size, PAGE_SIZE)
        self.kv_arrays = (self.table.kv_indptr, self.table.kv_indices, self.table.last_page_len)
        self.qo_indptr = torch.arange(batch_size + 1, dtype=torch.int32) * qo_len
        num_pages = len(self.table.kv_indices)
        shape = (num_pages, 2, PAGE_SIZE, KV_HEADS, DIM)
        self.kv_cache = torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE)
        self.q = torch.zeros(batch_size * qo_len, HEADS, DIM, dtype=torch.bfloat16, device=DEVICE)
        self.floats = torch.zeros(1 << 29, dtype=torch.uint8, device=DEVICE)


def flashinfer_decode(step: Step) -> tuple[Call, Call]:
    import flashinfer

    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        step.floats, use_tensor_cores=True, backend="fa2"
    )
    return (
        lambda: wrapper.plan(*step.kv_arrays, *SIZES, **TYPES),
        lambda: wrapper.run(step.q, step.kv_cache),
    )


def our_decode(step: Step) -> tuple[Call, Call]:
    wrapper = FlashInferDecodeWrapper(step.floats, *SIZES, device=DEVICE)
    return lambda: wrapper.plan(*step.kv_arrays), lambda: wrapper.run(step.q, step.kv_cache)


def flashinfer_prefill(kernel: str) -> Callable[[Step], tuple[Call, Call]]:
    def make(step: Step) -> tuple[Call, Call]:
        import flashinfer

        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(step.floats, backend=kernel)
        arrays = (step.qo_indptr, *step.kv_arrays)
        return (
            lambda: wrapper.plan(*arrays, *SIZES, causal=True, **TYPES),
            lambda: wrapper.run(step.q, step.kv_cache),
        )

    return make


def our_prefill(kernel: str) -> Callable[[Step], tuple[Call, Call]]:
    def make(step: Step) -> tuple[Call, Call]:
        wrapper = FlashInferPrefillWrapper(step.floats, *SIZES, device=DEVICE, backend=kernel)
        arrays = (step.qo_indptr, *step.kv_arrays)
        return lambda: wrapper.plan(*arrays), lambda: wrapper.run(step.q, step.kv_cache)

    return make


def our_facade(step: Step) -> tuple[Call, Call]:
    spec = AttentionSpec(HEADS, KV_HEADS, DIM)
    attn = PagedAttention(spec, PAGE_SIZE, backend="flashinfer", device=DEVICE)
    return (
        lambda: attn.plan(step.table),  # as both decode wrappers: without query bounds
        lambda: attn.run(step.q, step.kv_cache),
    )


PAIRS = {  # what: (query tokens a request, FlashInfer's, ours)
    "decode": (1, flashinfer_decode, our_decode),
    "prefill fa2": (16, flashinfer_prefill("fa2"), our_prefill("fa2")),
    "prefill fa3": (16, flashinfer_prefill("fa3"), our_prefill("fa3")),
    "decode, PagedAttention": (1, flashinfer_decode, our_facade),
}


def medians_us(*sides: Calls, repeats: int = 300) -> list[float]:
    """Host time of each side, and behind them of the last side over the first, all medians."""
    for _ in range(20):
        for calls in sides:
            seconds(calls)
    times = [[seconds(calls) for calls in sides] for _ in range(repeats)]
    columns = [*zip(*times, strict=True), [each[-1] - each[0] for each in times]]
    return [1e6 * statistics.median(column) for column in columns]


def seconds(calls: Calls) -> float:
    """Host time of calls one after the other, from an idle GPU."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - begin


def layers_under_a_graph(step: Step) -> tuple[Call, Call]:
    """One plan, one replay of 32 layers; refuses every synchronisation."""
    spec = AttentionSpec(HEADS, KV_HEADS, DIM)
    pages = len(step.table.kv_indices)
    capacity = Capacity(step.batch_size, step.batch_size, pages)
    attn = PagedAttention(spec, PAGE_SIZE, backend="flashinfer", device=DEVICE, capacity=capacity)
    attn.plan(step.table)
    attn.run(step.q, step.kv_cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAYERS):
            attn.run(step.q, step.kv_cache)

    def plan() -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            attn.plan(step.table)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return plan, graph.replay


def rows_of(batch_size: int) -> list[dict[str, str]]:
    rows = []
    for what, (qo_len, theirs, ours) in PAIRS.items():
        if "fa3" in what and torch.cuda.get_device_capability()[0] != 9:
            continue
        step = Step(batch_size, qo_len)
        sides = theirs(step), ours(step)
        for plan, _ in sides:
            plan()
        for part, chosen in PARTS.items():
            medians = medians_us(*(side[chosen] for side in sides))
            for who, median in zip(WHO, medians, strict=True):
                rows.append(row(batch_size, what, f"{part}: {who}", median))
    plan, replay = layers_under_a_graph(Step(batch_size, 1))
    for part, calls in {"plan": (plan,), "plan + replay": (plan, replay)}.items():
        median, _ = medians_us(calls)
        rows.append(row(batch_size, f"{LAYERS} layers", part, median))
    return rows


def row(batch_size: int, what: str, measure: str, value: float) -> dict[str, str]:
    print(f"batch {batch_size:4}  {what:24} {measure:30} {value:9.1f} us", flush=True)
    return {"batch": str(batch_size), "what": what, "measure": measure, "us": f"{value:.1f}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = [r for batch_size in args.batches for r in rows_of(batch_size)]
    print(describe_machine())
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        with args.output.open("w", newline="") as file:
            file.write(f"# {describe_machine()}\n")
            writer = csv.DictWriter(file, ["batch", "what", "measure", "us"])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
