"""Every backend that runs on this machine agrees with float64 attention, within its bound."""

import pytest
import torch
from attention_steps import assert_agrees, batch_of, half, require_support, supported_batches
from hypothesis import assume, given
from hypothesis import strategies as st

from pagedattn import AttentionSpec, PagedAttention, unsupported_reasons
from pagedattn.attention import AttentionOutput
from pagedattn.checking.batch import VALUE_KINDS, Batch
from pagedattn.checking.compare import check_backend
from pagedattn.checking.step import attend_with

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("mode", ["decode", "prefill", "mixed"])
@given(data=st.data())
def test_drawn_steps(backend, device, mode, data):
    batch = data.draw(supported_batches(backend, device, mode=mode))
    assume(not unsupported_reasons(backend, batch.spec, batch.page_size, device))
    assert_agrees(backend, batch, device)


@pytest.mark.parametrize("page_size", [1, 3, 5, 16, 64, 256])
def test_page_sizes_at_their_edges(backend, device, page_size):
    spec = AttentionSpec(4, 2, 64, half(backend))
    kv_lens = (max(page_size - 1, 1), page_size, page_size + 1, 2 * page_size, 3)
    assert_agrees(backend, batch_of(spec, page_size, kv_lens, (1, 1, 2, 1, 3)), device)


@pytest.mark.parametrize("group_size", [1, 3, 5, 6, 7, 8, 12, 16, 24, 32, 48])
def test_ratios_of_query_heads_to_kv_heads(backend, device, group_size):
    spec = AttentionSpec(2 * group_size, 2, 64, half(backend))
    assert_agrees(backend, batch_of(spec, 16, (33, 20), (1, 7)), device)


@pytest.mark.parametrize(("group_size", "head_dim"), [(128, 64), (64, 256)])
def test_many_query_heads_on_one_kv_head(backend, device, group_size, head_dim):
    """Tiles that grow with the ratio and the head size must still fit on the chip."""
    spec = AttentionSpec(group_size, 1, head_dim, half(backend))
    assert_agrees(backend, batch_of(spec, 16, (33, 20), (1, 3)), device)


@pytest.mark.parametrize("head_dim", [16, 24, 40, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("full_precision", [False, True], ids=["half", "float32"])
def test_head_dims(backend, device, head_dim, full_precision):
    dtype = FP32 if full_precision else half(backend)
    spec = AttentionSpec(4, 2, head_dim, dtype)
    assert_agrees(backend, batch_of(spec, 16, (37, 50), (1, 6)), device)


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256, 512])
def test_head_dims_in_the_largest_tiles_and_in_pieces(backend, device, head_dim):
    """Tiles grow with the queries, and are refused where head sizes leave no room for them."""
    spec = AttentionSpec(4, 2, head_dim, half(backend))
    assert_agrees(backend, batch_of(spec, 16, (300, 80), (1, 70)), device)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_dtypes(backend, device, dtype, causal):
    spec = AttentionSpec(6, 2, 64, dtype, causal=causal)
    assert_agrees(backend, batch_of(spec, 16, (40, 70, 33), (1, 70, 9)), device)


@pytest.mark.parametrize("window_left", [0, 1, 14, 15, 16, 17, 63, 64, 65])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_windows(backend, device, window_left, causal):
    spec = AttentionSpec(2, 1, 64, half(backend), causal=causal, window_left=window_left)
    batch = batch_of(spec, 16, (17, 70, 100), (1, 33, 1), values="loud_key")
    assert_agrees(backend, batch, device)


@pytest.mark.parametrize("soft_cap", [1.0, 30.0])
@pytest.mark.parametrize("values", ["large_logits", "low_scores", "loud_key"])
def test_soft_caps(backend, device, soft_cap, values):
    spec = AttentionSpec(4, 2, 64, half(backend), logits_soft_cap=soft_cap)
    assert_agrees(backend, batch_of(spec, 16, (37, 50), (1, 9), values=values), device)


@pytest.mark.parametrize("values", VALUE_KINDS)
@pytest.mark.parametrize("garbage", ["nan", "infinity", "junk"])
def test_kinds_of_values_and_of_garbage(backend, device, values, garbage):
    spec = AttentionSpec(4, 2, 64, BF16, window_left=20)
    batch = batch_of(spec, 4, (37, 50, 3), (1, 9, 3), values=values, garbage=garbage)
    assert_agrees(backend, batch, device)


@pytest.mark.parametrize("sm_scale", [0.01, 1.0])
def test_scales(backend, device, sm_scale):
    spec = AttentionSpec(4, 2, 64, half(backend), sm_scale=sm_scale)
    assert_agrees(backend, batch_of(spec, 16, (37, 50), (1, 9)), device)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    ("kv_lens", "qo_lens"),
    [
        ((17, 8), (40, 3)),  # more queries than keys: the first 23 see none
        ((0, 17, 0, 33), (1, 1, 2, 4)),  # requests without keys beside others
        ((5, 40, 6), (0, 1, 0)),  # requests without queries
        ((0, 0), (3, 1)),  # no key at all
        ((20, 30), (0, 0)),  # no query at all
        ((1,), (1,)),
        ((), ()),
    ],
)
def test_empty_rows_and_empty_requests(backend, device, causal, kv_lens, qo_lens):
    spec = AttentionSpec(4, 2, 64, half(backend), causal=causal)
    assert_agrees(backend, batch_of(spec, 4, kv_lens, qo_lens), device)


def test_a_row_that_sees_no_key_is_zero_with_an_lse_of_minus_infinity(backend, device):
    spec = AttentionSpec(4, 2, 64, half(backend))
    require_support(backend, spec, 4, device)
    out, lse = attend_with(backend)(batch_of(spec, 4, (17, 0), (40, 2)).materialise(device))
    empty = [*range(23), 40, 41]
    assert (out[empty] == 0).all()
    assert (lse[empty] == -torch.inf).all()
    assert torch.isfinite(lse[23:40]).all()


@pytest.mark.parametrize("name", ["reference", "triton"])
@pytest.mark.parametrize(("kv_len", "qo_len"), [(5, 8), (100, 131)])  # one short, one long
def test_a_row_that_sees_no_key_is_zero_beside_rows_that_see_nan(device, name, kv_len, qo_len):
    out, lse = attend_beside_nan(name, AttentionSpec(2, 2, 64, FP16), kv_len, qo_len, 0, device)
    empty = qo_len - kv_len
    assert (out[:empty] == 0).all()
    assert (lse[:empty] == -torch.inf).all()
    assert torch.isnan(out[empty:]).all()
    assert torch.isnan(lse[empty:]).all()


def test_a_piece_without_visible_keys_adds_nothing_though_other_rows_see_nan_there(device):
    """Full precision has the narrowest tiles, so that a block of so few keys is in pieces."""
    kv_len, qo_len, piece = (190, 200, 64) if device.type == "cuda" else (30, 32, 16)
    spec = AttentionSpec(1, 1, 256, FP32)
    out, lse = attend_beside_nan("triton", spec, kv_len, qo_len, piece, device)
    empty, block = qo_len - kv_len, 16
    assert (out[:empty] == 0).all()
    assert (lse[:empty] == -torch.inf).all()
    assert torch.isfinite(out[empty:block]).all()  # they see keys of the first piece alone
    assert torch.isfinite(lse[empty:block]).all()
    assert torch.isnan(out[empty + piece :]).all()


def attend_beside_nan(
    name: str, spec: AttentionSpec, kv_len: int, qo_len: int, first_nan: int, device: torch.device
) -> AttentionOutput:
    """One request whose keys and values are NaN from key `first_nan` on, each in its own page."""
    require_support(name, spec, 1, device)
    step = batch_of(spec, 1, (kv_len,), (qo_len,)).materialise(device)
    step.kv_cache[step.page_table.kv_indices[first_nan:].to(device)] = torch.nan
    return attend_with(name)(step)


@pytest.mark.parametrize("full_precision", [False, True], ids=["half", "float32"])
@pytest.mark.parametrize("window_left", [-1, 700])
def test_few_queries_over_contexts_that_are_split(backend, device, full_precision, window_left):
    dtype = FP32 if full_precision else half(backend)
    spec = AttentionSpec(2, 1, 64, dtype, window_left=window_left)
    longest = 20000 if device.type == "cuda" else 1500
    batch = batch_of(spec, 16, (longest, 1, 30), (1, 1, 3), values="loud_key")
    assert_agrees(backend, batch, device)


@pytest.mark.parametrize("full_precision", [False, True], ids=["half", "float32"])
def test_prompts_of_many_query_blocks(backend, device, full_precision):
    dtype = FP32 if full_precision else half(backend)
    spec = AttentionSpec(3, 1, 64, dtype)
    longest = 2000 if device.type == "cuda" else 200
    assert_agrees(backend, batch_of(spec, 16, (longest, 130), (longest, 65)), device)


def test_pages_shared_by_requests(backend, device):
    spec = AttentionSpec(4, 2, 64, half(backend))
    batch = Batch(spec, 4, 9, (14, 9, 14), (1, 9, 2), ((8, 1, 5, 0), (8, 1, 5), (8, 1, 2, 3)))
    assert_agrees(backend, batch, device)


def test_one_object_serves_steps_of_every_shape_in_turn(backend, device):
    spec = AttentionSpec(4, 2, 64, half(backend))
    require_support(backend, spec, 4, device)
    attn = PagedAttention(spec, 4, backend=backend, device=device)

    def attend(step):
        attn.plan(step.page_table, step.qo_indptr)
        return attn.run_return_lse(step.q, step.kv_cache)

    shapes = [((9,), (1,)), ((70, 3, 20), (70, 1, 5)), ((), ()), ((12, 12), (1, 1)), ((70,), (2,))]
    for seed, (kv_lens, qo_lens) in enumerate(shapes):
        step = batch_of(spec, 4, kv_lens, qo_lens, seed=seed).materialise(device)
        comparison = check_backend(backend, step, attend=attend)
        assert comparison.ok, comparison.worst


@pytest.mark.parametrize("layout", ["layer of a larger cache", "pair", "wider pages"])
def test_strided_caches(backend, device, layout):
    spec = AttentionSpec(4, 2, 64, half(backend))
    require_support(backend, spec, 4, device)
    step = batch_of(spec, 4, (14, 9), (1, 9)).materialise(device)
    cache = step.kv_cache
    if layout == "layer of a larger cache":
        strided = torch.full((cache.shape[0], 3, *cache.shape[1:]), torch.nan).to(cache)[:, 1]
    elif layout == "pair":
        strided = (cache[:, 0].contiguous(), cache[:, 1].contiguous())
    else:
        strided = torch.full((cache.shape[0], 2, 7, *cache.shape[3:]), torch.nan).to(cache)[
            :, :, 2:6
        ]
    if isinstance(strided, torch.Tensor):
        strided.copy_(cache)
    attn = PagedAttention(spec, 4, backend=backend, device=device)
    attn.plan(step.page_table, step.qo_indptr)
    comparison = check_backend(backend, step, attend=lambda s: attn.run_return_lse(s.q, strided))
    assert comparison.ok, comparison.worst


@pytest.mark.parametrize("num_heads", [1, 2])
def test_strides_of_axes_of_one_element_do_not_matter(backend, device, num_heads):
    """One token, or one head, as slices of something larger: what cannot be stepped is dense."""
    spec = AttentionSpec(num_heads, 1, 64, half(backend))
    require_support(backend, spec, 4, device)
    step = batch_of(spec, 4, (14,), (1,)).materialise(device)
    q = odd_strides(step.q, (999, 64 if num_heads > 1 else 777, 1))
    kv_cache = odd_strides(step.kv_cache, (*step.kv_cache.stride()[:3], 777, 1))
    attn = PagedAttention(spec, 4, backend=backend, device=device)
    attn.plan(step.page_table, step.qo_indptr)
    comparison = check_backend(backend, step, attend=lambda _: attn.run_return_lse(q, kv_cache))
    assert comparison.ok, comparison.worst


def odd_strides(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The same elements with other strides, which matter where an axis has more than one."""
    strided = tensor.clone().as_strided(tensor.shape, strides)
    assert torch.equal(strided.nan_to_num(), tensor.nan_to_num())
    return strided


def test_strided_queries(backend, device):
    spec = AttentionSpec(4, 2, 64, half(backend))
    require_support(backend, spec, 4, device)
    step = batch_of(spec, 4, (14, 9), (1, 9)).materialise(device)
    packed = torch.full((10, 8, 64), torch.nan).to(step.q)  # as a slice of packed q, k and v
    packed[:, :4] = step.q
    attn = PagedAttention(spec, 4, backend=backend, device=device)
    attn.plan(step.page_table, step.qo_indptr)
    comparison = check_backend(
        backend, step, attend=lambda s: attn.run_return_lse(packed[:, :4], s.kv_cache)
    )
    assert comparison.ok, comparison.worst
