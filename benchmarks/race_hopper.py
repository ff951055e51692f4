"""Race of the Gluon kernel: the programs that begin with long queries, and its tiles.

`python -m benchmarks.race_hopper [NAME ...]` runs each variant in a process of its own, for 75 s at
most: a kernel that waits for what never comes hangs its process for good.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks import cases, peers
from benchmarks.session import Session
from pagedattn.backends.triton import backend, tiles

DECODE = [
    "decode 1x32k", "decode 16x8k", "decode 64x4k", "decode 256x2k", "decode 128 ragged",
    "decode 8x512", "decode 64x4k heads 28/4",
]  # fmt: skip
DRAFTS = ["speculative 64x4k q8", "speculative 64x4k q8 heads 64/8", "speculative 1x32k q4"]
MIXED = [case.name for case in cases.select("mixed", "cuda")][:4]
PROMPTS = ["prefill 8x2k", "prefill 1x8k", "prefill 16x512 at 4k"]
ALL = DECODE + DRAFTS + MIXED + PROMPTS
(q8,) = [case for case in cases.CASES if case.name == DRAFTS[0]]
CASES = [*cases.CASES, replace(q8, name=DRAFTS[1], num_qo_heads=64)]
choose = tiles.choose_hopper_tiles


def share(part: int) -> Callable[[], None]:
    """So many of 132 programs begin with long queries."""
    return lambda: setattr(tiles, "LONG_SHARE", part / 132)


def ring(tile: int, num_stages: int, num_q_stages: int) -> Callable[[], None]:
    """Other tiles; `tile` is that of long queries."""

    def chosen(*arguments: object) -> object:
        return replace(
            choose(*arguments), tile=tile, num_stages=num_stages, num_q_stages=num_q_stages
        )

    return lambda: setattr(backend, "choose_hopper_tiles", chosen)


def chunks(factor: int) -> Callable[[], None]:
    """More and smaller chunks of short work."""
    choose_kinds = backend.choose_kinds

    def chosen(*arguments: object) -> list[tiles.Tiles]:
        kinds = choose_kinds(*arguments)
        return [replace(kind, short_chunks=factor * kind.short_chunks) for kind in kinds]

    return lambda: setattr(backend, "choose_kinds", chosen)


VARIANTS = {
    "peers": (lambda: None, ALL),
    "as it is": (lambda: None, ALL),
    "72 programs": (share(72), MIXED),
    "84 programs": (share(84), MIXED),
    "48 programs": (share(48), MIXED),
    "2 chunks a consumer": (chunks(2), DECODE + MIXED),
    "one block's rows, 3 stages": (ring(128, 3, 1), ALL),
    "tiles of 64, 6 stages": (ring(64, 6, 1), DECODE),
}
THEIRS = "flashinfer-decode", "flashinfer-fa2", "flashinfer-fa3", "flashinfer-batch-attention"


def measure(name: str) -> None:
    """One variant, in this process."""
    apply, names = VARIANTS[name]
    apply()
    chosen = [case for case in CASES if case.name in names]
    session = Session(chosen, torch.device("cuda", 0), seconds=0.05)
    wanted = (*THEIRS, "pagedattn-mixed") if name == "peers" else ("pagedattn-triton",)
    for case in chosen:
        for peer in peers.select(wanted):
            if peer.takes(case) and peer.missing(session.device) is None:
                row = session.measure(case, peer)
                times = [1e3 * (row.median_time or 0), row.launch_time_us or 0]
                print(
                    f"{case.name:32} {name:24} {peer.name:28} "
                    f"{times[0]:9.1f} {times[1]:6.1f} {row.verdict} {row.failure}"[:240],
                    flush=True,
                )


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "--here":
        measure(sys.argv[2])
        raise SystemExit
    for name in sys.argv[1:] or VARIANTS:
        command = [sys.executable, "-m", "benchmarks.race_hopper", "--here", name]
        try:
            subprocess.run(command, timeout=75, check=False)
        except subprocess.TimeoutExpired:
            print(f"{name}: no end in 75 s", flush=True)
