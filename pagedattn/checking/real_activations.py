"""Queries, keys and values of a real model, for steps of any shape.

Random numbers lack what trained layers have: outliers in a few elements, keys that all queries look
at, values of very different sizes. `smollm2_layers.safetensors`, beside this file, holds what the
first and the last attention layer of SmolLM2-135M were given for two prompts, 68 tokens in all. It
ships with the package, so that a seed gives the same step on every machine and without a model. It
is kept short, a quarter of a megabyte, because it ships: longer requests go on with other
stretches of the same tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pagedattn.integrations.layer_inputs import load_layer_inputs
from pagedattn.spec import AttentionSpec

KEPT_LAYERS = Path(__file__).with_name("smollm2_layers.safetensors")


class RealTokens(NamedTuple):
    """What a real layer's attention was given for some tokens, in the heads of another layer."""

    q: Tensor  # f32[tokens, num_qo_heads, head_dim]
    k: Tensor  # f32[tokens, num_kv_heads, head_dim]
    v: Tensor  # f32[tokens, num_kv_heads, head_dim]

    def stretches(self, length: int, generator: torch.Generator) -> Tensor:
        """i64[length]: numbers of tokens as they follow one another, from another place each lap.

        Places are drawn, so that no two pages of a long request hold the same by construction.
        """
        num_tokens = self.q.shape[0]
        starts = torch.randint(num_tokens, (length // num_tokens + 1,), generator=generator)
        laps = starts.repeat_interleave(num_tokens)[:length]
        return (laps + torch.arange(length)) % num_tokens


def real_tokens(spec: AttentionSpec, generator: torch.Generator) -> RealTokens:
    """Real activations in the heads of `spec`; a query head still reads a KV head of its own group.

    A wider head is several of the model's side by side, a narrower one the beginning of one.

    Args:
        spec: The layer kind.
        generator: Chooses the layer and its first head.
    """
    layers = list(load_layer_inputs(KEPT_LAYERS).values())
    layer = layers[int(torch.randint(len(layers), (1,), generator=generator))]
    num_heads, group_size = layer.k.shape[1], layer.q.shape[1] // layer.k.shape[1]
    first = int(torch.randint(num_heads, (1,), generator=generator))
    parts = torch.arange(-(-spec.head_dim // layer.q.shape[2]))
    kv_heads = (first + torch.arange(spec.num_kv_heads)[:, None] + parts) % num_heads
    member = torch.arange(spec.group_size)[:, None] % group_size
    qo_heads = (kv_heads[:, None] * group_size + member).flatten(0, 1)
    q, k, v = (
        tensor[:, heads].flatten(2)[..., : spec.head_dim].float()
        for tensor, heads in ((layer.q, qo_heads), (layer.k, kv_heads), (layer.v, kv_heads))
    )
    return RealTokens(q, k, v)
