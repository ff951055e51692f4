"""Names, parameters, defaults and order of the wrapper layer, which engines rely on."""

import inspect
import subprocess
import sys

import pytest
import torch

import pagedattn.flashinfer as layer
from pagedattn.backends import flashinfer as home

REQUIRED = inspect.Parameter.empty
CUDA = torch.device("cuda")
GRAPH = {"device": CUDA, "accelerator_graph": False, "enable_nvtx": False, "backend": "auto"}
SIZES = dict.fromkeys(("num_qo_heads", "num_kv_heads", "head_dim", "page_size"), REQUIRED)
TABLE = dict.fromkeys(("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"), REQUIRED)
OPTIONS = {"dtype": torch.bfloat16, "kv_lens": None, "window_left": -1, "kwargs": REQUIRED}

CONTRACT = {
    "FlashInferPrefillWrapper": {
        "workspace_buffer": REQUIRED,
        **SIZES,
        "batch_size": None,
        "max_total_tokens": None,
        "max_num_pages": None,
        **GRAPH,
    },
    "FlashInferPrefillWrapper.plan": {"qo_indptr": REQUIRED, **TABLE, "causal": True, **OPTIONS},
    "FlashInferDecodeWrapper": {
        "workspace_buffer": REQUIRED,
        **SIZES,
        "batch_size": None,
        "max_num_pages": None,
        **GRAPH,
    },
    "FlashInferDecodeWrapper.plan": {**TABLE, **OPTIONS},
    "FlashInferMixedWrapper": {
        "decode_workspace": REQUIRED,
        "prefill_workspace": REQUIRED,
        **SIZES,
        "batch_size": REQUIRED,
        "max_total_tokens": REQUIRED,
        "max_num_pages": REQUIRED,
        "max_prefill_rows": REQUIRED,
        "device": REQUIRED,
        "backend": "auto",
    },
    "FlashInferMixedWrapper.plan": {"qo_indptr": REQUIRED, **TABLE, "causal": True, **OPTIONS},
    "FlashInferPrefillWrapper.run": {"q": REQUIRED, "kv_cache_layer": REQUIRED},
    "check_flashinfer_head_dim": {"head_dim": REQUIRED, "device": None},
    "Workspace": {
        "tensor": REQUIRED,
        "name": REQUIRED,
        "sealed": False,
        "floor": "PAGEDATTN_WORKSPACE_BUFFER_MB",
    },
    "Workspace.plan": {"plan": REQUIRED, "args": REQUIRED, "kwargs": REQUIRED},
    "WorkspacePool": {"device": REQUIRED, "size_mb": None, "owner": "attention"},
    "WorkspacePool.get": {"label": REQUIRED, "cg_slot": None},
    "workspace_bytes": {"declared_mb": None},
    "workspace_need": {"spec": REQUIRED, "capacity": REQUIRED, "device_facts": REQUIRED},
}


@pytest.mark.parametrize("name", CONTRACT)
def test_parameters_defaults_and_order_are_as_promised(name):
    thing = layer
    for part in name.split("."):
        thing = getattr(thing, part)
    parameters = dict(inspect.signature(thing).parameters)
    parameters.pop("self", None)
    assert {n: p.default for n, p in parameters.items()} == CONTRACT[name]
    assert list(parameters) == list(CONTRACT[name])


def test_both_names_are_one_layer():
    assert layer.__all__ == home.__all__
    assert all(getattr(layer, name) is getattr(home, name) for name in home.__all__)


def test_importing_the_layer_does_not_import_flashinfer():
    code = "import sys, pagedattn.flashinfer; print('flashinfer' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
