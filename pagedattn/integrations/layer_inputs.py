"""Queries, keys and values of a real model's layers, as inputs for checks.

Real activations have outliers and structure that random ones lack. They are captured once with a
model, and saved so that checks need no model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from pagedattn.checking.step import Step
from pagedattn.page_table import PageTable
from pagedattn.slots import write_slots
from pagedattn.spec import AttentionSpec

if TYPE_CHECKING:
    from pagedattn.integrations.smollm2 import LanguageModel


@dataclass(frozen=True, eq=False)
class LayerInputs:
    """What one layer's attention was given in one forward pass, padding left out."""

    kv_lens: Tensor  # i32[batch]  tokens of each prompt
    q: Tensor  # dtype[tokens, num_qo_heads, head_dim]  prompts one after another
    k: Tensor  # dtype[tokens, num_kv_heads, head_dim]
    v: Tensor  # dtype[tokens, num_kv_heads, head_dim]
    sm_scale: float
    window_left: int = -1
    logits_soft_cap: float = 0.0

    def to(self, device: torch.device | str, dtype: torch.dtype) -> LayerInputs:
        """The same inputs, on `device` and rounded to `dtype`."""
        q, k, v = (tensor.to(device, dtype) for tensor in (self.q, self.k, self.v))
        return LayerInputs(
            self.kv_lens, q, k, v, self.sm_scale, self.window_left, self.logits_soft_cap
        )

    def step(self, page_size: int) -> Step:
        """The prompts' prefill: every token is new, and its pages are in a shuffled order."""
        num_pages = int((-(-self.kv_lens // page_size)).sum())
        page_ids = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0)).int()
        table = PageTable.from_lengths(self.kv_lens, page_size, page_ids)
        qo_indptr = torch.zeros(table.batch_size + 1, dtype=torch.int32)
        qo_indptr[1:] = self.kv_lens.cumsum(0)
        slots = write_slots(table, qo_indptr).to(self.k.device)
        kv_cache = self.k.new_full((num_pages, 2, page_size, *self.k.shape[1:]), torch.nan)
        page, offset = slots // page_size, slots % page_size
        kv_cache[page, 0, offset] = self.k
        kv_cache[page, 1, offset] = self.v
        spec = AttentionSpec(
            num_qo_heads=self.q.shape[1],
            num_kv_heads=self.k.shape[1],
            head_dim=self.q.shape[2],
            dtype=self.q.dtype,
            window_left=self.window_left,
            sm_scale=self.sm_scale,
            logits_soft_cap=self.logits_soft_cap,
        )
        return Step(spec, table, qo_indptr, self.q, kv_cache)


def capture_layer_inputs(
    language_model: LanguageModel, questions: list[str], layers: list[int]
) -> dict[int, LayerInputs]:
    """Run prompts through the model once and keep the inputs of some layers' attention.

    Args:
        language_model: Any decoder-only model.
        questions: The prompts.
        layers: Which layers to keep.
    """
    from pagedattn.integrations.transformers import ATTENTION_NAME, PagedCache, PagedKeys

    captured: dict[int, LayerInputs] = {}

    class RecordingCache(PagedCache):
        def attend(
            self, q: Tensor, k: PagedKeys, v: Tensor, mask: Tensor, spec: AttentionSpec
        ) -> Tensor:
            if k.layer in layers:
                new_q, new_k, new_v = (x.transpose(1, 2)[mask].contiguous() for x in (q, k, v))
                captured[k.layer] = LayerInputs(
                    mask.sum(1).int().cpu(),
                    new_q,
                    new_k,
                    new_v,
                    spec.scale,
                    spec.window_left,
                    spec.logits_soft_cap,
                )
            return super().attend(q, k, v, mask, spec)

    model, inputs = language_model.model, language_model.encode(questions)
    num_pages = 1 + inputs["input_ids"].numel()
    cache = RecordingCache(model.config, num_pages, page_size=1, backend="reference")
    before = model.config._attn_implementation
    model.set_attn_implementation(ATTENTION_NAME)
    try:
        with torch.no_grad():
            # padding moves no token: rotary embeddings count from a prompt's first token
            positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
            model(**inputs, position_ids=positions, past_key_values=cache)
    finally:
        model.set_attn_implementation(before)
    return captured


def save_layer_inputs(file: Path, captured: dict[int, LayerInputs]) -> None:
    """Write what `capture_layer_inputs` returned to a safetensors file."""
    tensors, settings = {}, {}
    for layer, inputs in captured.items():
        for name in ("kv_lens", "q", "k", "v"):
            tensors[f"{layer}.{name}"] = getattr(inputs, name).cpu()
        settings[str(layer)] = json.dumps(
            [inputs.sm_scale, inputs.window_left, inputs.logits_soft_cap]
        )
    save_file(tensors, file, settings)


def load_layer_inputs(file: Path) -> dict[int, LayerInputs]:
    """Read what `save_layer_inputs` wrote, to the CPU."""
    captured = {}
    with safe_open(file, framework="pt") as saved:
        for layer, settings in saved.metadata().items():
            tensors = [saved.get_tensor(f"{layer}.{name}") for name in ("kv_lens", "q", "k", "v")]
            captured[int(layer)] = LayerInputs(*tensors, *json.loads(settings))
    return dict(sorted(captured.items()))
