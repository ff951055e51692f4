"""Which head sizes FlashInfer's paged kernels compute exactly: each size in a process of its own.

Some sizes do not compile, some abort the process, some hang, and some give wrong numbers, so every
size runs in a subprocess with a time limit and is compared with float64. Prints one JSON object and
writes it to `--output`. The result is the source of `pagedattn/backends/flashinfer/head_dim.py`.

    python benchmarks/probe_flashinfer_head_dims.py --output results.json
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SIZES = (64, 128, 256, 96, 80, 112, 192, 32, 16, 160, 512, 320, 48, 224, 384, 448, 72, 100)
ALLOWED = 0.02  # bf16 outputs below 1: two roundings, with room; wrong kernels are off by far more
PAGE_SIZE = 16


def compile_only_paged() -> None:
    """Leave out of each compiled family what a causal paged prefill and a decode do not call.

    The rest stays undefined, which nobody notices who does not call it: a quarter of the work.
    """
    from flashinfer.jit.attention import modules

    whole = modules.gen_jit_spec

    def part(name, sources, *args, **kwargs):
        sources = [s for s in sources if not re.search(r"ragged_.*kernel|mask_[23]", Path(s).name)]
        return whole(name, sources, *args, extra_ldflags=["-Wl,-z,lazy"], **kwargs)

    modules.gen_jit_spec = part


def probe(head_dim: int, kernels: list[str]) -> dict[str, float]:
    """Largest error of every kernel over a prefill and a decode step, against float64."""
    import flashinfer
    import torch

    compile_only_paged()
    torch.manual_seed(0)
    device = torch.device("cuda")
    kv_lens, heads, kv_heads = [300, 133], 4, 2  # the longer one is split
    # one for each of FlashInfer's tiles of queries, which are chosen by the mean length
    steps = {"prefill": [5, 33], "long prefill": [100, 133], "decode": [1, 1]}
    pages = [-(-n // PAGE_SIZE) for n in kv_lens]
    cache = torch.randn(sum(pages), 2, PAGE_SIZE, kv_heads, head_dim, device=device).bfloat16()
    indptr = torch.tensor([0, pages[0], sum(pages)], dtype=torch.int32)
    indices = torch.arange(sum(pages), dtype=torch.int32)
    last = torch.tensor([(n - 1) % PAGE_SIZE + 1 for n in kv_lens], dtype=torch.int32)
    floats = torch.zeros(256 * 1024 * 1024, dtype=torch.uint8, device=device)
    errors = {}
    for kernel in kernels:
        for mode, lens in steps.items():
            if mode == "decode" and kernel != "fa2":
                continue
            q = torch.randn(sum(lens), heads, head_dim, device=device).bfloat16()
            sizes = (heads, kv_heads, head_dim, PAGE_SIZE)
            types = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
            if mode != "decode":
                wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(floats, backend=kernel)
                qo_indptr = torch.tensor([0, lens[0], sum(lens)], dtype=torch.int32)
                wrapper.plan(qo_indptr, indptr, indices, last, *sizes, causal=True, **types)
            else:
                wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                    floats, use_tensor_cores=True, backend=kernel
                )
                wrapper.plan(indptr, indices, last, *sizes, **types)
            out = wrapper.run(q, cache)
            torch.cuda.synchronize()
            errors[f"{kernel} {mode}"] = error_of(out, q, cache, kv_lens, lens, pages)
    return errors


def error_of(out, q, cache, kv_lens, qo_lens, pages) -> float:
    import torch

    worst, row, page = 0.0, 0, 0
    for kv_len, qo_len, num_pages in zip(kv_lens, qo_lens, pages, strict=True):
        k, v = cache[page : page + num_pages].double().transpose(0, 1).flatten(1, 2)[:, :kv_len]
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        rows = q[row : row + qo_len].double()
        scores = torch.einsum("qhd,khd->qhk", rows, k) * q.shape[-1] ** -0.5
        position = torch.arange(qo_len, device=q.device)[:, None] + kv_len - qo_len
        seen = torch.arange(kv_len, device=q.device) <= position
        weights = torch.softmax(scores.masked_fill(~seen[:, None], -torch.inf), -1)
        right = torch.einsum("qhk,khd->qhd", weights, v)
        error = (out[row : row + qo_len].double() - right).abs().max()
        worst = max(worst, float("inf") if bool(error.isnan()) else float(error))
        row, page = row + qo_len, page + num_pages
    return worst


def run_one(head_dim: int, args: argparse.Namespace, deadline: float) -> dict:
    """One size in its own process: its errors, or how it ended."""
    left = deadline - time.monotonic()
    if left < 5:
        return {"head_dim": head_dim, "verdict": "not probed: out of time"}
    command = [sys.executable, __file__, "--one", str(head_dim), "--kernels", *args.kernels]
    environment = {**os.environ, "MAX_JOBS": str(args.max_jobs)}
    begin = time.monotonic()
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=min(left, args.timeout),
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return {"head_dim": head_dim, "verdict": f"no answer in {min(left, args.timeout):.0f} s"}
    result = {"head_dim": head_dim, "seconds": round(time.monotonic() - begin, 1)}
    if done.returncode:
        reason = [line for line in done.stderr.splitlines() if "rror" in line] or [""]
        return {**result, "verdict": f"exit code {done.returncode}", "reason": reason[-1][:300]}
    errors = json.loads(done.stdout.splitlines()[-1])
    exact = max(errors.values()) <= ALLOWED
    return {**result, "verdict": "exact" if exact else "wrong", "errors": errors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", type=int, help="probe this size here and print its errors")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--kernels", nargs="+", default=["fa2"], choices=["fa2", "fa3"])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--max-jobs", type=int, default=4, help="compilers a process")
    parser.add_argument("--timeout", type=float, default=150, help="seconds a size")
    parser.add_argument("--budget", type=float, default=235, help="seconds in all")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(probe(args.one, args.kernels)))
        return
    deadline = time.monotonic() + args.budget
    with ThreadPoolExecutor(args.processes) as pool:
        results = list(pool.map(lambda size: run_one(size, args, deadline), args.sizes))
    text = json.dumps({**machine(), "kernels": args.kernels, "sizes": results}, indent=1)
    print(text)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(text + "\n")


def machine() -> dict[str, str]:
    """What a result depends on."""
    import flashinfer
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"flashinfer": flashinfer.__version__, "torch": torch.__version__, "gpu": gpu}


if __name__ == "__main__":
    main()
