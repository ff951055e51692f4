"""Race of the Gluon kernel for short queries: its tiles, and the SMs that prompts get beside it.

`python -m benchmarks.race_short` runs each variant in a process of its own, for a minute at most:
a kernel that waits for what never comes hangs its process for good.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import torch

from benchmarks import cases, peers
from benchmarks.session import Session
from pagedattn.backends.triton import backend, side_by_side
from pagedattn.backends.triton.tiles import KernelTiles

DECODE = [
    "decode 1x32k", "decode 16x8k", "decode 64x4k", "decode 256x2k", "decode 128 ragged",
    "decode 8x512",
]  # fmt: skip
DRAFTS = ["speculative 64x4k q8", "speculative 64x4k q8 heads 64/8", "speculative 1x32k q4"]
MIXED = [case.name for case in cases.select("mixed", "cuda")][:4]
(q8,) = [case for case in cases.CASES if case.name == DRAFTS[0]]
CASES = [*cases.CASES, replace(q8, name=DRAFTS[1], num_qo_heads=64)]
choose = backend.choose_short_hopper_tiles


def tiles(tile: int, num_stages: int, programs_per_sm: int) -> None:
    def chosen(*arguments: object) -> KernelTiles | None:
        default = choose(*arguments)
        return default and replace(
            default, tile=tile, num_stages=num_stages, programs_per_sm=programs_per_sm
        )

    backend.choose_short_hopper_tiles = chosen


def plain() -> None:
    backend.choose_short_hopper_tiles = lambda *_: None


def share(part: int) -> None:
    side_by_side.LONG_SHARE = part / 132


VARIANTS = {
    "peers": (lambda: None, DECODE + DRAFTS + MIXED),
    "plain": (plain, DECODE + DRAFTS + MIXED),
    "64 keys, 3 stages, 2 programs": (lambda: tiles(64, 3, 2), DECODE + DRAFTS + MIXED),
    "64 keys, 6 stages, 1 program": (lambda: tiles(64, 6, 1), DECODE + DRAFTS),
    "128 keys, 3 stages, 1 program": (lambda: tiles(128, 3, 1), DECODE + DRAFTS),
    "32 keys, 6 stages, 2 programs": (lambda: tiles(32, 6, 2), DECODE),
    "44 SMs": (lambda: share(44), MIXED),
    "76 SMs": (lambda: share(76), MIXED),
    "88 SMs": (lambda: share(88), MIXED),
}


def measure(name: str) -> None:
    """One variant, in this process."""
    apply, names = VARIANTS[name]
    apply()
    chosen = [case for case in CASES if case.name in names]
    session = Session(chosen, torch.device("cuda", 0), seconds=0.05)
    theirs = "flashinfer-decode", "flashinfer-fa2", "flashinfer-batch-attention", "pagedattn-mixed"
    for case in chosen:
        for peer in peers.select(theirs if name == "peers" else ("pagedattn-triton",)):
            if peer.takes(case) and peer.missing(session.device) is None:
                row = session.measure(case, peer)
                time = f"{1e3 * row.median_time:9.1f}" if row.median_time else "        -"
                launch = f"{row.launch_time_us:5.1f}" if row.launch_time_us else ""
                print(
                    f"{case.name:36} {name:32} {peer.name:28} {time} {launch} {row.verdict} "
                    f"{row.failure}"[:240],
                    flush=True,
                )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(sys.argv[1])
    else:
        for name in VARIANTS:
            command = [sys.executable, "-m", "benchmarks.race_short", name]
            try:
                subprocess.run(command, timeout=75, check=False)
            except subprocess.TimeoutExpired:
                print(f"{name}: no end in 75 s", flush=True)
