"""The process that warms Triton's cache: `python -m pagedattn.precompile.triton_child JSON`.

The backend is asked to plan and run a step as in service, on tensors that nobody reads, with every
launch turned into a compilation. So what is compiled is what a service looks for in the cache, with
the same specializations, on a machine without the GPU too.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from pagedattn.backends.triton import backend
from pagedattn.backends.triton.tiles import BLOCK_ROWS, DeviceFacts
from pagedattn.kernels.append import launch_append
from pagedattn.kernels.gluon_names import MISSING
from pagedattn.page_table import PageTable
from pagedattn.precompile.events import Event, emit
from pagedattn.spec import AttentionSpec

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_KV_LEN = 1024  # enough tokens that a prompt of them takes the kernel for long queries


@dataclass(frozen=True)
class Layer:
    """A kind of layer, as a command line says it.

    Attributes:
        dtype: "bf16", "fp16" or "fp32".
        page_size: Tokens of a page.
        capability: The GPU's compute capability without its point, such as 90.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    causal: bool
    window: bool
    soft_cap: bool
    page_size: int
    capability: int

    def __str__(self) -> str:
        options = ", window" * self.window + ", soft cap" * self.soft_cap
        options += "" if self.causal else ", not causal"
        heads = f"{self.num_qo_heads}/{self.num_kv_heads} heads of {self.head_dim}"
        return f"triton {self.dtype} {heads}, pages of {self.page_size}{options}"


class _AbsentGpu:
    """What Triton asks of a driver in order to compile."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main(arguments: str) -> int:
    """Compile every kernel of every layer kind.

    Args:
        arguments: A JSON list of `Layer` as dicts.
    """
    compile_instead_of_launching()
    for layer in (Layer(**fields) for fields in json.loads(arguments)):
        emit(Event("begin", str(layer)))
        triton.runtime.driver.set_active(_AbsentGpu(layer.capability))
        warm(layer)
        emit(Event("done", str(layer), triton.knobs.cache.dir))
    return 0


def compile_instead_of_launching() -> None:
    """Make every launch of this process a compilation, for good; prints one line for each."""
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        print(f"compiled {self.__name__}", flush=True)
        return kernel

    JITFunction.run = compile_only
    setattr(backend, "_device_facts", _facts_of_absent_gpu)  # noqa: B010


def _facts_of_absent_gpu(device: torch.device) -> DeviceFacts:
    """The size of the grid is no part of a kernel; which kernels there are is."""
    capability = triton.runtime.driver.active.get_current_target().arch
    return DeviceFacts(
        num_sms=132, compute_capability=divmod(capability, 10), missing_gluon=MISSING
    )


def warm(layer: Layer) -> None:
    """Plan and run a step with a one-token request and a prompt, and one of each height of blocks.

    All with and without LSE.
    """
    cpu = torch.device("cpu")
    spec = AttentionSpec(
        layer.num_qo_heads,
        layer.num_kv_heads,
        layer.head_dim,
        dtype=_DTYPES[layer.dtype],
        causal=layer.causal,
        window_left=1024 if layer.window else -1,
        logits_soft_cap=30.0 if layer.soft_cap else 0.0,
    )
    attention = backend.TritonBackend(spec, layer.page_size, cpu, None)
    num_pages = -(-_KV_LEN // layer.page_size)
    page_ids = torch.arange(2 * num_pages, dtype=torch.int32)
    table = PageTable.from_lengths([_KV_LEN, _KV_LEN], layer.page_size, page_ids)
    shape = (2 * num_pages, 2, layer.page_size, spec.num_kv_heads, spec.head_dim)
    pages = torch.empty(shape, dtype=spec.dtype)
    drafts = [rows // spec.group_size for rows in BLOCK_ROWS]
    for bounds in ([0, 1, 1 + _KV_LEN], *([0, n, 2 * n] for n in drafts if n)):
        attention.plan(table, np.array(bounds, dtype=np.int32))
        q = torch.empty(bounds[-1], spec.num_qo_heads, spec.head_dim, dtype=spec.dtype)
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        for wanted in (None, lse):
            attention.run(q, pages, torch.empty_like(q), wanted)
    new = torch.empty(len(q), spec.num_kv_heads, spec.head_dim, dtype=spec.dtype)
    launch_append(new, new, attention.write_slots, pages, torch.zeros(1, dtype=torch.int32))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
