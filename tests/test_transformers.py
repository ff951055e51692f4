"""Transformers' models on our backends, against its own attention."""

import copy

import pytest
import torch

from pagedattn import AttentionSpec, unsupported_reasons

pytest.importorskip("transformers")

from tiny_models import allowed_error, forced_logits, greedy, padded_inputs, rms, tiny_model
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from pagedattn.integrations.layer_inputs import capture_layer_inputs
from pagedattn.integrations.smollm2 import ModelNotFound, load_smollm2
from pagedattn.integrations.transformers import PagedCache, paged_attention_mask

PROMPTS = [
    "Hi",
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue, and why a sunset is red.",
]


@pytest.fixture(autouse=True)
def appends_by_torch(request, monkeypatch):
    """Interpreted appends would take most of the time on a CPU; the triton cases keep them."""
    if "triton" not in request.node.name:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def skip_unless_runs(backend, model, device, dtype):
    config = model.config
    spec = AttentionSpec(
        config.num_attention_heads, config.num_key_value_heads, config.head_dim, dtype
    )
    reasons = unsupported_reasons(backend, spec, 16, device)
    if reasons:
        pytest.skip("; ".join(reasons))


@pytest.fixture(scope="module")
def smollm2(device):
    try:
        return load_smollm2(device)
    except ModelNotFound as error:
        pytest.skip(str(error))


def first_layers(model, count):
    """The same weights, only the first layers."""
    cut = copy.deepcopy(model)
    cut.model.layers = cut.model.layers[:count]
    cut.config.num_hidden_layers = count
    return cut


@pytest.mark.model
def test_a_real_model_writes_sdpas_forty_tokens_from_a_padded_batch(smollm2, device, backend):
    model, num_tokens, inputs = smollm2.model, 40, smollm2.encode(PROMPTS)
    skip_unless_runs(backend, model, device, torch.float32)
    if backend == "triton" and device.type == "cpu":  # the interpreter: less of the same
        model, num_tokens = first_layers(model, 2), 3
    lengths = inputs["attention_mask"].sum(1).cpu()
    assert len(set(lengths.tolist())) == 3
    cache = PagedCache(model.config, num_pages=32, backend=backend)
    expected = greedy(model, "sdpa", inputs, num_tokens)
    assert greedy(model, "pagedattn", inputs, num_tokens, cache).tolist() == expected.tolist()
    # the last token is written and not read
    assert cache.page_table().kv_lens.tolist() == (lengths + num_tokens - 1).tolist()


@pytest.mark.model
def test_a_real_model_in_bfloat16_is_as_near_to_float32_as_sdpa_is(smollm2, device, backend):
    model, num_tokens, inputs = smollm2.model, 40, smollm2.encode(PROMPTS)
    skip_unless_runs(backend, model, device, torch.bfloat16)
    if device.type == "cpu":
        model, num_tokens = first_layers(model, 2), 2
    continuation = greedy(model, "sdpa", inputs, num_tokens)
    exact = forced_logits(model, "sdpa", inputs, continuation)
    rounded = copy.deepcopy(model).bfloat16()
    independent = forced_logits(rounded, "sdpa", inputs, continuation)
    cache = PagedCache(rounded.config, num_pages=32, backend=backend)
    ours = forced_logits(rounded, "pagedattn", inputs, continuation, cache)
    assert rms(ours - exact) <= allowed_error(exact, independent, torch.bfloat16)


@pytest.mark.model
def test_captured_activations_of_a_prompt_do_not_depend_on_its_batch(smollm2):
    layers = [0, smollm2.model.config.num_hidden_layers - 1]
    together = capture_layer_inputs(smollm2, PROMPTS[:2], layers)
    alone = capture_layer_inputs(smollm2, PROMPTS[:1], layers)
    assert list(together) == layers
    lengths = smollm2.encode(PROMPTS[:2])["attention_mask"].sum(1).tolist()
    for layer in layers:
        assert together[layer].kv_lens.tolist() == lengths
        for name in ("q", "k", "v"):
            many, one = getattr(together[layer], name), getattr(alone[layer], name)
            torch.testing.assert_close(many[: lengths[0]], one, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_windows_caps_scales_and_padding_are_those_of_the_model(device, family, backend):
    model = tiny_model(family, device)
    skip_unless_runs(backend, model, device, torch.float32)
    num_tokens = 3 if backend == "triton" and device.type == "cpu" else 12
    inputs = padded_inputs([9, 1, 14], device)
    double = tiny_model(family, device, torch.float64)
    continuation = greedy(double, "dense", inputs, num_tokens)
    exact = forced_logits(double, "dense", inputs, continuation)
    independent = forced_logits(model, "dense", inputs, continuation)
    cache = PagedCache(model.config, num_pages=64, page_size=4, backend=backend)
    ours = forced_logits(model, "pagedattn", inputs, continuation, cache)
    assert rms(ours - exact) <= allowed_error(exact, independent, torch.float32)
    assert cache.page_table().kv_lens.tolist() == [n + num_tokens - 1 for n in (9, 1, 14)]


def test_layers_of_one_kind_share_one_attention_object(device):
    for family, num_kinds in (("llama", 1), ("gemma2", 2)):
        model = tiny_model(family, device)
        cache = PagedCache(model.config, num_pages=64, backend="reference")
        greedy(model, "pagedattn", padded_inputs([3, 5], device), 3, cache)
        assert len(cache._attention) == num_kinds


def test_padding_gets_zeros_and_no_slot(device):
    model = tiny_model("llama", device)
    model.set_attn_implementation("pagedattn")
    cache = PagedCache(model.config, num_pages=8, page_size=4, backend="reference")
    outputs = []
    model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(
        lambda _, arguments: outputs.append(arguments[0])
    )
    inputs = padded_inputs([2, 7], device)
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
    is_zero = (outputs[0] == 0).all(-1)
    assert torch.equal(is_zero, inputs["attention_mask"] == 0)
    # 2 + 7 tokens in pages of 4: three pages, nine slots, in each layer
    is_written = cache.kv_cache.pages.ne(0).any(-1).any(-1)
    assert is_written.sum(dim=(1, 2, 3)).tolist() == [18, 18]
    assert not is_written[:, 0].any()


def test_a_prompt_without_mask_or_padding(device):
    model = tiny_model("mistral", device)
    tokens = padded_inputs([11], device)["input_ids"]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(tokens).logits
        model.set_attn_implementation("pagedattn")
        cache = PagedCache(model.config, num_pages=8, page_size=4, backend="reference")
        torch.testing.assert_close(model(tokens, past_key_values=cache).logits, expected)
    assert cache.get_seq_length() == 11


REFUSED = {
    "dropout": ({"attention_dropout": 0.1}, {}, "dropout must be 0, got 0.1"),
    "head_mask": ({}, {"head_mask": torch.ones(2, 6)}, "head_mask cannot be honoured"),
    "position_bias": ({}, {"position_bias": torch.ones(1)}, "position_bias cannot be honoured"),
    "is_causal": ({}, {"is_causal": False}, "bidirectional_mask_function"),
    "packed": ({}, {"cu_seq_lens_q": torch.ones(2)}, "cu_seq_lens_q cannot be honoured"),
    "mask": ({}, {"attention_mask": torch.zeros(2, 1, 5, 5)}, r"shape \[2, 1, 5, 5\]"),
    "short mask": ({}, {"attention_mask": torch.ones(2, 4)}, r"shape \[2, 5\].*got \[2, 4\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(device, case):
    changes, call, message = REFUSED[case]
    model = tiny_model("llama", device, **changes)
    model.set_attn_implementation("pagedattn")
    model.train(case == "dropout")
    cache = PagedCache(model.config, num_pages=8, backend="reference")
    call = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    inputs = {**padded_inputs([5, 3], device), **call}
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        model(**inputs, past_key_values=cache)


def test_sinks_a_missing_cache_and_gradients_are_refused(device):
    inputs = padded_inputs([5, 3], device)
    model = tiny_model("llama", device)
    model.set_attn_implementation("pagedattn")
    with torch.no_grad(), pytest.raises(ValueError, match="key does not come from a PagedCache"):
        model(**inputs)
    cache = PagedCache(model.config, num_pages=8, backend="reference")
    with pytest.raises(ValueError, match="no backward pass"):
        model(**inputs, past_key_values=cache)
    model = tiny_model("gpt_oss", device)
    model.set_attn_implementation("pagedattn")
    cache = PagedCache(model.config, num_pages=8, backend="reference")
    with torch.no_grad(), pytest.raises(ValueError, match="s_aux cannot be honoured"):
        model(**inputs, past_key_values=cache)


def test_a_layer_that_is_not_causal_is_refused_whatever_its_mask(device):
    model = tiny_model("llama", device)
    model.set_attn_implementation("pagedattn")
    model.model.layers[0].self_attn.is_causal = False
    cache = PagedCache(model.config, num_pages=8, backend="reference")
    with torch.no_grad(), pytest.raises(ValueError, match="attention is not causal here"):
        model(**padded_inputs([5, 3], device), past_key_values=cache)


@pytest.mark.parametrize(
    ("mask_function", "local_size"),
    [
        (bidirectional_mask_function, None),
        (and_masks(causal_mask_function, bidirectional_mask_function), None),
        (sliding_window_causal_mask_function(3), None),
        (sliding_window_causal_mask_function(3), 4),
        (chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.long)), 3),
        (causal_mask_function, 3),
    ],
)
def test_masks_of_another_pattern_are_refused(mask_function, local_size):
    with pytest.raises(ValueError, match="this model asks for another mask"):
        paged_attention_mask(2, 5, 5, mask_function=mask_function, local_size=local_size)


def test_causal_masks_keep_their_padding_and_window():
    padding = torch.tensor([[0, 1, 1], [1, 1, 1]])
    mask = paged_attention_mask(2, 1, 3, attention_mask=padding)
    assert mask.sliding_window is None
    assert torch.equal(mask, padding.bool())
    window = sliding_window_causal_mask_function(4)
    mask = paged_attention_mask(2, 3, 3, mask_function=window, local_size=4)
    assert mask.sliding_window == 4
    assert mask.tolist() == [[True] * 3] * 2


def test_a_window_that_the_mask_does_not_have_is_refused(device):
    model = tiny_model("mistral", device)
    model.set_attn_implementation("pagedattn")
    for layer in model.model.layers:
        layer.self_attn.config = copy.copy(model.config)
        layer.self_attn.config.sliding_window = 5
    cache = PagedCache(model.config, num_pages=8, backend="reference")
    with torch.no_grad(), pytest.raises(ValueError, match=r"sliding_window=5 but .* window 6"):
        model(**padded_inputs([5], device), past_key_values=cache)
