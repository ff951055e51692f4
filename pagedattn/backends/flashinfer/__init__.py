"""FlashInfer's paged kernels, behind wrappers that are safe to serve with.

The only place that knows FlashInfer. Importing this does not import it: that happens when a wrapper
is built, so the package works where FlashInfer is not installed.
"""

from pagedattn.backends.flashinfer.decode import FlashInferDecodeWrapper
from pagedattn.backends.flashinfer.defects import KnownDefectWarning
from pagedattn.backends.flashinfer.head_dim import check_flashinfer_head_dim
from pagedattn.backends.flashinfer.mixed import FlashInferMixedWrapper
from pagedattn.backends.flashinfer.need import DeviceFacts, WorkspaceNeed, workspace_need
from pagedattn.backends.flashinfer.prefill import FlashInferPrefillWrapper
from pagedattn.backends.flashinfer.workspace import (
    Workspace,
    WorkspacePool,
    WorkspaceTooSmall,
    workspace_bytes,
)

__all__ = [
    "DeviceFacts",
    "FlashInferDecodeWrapper",
    "FlashInferMixedWrapper",
    "FlashInferPrefillWrapper",
    "KnownDefectWarning",
    "Workspace",
    "WorkspaceNeed",
    "WorkspacePool",
    "WorkspaceTooSmall",
    "check_flashinfer_head_dim",
    "workspace_bytes",
    "workspace_need",
]
