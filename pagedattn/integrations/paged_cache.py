"""A Transformers `Cache` whose keys and values are in pages.

Which models and masks are honoured is `transformers.py`'s affair; how a padded batch becomes
requests is `padded_batch.py`'s.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from pagedattn.attention import PagedAttention
from pagedattn.integrations.padded_batch import PaddedBatch, PaddedStep
from pagedattn.kv_cache import PagedKVCache
from pagedattn.page_table import PageTable
from pagedattn.spec import AttentionSpec

ATTENTION_NAME = "pagedattn"
"""The name of our attention function: `model.set_attn_implementation("pagedattn")`."""

_LAYER_TYPES = ("full_attention", "sliding_attention")


class PagedKeys(Tensor):
    """dtype[batch, num_kv_heads, q_len, head_dim]: new keys that know the cache they belong to.

    `PagedCache.update` returns them and the attention function, called next, finds the cache by
    them. What a model computes from them in between is a plain tensor, which is refused there.
    """

    # results of operations are plain tensors
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    cache: PagedCache
    layer: int


class PagedCache(Cache):  # type: ignore[misc]  # its base is untyped
    """Keys and values of a decoder-only model's layers in pages, one request a row of the batch.

    Args:
        config: Of the model, which must run with `set_attn_implementation("pagedattn")`.
        num_pages: Pages of each layer, the sink page 0 included.
        page_size: Tokens in one page.
        backend: What computes attention: "flashinfer", "triton" or "reference".

    Attributes:
        kv_cache: The pages, made at the first step from the shape, dtype and device of the model's
            keys; `None` before.

    Raises:
        ValueError: The model has layers that are not attention with a growing cache.

    Example::

        model.set_attn_implementation("pagedattn")
        cache = PagedCache(model.config, num_pages=64, backend="triton")
        model.generate(**inputs, past_key_values=cache)
    """

    def __init__(
        self, config: PreTrainedConfig, num_pages: int, page_size: int = 16, *, backend: str
    ) -> None:
        self._config = config.get_text_config(decoder=True)
        others = set(getattr(self._config, "layer_types", None) or ()) - set(_LAYER_TYPES)
        if others:
            raise ValueError(f"layer_types must be of {list(_LAYER_TYPES)}, got {sorted(others)}")
        num_layers = self._config.num_hidden_layers
        super().__init__(layers=[_PagedLayer(self, layer) for layer in range(num_layers)])
        self.num_pages = num_pages
        self.page_size = page_size
        self.backend = backend
        self.kv_cache: PagedKVCache | None = None
        self._batch: PaddedBatch | None = None
        self._attention: dict[AttentionSpec, PagedAttention] = {}
        self._step: PaddedStep | None = None
        self._planned: set[AttentionSpec] = set()  # whose PagedAttention has this step's plan

    @property
    def num_columns(self) -> int:
        """Width of the padded batch so far: tokens and padding of each row."""
        return 0 if self._batch is None else self._batch.num_columns

    def page_table(self) -> PageTable:
        """The pages and lengths of every row, in order.

        Raises:
            RuntimeError: Nothing has been written yet.
        """
        if self._batch is None:
            raise RuntimeError("the cache is empty: its rows are made at the model's first step")
        return self._batch.page_table()

    def tag(self, layer: int, keys: Tensor) -> PagedKeys:
        """Return `keys` such that the attention function finds this cache.

        Raises:
            ValueError: The model runs another attention function, which would see new keys only.
        """
        if self._config._attn_implementation != ATTENTION_NAME:
            raise ValueError(
                f"PagedCache needs model.set_attn_implementation({ATTENTION_NAME!r}), the model "
                f"has {self._config._attn_implementation!r}"
            )
        tagged = keys.as_subclass(PagedKeys)
        tagged.cache, tagged.layer = self, layer
        return tagged

    def attend(
        self, q: Tensor, k: PagedKeys, v: Tensor, mask: Tensor, spec: AttentionSpec
    ) -> Tensor:
        """Write new keys and values of a layer into its pages, and attend to all of them.

        Args:
            q: dtype[batch, num_qo_heads, q_len, head_dim].
            k: dtype[batch, num_kv_heads, q_len, head_dim], as `update` returned them.
            v: As `k`.
            mask: bool[batch, columns]: which columns are tokens, this step's `q_len` included. The
                step's first layer reads it on the host, which waits for the GPU.
            spec: The layer kind. There is one `PagedAttention` for each.

        Returns:
            dtype[batch, q_len, num_qo_heads, head_dim], zeros for padding.

        Raises:
            OutOfPages: Too few pages are free for the step. It has not begun.
            ValueError: The step does not continue the last one, or shapes are not the cache's.
        """
        if self.kv_cache is None:
            self.kv_cache = PagedKVCache(
                len(self.layers), self.num_pages, self.page_size, spec, k.device
            )
        if self._batch is None:
            self._batch = PaddedBatch(self.kv_cache, q.shape[0])
        if self._step is None or mask.shape[1] != self.num_columns:
            self._step = None
            self._planned.clear()
            self._step = self._batch.begin_step(mask, q.shape[2])
        step, layer = self._step, self.kv_cache[k.layer]
        self.kv_cache.append(k.layer, _rows_of(k), _rows_of(v), step.slots)
        rows = _rows_of(q).contiguous()
        attention = self._planned_attention(self._batch, step, spec)
        if step.tokens is None:
            out = attention.run(rows, layer)
        else:
            out = torch.zeros_like(rows)
            out[step.tokens] = attention.run(rows[step.tokens], layer)
        return out.view(q.shape[0], q.shape[2], q.shape[1], q.shape[3])

    def reset(self) -> None:
        """Free every page."""
        self._select_rows([])
        self._batch = None

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last columns, as after rejected speculation.

        Args:
            tokens_to_remove: 0 or minus the number of columns, as Transformers calls it.
        """
        if not -self.num_columns <= tokens_to_remove <= 0:
            raise ValueError(
                f"tokens_to_remove must be {-self.num_columns} to 0, got {tokens_to_remove}"
            )
        if self._batch is not None and tokens_to_remove:
            self._batch.crop(self.num_columns + tokens_to_remove)
            self._step = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row `i` continue row `beam_idx[i]`; rows that continue one row share its pages."""
        self._select_rows(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`, in this order."""
        if self._batch is not None:
            self._select_rows(torch.arange(self._batch.batch_size)[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Let `repeats` rows continue each row; they share its pages."""
        if self._batch is not None:
            self._select_rows([r for r in range(self._batch.batch_size) for _ in range(repeats)])

    def __repr__(self) -> str:
        return (
            f"PagedCache({self.num_columns} columns, num_pages={self.num_pages}, "
            f"page_size={self.page_size}, backend={self.backend!r})"
        )

    def _select_rows(self, rows: list[int]) -> None:
        if self._batch is not None:
            self._batch.select_rows(rows)
            self._step = None

    def _planned_attention(
        self, batch: PaddedBatch, step: PaddedStep, spec: AttentionSpec
    ) -> PagedAttention:
        if spec not in self._attention:
            self._attention[spec] = PagedAttention(
                spec, self.page_size, backend=self.backend, device=step.slots.device
            )
        if spec not in self._planned:
            if spec.window_left >= 0 and batch.has_gaps:
                raise ValueError(
                    "attention_mask has padding between tokens of a row: Transformers counts it in "
                    "a sliding window, and pages do not hold it"
                )
            self._attention[spec].plan(step.page_table, step.qo_indptr)
            self._planned.add(spec)
        return self._attention[spec]


def _rows_of(heads: Tensor) -> Tensor:
    """[batch, heads, q_len, head_dim] as [batch * q_len, heads, head_dim]."""
    return heads.transpose(1, 2).flatten(0, 1)


class _PagedLayer(CacheLayerMixin):  # type: ignore[misc]  # its base is untyped
    """One layer as Transformers sees it; all layers have the cache's length."""

    is_compileable = False
    is_croppable = True
    is_sliding = False  # it keeps every token, also where the layer's window does not reach
    supports_early_init = False

    def __init__(self, cache: PagedCache, layer: int) -> None:
        super().__init__()
        self._cache = cache
        self._layer = layer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the cache makes its pages itself."""

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: Any,  # Transformers' contract; nothing that it passes here matters to pages
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys, tagged, and the new values; the attention function writes them."""
        return self._cache.tag(self._layer, key_states), value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that a mask must have, and the first of them."""
        return self._cache.num_columns + query_length, 0

    def get_seq_length(self) -> int:
        """Columns in the cache."""
        return self._cache.num_columns

    def get_max_length(self) -> int:
        """No bound on columns: pages are the bound."""
        return -1

    def get_max_cache_shape(self) -> int:
        """The older name of `get_max_length`."""
        return -1
