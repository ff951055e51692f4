"""Transformers on paged attention: an attention function, a mask function and their registration.

Importing this module registers both under the name "pagedattn". Any decoder-only model then runs on
our backends:

    model.set_attn_implementation("pagedattn")
    cache = PagedCache(model.config, num_pages=64, backend="triton")
    model.generate(**inputs, past_key_values=cache)

What cannot be honoured is refused, never ignored.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from pagedattn.integrations.paged_cache import ATTENTION_NAME, PagedCache, PagedKeys
from pagedattn.spec import AttentionSpec

__all__ = [
    "ATTENTION_NAME",
    "PagedCache",
    "PagedKeys",
    "paged_attention_forward",
    "paged_attention_mask",
]

_NOT_ABOUT_ATTENTION = frozenset(
    (
        "cache_position",
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",  # rotary embeddings have used them by now
        "return_dict",
        "use_cache",
    )
)
"""Keywords that models hand to attention functions and that do not change attention."""


class StepMask(Tensor):
    """bool[batch, columns]: which columns are tokens; knows the sliding window of its layers."""

    # results of operations are plain tensors
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    sliding_window: int | None


def paged_attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> StepMask:
    """Check that the mask is causal, with or without a sliding window, and keep its padding.

    The parameters are Transformers' contract for mask functions.

    Args:
        batch_size: Rows.
        q_length: New columns.
        kv_length: Columns in all.
        q_offset: First new column.
        kv_offset: First column; 0 with a `PagedCache`.
        mask_function: The pattern of visible keys.
        attention_mask: bool[batch_size, kv_length], which columns are tokens; `None`: all.
        local_size: The window or chunk of the pattern; `None`: it has none.
        device: Where the mask goes.
        **kwargs: How masks of other attention functions are to be built; nothing to us.

    Raises:
        ValueError: The pattern is another, or `attention_mask` does not fit the cache.
    """
    expected = causal_mask_function
    if local_size is not None:
        expected = sliding_window_causal_mask_function(local_size)
    if not _same_pattern(mask_function, expected):
        raise ValueError(
            f"attn_implementation={ATTENTION_NAME!r} computes causal attention, with or without a "
            "sliding window; this model asks for another mask (bidirectional, chunked, packed or "
            f"with an overlay): {getattr(mask_function, '__qualname__', mask_function)}"
        )
    if attention_mask is None:
        attention_mask = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    if tuple(attention_mask.shape) != (batch_size, kv_length):
        raise ValueError(
            f"attention_mask must have shape {[batch_size, kv_length]} [batch, columns in the "
            f"cache and new ones], got {list(attention_mask.shape)}"
        )
    mask = attention_mask.bool().as_subclass(StepMask)
    mask.sliding_window = local_size
    return mask


def paged_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer over the pages of the `PagedCache` that `key` came from.

    The parameters are Transformers' contract for attention functions.

    Args:
        module: The attention layer.
        query: dtype[batch, num_qo_heads, q_len, head_dim].
        key: dtype[batch, num_kv_heads, q_len, head_dim], as `PagedCache.update` returned it.
        value: As `key`.
        attention_mask: As `paged_attention_mask` returned it.
        dropout: Must be 0.
        scaling: Factor of the scores; `None`: `head_dim ** -0.5`.
        is_causal: Must not be false; `None`: as the module says.
        sliding_window: Keys that a query sees, its own included; must agree with the mask.
        softcap: Soft cap of the scores.
        **kwargs: What else the model passes. What would change attention is refused.

    Returns:
        dtype[batch, q_len, num_qo_heads, head_dim], zeros for padding; and no weights.

    Raises:
        ValueError: Something cannot be honoured; the message lists all of it.
    """
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    reasons = _tensor_reasons(query, key, attention_mask, sliding_window)
    if dropout:
        reasons.append(f"dropout must be 0, got {dropout}: call model.eval()")
    if not is_causal:
        reasons.append("attention is not causal here")
    for name, wanted in kwargs.items():
        if name not in _NOT_ABOUT_ATTENTION and wanted is not None and wanted is not False:
            reasons.append(f"{name} cannot be honoured")
    if reasons or not isinstance(key, PagedKeys) or not isinstance(attention_mask, StepMask):
        raise ValueError(
            f"attn_implementation={ATTENTION_NAME!r} cannot compute {type(module).__name__}:"
            + "".join(f"\n  - {reason}" for reason in reasons)
        )
    window = attention_mask.sliding_window
    spec = AttentionSpec(
        num_qo_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[3],
        dtype=query.dtype,
        window_left=-1 if window is None else window - 1,
        sm_scale=scaling,
        logits_soft_cap=softcap or 0.0,
    )
    return key.cache.attend(query, key, value, attention_mask, spec), None


def _tensor_reasons(
    query: Tensor, key: Tensor, mask: Tensor | None, sliding_window: int | None
) -> list[str]:
    reasons = []
    if query.requires_grad:
        reasons.append("there is no backward pass: run under torch.no_grad()")
    if not isinstance(key, PagedKeys):
        reasons.append("key does not come from a PagedCache: pass past_key_values=PagedCache(...)")
    if not isinstance(mask, StepMask):
        got = "none" if mask is None else f"shape {list(mask.shape)}"
        reasons.append(
            f"attention_mask must be None or [batch, columns] when it is given to the model, got a "
            f"mask that was made elsewhere ({got})"
        )
    elif sliding_window is not None and sliding_window != mask.sliding_window:
        reasons.append(
            f"sliding_window={sliding_window} but the layer's mask has window {mask.sliding_window}"
        )
    return reasons


def _same_pattern(left: object, right: object) -> bool:
    """Whether two mask functions are the same code over the same values."""
    if isinstance(left, FunctionType) and isinstance(right, FunctionType):
        held = [
            [cell.cell_contents for cell in function.__closure__ or ()]
            for function in (left, right)
        ]
        return left.__code__ is right.__code__ and _same_pattern(*held)
    if type(left) is not type(right):
        return False
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_same_pattern, left, right))
    return bool(left == right)


AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
AttentionMaskInterface.register(ATTENTION_NAME, paged_attention_mask)
