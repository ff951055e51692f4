"""Real activations, captured once and kept here: every backend on them."""

import pytest
import torch
from attention_steps import require_support

from pagedattn.checking.compare import check_backend
from pagedattn.checking.real_activations import KEPT_LAYERS as KEPT
from pagedattn.checking.transforms import last_queries
from pagedattn.integrations.layer_inputs import load_layer_inputs, save_layer_inputs


@pytest.mark.parametrize("layer", [0, 29])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("num_queries", [1, 1000], ids=["decode", "prefill"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_backends_agree_on_real_activations(backend, device, dtype, num_queries, page_size, layer):
    inputs = load_layer_inputs(KEPT)[layer].to(device, dtype)
    step = last_queries(inputs.step(page_size), num_queries)
    require_support(backend, step.spec, page_size, device)
    comparison = check_backend(backend, step)
    assert comparison.ok, str(comparison.worst)


def test_kept_activations_have_the_outliers_that_random_ones_lack():
    inputs = load_layer_inputs(KEPT)
    assert list(inputs) == [0, 29]
    assert inputs[0].q.shape[1:] == (9, 64)
    assert inputs[0].k.shape == inputs[0].v.shape == (int(inputs[0].kv_lens.sum()), 3, 64)
    # a normal sample of this size passes 6 times its root mean square once in 40,000
    for inputs_of_layer in inputs.values():
        for name in ("q", "k", "v"):
            x = getattr(inputs_of_layer, name).float()
            assert x.abs().max() > 6 * x.square().mean().sqrt()


def test_saving_and_loading_changes_no_bit(tmp_path):
    inputs = load_layer_inputs(KEPT)
    save_layer_inputs(tmp_path / "copy.safetensors", inputs)
    again = load_layer_inputs(tmp_path / "copy.safetensors")
    for layer, before in inputs.items():
        after = again[layer]
        for name in ("kv_lens", "q", "k", "v"):
            assert torch.equal(getattr(after, name), getattr(before, name))
        assert after.sm_scale == before.sm_scale == 64**-0.5
        assert (after.window_left, after.logits_soft_cap) == (-1, 0.0)


def test_a_step_holds_every_token_in_its_page_and_nan_elsewhere():
    inputs = load_layer_inputs(KEPT)[0]
    step = inputs.step(7)
    row = 0
    for request, kv_len in enumerate(inputs.kv_lens.tolist()):
        pages = step.kv_cache[step.page_table.pages_of(request).long()]
        held = pages.transpose(0, 1).flatten(1, 2)
        assert torch.equal(held[0, :kv_len], inputs.k[row : row + kv_len])
        assert torch.equal(held[1, :kv_len], inputs.v[row : row + kv_len])
        assert held[:, kv_len:].isnan().all()
        row += kv_len
    assert step.qo_lens == step.kv_lens == inputs.kv_lens.tolist()
