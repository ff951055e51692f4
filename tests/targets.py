"""Functions for `pagedattn check --target`, as somebody else might write them: right and wrong."""

from __future__ import annotations

import os
import time

import torch

# For `hostile`: with how many keys in a step it ends its process, and with how many it hangs.
DIES, HANGS = "PAGEDATTN_TEST_DIES", "PAGEDATTN_TEST_HANGS"


def attention(
    q,
    k_pages,
    v_pages,
    kv_indptr,
    kv_indices,
    kv_lens,
    qo_indptr,
    *,
    causal,
    window_left,
    sm_scale,
    logits_soft_cap,
):
    """Request by request, in float32 and plain torch."""
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -torch.inf, device=q.device)
    group = q.shape[1] // k_pages.shape[2]
    for request, kv_len in enumerate(kv_lens.tolist()):
        begin, end = qo_indptr[request : request + 2].tolist()
        pages = kv_indices[slice(*kv_indptr[request : request + 2].tolist())].long()
        if begin == end or not kv_len:
            continue
        position = torch.arange(kv_len - (end - begin), kv_len, device=q.device)[:, None]
        key = torch.arange(kv_len, device=q.device)
        seen = (key <= position) if causal else torch.ones_like(key <= position)
        if window_left >= 0:
            seen = seen & (key >= position - window_left)
        k, v = (
            torch.where(
                seen.any(0)[:, None, None], p[pages].flatten(0, 1)[:kv_len].float(), 0
            ).repeat_interleave(group, 1)
            for p in (k_pages, v_pages)
        )
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].float(), k) * sm_scale
        if logits_soft_cap > 0:
            scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
        scores = scores.masked_fill(~seen, -torch.inf)
        p = scores.softmax(-1).nan_to_num(0).to(q.dtype).float()
        out[begin:end] = torch.einsum("hqk,khd->qhd", p, v).to(q.dtype)
        lse[begin:end] = scores.logsumexp(-1).T
    return out, lse


def without_lse(*tensors, **options):
    return attention(*tensors, **options)[0]


def window_one_short(*tensors, window_left, **options):
    """Wrong, and without an LSE."""
    return attention(*tensors, window_left=max(window_left - 1, min(window_left, 0)), **options)[0]


def without_soft_cap(*tensors, logits_soft_cap, **options):
    if logits_soft_cap:
        raise NotImplementedError("no soft cap yet")
    return attention(*tensors, logits_soft_cap=0.0, **options)


def nothing(*tensors, **options):
    raise NotImplementedError("comes next year")


def raising(*tensors, **options):
    raise ZeroDivisionError("no kernel for this")


def wrong_shape(q, *tensors, **options):
    return q[:, :, :-1]


def a_list(q, *tensors, **options):
    return [q]


def hostile(q, k_pages, v_pages, kv_indptr, kv_indices, kv_lens, *tensors, **options):
    """Kills its process or hangs, for some lengths."""
    total = str(int(kv_lens.sum()))
    if total == os.environ[DIES]:
        stack = "".join(f"frame #{number}: somewhere\n" for number in range(40))
        print(f"about to die\n{stack}", flush=True)
        os.abort()
    if total == os.environ[HANGS]:
        time.sleep(1000)
    return attention(q, k_pages, v_pages, kv_indptr, kv_indices, kv_lens, *tensors, **options)
