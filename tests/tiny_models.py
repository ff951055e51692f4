"""Small random decoder-only models, and logits of a fixed continuation under any attention."""

import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
)
from transformers.masking_utils import sdpa_mask
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 6},  # every layer
    "gemma2": {  # every other layer
        "sliding_window": 6,
        "attn_logit_softcapping": 4.0,
        "query_pre_attn_scalar": 20,
    },
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1},
}


def tiny_model(family, device, dtype=torch.float32, **changes):
    """A model of two layers whose scores are large enough for windows and caps to matter."""
    settings = {
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,  # so that every row goes on to the end
        **FAMILIES[family],
        **changes,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**settings))
    return model.to(device, dtype).eval()


def padded_inputs(lengths, device, seed=0):
    """Random prompts, left-padded to one width with tokens that must not matter."""
    width = max(lengths)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, 96, (len(lengths), width), generator=generator)
    mask = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    return {
        "input_ids": tokens.to(device),
        "attention_mask": mask.long().to(device),
    }


def dense_attention(
    module, query, key, value, attention_mask, scaling=None, softcap=None, **kwargs
):
    """Attention in the tensors' own dtype, with soft cap; Transformers' own rounds in between."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is None:  # sdpa_mask leaves out what is causal and nothing else
        attention_mask = torch.ones_like(scores, dtype=torch.bool)
        attention_mask = attention_mask.tril(key.shape[2] - query.shape[2])
    weights = scores.masked_fill(~attention_mask, -torch.inf).softmax(-1).nan_to_num(0.0)
    return (weights @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register("dense", dense_attention)
AttentionMaskInterface.register("dense", sdpa_mask)


class _Force(LogitsProcessor):
    def __init__(self, continuation, width):
        self.continuation = continuation
        self.width = width

    def __call__(self, input_ids, scores):
        tokens = self.continuation[:, input_ids.shape[1] - self.width]
        return torch.full_like(scores, -torch.inf).scatter(1, tokens[:, None], 0.0)


def greedy(model, implementation, inputs, num_tokens, cache=None, **options):
    """i64[batch, num_tokens]: what the model writes."""
    model.set_attn_implementation(implementation)
    options = {"do_sample": False, "min_new_tokens": num_tokens, **options}
    out = model.generate(**inputs, past_key_values=cache, max_new_tokens=num_tokens, **options)
    return out[:, inputs["input_ids"].shape[1] :]


def forced_logits(model, implementation, inputs, continuation, cache=None):
    """f64[new tokens, batch, vocab]: logits before each token of a given continuation."""
    model.set_attn_implementation(implementation)
    out = model.generate(
        **inputs,
        past_key_values=cache,
        max_new_tokens=continuation.shape[1],
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        logits_processor=LogitsProcessorList([_Force(continuation, inputs["input_ids"].shape[1])]),
    )
    return torch.stack(out.logits).double()


def rms(x):
    return x.square().mean().sqrt().item()


def allowed_error(exact, independent, dtype):
    """Twice the error of another low-precision run, and one rounding of the logits."""
    return 2 * rms(independent - exact) + torch.finfo(dtype).eps * rms(exact)
