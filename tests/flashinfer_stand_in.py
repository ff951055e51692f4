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

    def _reserve_workspaces(self, num_rows: int, num_qo_heads: int, head_dim: int) -> None:
        space = self._float_workspace_buffer.numel()
        taken = _reserve("batch_prefill_tmp_v", 4 * num_rows * num_qo_heads * head_dim, 0, space)
        _reserve("batch_prefill_tmp_s", 4 * num_rows * num_qo_heads, taken, space)
        space = self._int_workspace_buffer.numel()
        taken = _reserve("batch_prefill_request_indices", 4 * num_rows, 0, space)
        _reserve("batch_prefill_merge_indptr", 4 * (num_rows + 1), taken, space)

    def _stage_schedule(self, values: torch.Tensor) -> None:
        """What a plan knows goes through the page-locked buffer to the integer workspace."""
        raw = values.to(torch.int32).contiguous().view(torch.uint8)
        self._pin_memory_int_workspace_buffer[: raw.numel()] = raw
        self._int_workspace_buffer[: raw.numel()].copy_(
            self._pin_memory_int_workspace_buffer[: raw.numel()]
        )
        self._num_scheduled = values.numel()

    def _scheduled_kv_lens(self) -> list[int]:
        return self._int_workspace_buffer[: 4 * self._num_scheduled].view(torch.int32).tolist()

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

    def _attend(self, q, paged_kv_cache, qo_bounds, causal, out, lse):
        """Per request; everything but the masks comes from the buffers, as on a device."""
        k_pages, v_pages = paged_kv_cache
        page_size = k_pages.shape[1]
        bounds = self._paged_kv_indptr_buf.tolist()
        if not out.is_contiguous() or (lse is not None and not lse.is_contiguous()):
            raise RuntimeError("the kernels write contiguous outputs only")
        for request, kv_len in enumerate(self._scheduled_kv_lens()):
            ids = self._paged_kv_indices_buf[bounds[request] : bounds[request + 1]].long()
            last = int(self._paged_kv_last_page_len_buf[request])
            if kv_len != max(len(ids) - 1, 0) * page_size + last:
                raise RuntimeError("the schedule and the page table disagree")
            k = k_pages[ids].flatten(0, 1)[:kv_len]
            v = v_pages[ids].flatten(0, 1)[:kv_len]
            rows = slice(*qo_bounds[request : request + 2])
            o, log2_sum = self._attend_request(q[rows], k, v, causal)
            out[rows] = o
            if lse is not None:
                lse[rows] = log2_sum

    def _attend_request(self, q, k, v, causal):
        qo_len, heads, dim = q.shape
        kv_len, group = k.shape[0], heads // k.shape[1]
        scale = self._sm_scale if self._sm_scale is not None else 1 / math.sqrt(dim)
        k = k.double().repeat_interleave(group, 1)
        v = v.double().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->qhk", q.double(), k) * scale
        if self._logits_soft_cap:
            scores = self._logits_soft_cap * torch.tanh(scores / self._logits_soft_cap)
        position = torch.arange(qo_len)[:, None] + kv_len - qo_len
        key = torch.arange(kv_len)
        seen = torch.ones(qo_len, kv_len, dtype=torch.bool)
        if causal:
            seen &= key <= position
        if self._window_left >= 0:
            seen &= key >= position - self._window_left
        v = torch.where(seen.any(0)[:, None, None], v, 0)  # the kernel's tiles begin at the window
        scores = torch.where(seen[:, None], scores, -torch.inf)
        log_sum = (
            torch.logsumexp(scores, -1) if kv_len else scores.new_full((qo_len, heads), -torch.inf)
        )
        weights = torch.where(seen[:, None], torch.exp(scores - log_sum[..., None]), 0.0)
        return torch.einsum("qhk,khd->qhd", weights, v), log_sum / math.log(2)


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
        self._max_total_num_rows = None

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
        num_rows = int(qo_indptr[-1])
        num_rows / batch_size  # the real planner divides by the batch size too
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
        self._reserve_workspaces(num_rows, num_qo_heads, head_dim_qk)
        if seq_lens is None:
            pages = paged_kv_indptr.diff() - 1
            seq_lens = pages.clamp(min=0) * page_size + paged_kv_last_page_len
        self._stage_schedule(seq_lens)
        self._causal, self._window_left = causal, window_left
        self._sm_scale, self._logits_soft_cap = sm_scale, logits_soft_cap
        self._dtype, self._num_rows = q_data_type, num_rows

    def run(self, q, paged_kv_cache, out=None, lse=None, return_lse=False, lse_base="log2"):
        if q.shape[0] != self._num_rows or q.dtype != self._dtype:
            raise ValueError(f"q {list(q.shape)} {q.dtype} does not match the plan")
        self._attend(q, paged_kv_cache, self._qo_indptr_buf.tolist(), self._causal, out, lse)
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
        batch_size / batch_size  # the real planner divides by the batch size too
        if self._use_cuda_graph and batch_size != len(self._paged_kv_last_page_len_buf):
            raise ValueError("The batch size should be fixed in cudagraph mode")
        self._copy_to_buffers(indptr, indices, last_page_len)
        self._reserve_workspaces(batch_size, num_qo_heads, head_dim)
        self._stage_schedule(seq_lens)
        self._window_left, self._sm_scale = window_left, sm_scale
        self._logits_soft_cap, self._dtype = logits_soft_cap, q_data_type

    def run(self, q, paged_kv_cache, out=None, lse=None, return_lse=False):
        if q.shape[0] != self._num_scheduled or q.dtype != self._dtype:
            raise ValueError(f"q {list(q.shape)} {q.dtype} does not match the plan")
        self._attend(q, paged_kv_cache, list(range(q.shape[0] + 1)), False, out, lse)
        return (out, lse) if return_lse else out
