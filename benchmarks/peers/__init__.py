"""Everything that can be timed, by name; the most important first."""

from __future__ import annotations

from fnmatch import fnmatchcase

from benchmarks.peer import Peer
from benchmarks.peers.dense import DENSE
from benchmarks.peers.flash_attention import FLASH_ATTENTION
from benchmarks.peers.flashinfer_calls import FLASHINFER_CALLS
from benchmarks.peers.ours import OURS

PEERS: tuple[Peer, ...] = (*OURS, *FLASHINFER_CALLS, *FLASH_ATTENTION, *DENSE)


def select(patterns: tuple[str, ...]) -> list[Peer]:
    """The peers that were asked for, by name, glob or part of a name; none: those of every run.

    Raises:
        ValueError: A pattern names none.
    """
    if not patterns:
        return [peer for peer in PEERS if peer.by_default]
    chosen: list[Peer] = []
    for pattern in patterns:
        glob = pattern if any(c in pattern for c in "*?[") else f"*{pattern}*"
        found = [peer for peer in PEERS if peer.name == pattern]
        found = found or [peer for peer in PEERS if fnmatchcase(peer.name, glob)]
        if not found:
            names = ", ".join(peer.name for peer in PEERS)
            raise ValueError(f"no backend is named like {pattern!r}, expected some of {names}")
        chosen += found
    return [peer for peer in PEERS if peer in chosen]
