"""`pagedattn demo`: a language model writes the same text through pages as through sdpa."""

from __future__ import annotations

import os
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
import torch
from torch import Tensor

from pagedattn.backends import backend_names
from pagedattn.integrations.smollm2 import (
    LanguageModel,
    ModelNotFound,
    find_smollm2,
    load_model,
)
from pagedattn.page_table import PageTable

if TYPE_CHECKING:
    from rich.console import Console

PROMPTS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about a library at night, with a cat in it.",
)
PAGE_SIZE = 16


@dataclass(frozen=True, eq=False)
class Written:
    """What one attention implementation wrote, and how long it took."""

    tokens: Tensor  # i64[batch, new tokens]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows per second, the prompts' time included."""
        return self.tokens.numel() / self.seconds


@dataclass(frozen=True, eq=False)
class Comparison:
    """The same prompts through sdpa and through pages."""

    sdpa: Written
    paged: Written
    page_table: PageTable

    @property
    def same(self) -> list[bool]:
        """Whether each prompt got the same tokens."""
        if self.sdpa.tokens.shape != self.paged.tokens.shape:
            return [False] * self.sdpa.tokens.shape[0]
        equal: list[bool] = (self.sdpa.tokens == self.paged.tokens).all(1).tolist()
        return equal


def compare_with_sdpa(
    language_model: LanguageModel, questions: list[str], backend: str, max_new_tokens: int
) -> Comparison:
    """Generate greedily twice, with sdpa and with a backend of ours.

    Args:
        language_model: Any decoder-only model.
        questions: The prompts, one batch.
        backend: "flashinfer", "triton" or "reference".
        max_new_tokens: Tokens to generate at most.
    """
    from pagedattn.integrations.transformers import ATTENTION_NAME, PagedCache

    model, inputs = language_model.model, language_model.encode(questions)
    batch_size, width = inputs["input_ids"].shape
    pages_a_row = -(-(width + max_new_tokens) // PAGE_SIZE)
    cache = PagedCache(model.config, 1 + batch_size * pages_a_row, PAGE_SIZE, backend=backend)

    def write(implementation: str, past_key_values: PagedCache | None) -> Written:
        model.set_attn_implementation(implementation)
        begin = time.perf_counter()
        tokens = model.generate(
            **inputs,
            past_key_values=past_key_values,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            temperature=None,  # what a model's own settings say of sampling does not apply
            top_p=None,
            top_k=None,
        ).cpu()
        return Written(tokens[:, width:], time.perf_counter() - begin)

    sdpa, paged = write("sdpa", None), write(ATTENTION_NAME, cache)
    return Comparison(sdpa, paged, cache.page_table())


@click.command(short_help="Let a real model write through pages and through sdpa.")
@click.option(
    "--model",
    "folder",
    type=click.Path(path_type=Path),
    help="Folder of a decoder-only model. [default: SmolLM2-135M-Instruct, if installed]",
)
@click.option(
    "--backend",
    type=click.Choice(backend_names()),
    help="Where Triton interprets it takes minutes. [default: triton on a GPU, reference on a CPU]",
)
@click.option(
    "--prompt", "prompts", multiple=True, help="What the model continues; may be repeated."
)
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=40, show_default=True)
@click.pass_context
def demo(
    ctx: click.Context,
    folder: Path | None,
    backend: str | None,
    prompts: tuple[str, ...],
    max_new_tokens: int,
) -> None:
    """Let a language model write through pages and through sdpa, and compare.

    Exit code 1 if the texts differ, 2 if there is no model.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if backend is None:
        backend = "triton" if device == "cuda" else "reference"
    if backend == "triton" and device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
    # FlashInfer has no float32; the others compute as exactly as sdpa does
    dtype = torch.bfloat16 if backend == "flashinfer" else torch.float32
    questions = list(prompts or PROMPTS)
    from rich.console import Console

    console = Console()
    try:
        with console.status("loading the model"):
            _quieten_transformers()
            language_model = load_model(folder or find_smollm2(), device, dtype)
    except ModelNotFound as error:
        click.echo(f"Error: {error}", err=True)
        ctx.exit(2)
    with console.status(f"writing with sdpa and with {backend}"):
        comparison = compare_with_sdpa(language_model, questions, backend, max_new_tokens)
    _print_texts(console, language_model, questions, comparison)
    _print_page_table(console, comparison.page_table)
    console.print(
        f"{device}, {str(dtype).removeprefix('torch.')}, tokens per second, prompts included: "
        f"sdpa {comparison.sdpa.tokens_per_second:.1f}, "
        f"{backend} {comparison.paged.tokens_per_second:.1f}"
    )
    ctx.exit(0 if all(comparison.same) else 1)


def _quieten_transformers() -> None:
    """Keep progress bars and advice out of the output."""
    os.environ["TQDM_DISABLE"] = "1"  # read when transformers imports it
    warnings.simplefilter("ignore", FutureWarning)  # 5.x is renaming past_key_values to cache
    try:
        from transformers.utils import logging
    except ImportError:
        return  # load_model says that it is missing
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _print_texts(
    console: Console, language_model: LanguageModel, questions: list[str], comparison: Comparison
) -> None:
    decode = language_model.tokenizer.batch_decode
    ours = decode(comparison.paged.tokens, skip_special_tokens=True)
    theirs = decode(comparison.sdpa.tokens, skip_special_tokens=True)
    for question, text, other, same in zip(questions, ours, theirs, comparison.same, strict=True):
        console.print(f"[bold]{_plain(question)}[/bold]")
        console.print(_plain(text.strip()))
        if same:
            console.print("[green]equal to sdpa's[/green]\n")
        else:
            console.print(f"[red]sdpa wrote:[/red] {_plain(other.strip())}\n")


def _print_page_table(console: Console, page_table: PageTable) -> None:
    from rich.table import Table

    table = Table(title=f"page table at the end, {page_table.page_size} tokens a page")
    for column in ("request", "tokens", "pages"):
        table.add_column(column, justify="left" if column == "pages" else "right")
    for row in range(page_table.batch_size):
        pages = page_table.pages_of(row).tolist()
        table.add_row(str(row), str(int(page_table.kv_lens[row])), " ".join(map(str, pages)))
    console.print(table)


def _plain(text: str) -> str:
    """Escape what rich would read as markup."""
    from rich.markup import escape

    return escape(text)
