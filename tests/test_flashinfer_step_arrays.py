"""A step's arrays: what goes in comes out, on both sides, in fixed places or in ones that grow."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedattn.backends.flashinfer.step_arrays import StepArrays

DTYPES = {"ids": torch.int32, "slots": torch.int64, "flags": torch.bool, "pages": torch.int32}


def arrays_of(lengths: list[int], seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    dtypes = (np.int32, np.int64, np.bool_, np.int32)
    return [rng.integers(0, 2, n).astype(d) for n, d in zip(lengths, dtypes, strict=True)]


def check(staged: StepArrays, arrays: list[np.ndarray]) -> None:
    for name, array in zip(DTYPES, arrays, strict=True):
        for side in (staged.host(name), staged.on_device(name)):
            assert side.dtype == DTYPES[name]
            assert side.tolist() == array.tolist()


@pytest.mark.parametrize("fixed", [False, True])
@given(steps=st.lists(st.lists(st.integers(0, 20), min_size=4, max_size=4), max_size=9))
def test_uploads_come_out_as_they_went_in(device, fixed, steps):
    staged = StepArrays(device, DTYPES, [20] * 4 if fixed else None)
    for seed, lengths in enumerate(steps):
        arrays = arrays_of(lengths, seed)
        staged.upload(arrays)
        check(staged, arrays)


def test_fixed_arrays_never_move_and_have_their_capacity(device):
    staged = StepArrays(device, DTYPES, [3, 5, 7, 9])
    before = {name: staged.fixed(name).data_ptr() for name in DTYPES}
    assert [staged.fixed(name).shape[0] for name in DTYPES] == [3, 5, 7, 9]
    for lengths in ([3, 5, 7, 9], [1, 1, 1, 1], [1, 2, 3, 4]):
        staged.upload(arrays_of(lengths, 0))
        assert {name: staged.on_device(name).data_ptr() for name in DTYPES} == before
    assert all(address % 16 == 0 for address in before.values())


def test_an_upload_leaves_the_host_arrays_of_the_one_before_alone(device):
    staged = StepArrays(device, DTYPES, [4] * 4)
    first, second = arrays_of([4] * 4, 1), arrays_of([4] * 4, 2)
    staged.upload(first)
    queued = {name: staged.host(name) for name in DTYPES}
    staged.upload(second)
    for name, array in zip(DTYPES, first, strict=True):
        assert queued[name].tolist() == array.tolist()
