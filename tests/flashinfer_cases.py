"""Shared by the tests of the FlashInfer wrappers: the library, steps, and the right answer.

On a GPU with flashinfer-python the real library is tested, elsewhere a stand-in over plain torch.
"""

from dataclasses import dataclass

import flashinfer_stand_in
import pytest
import torch

from pagedattn.backends.flashinfer import (
    FlashInferDecodeWrapper,
    FlashInferMixedWrapper,
    FlashInferPrefillWrapper,
    backend,
    decode,
    head_dim,
    need,
    prefill,
)
from pagedattn.backends.reference import ReferenceBackend
from pagedattn.page_table import PageTable
from pagedattn.spec import AttentionSpec

HEADS = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64}
PAGE_SIZE = 4
SIZES = (*HEADS.values(), PAGE_SIZE)
BATCH, TOKENS, PAGES = 4, 16, 48
"""Of wrappers in graph mode."""


@pytest.fixture(autouse=True)
def flashinfer(device: torch.device, monkeypatch: pytest.MonkeyPatch):
    """The library under test; the wrappers find it through their one seam."""
    if device.type == "cuda":
        return pytest.importorskip("flashinfer")
    for module in (backend, decode, head_dim, need, prefill):
        monkeypatch.setattr(module, "load_flashinfer", lambda: flashinfer_stand_in)
    return flashinfer_stand_in


@dataclass
class Step:
    """A step: a table over shuffled pages, query bounds, and real inputs for a layer."""

    table: PageTable
    qo_indptr: torch.Tensor
    q: torch.Tensor
    kv_cache: torch.Tensor

    @property
    def kv_arrays(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.table.kv_indptr, self.table.kv_indices, self.table.last_page_len


def make_step(
    device: torch.device,
    kv_lens: list[int],
    qo_lens: list[int] | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    max_pages: int = 64,
    page_size: int = PAGE_SIZE,
) -> Step:
    """Pages 1 and up in random order; page 0 is the sink page: finite, and nobody's."""
    gen = torch.Generator().manual_seed(seed)
    qo_lens = [1] * len(kv_lens) if qo_lens is None else qo_lens
    ids = (torch.randperm(max_pages - 1, generator=gen) + 1).int()
    table = PageTable.from_lengths(kv_lens, page_size, ids)
    qo_indptr = torch.tensor([0, *qo_lens], dtype=torch.int32).cumsum(0).int()
    heads, kv_heads, dim = HEADS.values()
    q = torch.randn(int(qo_indptr[-1]), heads, dim, generator=gen)
    cache = torch.full((max_pages, 2, page_size, kv_heads, dim), torch.nan)
    cache[0] = 0.0
    for request in range(len(kv_lens)):
        pages = table.pages_of(request).long()
        tokens = torch.randn(2, len(pages) * page_size, kv_heads, dim, generator=gen)
        tokens[:, kv_lens[request] :] = torch.nan  # the unused tail of the last page
        cache[pages] = tokens.unflatten(1, (-1, page_size)).transpose(0, 1)
    return Step(table, qo_indptr, q.to(device, dtype), cache.to(device, dtype))


def right_answer(step: Step, **mask) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 attention and natural-log LSE of a step."""
    spec = AttentionSpec(**HEADS, dtype=step.q.dtype, **mask)
    oracle = ReferenceBackend(spec, step.table.page_size, step.q.device, None)
    oracle.plan(step.table, step.qo_indptr.numpy())
    out = torch.empty(step.q.shape, dtype=torch.float64, device=step.q.device)
    lse = torch.empty(step.q.shape[:2], dtype=torch.float64, device=step.q.device)
    oracle.run(step.q, step.kv_cache, out, lse)
    return out, lse


def assert_right(out: torch.Tensor, lse: torch.Tensor | None, step: Step, **mask) -> None:
    """Allow what rounding the weights and the output once each costs.

    Outputs are means of values below about 4: twice one rounding of each is below 4 * 2 * eps.
    FlashInfer's fa2 sums weights that are rounded already, each by at most eps / 2 of itself, so
    that is the most the logarithm of their sum can be off.
    """
    right, right_lse = right_answer(step, **mask)
    rows = right.shape[0]
    eps = torch.finfo(step.q.dtype).eps
    torch.testing.assert_close(out[:rows].double(), right, rtol=0, atol=8 * eps)
    if lse is not None:
        torch.testing.assert_close(lse[:rows].double(), right_lse, rtol=0, atol=eps / 2)


def padded_query(step: Step, rows: int) -> torch.Tensor:
    """The step's queries, and padding rows behind them."""
    padding = torch.ones(rows - step.q.shape[0], *step.q.shape[1:])
    return torch.cat([step.q, padding.to(step.q)])


def workspace(device: torch.device) -> torch.Tensor:
    """Room enough for any step of these tests."""
    num_bytes = 128 * 1024 * 1024 if device.type == "cuda" else 1 << 20
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def eager_decode(device: torch.device, **options) -> FlashInferDecodeWrapper:
    return FlashInferDecodeWrapper(workspace(device), *SIZES, device=device, **options)


def eager_prefill(device: torch.device, **options) -> FlashInferPrefillWrapper:
    return FlashInferPrefillWrapper(workspace(device), *SIZES, device=device, **options)


def graph_decode(device: torch.device) -> FlashInferDecodeWrapper:
    return eager_decode(device, batch_size=BATCH, max_num_pages=PAGES, accelerator_graph=True)


def graph_prefill(device: torch.device, backend: str = "auto") -> FlashInferPrefillWrapper:
    sizes = {"batch_size": BATCH, "max_total_tokens": TOKENS, "max_num_pages": PAGES}
    return eager_prefill(device, **sizes, accelerator_graph=True, backend=backend)


def graph_mixed(device: torch.device) -> FlashInferMixedWrapper:
    halves = (workspace(device), workspace(device))
    return FlashInferMixedWrapper(*halves, *SIZES, BATCH, TOKENS, PAGES, BATCH, device)


def plan(wrapper, step: Step, **options) -> None:
    """Plan a step on any wrapper."""
    arrays = () if isinstance(wrapper, FlashInferDecodeWrapper) else (step.qo_indptr,)
    wrapper.plan(*arrays, *step.kv_arrays, **options)
