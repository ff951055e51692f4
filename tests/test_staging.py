"""`Staging`: what is uploaded arrives, and no buffer is rewritten before its copy is done."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedattn.staging import Staging

DTYPES = [torch.int32, torch.int64, torch.float32, torch.uint8, torch.float16]


def draw_tensor(data, max_size: int = 40) -> torch.Tensor:
    dtype = data.draw(st.sampled_from(DTYPES))
    size = data.draw(st.integers(0, max_size))
    return torch.randint(0, 100, (size,)).to(dtype)


@given(data=st.data())
def test_every_tensor_arrives_with_its_shape_and_dtype(device, data):
    staging = Staging(device)
    for _ in range(data.draw(st.integers(1, 6))):
        tensors = [draw_tensor(data) for _ in range(data.draw(st.integers(1, 4)))]
        uploaded = staging.upload(tensors)
        assert [(t.dtype, t.shape, t.device) for t in uploaded] == [
            (t.dtype, t.shape, device) for t in tensors
        ]
        assert all(torch.equal(a.cpu(), b) for a, b in zip(uploaded, tensors, strict=True))


def test_without_a_capacity_an_earlier_upload_is_not_touched(device):
    staging = Staging(device, num_buffers=2)
    uploaded = [staging.upload([torch.full((9,), i)])[0] for i in range(7)]
    assert [t.unique().tolist() for t in uploaded] == [[i] for i in range(7)]


@given(data=st.data())
def test_with_a_capacity_addresses_never_change(device, data):
    staging = Staging(device, [160, 320])
    first = [t.data_ptr() for t in staging.upload([torch.zeros(40).int(), torch.zeros(40).long()])]
    for _ in range(data.draw(st.integers(1, 6))):
        tensors = [
            torch.randint(0, 99, (data.draw(st.integers(1, 40)),)).int(),
            torch.randint(0, 99, (data.draw(st.integers(1, 40)),)),
        ]
        uploaded = staging.upload(tensors)
        assert [t.data_ptr() for t in uploaded] == first
        assert all(torch.equal(a.cpu(), b) for a, b in zip(uploaded, tensors, strict=True))


def test_arrays_are_aligned_whatever_comes_before_them(device):
    staging = Staging(device)
    sizes = (1, 3, 17, 0, 5)
    uploaded = staging.upload([torch.zeros(size, dtype=torch.uint8) for size in sizes])
    base = uploaded[0].data_ptr()
    assert all((t.data_ptr() - base) % 16 == 0 for t in uploaded if t.numel())


def test_the_source_may_change_once_upload_returns(device):
    source = torch.arange(9)
    (uploaded,) = Staging(device).upload([source])
    source.zero_()
    assert uploaded.tolist() == list(range(9))


def block_stream(device: torch.device) -> None:
    """Keep the current stream busy for some tenths of a second."""
    torch.cuda._sleep(int(5e8))


@pytest.mark.gpu
def test_uploads_behind_a_busy_stream_arrive_as_they_were(device):
    """More uploads than buffers, all queued while the GPU is busy: none may overwrite another."""
    staging = Staging(device, num_buffers=3)
    staging.upload([torch.zeros(1000)])
    torch.cuda.synchronize()
    block_stream(device)
    uploaded = [staging.upload([torch.full((1000,), float(i))])[0] for i in range(8)]
    assert [t.unique().tolist() for t in uploaded] == [[float(i)] for i in range(8)]


@pytest.mark.gpu
def test_an_upload_does_not_wait_for_the_stream(device):
    staging = Staging(device, num_buffers=4)
    for _ in range(4):
        staging.upload([torch.zeros(1000)])  # page-locks every buffer
    torch.cuda.synchronize()
    block_stream(device)
    for i in range(3):
        staging.upload([torch.full((1000,), float(i))])
    assert not torch.cuda.current_stream(device).query()
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_plans_ahead_of_a_busy_stream_are_each_their_own_steps(backend, device):
    """Block the stream; plan and run A, then B, with no sync: both answers are right."""
    from attention_steps import assert_same_bits, batch_of, half, require_support

    from pagedattn import AttentionSpec, PagedAttention

    spec = AttentionSpec(4, 2, 64, half(backend))
    require_support(backend, spec, 4, device)
    if backend == "reference":
        pytest.skip("reference: reads lengths on the host, so it cannot run ahead")
    attn = PagedAttention(spec, 4, backend=backend, device=device)
    shapes = [((90, 30), (1, 1)), ((30, 90), (1, 1)), ((61, 59), (1, 1)), ((90, 30), (1, 1))] * 2
    steps = [batch_of(spec, 4, *s, seed=i).materialise(device) for i, s in enumerate(shapes)]

    def run(step):
        attn.plan(step.page_table, step.qo_indptr)
        return attn.run_return_lse(step.q, step.kv_cache)

    expected = [run(step) for step in steps]
    torch.cuda.synchronize()
    block_stream(device)
    answers = [run(step) for step in steps]
    torch.cuda.synchronize()
    for got, right in zip(answers, expected, strict=True):
        assert_same_bits(got, right)
