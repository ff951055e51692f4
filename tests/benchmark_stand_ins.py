"""Stand-ins for calls of other libraries that only the benchmark makes, over the reference backend.

As a module this stands in for flashinfer, and for the modules of FlashAttention. FlashInfer's
signatures are compared with the installed package in `test_benchmarks.py`.
"""

from __future__ import annotations

import torch
from flashinfer_stand_in import (  # noqa: F401 - the benchmark finds them here
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
)

from pagedattn import AttentionSpec, PagedAttention, PageTable


def _attend(layer, table, qo_indptr, q, kv_cache, causal=True):
    num_qo_heads, num_kv_heads, head_dim, dtype, window_left, sm_scale = layer
    spec = AttentionSpec(
        num_qo_heads,
        num_kv_heads,
        head_dim,
        dtype=dtype,
        causal=causal,
        window_left=window_left,
        sm_scale=sm_scale,
    )
    attn = PagedAttention(spec, table.page_size, backend="reference", device=q.device)
    attn.plan(table, qo_indptr)
    return attn.run(q, kv_cache)


class BatchAttention:
    def __init__(self, kv_layout="NHD", device="cuda"):
        self._device = torch.device(device)

    def plan(
        self,
        qo_indptr,
        kv_indptr,
        kv_indices,
        kv_len_arr,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        head_dim_vo,
        page_size,
        causal=False,
        sm_scale=None,
        logits_soft_cap=None,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    ):
        self._layer = (num_qo_heads, num_kv_heads, head_dim_qk, q_data_type, -1, sm_scale)
        self._table = PageTable(page_size, kv_indptr, kv_indices, kv_len_arr)
        self._qo_indptr, self._causal = qo_indptr, causal

    def run(self, q, kv_cache, out=None, lse=None):
        out.copy_(_attend(self._layer, self._table, self._qo_indptr, q, kv_cache, self._causal))
        return out, lse


class PODWithPagedKVCacheWrapper:
    def __init__(self, float_workspace_buffer, kv_layout="NHD"):
        pass

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        window_left=-1,
        q_data_type="float16",
        kv_data_type=None,
        sm_scale=None,
    ):
        self._layer = (num_qo_heads, num_kv_heads, head_dim, q_data_type, window_left, sm_scale)
        self._table = PageTable.from_csr(indptr, indices, last_page_len, page_size)

    def run(self, q_p, k_p, v_p, q_d, paged_kv_cache_d, causal_p=False, window_left_p=-1):
        one_page = PageTable.from_lengths([k_p.shape[0]], k_p.shape[0])
        rows = torch.tensor([0, q_p.shape[0]], dtype=torch.int32)
        prompt_layer = (*self._layer[:4], window_left_p, self._layer[5])
        prompt = _attend(prompt_layer, one_page, rows, q_p, (k_p[None], v_p[None]), causal_p)
        return prompt, _attend(self._layer, self._table, None, q_d, paged_kv_cache_d)


class BatchPODWithPagedKVCacheWrapper:
    def __init__(self, float_workspace_buffer, kv_layout="NHD"):
        pass

    def plan(
        self,
        qo_indptr_p,
        kv_indptr_p,
        kv_indices_p,
        last_page_len_p,
        qo_indptr_d,
        kv_indptr_d,
        kv_indices_d,
        last_page_len_d,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        window_left=-1,
        q_data_type="float16",
        kv_data_type=None,
        sm_scale=None,
    ):
        self._layer = (num_qo_heads, num_kv_heads, head_dim, q_data_type, window_left, sm_scale)
        of_prompts = (kv_indptr_p, kv_indices_p, last_page_len_p, page_size)
        of_decode = (kv_indptr_d, kv_indices_d, last_page_len_d, page_size)
        self._prompts = PageTable.from_csr(*of_prompts), qo_indptr_p
        self._decode = PageTable.from_csr(*of_decode), qo_indptr_d

    def run(self, q_p, paged_kv_cache_p, q_d, paged_kv_cache_d, causal_p=False):
        prompts = _attend(self._layer, *self._prompts, q_p, paged_kv_cache_p, causal_p)
        return prompts, _attend(self._layer, *self._decode, q_d, paged_kv_cache_d)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    *,
    cache_seqlens,
    page_table,
    cu_seqlens_q,
    max_seqlen_q,
    softmax_scale,
    causal,
    window_size,
):
    table = PageTable.from_block_table(page_table, cache_seqlens, k_cache.shape[1])
    layer = (q.shape[1], k_cache.shape[2], q.shape[2], q.dtype, window_size[0], softmax_scale)
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    return _attend(layer, table, cu_seqlens_q, q, (k_cache, v_cache), causal)


def flash_attn_varlen_func(
    q, k, v, *, max_seqlen_k, seqused_k, window_size, **rest_of_flash_attention_3
):
    assert max_seqlen_k == int(seqused_k.max())
    window_size = [-1 if side is None else side for side in window_size]
    out = flash_attn_with_kvcache(
        q, k, v, cache_seqlens=seqused_k, window_size=window_size, **rest_of_flash_attention_3
    )
    return out, None
