"""A stand-in for the module flashinfer, over plain torch on a CPU, for any head size.

It keeps FlashInfer's signatures (`test_flashinfer_signatures.py` compares them), its rules on
static buffers, workspaces and their overflow, and its base-2 LSE. As FlashInfer does, it reads what
the device would read at `run` from the buffers, not from what `plan` was given.
"""

import math

import torch

__version__ = "0.7.4"

INTEGER_BYTES = 8 * 1024 * 1024


def _reserve(name: str, size: int, taken: int, space: int) -> int:
    begin = -(-taken // 16) * 16
    if begin + size > space:
        raise RuntimeError(
            f"Error in function 'aligned_alloc' at allocator.h:68: Buffer overflow when allocating "
            f"memory for {name} with size {size} and alignment 16, but only {space - taken} bytes "
            "available in AlignedAllocator. Increase the workspace buffer size."
        )
    return begin + size


class _Module:
    """The compiled part: it builds the schedule, from host arrays, into the integer workspace."""

    def __init__(self, backend):
        self.backend = backend

    def plan(
        self,
        float_workspace_buffer,
        int_workspace_buffer,
        pin_memory_int_workspace_buffer,
        qo_indptr_host,
        kv_indptr_host,
        kv_lens_host,
        total_num_rows,
        batch_size,
        num_qo_heads,
        num_kv_heads,
        page_size,
        enable_cuda_graph,
        head_dim_qk,
        head_dim_vo,
        causal,
        window_left,
        *of_fa2,
    ):
        if len(of_fa2) != (5 if self.backend == "fa2" else 0):
            raise TypeError(f"{self.backend} does not take {len(of_fa2)} more arguments")
        total_num_rows / batch_size  # the real planner divides by the batch size too
        if int(qo_indptr_host[-1]) != total_num_rows and not enable_cuda_graph:
            raise ValueError("the queries' bounds and the rows disagree")
        space = float_workspace_buffer.numel()
        size = 4 * total_num_rows * num_qo_heads
        taken = _reserve("batch_prefill_tmp_v", size * head_dim_vo, 0, space)
        _reserve("batch_prefill_tmp_s", size, taken, space)
        space = int_workspace_buffer.numel()
        taken = _reserve("batch_prefill_request_indices", 4 * total_num_rows, 0, space)
        _reserve("batch_prefill_merge_indptr", 4 * (total_num_rows + 1), taken, space)
        raw = kv_lens_host.to(torch.int32).contiguous().view(torch.uint8)
        pin_memory_int_workspace_buffer[: raw.numel()] = raw
        staged = pin_memory_int_workspace_buffer[: raw.numel()]
        int_workspace_buffer[: raw.numel()].copy_(staged)
        return [batch_size]

    def paged_run(
        self,
        float_workspace_buffer,
        int_workspace_buffer,
        plan_info,
        q,
        k_pages,
        v_pages,
        qo_indptr,
        kv_indptr,
        kv_indices,
        last_page_len,
        out,
        lse,
        mask,
        cum_seq_lens_q,
        cum_seq_lens_kv,
    ):
        """Per request; everything but the masks comes from the buffers, as on a device."""
        if cum_seq_lens_q is not qo_indptr or cum_seq_lens_kv is not kv_indptr:
            raise RuntimeError("some kernels read these instead")
        page_size = k_pages.shape[1]
        qo_bounds, bounds = qo_indptr.tolist(), kv_indptr.tolist()
        if not out.is_contiguous() or (lse is not None and not lse.is_contiguous()):
            raise RuntimeError("the kernels write contiguous outputs only")
        scheduled = int_workspace_buffer[: 4 * plan_info[0]].view(torch.int32).tolist()
        for request, kv_len in enumerate(scheduled):
            ids = kv_indices[bounds[request] : bounds[request + 1]].long()
            last = int(last_page_len[request])
            if kv_len != max(len(ids) - 1, 0) * page_size + last:
                raise RuntimeError("the schedule and the page table disagree")
            k = k_pages[ids].flatten(0, 1)[:kv_len]
            v = v_pages[ids].flatten(0, 1)[:kv_len]
            rows = slice(*qo_bounds[request : request + 2])
            o, log2_sum = _attend_request(q[rows], k, v, *mask)
            out[rows] = o
            if lse is not None:
                lse[rows] = log2_sum


def _attend_request(q, k, v, causal, window_left, logits_soft_cap, scale):
    qo_len, heads, _ = q.shape
    kv_len, group = k.shape[0], heads // k.shape[1]
    k = k.double().repeat_interleave(group, 1)
    v = v.double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->qhk", q.double(), k) * scale
    if logits_soft_cap:
        scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
    position = torch.arange(qo_len)[:, None] + kv_len - qo_len
    key = torch.arange(kv_len)
    seen = torch.ones(qo_len, kv_len, dtype=torch.bool)
    if causal:
        seen &= key <= position
    if window_left >= 0:
        seen &= key >= position - window_left
    v = torch.where(seen.any(0)[:, None, None], v, 0)  # the kernel's tiles begin at the window
    scores = torch.where(seen[:, None], scores, -torch.inf)
    log_sum = (
        torch.logsumexp(scores, -1) if kv_len else scores.new_full((qo_len, heads), -torch.inf)
    )
    weights = torch.where(seen[:, None], torch.exp(scores - log_sum[..., None]), 0.0)
    return torch.einsum("qhk,khd->qhd", weights, v), log_sum / math.log(2)


class _Wrapper:
    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = int_workspace_buffer
        self._pin_memory_int_workspace_buffer = torch.empty_like(int_workspace_buffer)

    def _make_buffers(self, float_workspace_buffer, kv_layout, use_cuda_graph):
        if kv_layout != "NHD":
            raise NotImplementedError(kv_layout)
        self.device = float_workspace_buffer.device
        integers = torch.empty(INTEGER_BYTES, dtype=torch.uint8, device=self.device)
        self.reset_workspace_buffer(float_workspace_buffer, integers)
        self._use_cuda_graph = use_cuda_graph
        self._max_total_num_rows = None

    def _plan_module(self, qo_indptr, kv_indptr, kv_lens, num_rows, sizes, mask, of_fa2):
        num_qo_heads, num_kv_heads, head_dim, page_size = sizes
        self._cached_module = _Module(self._backend)
        self._plan_info = self._cached_module.plan(
            self._float_workspace_buffer,
            self._int_workspace_buffer,
            self._pin_memory_int_workspace_buffer,
            qo_indptr,
            kv_indptr,
            kv_lens,
            num_rows,
            len(kv_lens),
            num_qo_heads,
            num_kv_heads,
            page_size,
            self._use_cuda_graph,
            head_dim,
            head_dim,
            *mask,
            *(of_fa2 if self._backend == "fa2" else ()),
        )

    def _copy_to_buffers(self, indptr, indices, last_page_len):
        if self._use_cuda_graph:
            if len(indices) > len(self._paged_kv_indices_buf):
                raise ValueError(
                    "The length of paged_kv_indices exceeds the allocated buffer size."
                )
            self._paged_kv_indptr_buf.copy_(indptr)
            self._paged_kv_indices_buf[: len(indices)].copy_(indices)
            self._paged_kv_last_page_len_buf.copy_(last_page_len)
        else:
            self._paged_kv_indptr_buf = indptr.to(self.device)
            self._paged_kv_indices_buf = indices.to(self.device)
            self._paged_kv_last_page_len_buf = last_page_len.to(self.device)

    def _run_module(self, q, paged_kv_cache, causal, out, lse):
        k_pages, v_pages = paged_kv_cache
        scale = self._sm_scale if self._sm_scale is not None else 1 / math.sqrt(q.shape[-1])
        self._cached_module.paged_run(
            self._float_workspace_buffer,
            self._int_workspace_buffer,
            self._plan_info,
            q,
            k_pages,
            v_pages,
            self._qo_indptr_buf,
            self._paged_kv_indptr_buf,
            self._paged_kv_indices_buf,
            self._paged_kv_last_page_len_buf,
            out,
            lse,
            (causal, self._window_left, self._logits_soft_cap, scale),
            self._qo_indptr_buf,  # FlashInfer hands these over twice as well
            self._paged_kv_indptr_buf,
        )


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        backend="auto",
    ):
        self._make_buffers(float_workspace_buffer, kv_layout, use_cuda_graph)
        self._qo_indptr_buf = qo_indptr_buf
        self._paged_kv_indptr_buf = paged_kv_indptr_buf
        self._paged_kv_indices_buf = paged_kv_indices_buf
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buf
        self._backend = backend

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        causal=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
        seq_lens=None,
        max_token_per_sequence=None,
        fixed_split_size=None,
        disable_split_kv=False,
    ):
        batch_size = len(qo_indptr) - 1
        num_rows = self._qo_indptr_last = int(qo_indptr[-1])
        if self._use_cuda_graph:
            if self._max_total_num_rows is None:
                self._max_total_num_rows = num_rows
            if num_rows > self._max_total_num_rows:
                raise ValueError("The total number of rows in qo_indptr cannot grow")
            if batch_size != len(self._qo_indptr_buf) - 1:
                raise ValueError("The batch size should be fixed")
            self._qo_indptr_buf.copy_(qo_indptr)
        else:
            self._qo_indptr_buf = qo_indptr.to(self.device)
        self._copy_to_buffers(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        if seq_lens is None:
            pages = paged_kv_indptr.diff() - 1
            seq_lens = pages.clamp(min=0) * page_size + paged_kv_last_page_len
        self._plan_module(
            qo_indptr,
            paged_kv_indptr,
            seq_lens,
            self._max_total_num_rows or num_rows,
            (num_qo_heads, num_kv_heads, head_dim_qk, page_size),
            (causal, window_left),
            (fixed_split_size or -1, disable_split_kv, 0, 0, False),
        )
        self._causal, self._window_left = causal, window_left
        self._sm_scale, self._logits_soft_cap = sm_scale, logits_soft_cap
        self._dtype = q_data_type

    def run(self, q, paged_kv_cache, out=None, lse=None, return_lse=False, lse_base="log2"):
        if q.shape[0] != self._qo_indptr_last or q.dtype != self._dtype:
            raise ValueError(f"q {list(q.shape)} {q.dtype} does not match the plan")
        self._run_module(q, paged_kv_cache, self._causal, out, lse)
        if lse is not None and lse_base == "ln":
            lse.mul_(math.log(2))
        return (out, lse) if return_lse else out


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
    ):
        self._make_buffers(float_workspace_buffer, kv_layout, use_cuda_graph)
        self._backend = backend
        self._paged_kv_indptr_buf = paged_kv_indptr_buffer
        self._paged_kv_indices_buf = paged_kv_indices_buffer
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buffer

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *deprecated_positional_args,
        **kwargs,
    ):
        self._plan_impl(
            indptr,
            indices,
            last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            **kwargs,
        )

    def _plan_impl(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *,
        window_left=-1,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
        sm_scale=None,
        seq_lens=None,
        fixed_split_size=None,
        disable_split_kv=False,
    ):
        batch_size = len(last_page_len)
        if self._use_cuda_graph and batch_size != len(self._paged_kv_last_page_len_buf):
            raise ValueError("The batch size should be fixed in cudagraph mode")
        self._copy_to_buffers(indptr, indices, last_page_len)
        qo_indptr = torch.arange(batch_size + 1, dtype=torch.int32)
        self._qo_indptr_buf = qo_indptr.to(self.device)
        self._plan_module(
            qo_indptr,
            indptr,
            seq_lens,
            batch_size,
            (num_qo_heads, num_kv_heads, head_dim, page_size),
            (False, window_left),
            (fixed_split_size or -1, disable_split_kv, 0, 1, True),
        )
        self._window_left, self._sm_scale = window_left, sm_scale
        self._logits_soft_cap, self._dtype = logits_soft_cap, q_data_type

    def run(self, q, paged_kv_cache, out=None, lse=None, return_lse=False):
        if q.shape[0] != len(self._paged_kv_last_page_len_buf) or q.dtype != self._dtype:
            raise ValueError(f"q {list(q.shape)} {q.dtype} does not match the plan")
        self._run_module(q, paged_kv_cache, False, out, lse)
        return (out, lse) if return_lse else out
