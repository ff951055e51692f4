"""FlashAttention-3 and -4 with a page table, where they are installed."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from benchmarks.inputs import Inputs
from benchmarks.peer import Call, Peer, cache_views, needs_gpu_and

FA3_MODULE = "flash_attn_interface"
FA4_MODULE = "flash_attn.cute.interface"


class _Tables:
    """What both take on the device; sending it there is their plan."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self.plan()

    def plan(self) -> None:
        table, device = self._inputs.table, self._inputs.device
        self.page_table = table.to_block_table(fill=0).to(device)
        self.kv_lens = table.kv_lens.to(device)
        self.qo_indptr = self._inputs.qo_indptr.to(device)


def build_flash_attention_3(inputs: Inputs) -> Call:
    """flash_attn_with_kvcache."""
    attend: Any = importlib.import_module(FA3_MODULE).flash_attn_with_kvcache
    tables, (k_pages, v_pages), case = _Tables(inputs), cache_views(inputs), inputs.case
    window = (case.window_left, 0) if case.window_left >= 0 else (-1, -1)
    return Call(
        plan=tables.plan,
        run=lambda: attend(
            inputs.q,
            k_pages,
            v_pages,
            cache_seqlens=tables.kv_lens,
            page_table=tables.page_table,
            cu_seqlens_q=tables.qo_indptr,
            max_seqlen_q=max(case.qo_lens),
            softmax_scale=case.spec.scale,
            causal=True,
            window_size=window,
        ),
        rows=_first,
    )


def build_flash_attention_4(inputs: Inputs) -> Call:
    """flash_attn_varlen_func of the CuTe DSL package."""
    attend: Any = importlib.import_module(FA4_MODULE).flash_attn_varlen_func
    tables, (k_pages, v_pages), case = _Tables(inputs), cache_views(inputs), inputs.case
    window = (case.window_left, 0) if case.window_left >= 0 else (None, None)
    return Call(
        plan=tables.plan,
        run=lambda: attend(
            inputs.q,
            k_pages,
            v_pages,
            cu_seqlens_q=tables.qo_indptr,
            max_seqlen_q=max(case.qo_lens),
            max_seqlen_k=max(case.kv_lens),
            seqused_k=tables.kv_lens,
            page_table=tables.page_table,
            softmax_scale=case.spec.scale,
            causal=True,
            window_size=window,
        ),
        rows=_first,
    )


def _first(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Some versions return the log-sum-exp too."""
    return result if isinstance(result, Tensor) else result[0]


FLASH_ATTENTION = (
    Peer(
        "flash-attention-3",
        "flash_attn_with_kvcache",
        build_flash_attention_3,
        missing=needs_gpu_and(FA3_MODULE),
        kernel="fa3",
    ),
    Peer(
        "flash-attention-4",
        "flash_attn_varlen_func",
        build_flash_attention_4,
        missing=needs_gpu_and(FA4_MODULE),
        kernel="fa4",
    ),
)
