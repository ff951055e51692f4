"""`Staging`: what is uploaded arrives, and no buffer is rewritten before its copy is done."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedattn.staging import PinnedRing, Staging

ROOM = [20, 30, 60]


def arrays_of(sizes, seed: int = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(-9, 99, n, dtype=np.int32) for n in sizes]


def check(staging: Staging, arrays: list[np.ndarray], last: list[int]) -> None:
    """What was uploaded is on the device, each value of `last` behind its array."""
    expected = [array.tolist() for array in arrays]
    expected = [[*e, v] for e, v in zip(expected, last, strict=False)] + [expected[-1]]
    for array, values in zip(staging.arrays, expected, strict=True):
        assert array.device == staging.device
        assert array[: len(values)].tolist() == values


@given(
    uploads=st.lists(
        st.tuples(st.integers(0, 19), st.integers(0, 29), st.integers(0, 60)), max_size=7
    )
)
def test_arrays_arrive_and_addresses_never_change(device, uploads):
    staging = Staging(device, ROOM)
    addresses = [array.data_ptr() for array in staging.arrays]
    for seed, sizes in enumerate(uploads):
        arrays = arrays_of(sizes, seed)
        staging.upload(arrays, [seed, -seed])
        check(staging, arrays, [seed, -seed])
        assert [array.data_ptr() for array in staging.arrays] == addresses


def test_room_can_be_made_between_uploads(device):
    staging = Staging(device, [])
    for entries in (2, 100, 3000):
        staging.make_room([entries + 1, entries])
        for seed in range(5):  # every buffer in turn
            arrays = arrays_of([entries] * 2, seed)
            staging.upload(arrays, [seed])
            check(staging, arrays, [seed])


def test_arrays_are_aligned_whatever_comes_before_them(device):
    arrays = Staging(device, [1, 3, 17, 2, 5]).arrays
    assert all(array.data_ptr() % 16 == 0 for array in arrays)


def test_the_source_may_change_once_upload_returns(device):
    staging, source = Staging(device, [9]), np.arange(9, dtype=np.int32)
    staging.upload([source], [])
    source[:] = 0
    assert staging.arrays[0].tolist() == list(range(9))


def block_stream(device: torch.device) -> None:
    """Keep the current stream busy for some tenths of a second."""
    torch.cuda._sleep(int(5e8))


@pytest.mark.gpu
def test_uploads_behind_a_busy_stream_arrive_as_they_were(device):
    """More uploads than buffers, all queued while the GPU is busy: none may overwrite another."""
    staging = Staging(device, [1000], num_buffers=3)
    staging.upload([np.zeros(1000, np.int32)], [])
    torch.cuda.synchronize()
    block_stream(device)
    copies = []
    for i in range(8):
        staging.upload([np.full(1000, i, np.int32)], [])
        copies.append(staging.arrays[0].clone())
    assert [copy.unique().tolist() for copy in copies] == [[i] for i in range(8)]


@pytest.mark.gpu
def test_a_buffer_is_used_again_once_its_copies_are_done_and_not_before(device):
    ring = PinnedRing(device, num_buffers=2)
    target = torch.empty(64, dtype=torch.uint8, device=device)

    def upload() -> int:
        buffer = ring.next(64)
        target.copy_(buffer[:64], non_blocking=True)
        ring.hold()
        return buffer.data_ptr()

    first, second = upload(), upload()
    assert first != second
    torch.cuda.synchronize()
    assert upload() == second
    torch.cuda.synchronize()
    block_stream(device)
    assert upload() == second
    assert upload() == first
    torch.cuda.synchronize()


def test_a_buffer_that_nobody_holds_is_not_used_again_at_once(device):
    ring = PinnedRing(device, num_buffers=2)
    for _ in range(2):  # makes both
        ring.next(64)
        ring.hold()
    ring.next(64)
    before = ring.next(64).data_ptr()
    assert ring.next(64).data_ptr() != before


@pytest.mark.gpu
def test_an_upload_does_not_wait_for_the_stream(device):
    staging = Staging(device, [1000], num_buffers=4)
    for _ in range(4):
        staging.upload([np.zeros(1000, np.int32)], [])  # page-locks every buffer
    torch.cuda.synchronize()
    block_stream(device)
    for i in range(3):
        staging.upload([np.full(1000, i, np.int32)], [])
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
