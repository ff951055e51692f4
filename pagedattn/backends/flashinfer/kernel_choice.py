"""Which FlashInfer kernel a step runs on: by measurement, not by FlashInfer's `auto`.

Measured on one NVIDIA H200, bf16, 32/8 heads, head_dim 128, page_size 16 (µs of one call):

| step | tensor-core decode | fa2 prefill | fa3 prefill |
|---|---|---|---|
| 64 one-token rows at 4k | 258 | | 1095 |
| 256 one-token rows at 2k | 503 | | 2585 |
| 1 prompt of 8k | | 1812 | 1079 |
| 8 prompts of 2k | | 949 | 652 |
| 16 chunks of 512 at 4k of context | | 1764 | 1202 |

So one-token rows never run on fa3, and long prompts do where the GPU has it. FlashInfer's own
`auto` takes fa2 for both. fa3 gives every query head a tile of 128 tokens of one request to itself,
while fa2 packs the query heads that share a KV head into its tiles: rows shorter than a tile waste
fa3.
"""

from __future__ import annotations

import torch

from pagedattn.backends.flashinfer.head_dim import FA3_HEAD_DIMS

FA3_TILE = 128
"""Query tokens of one fa3 tile; the mean row that fills one is worth fa3."""

KERNELS = ("auto", "fa2", "fa3")


def has_fa3(device: torch.device, head_dim: int) -> bool:
    """Whether this GPU has the Hopper kernel, for this head size."""
    if device.type != "cuda" or head_dim not in FA3_HEAD_DIMS:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


def prefill_kernel(num_tokens: int, num_rows: int, *, fa3: bool, window_left: int = -1) -> str:
    """Choose a prefill kernel.

    Args:
        num_tokens: Query tokens of the prompt rows.
        num_rows: Rows with query tokens.
        fa3: Whether there is a choice, see `has_fa3`.
        window_left: The window, -1 for none.

    Returns:
        "fa2" or "fa3".

    Example:
        >>> prefill_kernel(8192, 1, fa3=True), prefill_kernel(64, 64, fa3=True)
        ('fa3', 'fa2')
    """
    if not fa3 or window_left >= 0:
        return "fa2"  # fa3 is wrong for windows: see defects.py
    return "fa3" if num_tokens >= FA3_TILE * max(num_rows, 1) else "fa2"


def graph_prefill_kernel(
    num_tokens: int, num_rows: int, *, fa3: bool, window_left: int = -1
) -> str:
    """Choose the prompt rows' kernel by the capacity of a graph.

    A graph is made for many steps, and what its capacity says of one is only an upper bound. Room
    for many tokens, and for many more than rows, is there for prompts or chunks of them, few in a
    step; room for a few tokens a row is there for speculative decoding.

    Args:
        num_tokens: Most query tokens of a step.
        num_rows: Most rows with more than one token.
        fa3: Whether there is a choice, see `has_fa3`.
        window_left: The window, -1 for none.
    """
    prompts = num_tokens >= 8 * FA3_TILE and holds_prompts(num_tokens, num_rows)
    rows = 1 if prompts else num_tokens
    return prefill_kernel(num_tokens, rows, fa3=fa3, window_left=window_left)


def most_prompts(num_tokens: int, num_rows: int) -> int:
    """The most rows of a capacity that can have more than one token; at least 1."""
    return max(1, min(num_rows, num_tokens // 2))


def holds_prompts(num_tokens: int, num_rows: int) -> bool:
    """Whether a capacity is more than what one-token rows with a few drafted tokens need."""
    return num_tokens > 8 * num_rows
