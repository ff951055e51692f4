"""Wrong backends that are planted beside the right ones, and steps to find them with a shadow."""

import re
from dataclasses import replace

import pytest
import torch
from attention_steps import batch_of

from pagedattn import AttentionSpec, PagedAttention, Shadow, backends
from pagedattn.backends.reference import ReferenceBackend

SPEC = AttentionSpec(2, 1, 64, dtype=torch.float16, window_left=9)
PAGE_SIZE = 4
LENGTHS = (40, 3, 0, 17), (6, 1, 2, 0)  # kv_lens, qo_lens: request 2 sees no key


class WindowOneShort(ReferenceBackend):
    """Sees one key too few."""

    def __init__(self, spec, page_size, device, capacity, batch_invariant):
        super().__init__(
            replace(spec, window_left=spec.window_left - 1), page_size, device, capacity
        )


class BlindRowsAnswerOne(ReferenceBackend):
    """A row that sees no key gives 1."""

    def run(self, q, kv_cache, out, lse):
        super().run(q, kv_cache, out, lse)
        out[(out == 0).flatten(1).all(1)] = 1


class NeverWrites(ReferenceBackend):
    """Leaves its outputs as they are."""

    def run(self, q, kv_cache, out, lse):
        pass


class Breaks(ReferenceBackend):
    """Raises an error."""

    def run(self, q, kv_cache, out, lse):
        raise RuntimeError("no more memory")


class CannotCompute(ReferenceBackend):
    """Supports nothing."""

    @classmethod
    def unsupported_reasons(cls, spec, page_size, device):
        return ["too wide", "too old"]


@pytest.fixture
def planted(monkeypatch):
    """The wrong backends above, by their class names."""
    for made in (WindowOneShort, BlindRowsAnswerOne, NeverWrites, Breaks, CannotCompute):
        entry = backends._Entry(f"{__name__}.{made.__name__}", needs="torch", install="")
        monkeypatch.setitem(backends._BACKENDS, made.__name__, entry)


def step_of(device, lengths=LENGTHS, spec=SPEC, seed=0):
    return batch_of(spec, PAGE_SIZE, *lengths, seed=seed).materialise(device)


def build(served, other, device, spec=SPEC, *, every=1, capacity=None, **options):
    shadow = Shadow(other, every, **options)
    return PagedAttention(
        spec, PAGE_SIZE, backend=served, device=device, capacity=capacity, shadow=shadow
    )


def serve(attn, step, layers=1):
    attn.plan(step.page_table, step.qo_indptr)
    for _ in range(layers):
        attn.run_return_lse(step.q, step.kv_cache)


def looked_at(caplog):
    """(step, layer) of each mismatch that was logged."""
    found = [re.search(r"step (\d+), layer (\d+),", record.message) for record in caplog.records]
    return [(int(match[1]), int(match[2])) for match in found if match]
