"""Splitting a step into its one-token rows and its prompt rows.

The one-token rows are moved to the front of a small tensor, for the decode wrapper. The prompt rows
stay where they are: between them, the prefill wrapper sees requests without keys that own the other
rows' tokens. It writes 0 there, and one-token rows write theirs afterwards. So no prompt token is
copied.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pagedattn.backends.flashinfer.host_step import HostStep, Ints


@dataclass(frozen=True, eq=False)
class MixedStep:
    """A step in two parts."""

    decode: HostStep  # the one-token rows alone
    decode_places: NDArray[np.int64]  # i64[decode rows]  the token of each
    prefill: HostStep  # gap, prompt, gap, prompt, ..., over the step's tokens
    num_prompts: int


def split_step(step: HostStep, *, causal: bool, last_gap: bool) -> MixedStep:
    """Split a step by query length: one token is a decode row, more are a prompt row.

    Args:
        step: Any step.
        causal: Whether a prompt row's queries before its first key belong to the gap before it, for
            the reason that `separate_rows_without_keys` gives.
        last_gap: Whether the prefill part also owns the tokens behind the last prompt row.

    Example:
        >>> from pagedattn.page_table import PageTable
        >>> import torch
        >>> table = PageTable.from_lengths([9, 5, 3], page_size=4)
        >>> step = HostStep.of_table(table, np.array([0, 1, 4, 5], np.int32))
        >>> mixed = split_step(step, causal=True, last_gap=True)
        >>> mixed.decode_places.tolist(), mixed.prefill.qo_indptr.tolist()
        ([0, 4], [0, 1, 4, 5])
        >>> mixed.decode.kv_lens.tolist(), mixed.prefill.kv_lens.tolist()
        ([9, 3], [0, 5, 0])
    """
    is_decode, is_prompt = step.qo_lens == 1, step.qo_lens > 1
    begins, ends = step.qo_indptr[:-1], step.qo_indptr[1:]
    first_with_key = np.maximum(begins, ends - step.kv_lens) if causal else begins
    prompts = step.rows(is_prompt)
    num_tokens = step.num_tokens if last_gap else None
    return MixedStep(
        decode=step.rows(is_decode),
        decode_places=begins[is_decode].astype(np.int64),
        prefill=_with_gaps(prompts, first_with_key[is_prompt], ends[is_prompt], num_tokens),
        num_prompts=prompts.batch_size,
    )


def _with_gaps(prompts: HostStep, begins: Ints, ends: Ints, num_tokens: int | None) -> HostStep:
    """Requests at given tokens, with requests without keys for the tokens between them.

    Args:
        prompts: The requests.
        begins: i32[batch], the first query token of each.
        ends: i32[batch], the token behind its last one.
        num_tokens: The tokens of all; `None`: those behind the last request belong to nobody.
    """
    in_pairs = 2 * prompts.batch_size
    num_rows = in_pairs + (num_tokens is not None)
    qo_indptr = np.zeros(num_rows + 1, dtype=np.int32)
    qo_indptr[1:in_pairs:2] = begins
    qo_indptr[2 : in_pairs + 1 : 2] = ends
    if num_tokens is not None:
        qo_indptr[-1] = num_tokens
    kv_lens, last_page_len = np.zeros((2, num_rows), dtype=np.int32)
    kv_lens[1:in_pairs:2] = prompts.kv_lens
    last_page_len[1:in_pairs:2] = prompts.last_page_len
    # a gap begins and ends where the pages of the prompt before it end
    kv_indptr = np.full(num_rows + 1, prompts.kv_indptr[-1], dtype=np.int32)
    kv_indptr[: in_pairs + 1] = np.repeat(prompts.kv_indptr, 2)[:-1]
    return replace(
        prompts,
        qo_indptr=qo_indptr,
        kv_indptr=kv_indptr,
        kv_lens=kv_lens,
        last_page_len=last_page_len,
    )
