"""Capsules: one attention step with a wrong answer, as a file that any machine can replay.

A capsule is a safetensors file: numbers and a JSON object, nothing that could be executed. It holds
the pages in use alone, bit for bit, unused slots included.

| tensor | meaning |
|---|---|
| `kv_indptr`, `kv_indices`, `kv_lens` | i32, a `PageTable` over the kept pages |
| `qo_indptr` | i32[batch + 1] |
| `page_ids` | i32[pages], the number that each kept page had in its cache |
| `q`, `kv_cache` | as in `Step`; `kv_cache` holds the kept pages |
| `expected_out`, `expected_lse` | f64, the right answer |
| `got_out` | the answer that was wrong; absent where there was an error instead |
| `got_lse` | likewise; absent too where no LSE was asked for |

Capsules come from strangers. `load_capsule` looks at the file's size, then at its header, then at
shapes and dtypes, before it reads a tensor; then tables are checked against one another, and what
would take unreasonable memory or time to compute is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pagedattn.attention import AttentionOutput
from pagedattn.checking.capsule_checks import (
    MAX_HEADER_BYTES,
    check_file,
    check_layout,
    check_size,
    check_table,
)
from pagedattn.checking.capsule_metadata import CapsuleMetadata, printable
from pagedattn.checking.step import Step
from pagedattn.page_table import PageTable
from pagedattn.toolchain import FLASHINFER_PACKAGE, package_version

SUFFIX = ".safetensors"
MAX_POOL_BYTES = 2**28
"""A cache up to this size is built again, every page at its own number."""

_JSON = "capsule"  # where safetensors' own map of strings holds our JSON
_PACKAGES = ("pagedattn", "torch", "triton", FLASHINFER_PACKAGE)
_DTYPES = {
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}


@dataclass(frozen=True, eq=False)
class Capsule:
    """One step and its answers, on the CPU."""

    metadata: CapsuleMetadata
    step: Step  # its table counts the kept pages
    page_ids: Tensor  # i32[pages]  the number of each kept page in its cache
    expected: AttentionOutput  # f64[tokens, num_qo_heads, head_dim], f64[tokens, num_qo_heads]
    got: AttentionOutput | None  # None: the backend raised an error
    has_lse: bool = True  # False: no LSE was asked for, and that of `got` is the right one

    @property
    def original_table(self) -> PageTable:
        """The step's table with the page numbers that it had."""
        table = self.step.page_table
        ids = self.page_ids[table.kv_indices.long()]
        return PageTable(table.page_size, table.kv_indptr, ids, table.kv_lens)

    @property
    def keeps_page_numbers(self) -> bool:
        """Whether `step_on` gives each page its own number; not where the cache was huge."""
        page = self.step.kv_cache[:1]
        page_bytes = math.prod(page.shape[1:]) * page.element_size()
        return self.metadata.num_pages * page_bytes <= MAX_POOL_BYTES

    def step_on(self, device: torch.device | str) -> Step:
        """The step on a device, each page at its own number where the cache was not huge.

        Pages that the step does not use are NaN.
        """
        step = self.step
        q = step.q.to(device)
        if not self.keeps_page_numbers:
            return Step(step.spec, step.page_table, step.qo_indptr, q, step.kv_cache.to(device))
        pool_shape = (self.metadata.num_pages, *step.kv_cache.shape[1:])
        kv_cache = torch.full(pool_shape, torch.nan, dtype=step.spec.dtype, device=device)
        kv_cache[self.page_ids.to(device).long()] = step.kv_cache.to(device)
        return Step(step.spec, self.original_table, step.qo_indptr, q, kv_cache)


def save_capsule(
    path: Path,
    step: Step,
    got: AttentionOutput | None,
    expected: AttentionOutput,
    *,
    backend: str,
    problem: str = "",
    seed: int | None = None,
    has_lse: bool = True,
) -> None:
    """Write a step and its answers to a safetensors file.

    Args:
        path: The file; one that exists is replaced.
        step: What was computed, on any device.
        got: The answer under suspicion; `None`: there was an error instead.
        expected: The right answer, f64[tokens, num_qo_heads, head_dim] and
            f64[tokens, num_qo_heads].
        backend: What computed `got`.
        problem: What is wrong with it, in words; made printable and short.
        seed: What the step was drawn from, where it was drawn.
        has_lse: False: `got` holds no LSE of the backend's, and none is kept.

    Raises:
        ValueError: `load_capsule` would refuse the file; the message says why.
    """
    metadata = CapsuleMetadata(
        step.spec,
        step.page_size,
        num_pages=step.kv_cache.shape[0],
        backend=printable(backend),
        problem=printable(problem),
        seed=seed,
        versions=versions_here(),
    )
    page_ids = torch.unique(step.page_table.kv_indices)
    write_capsule(path, Capsule(metadata, step.compacted(), page_ids, expected, got, has_lse))


def write_capsule(path: Path, capsule: Capsule) -> None:
    """Write a capsule to a safetensors file; one that exists is replaced.

    Raises:
        ValueError: `load_capsule` would refuse the file; the message says why.
    """
    step, table = capsule.step, capsule.step.page_table
    tensors = {
        "kv_indptr": table.kv_indptr,
        "kv_indices": table.kv_indices,
        "kv_lens": table.kv_lens,
        "qo_indptr": step.qo_indptr,
        "page_ids": capsule.page_ids,
        "q": step.q,
        "kv_cache": step.kv_cache,
        "expected_out": capsule.expected.out,
        "expected_lse": capsule.expected.lse,
    }
    if capsule.got is not None:
        tensors |= {"got_out": capsule.got.out}
        tensors |= {"got_lse": capsule.got.lse} if capsule.has_lse else {}
    # a clone: safetensors refuses tensors that share memory
    tensors = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    written = capsule.metadata.to_json()
    _capsule(CapsuleMetadata.from_json(written), tensors)
    check_size(sum(tensor.nbytes for tensor in tensors.values()) + MAX_HEADER_BYTES)
    save_file(tensors, path, {_JSON: written})


def load_capsule(path: Path) -> Capsule:
    """Read a capsule, to the CPU, trusting nothing of it.

    Raises:
        ValueError: The file is no capsule, is damaged, contradicts itself or is too large to
            compute; the message names the field.
        OSError: The file cannot be read.
    """
    check_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            written = file.metadata() or {}
            if list(written) != [_JSON]:
                raise ValueError(f"the header must hold {_JSON!r} alone, got {sorted(written)[:9]}")
            metadata = CapsuleMetadata.from_json(written[_JSON])
            names = list(file.keys())
            # slices know their dtype and shape and have read nothing
            check_layout(metadata, {name: _layout(name, file.get_slice(name)) for name in names})
            tensors = {name: file.get_tensor(name).clone() for name in names}
    except SafetensorError as error:
        raise ValueError(f"not a safetensors file: {printable(str(error))}") from None
    return _capsule(metadata, tensors)


def versions_here() -> dict[str, str]:
    """Version of each package that takes part on this machine."""
    versions = {name: package_version(name) for name in _PACKAGES}
    versions["torch"] = torch.__version__  # with its CUDA version, which metadata may lack
    return {name: printable(version) for name, version in versions.items() if version is not None}


def _layout(name: str, tensor: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    """Dtype and shape of a slice of safetensors."""
    dtype = tensor.get_dtype()
    if dtype not in _DTYPES:
        raise ValueError(f"{name} has dtype {dtype}, expected one of {list(_DTYPES)}")
    return _DTYPES[dtype], tuple(tensor.get_shape())


def _capsule(metadata: CapsuleMetadata, tensors: Mapping[str, Tensor]) -> Capsule:
    """Check tensors on the CPU against one another and put them in their places."""
    check_layout(metadata, {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()})
    table = PageTable(
        metadata.page_size, tensors["kv_indptr"], tensors["kv_indices"], tensors["kv_lens"]
    )
    q, qo_indptr, page_ids = tensors["q"], tensors["qo_indptr"], tensors["page_ids"]
    check_table(metadata, table, qo_indptr, page_ids, q.shape[0])
    expected = AttentionOutput(tensors["expected_out"], tensors["expected_lse"])
    got = None
    if "got_out" in tensors:
        got = AttentionOutput(tensors["got_out"], tensors.get("got_lse", expected.lse))
    step = Step(metadata.spec, table, qo_indptr, q, tensors["kv_cache"])
    return Capsule(metadata, step, page_ids, expected, got, got is None or "got_lse" in tensors)
