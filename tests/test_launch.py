"""`Launch`: a remembered launch is one that Triton would have compiled to the same kernel."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedattn.backends import unsupported_reasons
from pagedattn.device import resolve_device
from pagedattn.spec import AttentionSpec

REASONS = unsupported_reasons("triton", AttentionSpec(1, 1, 16), 16, resolve_device(None))
if REASONS:
    pytest.skip("; ".join(REASONS), allow_module_level=True)

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from attention_steps import assert_same_bits, batch_of  # noqa: E402
from triton._C.libtriton import native_specialize_impl  # noqa: E402
from triton.backends.compiler import BaseBackend  # noqa: E402

from pagedattn.attention import PagedAttention  # noqa: E402
from pagedattn.backends.triton.descriptors import Descriptors  # noqa: E402
from pagedattn.backends.triton.launch import Launch, LayerPointers, Pointers  # noqa: E402

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.int64]
INTS = [0, 1, 2, 15, 16, 17, 48, 2**31 - 1, 2**31, 2**32, 2**62, -1, -16, -(2**31), -(2**31) - 1]
NUMBERS = st.sampled_from([*INTS, 1.0, 0.0, 16.0, True, False])


@st.composite
def views(draw) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    return torch.zeros(64, dtype=dtype)[draw(st.integers(0, 16)) :]


class Recorder:
    """Stands for a compiled kernel: one object for each way in which Triton would compile it."""

    arg_names = ("A", "B", "n", "m", "SIZE")

    def __init__(self) -> None:
        self.pre_run_hooks: list = []
        self.ordinary: list[list] = []
        self.direct: list[tuple] = []
        self.compiled: type = Compiled

    def specialization(self, arguments) -> list:
        return [native_specialize_impl(BaseBackend, a, False, True, True) for a in arguments]

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.ordinary.append(self.specialization(arguments))
            return self.compiled(self, self.ordinary[-1])

        return launch


class Compiled:
    packed_metadata = "metadata"

    def __init__(self, recorder: Recorder, function: list) -> None:
        self.function = function
        self.run = lambda *arguments: recorder.direct.append(arguments)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def remembering(recorder: Recorder) -> Launch:
    """A launch on the stream numbered 7, of a kernel that would have been compiled."""
    launch = Launch(recorder, torch.device("cpu"), {"SIZE": 4}, {"num_warps": 8})
    launch.remembers = True
    launch._device_index, launch._current_stream = 0, lambda index: 7
    return launch


@given(
    launches=st.lists(st.tuples(views(), views(), NUMBERS, NUMBERS), min_size=2, max_size=12),
    num_that_stay=st.integers(0, 2),
)
def test_what_is_remembered_is_what_triton_compiled_for_these_arguments(launches, num_that_stay):
    recorder = Recorder()
    launch = remembering(recorder)
    for a, b, *numbers in launches * 2:
        before, (n, m) = len(recorder.direct), numbers
        stay, others = numbers[:num_that_stay], numbers[num_that_stay:]
        launch(3, Pointers.of(a), Pointers.of(b).before(*stay), *others)
        for direct in recorder.direct[before:]:
            assert direct[4] == recorder.specialization([a, b, n, m])
            assert direct[:4] == (3, 1, 1, 7)
            assert direct[5:9] == ("metadata", None, None, None)
            assert direct[9:] == (a.data_ptr(), b.data_ptr(), n, m, 4)
    assert len(recorder.ordinary) + len(recorder.direct) == 2 * len(launches)
    assert len(recorder.direct) >= len(launches)  # the second time, all are remembered


@given(launches=st.lists(st.lists(st.integers(0, 16), min_size=5, max_size=5), min_size=1))
def test_what_is_remembered_of_a_layer_is_what_triton_compiled_for_its_addresses(launches):
    recorder = Recorder()
    launch = remembering(recorder)
    dtypes = [torch.float16] * 4 + [torch.float32]
    for offsets in launches * 2:
        tensors = [
            torch.zeros(64, dtype=dtype)[offset:]
            for dtype, offset in zip(dtypes, offsets, strict=True)
        ]
        before = len(recorder.direct)
        q, k_pages, v_pages, out, lse = tensors
        launch(3, LayerPointers.of(q, (k_pages, v_pages), out, lse), Pointers.of(), 1, 2)
        for direct in recorder.direct[before:]:
            assert direct[4] == recorder.specialization([*tensors, 1, 2])
            assert direct[9:14] == tuple(tensor.data_ptr() for tensor in tensors)
    assert len(recorder.direct) >= len(launches)


@pytest.mark.parametrize("num_pages", [0, 1, 3])
@pytest.mark.parametrize("head_dim", [3, 16])  # of 3, values may begin anywhere
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_keys_and_values_in_one_tensor_are_where_their_views_are(num_pages, head_dim, offset):
    pool = torch.zeros(5, 2, 4, 1, head_dim, dtype=torch.float16).flatten()
    kv_cache = pool[offset:].as_strided(
        (num_pages, 2, 2, 1, head_dim), (8 * head_dim, 4 * head_dim, 2 * head_dim, 2, 1)
    )
    q, halves = torch.zeros(1, 1, head_dim), kv_cache.unbind(1)
    one, two = LayerPointers.of(q, kv_cache, q, q), LayerPointers.of(q, halves, q, q)
    assert one[4:] == two[4:]
    assert one.addresses[1:3] == tuple(half.data_ptr() for half in halves)
    for mine, theirs in zip(one.tensors, two.tensors, strict=True):
        assert (mine.data_ptr(), mine.stride()) == (theirs.data_ptr(), theirs.stride())


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_with_a_launch_hook_every_launch_is_an_ordinary_one(recorder, monkeypatch, name):
    launch, pointers = remembering(recorder), Pointers.of(torch.zeros(4))
    chain = type(getattr(triton.knobs.runtime, name))()
    monkeypatch.setattr(triton.knobs.runtime, name, chain)
    for _ in range(3):
        launch(1, pointers, pointers, 1, 2)
    assert len(recorder.ordinary) == 1
    chain.add(lambda *_: None)
    launch(1, pointers, pointers, 1, 2)
    assert (len(recorder.ordinary), len(recorder.direct)) == (2, 2)
    monkeypatch.setattr(triton.knobs.runtime, name, lambda *_: None)
    launch(1, pointers, pointers, 1, 2)
    recorder.pre_run_hooks.append(lambda *_: None)
    monkeypatch.setattr(triton.knobs.runtime, name, None)
    launch(1, pointers, pointers, 1, 2)
    assert (len(recorder.ordinary), len(recorder.direct)) == (4, 2)


def test_no_more_is_remembered_than_there_is_room_for(recorder, monkeypatch):
    monkeypatch.setattr("pagedattn.backends.triton.launch.MAX_REMEMBERED", 5)
    launch, pointers = remembering(recorder), Pointers.of(torch.zeros(4))
    for n in range(20):
        launch(1, pointers, pointers, n, 0)
        launch(1, pointers, pointers, n, 0)
    assert len(launch._remembered) <= 5
    assert len(recorder.direct) == 20


def test_each_cache_has_its_own_descriptors_encoded_once(recorder):
    launch, pointers = remembering(recorder), Pointers.of(torch.zeros(4))
    recorder.specialization = lambda arguments: arguments
    encoded = []

    def launch_of(launcher):
        def wrapper(*given):
            encoded.append(given[9])
            launcher(*given[:9], f"map of {given[9]}", *given[10:])

        return wrapper

    class Wrapped(Compiled):
        def __init__(self, recorder, function):
            super().__init__(recorder, function)
            self.run = WithWrapper(launch_of(self.run))

    recorder.compiled = Wrapped
    caches = [Descriptors(("a",)), Descriptors(("b",)), Descriptors(("a",))]
    for cache in caches * 3:
        launch(1, pointers, pointers.before(1, 2), descriptors=cache)
    assert [ordinary[0] for ordinary in recorder.ordinary] == ["a", "b", "a"]
    assert [direct[9] for direct in recorder.direct] == ["map of a", "map of b", "map of a"] * 2
    assert encoded == ["a", "b", "a"]


class WithWrapper:
    """A launcher as Triton's: what it is called with goes through its `launch`."""

    def __init__(self, launch) -> None:
        self.launch = launch

    def __call__(self, *arguments) -> None:
        self.launch(*arguments)


@triton.jit(do_not_specialize=["n"])
def _scale(SOURCE, TARGET, n, factor, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(TARGET + at, tl.load(SOURCE + at, mask=at < n, other=0.0) * factor)


@triton.jit(do_not_specialize=["n", "m"])
def _count(TARGET, n, m, SIZE: tl.constexpr):
    tl.store(TARGET + tl.arange(0, SIZE), n + m)


def test_a_kernel_for_any_numbers_is_remembered_whatever_they_are(recorder, monkeypatch):
    launch, pointers = remembering(recorder), Pointers.of(torch.zeros(4))
    assert not launch._is_for_any_numbers
    launch._is_for_any_numbers = True
    for n in (1, 16, 17, 2**31 - 1, 2**31, 2**31):
        launch(1, pointers, pointers, n, 0)
    assert (len(recorder.ordinary), len(recorder.direct)) == (2, 4)  # 64 bits are another kernel


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="an interpreted kernel is not compiled")
def test_numbers_that_nothing_is_compiled_for_are_recognised(device):
    assert Launch(_count, device, {"SIZE": 4}, {})._is_for_any_numbers
    assert not Launch(_scale, device, {"SIZE": 16}, {})._is_for_any_numbers


def test_interpreted_kernels_take_the_ordinary_way(device):
    launch = Launch(_scale, device, {"SIZE": 16}, {"num_warps": 1})
    assert launch.remembers == (not triton.knobs.runtime.interpret)


def test_misaligned_tensors_and_other_numbers_between_aligned_ones_are_right(device):
    launch = Launch(_scale, device, {"SIZE": 16}, {"num_warps": 1})
    for _ in range(2):
        for dtype in (torch.float32, torch.float16):
            for offset in (0, 1, 3, 8):
                for n, factor in ((16, 2.0), (1, 2.0), (5, 0.5)):
                    source = torch.arange(40, device=device).to(dtype)[offset:]
                    target = torch.full((40,), -1.0, device=device)[offset:]
                    launch(1, Pointers.of(source), Pointers.of(target), n, factor)
                    expected = torch.zeros(16)
                    expected[:n] = (torch.arange(n) + offset) * factor
                    assert target[:16].tolist() == expected.tolist()
                    assert (target[16:] == -1).all()


@pytest.mark.parametrize("lens", [((40, 30), (1, 1)), ((40,), (35,))])
def test_a_misaligned_query_gives_the_same_bits(device, lens):
    """Views that begin anywhere, before and after one that is aligned."""
    spec = AttentionSpec(4, 2, 64, torch.float16)
    step = batch_of(spec, 16, *lens).materialise(device)
    attn = PagedAttention(spec, 16, backend="triton", device=device)
    attn.plan(step.page_table, step.qo_indptr)
    expected = attn.run_return_lse(step.q, step.kv_cache)
    rows = step.q.shape[0]
    for offset in (1, 0, 4, 1):
        flat = torch.zeros(step.q.numel() + offset, dtype=spec.dtype, device=device)
        q = flat[offset:].view_as(step.q).copy_(step.q)
        out = torch.zeros(rows * 5 * 64 + offset, dtype=spec.dtype, device=device)
        out = out[offset:].view(rows, 5, 64)[:, :4]
        assert_same_bits(attn.run_return_lse(q, step.kv_cache, out=out), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("is_current", [True, False])
def test_launches_go_to_the_stream_that_is_current_or_named(device, is_current):
    launch = Launch(_scale, device, {"SIZE": 16}, {"num_warps": 1})
    source, target = (torch.ones(16, device=device) for _ in range(2))
    arguments = (1, Pointers.of(source), Pointers.of(target), 16)
    launch(*arguments, 2.0)
    launch(*arguments, 2.0)
    torch.cuda.synchronize()
    side = torch.cuda.Stream(device)
    named = {} if is_current else {"stream": side}
    with torch.cuda.stream(side):
        torch.cuda._sleep(int(2e8))
    with torch.cuda.stream(side if is_current else None):
        launch(*arguments, 3.0, **named)
        launch(*arguments, 3.0, **named)
    assert target.tolist() == [2.0] * 16  # read on the default stream, while the other sleeps
    side.synchronize()
    assert target.tolist() == [3.0] * 16
