"""What Transformers does to a cache besides filling it ends in the tokens of its own cache."""

import pytest
import torch

from pagedattn import OutOfPages

pytest.importorskip("transformers")

from tiny_models import greedy, padded_inputs, tiny_model

from pagedattn.integrations.transformers import PagedCache


@pytest.fixture(autouse=True)
def appends_by_torch(monkeypatch):
    """Interpreted appends would take most of the time on a CPU."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def paged(model, num_pages=128, page_size=4):
    return PagedCache(model.config, num_pages, page_size, backend="reference")


def free_pages(cache):
    return cache.kv_cache.allocator.num_free_pages


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_beam_search_reorders_rows_by_sharing_pages(device, family):
    model, inputs = tiny_model(family, device), padded_inputs([7, 3], device)
    cache = paged(model)
    beams = {"num_beams": 4}
    expected = greedy(model, "dense", inputs, 9, **beams)
    assert torch.equal(greedy(model, "pagedattn", inputs, 9, cache, **beams), expected)
    # 2 prompts with 4 beams each: without sharing, 4 * (ceil(15 / 4) + ceil(11 / 4)) pages
    assert len(set(cache.page_table().kv_indices.tolist())) < 4 * (4 + 3)


def test_prompt_lookup_crops_rejected_tokens(device):
    model = tiny_model("llama", device)
    inputs = padded_inputs([6], device)
    inputs["input_ids"] = inputs["input_ids"].repeat(1, 3)  # so that there is something to find
    inputs["attention_mask"] = inputs["attention_mask"].repeat(1, 3)
    cache, crops = paged(model), []
    crop = cache.crop
    cache.crop = lambda tokens_to_remove: (crops.append(tokens_to_remove), crop(tokens_to_remove))
    expected = greedy(model, "dense", inputs, 12)
    lookup = {"prompt_lookup_num_tokens": 3}
    assert torch.equal(greedy(model, "pagedattn", inputs, 12, cache, **lookup), expected)
    assert any(crops)
    assert cache.page_table().kv_lens.tolist() == [18 + 11]


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_prompt_may_come_in_chunks(device, family):
    model, inputs = tiny_model(family, device), padded_inputs([13, 8], device)
    expected = greedy(model, "dense", inputs, 6)
    chunks = {"prefill_chunk_size": 5}
    assert torch.equal(greedy(model, "pagedattn", inputs, 6, paged(model), **chunks), expected)


def test_a_conversation_goes_on_in_the_same_cache(device):
    model, inputs = tiny_model("mistral", device), padded_inputs([5, 9], device)
    cache = paged(model)
    first = greedy(model, "pagedattn", inputs, 4, cache)
    more = padded_inputs([3, 3], device, seed=1)["input_ids"]
    longer = {
        "input_ids": torch.cat([inputs["input_ids"], first, more], 1),
        "attention_mask": torch.nn.functional.pad(inputs["attention_mask"], (0, 7), value=1),
    }
    expected = greedy(model, "dense", longer, 5)
    assert torch.equal(greedy(model, "pagedattn", longer, 5, cache), expected)
    assert cache.page_table().kv_lens.tolist() == [5 + 4 + 3 + 4, 9 + 4 + 3 + 4]


def test_rows_may_be_repeated_and_selected(device):
    model, inputs = tiny_model("llama", device), padded_inputs([5, 9], device)
    cache = paged(model)
    greedy(model, "pagedattn", inputs, 4, cache)
    one, other = (cache.page_table().pages_of(row).tolist() for row in range(2))
    cache.batch_repeat_interleave(2)
    table = cache.page_table()
    assert [table.pages_of(row).tolist() for row in range(4)] == [one, one, other, other]
    cache.batch_select_indices(torch.tensor([3, 0]))
    table = cache.page_table()
    assert [table.pages_of(row).tolist() for row in range(2)] == [other, one]
    assert table.kv_lens.tolist() == [12, 8]
    assert free_pages(cache) == 127 - len(one) - len(other)
    cache.batch_select_indices(torch.tensor([False, True]))
    assert free_pages(cache) == 127 - len(one)
    cache.reset()
    assert (free_pages(cache), cache.get_seq_length()) == (127, 0)
    expected = greedy(model, "dense", inputs, 4)
    assert torch.equal(greedy(model, "pagedattn", inputs, 4, cache), expected)


def test_a_step_that_does_not_fit_leaves_the_cache_as_it_was(device):
    model = tiny_model("llama", device)
    model.set_attn_implementation("pagedattn")
    cache = paged(model, num_pages=7)
    inputs = padded_inputs([8, 12], device)  # five of the six pages
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
        before = cache.page_table()
        step = {
            "input_ids": inputs["input_ids"][:, :1],
            "attention_mask": torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1),
        }
        with pytest.raises(OutOfPages, match="1 pages were asked for and 0 are free"):
            model(**step, past_key_values=cache)
        after = cache.page_table()
        assert after.kv_lens.tolist() == before.kv_lens.tolist() == [8, 12]
        assert torch.equal(after.kv_indices, before.kv_indices)
        assert (free_pages(cache), cache.get_seq_length()) == (1, 12)
        cache.batch_select_indices(torch.tensor([0]))
        step = {name: x[:1] for name, x in step.items()}
        logits = model(**step, past_key_values=cache).logits
        model.set_attn_implementation("dense")
        whole = {**step, "input_ids": torch.cat([inputs["input_ids"][:1], step["input_ids"]], 1)}
        positions = torch.arange(13, device=device)[None]  # as above, where none were given
        expected = model(**whole, position_ids=positions).logits[:, -1:]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_mask_that_contradicts_the_cache_is_refused(device):
    model = tiny_model("llama", device)
    model.set_attn_implementation("pagedattn")
    cache = paged(model)
    with torch.no_grad():
        model(**padded_inputs([5, 3], device), past_key_values=cache)
        token = torch.ones(2, 1, dtype=torch.long, device=device)
        with pytest.raises(ValueError, match=r"must repeat the mask \[2, 5\]"):
            model(token, past_key_values=cache)  # no mask: no padding, and there was some


def test_padding_between_tokens_is_honoured_but_not_under_a_window(device):
    mask = torch.tensor([[1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1]], device=device)
    inputs = {"input_ids": padded_inputs([6, 6], device)["input_ids"], "attention_mask": mask}
    with torch.no_grad():
        model = tiny_model("llama", device)
        model.set_attn_implementation("dense")
        expected = model(**inputs).logits[mask.bool()]
        model.set_attn_implementation("pagedattn")
        logits = model(**inputs, past_key_values=paged(model)).logits[mask.bool()]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        model = tiny_model("mistral", device)
        model.set_attn_implementation("pagedattn")
        with pytest.raises(ValueError, match="padding between tokens"):
            model(**inputs, past_key_values=paged(model))


def test_a_model_with_another_attention_is_refused(device):
    model = tiny_model("llama", device)
    with pytest.raises(ValueError, match=r"needs model.set_attn_implementation\('pagedattn'\)"):
        greedy(model, "sdpa", padded_inputs([3], device), 2, paged(model))


def test_layers_that_are_not_attention_are_refused(device):
    config = tiny_model("llama", device).config
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match=r"got \['linear_attention'\]"):
        PagedCache(config, 8, backend="reference")


def test_an_empty_cache_has_no_page_table_and_an_impossible_crop_raises(device):
    model = tiny_model("llama", device)
    cache = paged(model)
    cache.crop(0)
    with pytest.raises(RuntimeError, match="the cache is empty"):
        cache.page_table()
    for tokens_to_remove in (1, -1):
        with pytest.raises(ValueError, match="tokens_to_remove must be 0 to 0"):
            cache.crop(tokens_to_remove)
