"""Descriptors encoded once are what Triton's launcher would hand on, or the launcher stays."""

import itertools
from types import SimpleNamespace

import pytest

triton = pytest.importorskip("triton")

from triton.backends.nvidia import driver as nvidia  # noqa: E402

from pagedattn.backends.triton.descriptors import Expanded, expand  # noqa: E402

OTHERS = [1024, 2048, 8, -1, 0.125, 132, True, 4]
TYPE = "tensordesc<bf16[16,128],NVMMASharedLayout(...)>"
META = {
    "swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [16, 64], "fp4_padded": False,
}  # fmt: skip


def descriptor(address: int, **fields: object) -> SimpleNamespace:
    base = SimpleNamespace(data_ptr=lambda: address)
    return SimpleNamespace(
        base=base, shape=[80, 128], strides=[128, 1], padding="zero", round_f32_to_tf32=False,
        **fields,
    )  # fmt: skip


K, V = descriptor(1 << 20), descriptor(1 << 21)


class Driver:
    """Stands for Triton's driver: a map is what it was encoded from."""

    def __init__(self) -> None:
        self.num_encoded = 0
        self.utils = SimpleNamespace(
            fill_tma_descriptor=self.encode, fill_tma_descriptor_tiled=self.encode
        )

    def encode(self, *fields: object) -> tuple[object, ...]:
        self.num_encoded += 1
        return ("map", *map(str, fields))


@pytest.fixture
def driver(monkeypatch):
    stands = Driver()
    monkeypatch.setattr(type(triton.runtime.driver), "active", stands)
    return stands


def launcher_of_triton(launched: list) -> object:
    """Triton's launcher of a kernel of two descriptors and `OTHERS`, down to what is C."""
    launcher = object.__new__(nvidia.CudaLauncher)
    fields = dict.fromkeys(
        ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl"), 0
    )
    fields |= {"num_ctas": 1, "global_scratch_align": 1, "profile_scratch_align": 1}
    fields |= {"gsan_enabled": False, "arg_annotations": ["annotated"], "kernel_signature": b"s"}
    for name, value in fields.items():
        setattr(launcher, name, value)
    signature = dict(enumerate([TYPE, TYPE, *["i32"] * len(OTHERS)]))
    launcher.launch = nvidia.wrap_handle_tensordesc(
        lambda *given: launched.append(given), signature, [META, META]
    )
    return launcher


def launch(run, *arguments: object) -> None:
    run(60, 1, 1, 7, 64, (4, 1, 0), None, None, None, *arguments)


def flat(given: tuple) -> list:
    return [*given[:-1], *given[-1]] if isinstance(given[-1], (list, tuple)) else [*given]


def test_the_function_behind_the_wrapper_is_given_the_same_without_it(driver):
    launched: list = []
    run = launcher_of_triton(launched)
    expanded = expand(run, (K, V), OTHERS)
    assert not launched
    num_encoded = driver.num_encoded
    launch(run, K, V, *OTHERS)
    for _ in range(3):
        launch(expanded.run, *expanded.arguments, *OTHERS)
    theirs, *ours = map(flat, launched)
    assert ours == [theirs] * 3
    assert driver.num_encoded == num_encoded + 2  # by Triton's own launch alone
    assert len(expanded.arguments) == 2 * (1 + 2 + 2)  # the map, its shape and strides


def test_other_arguments_go_with_the_same_maps(driver):
    launched: list = []
    run = launcher_of_triton(launched)
    expanded = expand(run, (K, V), OTHERS)
    other = [value + 1 for value in OTHERS]
    launch(run, K, V, *other)
    launch(expanded.run, *expanded.arguments, *other)
    assert flat(launched[0]) == flat(launched[1])


def test_without_descriptors_the_launcher_stays():
    run = SimpleNamespace(launch=lambda *_: None)
    assert expand(run, (), OTHERS) == Expanded(run, ())


class Other:
    """A launcher whose `launch` hands on something else, or is something else."""

    def __init__(self, launch: object) -> None:
        self.launch = launch

    def __call__(self, *arguments: object) -> None:
        self.launch(*arguments)


def changes_a_number(launcher):
    return lambda *given: launcher(*given[:9], "map", "map", *given[11:-1], 5)


def drops_one(launcher):
    return lambda *given: launcher(*given[:9], "map", "map", *given[12:])


def reorders(launcher):
    return lambda *given: launcher(*given[:9], *given[11:], "map", "map")


def changes_the_front(launcher):
    return lambda *given: launcher(5, *given[1:9], "map", "map", *given[11:])


def encodes_one(launcher):
    return lambda *given: launcher(*given[:9], "map", *given[10:])


def encodes_none(launcher):
    return lambda *given: launcher(*given)


def leaves_them_out(launcher):
    return lambda *given: launcher(*given[:9], *given[11:])


def is_expected(launcher):
    return lambda *given: launcher(*given[:9], "map", "map", *given[11:])


def names_it_otherwise(function):
    return lambda *given: function(*given[:9], "map", "map", *given[11:])


WRAPPERS = [
    changes_a_number, drops_one, reorders, changes_the_front, encodes_one, encodes_none,
    leaves_them_out, names_it_otherwise,
]  # fmt: skip


def of_no_kernel(*_: object) -> None:
    raise AssertionError("launched")


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_an_unexpected_wrapper_stays(wrapper):
    run = Other(wrapper(of_no_kernel))
    assert expand(run, (K, V), OTHERS) == Expanded(run, (K, V))


def test_an_expected_wrapper_does_not():
    run = Other(is_expected(of_no_kernel))
    expanded = expand(run, (K, V), OTHERS)
    assert (expanded.run.launch, expanded.arguments) == (of_no_kernel, ("map", "map"))


@pytest.mark.parametrize("launch", [None, print, itertools.count().__next__])
def test_a_launcher_without_such_a_wrapper_stays(launch):
    run = Other(launch)
    assert expand(run, (K, V), OTHERS) == Expanded(run, (K, V))
