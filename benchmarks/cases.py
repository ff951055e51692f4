"""The steps that are timed, by name, the most important first. Nothing here touches a device."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import product

import numpy as np
import torch

from pagedattn import AttentionSpec

MAX_CACHE_BYTES = 80 * 10**9
"""Of a case's keys and values: what fits a GPU of 140 GB beside everything else."""


@dataclass(frozen=True)
class Case:
    """One step of one layer kind: causal, pages in random order.

    Args:
        name: What `--case` selects by.
        group: What it is for; "small" cases are for a CPU.
        kv_lens: Keys of each request.
        qo_lens: Queries of each request; in mixed steps the one-token requests come first.
    """

    name: str
    group: str
    kv_lens: tuple[int, ...]
    qo_lens: tuple[int, ...]
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    window_left: int = -1
    dtype: torch.dtype = torch.bfloat16

    @property
    def spec(self) -> AttentionSpec:
        """The layer kind."""
        return AttentionSpec(
            self.num_qo_heads,
            self.num_kv_heads,
            self.head_dim,
            dtype=self.dtype,
            window_left=self.window_left,
        )

    @property
    def num_decodes(self) -> int:
        """Requests with one query."""
        return self.qo_lens.count(1)

    @property
    def kind(self) -> str:
        """One of decode, speculative, prefill and mixed."""
        if self.num_decodes == len(self.qo_lens):
            return "decode"
        if self.num_decodes:
            return "mixed"
        return "speculative" if max(self.qo_lens) <= 8 else "prefill"

    @property
    def is_uniform(self) -> bool:
        """Whether all requests have the same lengths, so that they make one dense batch."""
        return len(set(self.kv_lens)) == len(set(self.qo_lens)) == 1

    @property
    def num_tokens(self) -> int:
        """Query tokens."""
        return sum(self.qo_lens)

    @property
    def num_pages(self) -> int:
        """Pages that the requests own."""
        return sum(-(-n // self.page_size) for n in self.kv_lens)

    @property
    def token_bytes(self) -> int:
        """Of one token's key and value."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def cache_bytes(self) -> int:
        """Of all pages, and of one that nobody owns."""
        return (self.num_pages + 1) * self.page_size * self.token_bytes


def short(number: int) -> str:
    """A length as names have it.

    Example:
        >>> short(8192), short(1025)
        ('8k', '1025')
    """
    return f"{number // 1024}k" if number % 1024 == 0 and number else str(number)


def decode(batch_size: int, kv_len: int, group: str) -> Case:
    """One new token a request."""
    name = f"decode {batch_size}x{short(kv_len)}"
    return Case(name, group, (kv_len,) * batch_size, (1,) * batch_size)


def speculative(batch_size: int, kv_len: int, qo_len: int, group: str = "speculative") -> Case:
    """A few drafted tokens a request."""
    name = f"speculative {batch_size}x{short(kv_len)} q{qo_len}"
    return Case(name, group, (kv_len,) * batch_size, (qo_len,) * batch_size)


def prefill(batch_size: int, qo_len: int, context: int, group: str) -> Case:
    """Prompts, or chunks of them behind `context` tokens."""
    name = f"prefill {batch_size}x{short(qo_len)}" + (f" at {short(context)}" if context else "")
    return Case(name, group, (context + qo_len,) * batch_size, (qo_len,) * batch_size)


def mixed(decodes: tuple[int, int], prompts: tuple[int, int, int], group: str) -> Case:
    """Requests that decode, (how many, keys), and prompts, (how many, tokens, context)."""
    first, second = decode(*decodes, group), prefill(*prompts, group)
    name = f"mixed {first.name.split(' ', 1)[1]} + {second.name.split(' ', 1)[1]}"
    kv_lens, qo_lens = first.kv_lens + second.kv_lens, first.qo_lens + second.qo_lens
    return Case(name, group, kv_lens, qo_lens)


def variant(
    case: Case,
    group: str,
    *,
    heads: tuple[int, int] | None = None,
    head_dim: int | None = None,
    page_size: int | None = None,
    window_left: int | None = None,
) -> Case:
    """The same lengths with another layer kind or page size, which the name tells."""
    changes: dict[str, int] = {}
    words = [case.name]
    if heads is not None:
        changes.update(num_qo_heads=heads[0], num_kv_heads=heads[1])
        words.append(f"heads {heads[0]}/{heads[1]}")
    if head_dim is not None:
        changes["head_dim"] = head_dim
        words.append(f"dim {head_dim}")
    if page_size is not None:
        changes["page_size"] = page_size
        words.append(f"page {page_size}")
    if window_left is not None:
        changes["window_left"] = window_left
        words.append(f"window {window_left}")
    return replace(case, name=" ".join(words), group=group, **changes)


def anchors() -> list[Case]:
    """The cases that are measured in every run: the table of the README."""
    ragged = tuple(int(n) for n in np.random.default_rng(0).integers(64, 8193, 128))
    sizes = ((1, 32768), (16, 8192), (64, 4096), (256, 2048))
    return [
        *(decode(*size, "anchors") for size in sizes),
        Case("decode 128 ragged", "anchors", ragged, (1,) * 128),
        decode(8, 512, "anchors"),
        variant(decode(64, 4096, ""), "anchors", page_size=1),
        variant(decode(64, 4096, ""), "anchors", heads=(28, 4)),
        variant(decode(32, 4096, ""), "anchors", heads=(32, 32)),
        prefill(1, 8192, 0, "anchors"),
        prefill(8, 2048, 0, "anchors"),
        prefill(16, 512, 4096, "anchors"),
        variant(prefill(1, 8192, 0, ""), "anchors", page_size=64),
        prefill(1, 32768, 0, "anchors"),
        mixed((64, 4096), (2, 2048, 0), "anchors"),
        mixed((32, 8192), (1, 8192, 0), "anchors"),
        mixed((256, 2048), (1, 512, 0), "anchors"),
        mixed((128, 8192), (4, 1024, 8192), "anchors"),
    ]


def windows() -> list[Case]:
    """Sliding windows, and the same work without one."""
    long_decode, long_prompt = decode(64, 32768, ""), prefill(1, 32768, 0, "")
    one_prompt = prefill(1, 8192, 0, "")
    return [
        variant(long_decode, "windows", window_left=1024),
        decode(64, 1025, "windows"),
        variant(long_prompt, "windows", window_left=4096),
        *(variant(long_decode, "windows", window_left=w) for w in (128, 4096)),
        *(variant(one_prompt, "windows", window_left=w) for w in (128, 1024, 4096)),
        variant(prefill(16, 512, 4096, ""), "windows", window_left=1024),
    ]


def speculation() -> list[Case]:
    """Two to eight query tokens a request."""
    sizes = ((64, 4096, 4), (64, 4096, 2), (64, 4096, 8), (1, 32768, 4), (256, 2048, 3))
    return [speculative(*size) for size in sizes]


def chunks() -> list[Case]:
    """Chunked prefill: short chunks behind long contexts."""
    sizes = ((1, 2048, 30720), (4, 1024, 8192), (8, 256, 16384), (32, 128, 2048))
    return [prefill(*size, "chunked") for size in sizes]


def skews() -> list[Case]:
    """Steps in which a few requests have nearly all of the work."""
    lens = [round(65536 / (i + 1)) for i in range(128)]
    random.Random(0).shuffle(lens)
    prompts = tuple(random.Random(1).choices((64, 128, 512, 4096), k=16))
    return [
        Case("decode 63x512 + 1x128k", "skewed", (512,) * 63 + (131072,), (1,) * 64),
        Case("decode 255x256 + 1x32k", "skewed", (256,) * 255 + (32768,), (1,) * 256),
        Case("decode 128 harmonic", "skewed", tuple(lens), (1,) * 128),
        Case("prefill 16 ragged", "skewed", prompts, prompts),
    ]


def more_mixed() -> list[Case]:
    """Mixed steps besides the anchors."""
    return [
        mixed((128, 4096), (1, 4096, 0), "more-mixed"),
        mixed((32, 2048), (8, 256, 1024), "more-mixed"),
        variant(mixed((64, 4096), (2, 2048, 0), ""), "more-mixed", window_left=1024),
    ]


def shapes() -> list[Case]:
    """Ratios of heads, page sizes and head sizes, each around one decode and one prefill step."""
    steps = (decode(64, 4096, ""), prefill(8, 2048, 0, ""))
    ratios = ((24, 8), (64, 8), (28, 4), (32, 32))
    return [
        *(variant(step, "shapes", heads=heads) for heads, step in product(ratios, steps)),
        *(variant(step, "shapes", page_size=n) for n, step in product((1, 64, 128), steps)),
        *(variant(step, "shapes", head_dim=n) for n, step in product((64, 256), steps)),
    ]


def sweep() -> list[Case]:
    """Decode over batch and context."""
    sizes = product((1, 8, 32, 64, 128, 256), (512, 2048, 8192, 32768, 131072))
    return [decode(*size, "sweep") for size in sizes]


def small() -> list[Case]:
    """Steps that Triton's interpreter computes in a moment."""
    layer = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 4}
    return [
        Case("small decode", "small", (9, 17), (1, 1), **layer),
        Case("small speculative", "small", (9, 9), (3, 3), **layer),
        Case("small prefill", "small", (12, 12), (12, 12), **layer),
        Case("small chunked", "small", (20, 33), (7, 9), **layer),
        Case("small mixed", "small", (9, 3, 20), (1, 1, 12), **layer),
        Case("small window", "small", (33, 20), (1, 12), **layer, window_left=5),
    ]


def _all_cases() -> tuple[Case, ...]:
    """Every case once: the sweep meets some of the anchors again."""
    cases: dict[str, Case] = {}
    groups = (anchors, windows, more_mixed, speculation, chunks, skews, shapes, sweep, small)
    for case in (case for group in groups for case in group()):
        if case.cache_bytes <= MAX_CACHE_BYTES:
            cases.setdefault(case.name, case)
    return tuple(cases.values())


CASES = _all_cases()


def select(pattern: str | None, device_type: str) -> list[Case]:
    """The cases that a pattern names, in order of importance.

    Args:
        pattern: A whole name or a group; else, of the cases for this device, a glob of names or a
            part of them; `None`: all for this device.
        device_type: "cuda" or "cpu".
    """
    whole = [case for case in CASES if pattern in (case.name, case.group)]
    here = [case for case in CASES if (case.group == "small") == (device_type == "cpu")]
    if whole or pattern is None:
        return whole or here
    glob = pattern if any(c in pattern for c in "*?[") else f"*{pattern}*"
    return [case for case in here if fnmatchcase(case.name, glob)]
