"""Where a step's new tokens belong in the cache: as slots, and as pages and places inside them.

In numpy for what is staged on the host, in torch for what is asked of the device.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pagedattn.backends.flashinfer.host_step import INT_MAX, HostStep
from pagedattn.slots import Slots, slots_of_arrays

NO_SLOTS: Slots = np.empty(0, dtype=np.int64)
"""In place of `token_slots`, where somebody else says where new tokens belong."""


def slot_arrays(in_graph: bool) -> dict[str, torch.dtype]:
    """Where new tokens belong, among a wrapper's `StepArrays`; in graph mode in every form."""
    names = ("write_slots", "token_to_page", "token_to_cache") if in_graph else ("write_slots",)
    return dict.fromkeys(names, torch.int64)


def token_slots(step: HostStep, num_tokens: int) -> Slots:
    """[num_tokens]: `pagedattn.slots.write_slots` of a step, and -1 behind them.

    In i32 where the step's page ids are known to allow it, which takes numpy half the time.
    """
    narrow = 0 < step.num_pages <= INT_MAX // step.page_size
    slots: Slots
    if step.decodes:
        last_page = step.kv_indices[step.kv_indptr[1:] - 1]
        slots = np.multiply(last_page, step.page_size, dtype=np.int32 if narrow else np.int64)
        slots += step.last_page_len
        slots -= 1
    else:
        arrays = (step.qo_indptr, step.kv_indptr, step.kv_indices, step.kv_lens)
        slots = slots_of_arrays(*arrays, step.page_size, narrow=narrow)
    if len(slots) == num_tokens:
        return slots
    return np.concatenate([slots, np.full(num_tokens - len(slots), -1, dtype=np.int64)])


def pages_and_places(slots: Slots, page_size: int, sink_page: int | None) -> list[Slots]:
    """[tokens] pages and [tokens] places inside them; without a slot, of the sink page or -1.

    Args:
        slots: [tokens], -1 for a token without one.
        page_size: Tokens in one page.
        sink_page: Where padding may be written.
    """
    page = slots // page_size
    place = slots - page * page_size
    has_none = slots < 0
    page[has_none] = -1 if sink_page is None else sink_page
    place[has_none] = -1 if sink_page is None else 0
    return [page, place]


def page_of_slots(slots: Tensor, page_size: int, sink_page: int | None) -> Tensor:
    """i64[tokens] on the device: the pages of `pages_and_places`."""
    page = slots.div(page_size, rounding_mode="floor")
    return page.masked_fill_(slots < 0, -1 if sink_page is None else sink_page)


def place_of_slots(slots: Tensor, page_size: int, sink_page: int | None) -> Tensor:
    """i64[tokens] on the device: the places of `pages_and_places`."""
    return slots.remainder(page_size).masked_fill_(slots < 0, -1 if sink_page is None else 0)
