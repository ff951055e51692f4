"""`Batch`: an attention step as a small value that prints, compares and becomes tensors.

Holds structure in plain integers and everything else as a seed with a named kind, so a failing case
is reproduced by pasting its repr.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from pagedattn.checking.real_activations import real_tokens
from pagedattn.checking.step import Step
from pagedattn.page_table import PageTable
from pagedattn.spec import AttentionSpec

VALUE_KINDS = (
    "normal",
    "large_logits",  # scores spread over about plus and minus 100
    "low_scores",  # every score below -5e4, where a finite "minus infinity" would win
    "loud_key",  # one key of each request, at an edge of what is visible, outweighs the rest
    "constant_values",  # the same V everywhere: the output is V
    "zero_query",  # q = 0: the output is the mean of the visible V
    "real_activations",  # what two layers of SmolLM2 were given, in the heads of the spec
)
GARBAGE_KINDS = ("nan", "infinity", "junk", "zeros")

LOUD_SCORE = 12.0


@dataclass(frozen=True)
class Batch:
    """One attention step, as structure and a seed.

    Args:
        spec: The layer kind.
        page_size: Tokens in one page.
        num_pages: Pages of the cache, used or not.
        kv_lens: Keys of each request.
        qo_lens: Queries of each request.
        pages: Physical pages of each request, `ceil(kv_len / page_size)` of them; they may share.
        values: One of `VALUE_KINDS`: what q, K and V hold.
        garbage: One of `GARBAGE_KINDS`: what every slot holds that no query may see.
        seed: Of the values and of the garbage.

    Example:
        >>> spec = AttentionSpec(num_qo_heads=2, num_kv_heads=1, head_dim=16)
        >>> pages = ((8, 0), (3,))
        >>> batch = Batch(spec, 4, num_pages=9, kv_lens=(5, 1), qo_lens=(1, 1), pages=pages)
        >>> step = batch.materialise()
        >>> step.q.shape, step.kv_cache.shape
        (torch.Size([2, 2, 16]), torch.Size([9, 2, 4, 1, 16]))
        >>> step.page_table.kv_indices.tolist()
        [8, 0, 3]
    """

    spec: AttentionSpec
    page_size: int
    num_pages: int
    kv_lens: tuple[int, ...]
    qo_lens: tuple[int, ...]
    pages: tuple[tuple[int, ...], ...]
    values: str = "normal"
    garbage: str = "nan"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, known in (
            ("values", self.values, VALUE_KINDS),
            ("garbage", self.garbage, GARBAGE_KINDS),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {known}, got {value!r}")

    @property
    def page_table(self) -> PageTable:
        """The step's table, on the host."""
        ids = [page for pages in self.pages for page in pages]
        return PageTable.from_lengths(self.kv_lens, self.page_size, ids)

    @property
    def qo_indptr(self) -> Tensor:
        """i32[batch + 1]: where each request's queries begin, on the host."""
        return torch.tensor([0, *accumulate(self.qo_lens)], dtype=torch.int32)

    def materialise(self, device: torch.device | str = "cpu") -> Step:
        """Make the tensors. The same on every device: values are drawn on the host.

        What a page holds goes with its place in the table, not with its number: a batch that
        differs in nothing but page numbers has the same keys and values.
        """
        generator = torch.Generator().manual_seed(self.seed)
        spec = self.spec
        q = torch.randn(sum(self.qo_lens), spec.num_qo_heads, spec.head_dim, generator=generator)
        used = list(dict.fromkeys(page for pages in self.pages for page in pages))
        page_shape = (2, self.page_size, spec.num_kv_heads, spec.head_dim)
        contents = torch.randn(len(used), *page_shape, generator=generator)
        slots = self._slots_in_order_of_use()
        _shape_values(self, q, contents, slots, generator)

        kv_cache = torch.empty(self.num_pages, *page_shape, dtype=spec.dtype, device=device)
        _fill_with_garbage(kv_cache, self.garbage, self.seed)
        seen = torch.zeros(len(used) * self.page_size, dtype=torch.bool)
        for request_slots, keys in zip(slots, self.visible_keys(), strict=True):
            seen[request_slots[keys.start : keys.stop]] = True
        seen = seen.view(-1, 1, self.page_size, 1, 1).to(device)
        ids = torch.tensor(used, dtype=torch.int64, device=device)
        kv_cache[ids] = torch.where(seen, contents.to(device, spec.dtype), kv_cache[ids])
        return Step(spec, self.page_table, self.qo_indptr, q.to(device, spec.dtype), kv_cache)

    def visible_keys(self) -> list[range]:
        """The keys of each request that at least one of its queries sees."""
        keys = []
        for kv_len, qo_len in zip(self.kv_lens, self.qo_lens, strict=True):
            window = self.spec.window_left if self.spec.window_left >= 0 else kv_len
            keys.append(range(max(0, kv_len - qo_len - window) if qo_len else kv_len, kv_len))
        return keys

    def _slots_in_order_of_use(self) -> list[Tensor]:
        """i64[kv_len] for each request: where its keys are, pages numbered by their first use."""
        number: dict[int, int] = {}
        slots = []
        for kv_len, pages in zip(self.kv_lens, self.pages, strict=True):
            numbers = torch.tensor([number.setdefault(p, len(number)) for p in pages]).long()
            in_pages = numbers[:, None] * self.page_size + torch.arange(self.page_size)
            slots.append(in_pages.flatten()[:kv_len])
        return slots


def _fill_with_garbage(kv_cache: Tensor, kind: str, seed: int) -> None:
    if kind == "junk":
        generator = torch.Generator(kv_cache.device).manual_seed(seed)
        kv_cache.uniform_(-3e4, 3e4, generator=generator)
    else:
        kv_cache.fill_({"nan": torch.nan, "infinity": torch.inf, "zeros": 0.0}[kind])
        if kind == "infinity":
            kv_cache[..., ::2] = -torch.inf


def _shape_values(
    batch: Batch, q: Tensor, contents: Tensor, slots: list[Tensor], generator: torch.Generator
) -> None:
    """Turn standard normal q, K and V into the batch's kind of values, in place.

    Args:
        batch: The batch.
        q: f32[tokens, num_qo_heads, head_dim].
        contents: f32[pages in use, 2, page_size, num_kv_heads, head_dim].
        slots: i64[kv_len] for each request, into the pages in use.
        generator: Of further choices.
    """
    spec = batch.spec
    k, v = contents.unbind(1)
    match batch.values:
        case "large_logits":
            q *= 30 / (spec.scale * spec.head_dim**0.5)
        case "low_scores":  # -8e4 from all elements but the first, a normal spread from the first
            q.fill_((8e4 / (spec.scale * max(spec.head_dim - 1, 1))) ** 0.5)
            k[..., 1:] = -q.max() if q.numel() else 0
            k[..., 0] /= spec.scale
            q[..., 0] = 1
        case "loud_key":
            q += 2
            _plant_loud_keys(batch, contents, slots, generator)
        case "constant_values":
            v.copy_(torch.randn(v.shape[2:], generator=generator))
        case "zero_query":
            q.zero_()
        case "real_activations":
            _put_real_activations(batch, q, contents, slots, generator)


def _put_real_activations(
    batch: Batch, q: Tensor, contents: Tensor, slots: list[Tensor], generator: torch.Generator
) -> None:
    """Give each request a stretch of real tokens; queries and keys of one position are one token's.

    In a page that requests share, the last of them writes.
    """
    tokens = real_tokens(batch.spec, generator)
    row = 0
    for request_slots, kv_len, qo_len in zip(slots, batch.kv_lens, batch.qo_lens, strict=True):
        # some queries may come before the first key
        stretch = tokens.stretches(qo_len + kv_len, generator)
        page, offset = request_slots // batch.page_size, request_slots % batch.page_size
        contents[page, 0, offset] = tokens.k[stretch[qo_len:]]
        contents[page, 1, offset] = tokens.v[stretch[qo_len:]]
        q[row : row + qo_len] = tokens.q[stretch[kv_len:]]
        row += qo_len


def _plant_loud_keys(
    batch: Batch, contents: Tensor, slots: list[Tensor], generator: torch.Generator
) -> None:
    """In each request, let one key at an edge of what some query sees outweigh all the others.

    Queries lean towards (1, 1, ...); the key lies that way, and its value stands out.
    """
    spec, page_size = batch.spec, batch.page_size
    for request, (kv_len, qo_len) in enumerate(zip(batch.kv_lens, batch.qo_lens, strict=True)):
        if not kv_len:
            continue
        position = kv_len - 1 - _below(max(qo_len, 1), generator)
        left = position - max(spec.window_left, 0)
        edges = [left, left - 1, position, position + 1, kv_len - 1]
        edges += [(kv_len - 1) // page_size * page_size, position // page_size * page_size - 1]
        key = min(max(edges[_below(len(edges), generator)], 0), kv_len - 1)
        page, offset = divmod(int(slots[request][key]), page_size)
        contents[page, 0, offset] = LOUD_SCORE / (2 * spec.head_dim * spec.scale)
        contents[page, 1, offset] = 8


def _below(bound: int, generator: torch.Generator) -> int:
    return int(torch.randint(bound, (1,), generator=generator))
