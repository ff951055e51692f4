"""The process that compiles FlashInfer's kernels: `python -m pagedattn.precompile.child JSON`.

FlashInfer is imported here and never in the process that waits: its import fails where torch has no
CUDA, unless torch is told that it has, and neither may touch a user's own process.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from pagedattn.backends.flashinfer.library import takes_argument
from pagedattn.precompile.environment import RELEASE_VARIABLE
from pagedattn.precompile.events import Event, emit
from pagedattn.precompile.families import Family

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def main(arguments: str) -> int:
    """Compile families, one after the other, until one fails.

    Args:
        arguments: A JSON list of `Family` as dicts.
    """
    if torch.version.cuda is None:
        torch.version.cuda = os.environ[RELEASE_VARIABLE]
    for family in (Family(**fields) for fields in json.loads(arguments)):
        emit(Event("begin", str(family)))
        try:
            path = build(family)
        except RuntimeError as error:
            print(error, flush=True)  # ninja's output, where it has not been printed yet
            emit(Event("failed", str(family)))
            return 1
        emit(Event("done", str(family), str(path)))
    return 0


def build(family: Family) -> Path:
    """Compile one family, unless it is compiled already; ninja knows.

    Returns:
        The library that FlashInfer will load.
    """
    spec = generate(family)
    if getattr(spec, "is_aot", False):
        return Path(spec.get_library_path())  # shipped as a package
    num_compilations = len(spec.sources) + 1  # and a link
    print(f"[0/{num_compilations}] begins", flush=True)  # ninja says no more before one is done
    # a service that needs the same kernels now waits for this lock
    options = {"need_lock": True} if takes_argument(spec.build, "need_lock") else {}
    spec.build(True, **options)
    return Path(spec.get_library_path())


def generate(family: Family) -> Any:
    """FlashInfer's description of the library that its paged wrappers load for this family.

    From 0.7.4 on its fa2 wrappers load one for equal strides of keys and values, which our caches
    have; the public function describes another one that they never load.
    """
    modules = importlib.import_module("flashinfer.jit.attention.modules")
    generate = getattr(modules, "_gen_batch_prefill_primary_module", None)
    if generate is None or family.kernel != "fa2":
        generate = modules.gen_batch_prefill_module
    dtype = _DTYPES[family.dtype]
    return generate(
        family.kernel,
        dtype,
        dtype,
        dtype,
        torch.int32,
        family.head_dim,
        family.head_dim,
        0,  # no rotary embedding
        family.window,
        family.soft_cap,
        False,  # products of q and k are summed in float32
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
