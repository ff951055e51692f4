"""What a step is handed to FlashInfer's prefill kernels as, so that they are right for it.

The ways round `defects.py`: an option, or other requests over the same tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from pagedattn.backends.flashinfer.defects import (
    FA2_ROWS_WITHOUT_KEYS,
    FA2_SMALLEST_TILE,
    FA2_WINDOW_WITHOUT_MASK,
    FA3_ROWS_WITHOUT_KEYS,
    Call,
)
from pagedattn.backends.flashinfer.host_step import HostStep


def safe_options(options: dict[str, Any], call: Call) -> dict[str, Any]:
    """The options for FlashInfer's plan, with what the step needs to be right."""
    if not FA2_WINDOW_WITHOUT_MASK.hits(call):
        return options
    if options.get("disable_split_kv") is False:
        raise ValueError(
            "disable_split_kv=False with a window and no causal mask: FlashInfer's split is wrong "
            f"there ({FA2_WINDOW_WITHOUT_MASK.report})"
        )
    return {**options, "disable_split_kv": True}


def safe_requests(step: HostStep, call: Call, max_batch_size: int | None) -> HostStep:
    """The requests that FlashInfer computes a step as.

    Args:
        step: The step; with `max_batch_size`, at most as many requests.
        call: How it is computed.
        max_batch_size: Room for requests, the added ones included; `None`: no bound.

    Raises:
        ValueError: There is no room for the requests that must be added.
    """
    requests = separate_rows_without_keys(step) if call.causal else step
    if max_batch_size is None or requests.batch_size <= max_batch_size:
        return requests
    requests = step
    if FA2_ROWS_WITHOUT_KEYS.hits(call):
        requests = separate_rows_without_keys(step, FA2_SMALLEST_TILE)
    elif FA3_ROWS_WITHOUT_KEYS.hits(call):
        requests = separate_rows_without_keys(step)
    if requests.batch_size > max_batch_size:
        raise ValueError(
            f"{requests.batch_size - step.batch_size} requests have more queries than keys, and "
            "FlashInfer computes their queries without keys as requests of their own: raise "
            f"batch_size (max_batch_size of a Capacity) to {requests.batch_size}, got "
            f"{max_batch_size}"
        )
    return requests


def separate_rows_without_keys(step: HostStep, min_keys: int = 1) -> HostStep:
    """Make the queries that a causal mask leaves without a key requests of their own, without keys.

    FlashInfer's kernels are wrong where such queries share a request with others: see `defects.py`.

    Args:
        step: The step.
        min_keys: Requests with fewer keys stay as they are.
    """
    shorter = step.qo_lens > step.kv_lens
    if not np.count_nonzero(shorter):
        return step
    shared = np.flatnonzero(shorter & (step.kv_lens >= min_keys))
    if not len(shared):
        return step
    first_with_key = step.qo_indptr[shared + 1] - step.kv_lens[shared]
    return replace(
        step,
        qo_indptr=np.insert(step.qo_indptr, shared + 1, first_with_key),
        kv_indptr=np.insert(step.kv_indptr, shared + 1, step.kv_indptr[shared]),
        kv_lens=np.insert(step.kv_lens, shared, 0),
        last_page_len=np.insert(step.last_page_len, shared, 0),
    )
