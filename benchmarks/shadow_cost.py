"""What a shadow costs: nothing at all, between looks, for a look, and for settling a doubt.

A step is one plan and the runs of its layers. Medians over many steps; the objects that are
compared take turns, step by step, so that a machine that slows down slows all of them. On a GPU
"host" is the time until the last launch and "whole" the time until the GPU is done; a look waits
for the GPU, so its cost is a difference of whole steps.

    python benchmarks/shadow_cost.py --output benchmarks/results/shadow_cost.csv
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
import timeit
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from pagedattn import AttentionSpec, PagedAttention, PageTable, Shadow
from pagedattn.checking import arbitration
from pagedattn.checking.choice import interpret_on_cpu
from pagedattn.checking.step import Step
from pagedattn.device import resolve_device
from pagedattn.toolchain import FLASHINFER_PACKAGE, package_version

PAGE_SIZE = 16
NEVER = 1 << 62  # the first step is looked at, and no other within a lifetime
COLUMNS = ["served", "shadow", "batch", "kv_len", "layers", "measure", "us"]


class Times(NamedTuple):
    """Medians in microseconds."""

    host: float
    whole: float


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def decode_step(spec: AttentionSpec, batch_size: int, kv_len: int, device: torch.device) -> Step:
    table = PageTable.from_lengths([kv_len] * batch_size, PAGE_SIZE)
    qo_indptr = torch.arange(batch_size + 1, dtype=torch.int32)
    q = torch.randn(batch_size, spec.num_qo_heads, spec.head_dim, dtype=spec.dtype, device=device)
    shape = (table.kv_indices.numel(), 2, PAGE_SIZE, spec.num_kv_heads, spec.head_dim)
    kv_cache = torch.randn(shape, dtype=spec.dtype, device=device)
    return Step(spec, table, qo_indptr, q, kv_cache)


def time_one(attn: PagedAttention, step: Step, layers: int) -> Times:
    synchronise(attn.device)
    begin = time.perf_counter()
    attn.plan(step.page_table, step.qo_indptr)
    for _ in range(layers):
        attn.run(step.q, step.kv_cache)
    host = time.perf_counter()
    synchronise(attn.device)
    return Times(1e6 * (host - begin), 1e6 * (time.perf_counter() - begin))


def medians(
    objects: Sequence[PagedAttention], step: Step, layers: int, repeats: int
) -> list[Times]:
    times: list[list[Times]] = [[] for _ in objects]
    for turn in range(repeats + 2):
        for attn, taken in zip(objects, times, strict=True):
            measured = time_one(attn, step, layers)
            if turn >= 2:  # the first ones compile and look
                taken.append(measured)
    return [Times(*map(statistics.median, zip(*taken, strict=True))) for taken in times]


def cost_of_calls(attn: PagedAttention, step: Step, layers: int, repeats: int = 2000) -> float:
    """Microseconds of what a shadow is told of a step that it does not look at."""
    watch = attn.shadow
    assert watch is not None
    begin = time.perf_counter()
    for _ in range(repeats):
        watch.begin_step(step.page_table, step.qo_indptr)
        for _ in range(layers):
            watch.after_run(step.q, step.kv_cache, step.q, None)
    return 1e6 * (time.perf_counter() - begin) / repeats


def cost_of_test(attn: PagedAttention) -> float:
    """Microseconds of the one test that a run has for a shadow."""
    return 1e6 * timeit.timeit("attn.shadow is None", globals={"attn": attn}, number=10**6) / 1e6


def costs_of(args: argparse.Namespace, batch_size: int, kv_len: int) -> dict[str, float]:
    device = resolve_device(args.device)
    spec = AttentionSpec(args.qo_heads, args.kv_heads, 128)
    step = decode_step(spec, batch_size, kv_len, device)

    def build(shadow: Shadow | None) -> PagedAttention:
        return PagedAttention(spec, PAGE_SIZE, backend=args.served, device=device, shadow=shadow)

    idle = Shadow(args.shadow, every=NEVER, rows=args.rows, on_mismatch="raise")
    busy = replace(idle, every=1)
    objects = [build(None), build(idle), build(busy)]
    off, between, look = medians(objects, step, args.layers, args.repeats)
    # where nothing agrees, the last bit is in doubt: one row of each step is settled in float64
    kept = arbitration.AGREEMENT_UNITS, arbitration.FLOAT32_TOLERANCE
    arbitration.AGREEMENT_UNITS = arbitration.FLOAT32_TOLERANCE = 0
    doubting = build(replace(busy, rows=1))
    doubt = medians([doubting], step, 1, min(args.repeats, 5))[0]
    arbitration.AGREEMENT_UNITS, arbitration.FLOAT32_TOLERANCE = kept
    one = medians([build(replace(busy, rows=1))], step, 1, args.repeats)[0]
    doubted = doubting.shadow is not None and doubting.shadow.counts.doubtful > 0
    return {
        "a step, no shadow, host": off.host,
        "a step, no shadow, whole": off.whole,
        "no shadow: one test, each run": cost_of_test(objects[0]),
        "between looks: its calls, a step": cost_of_calls(objects[1], step, args.layers),
        "between looks: more host time": between.host - off.host,
        "a look: more time": look.whole - between.whole,
        "a look, spread over 1000 steps": (look.whole - between.whole) / 1000,
        "a doubt, one row: more time": doubt.whole - one.whole if doubted else float("nan"),
    }


def describe_machine() -> str:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    names = ("torch", "triton", FLASHINFER_PACKAGE)
    return ", ".join([gpu, *(f"{name} {package_version(name)}" for name in names)])


def parse() -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--served", default="flashinfer" if on_gpu else "reference")
    parser.add_argument("--shadow", default="triton")
    parser.add_argument("--device")
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 256] if on_gpu else [2])
    parser.add_argument("--kv-lens", type=int, nargs="+", default=[1024, 8192] if on_gpu else [64])
    parser.add_argument("--layers", type=int, default=32 if on_gpu else 4)
    parser.add_argument("--qo-heads", type=int, default=32 if on_gpu else 4)
    parser.add_argument("--kv-heads", type=int, default=8 if on_gpu else 2)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=100 if on_gpu else 5)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parse()
    interpret_on_cpu(resolve_device(args.device))
    print(describe_machine())
    rows = []
    for batch_size in args.batches:
        for kv_len in args.kv_lens:
            for measure, us in costs_of(args, batch_size, kv_len).items():
                print(f"batch {batch_size:4} kv_len {kv_len:6}  {measure:32} {us:14.3f} us")
                sizes = (batch_size, kv_len, args.layers)
                values = (args.served, args.shadow, *sizes, measure, f"{us:.3f}")
                rows.append(dict(zip(COLUMNS, map(str, values), strict=True)))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        with args.output.open("w", newline="") as file:
            file.write(f"# {describe_machine()}\n")
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
