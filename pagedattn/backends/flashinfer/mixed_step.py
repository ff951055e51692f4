"""Splitting a step into its one-token rows and its prompt rows.

The one-token rows are moved to the front of a small tensor, for the decode wrapper. The prompt rows
stay where they are: between them, the prefill wrapper sees requests without keys that own the other
rows' tokens, whose output is then overwritten. So no prompt token is copied.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagedattn.backends.flashinfer.host_step import HostStep
from pagedattn.page_table import PageTable


@dataclass(frozen=True, eq=False)
class MixedStep:
    """A step in two parts."""

    decode: HostStep  # the one-token rows alone
    decode_places: Tensor  # i64[decode rows]  the token of each
    prefill: HostStep  # gap, prompt, gap, prompt, ..., over the step's tokens
    num_prompts: int


def split_step(step: HostStep, *, last_gap: bool) -> MixedStep:
    """Split a step by query length: one token is a decode row, more are a prompt row.

    Args:
        step: Any step.
        last_gap: Whether the prefill part also owns the tokens behind the last prompt row.

    Example:
        >>> table = PageTable.from_lengths([9, 5, 3], page_size=4)
        >>> mixed = split_step(HostStep(table, torch.tensor([0, 1, 4, 5]).int(), 6), last_gap=True)
        >>> mixed.decode_places.tolist(), mixed.prefill.qo_indptr.tolist()
        ([0, 4], [0, 1, 4, 5])
        >>> mixed.decode.table.kv_lens.tolist(), mixed.prefill.table.kv_lens.tolist()
        ([9, 3], [0, 5, 0])
    """
    qo_lens = step.qo_indptr.diff()
    is_decode, is_prompt = qo_lens == 1, qo_lens > 1
    prompts = is_prompt.nonzero()[:, 0]
    num_prompts = prompts.shape[0]
    bounds = torch.stack([step.qo_indptr[:-1][prompts], step.qo_indptr[1:][prompts]], dim=1)
    qo_indptr = torch.cat([torch.zeros(1, dtype=torch.int32), bounds.flatten()])
    table = _rows_of(step.table, is_prompt)
    lens = torch.stack([torch.zeros_like(table.kv_lens), table.kv_lens], dim=1).flatten()
    indptr = table.kv_indptr.repeat_interleave(2)[:-1]  # a gap begins and ends where pages do
    if last_gap:
        qo_indptr = torch.cat([qo_indptr, step.qo_indptr[-1:]])
        lens = torch.cat([lens, lens.new_zeros(1)])
        indptr = torch.cat([indptr, indptr[-1:]])
    gapped = PageTable(table.page_size, indptr, table.kv_indices, lens)
    decode_table = _rows_of(step.table, is_decode)
    ones = torch.arange(decode_table.batch_size + 1, dtype=torch.int32)
    return MixedStep(
        decode=HostStep(decode_table, ones, step.num_pages),
        decode_places=step.qo_indptr[:-1][is_decode].long(),
        prefill=HostStep(gapped, qo_indptr, step.num_pages),
        num_prompts=num_prompts,
    )


def _rows_of(table: PageTable, chosen: Tensor) -> PageTable:
    """The table of the chosen requests alone, in order."""
    num_pages = table.kv_indptr.diff()
    pages = table.kv_indices[chosen.repeat_interleave(num_pages)]
    indptr = torch.zeros(int(chosen.sum()) + 1, dtype=torch.int32)
    indptr[1:] = num_pages[chosen].cumsum(0)
    return PageTable(table.page_size, indptr, pages, table.kv_lens[chosen])
