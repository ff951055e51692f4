"""GPU memory of a pool of eight graph-mode buckets, before and after sealing.

python benchmarks/flashinfer_memory.py --output benchmarks/results/flashinfer_memory.csv
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import torch
from flashinfer_machine import describe_machine

from pagedattn import PageTable
from pagedattn.backends.flashinfer import FlashInferDecodeWrapper, WorkspacePool

BATCHES = (1, 2, 4, 8, 16, 64, 128, 256)
SIZES = (32, 8, 128, 16)
PAGES_A_REQUEST = 256
DEVICE = torch.device("cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workspace-mb", type=float, default=1.0, help="each workspace at first")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    pool = WorkspacePool(DEVICE, args.workspace_mb, owner="benchmark")
    shared = pool.get("decode")
    wrappers, rows, begin = [], [], torch.cuda.memory_allocated()
    for batch_size in BATCHES:
        before = torch.cuda.memory_allocated()
        wrapper = FlashInferDecodeWrapper(
            shared,
            *SIZES,
            batch_size=batch_size,
            max_num_pages=PAGES_A_REQUEST * batch_size,
            device=DEVICE,
            accelerator_graph=True,
        )
        table = PageTable.from_lengths([PAGES_A_REQUEST * 16] * batch_size, 16)
        wrapper.plan(table.kv_indptr, table.kv_indices, table.last_page_len)
        wrappers.append(wrapper)
        rows.append((f"bucket of {batch_size}", torch.cuda.memory_allocated() - before))
    rows.append(("workspaces before sealing", pool.num_bytes))
    pool.seal()
    rows.append(("workspaces after sealing", pool.num_bytes))
    rows.append(("all buckets", torch.cuda.memory_allocated() - begin))
    for what, num_bytes in rows:
        print(f"{what:28} {num_bytes / 2**20:10.3f} MiB")
    print(describe_machine())
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        with args.output.open("w", newline="") as file:
            file.write(f"# {describe_machine()}\n")
            writer = csv.writer(file)
            writer.writerow(["what", "bytes"])
            writer.writerows(rows)


if __name__ == "__main__":
    main()
