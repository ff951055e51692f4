"""FlashInfer wrappers that are safe to serve with; see `pagedattn.backends.flashinfer`."""

from pagedattn.backends.flashinfer import (
    FlashInferDecodeWrapper,
    FlashInferMixedWrapper,
    FlashInferPrefillWrapper,
    Workspace,
    WorkspacePool,
    WorkspaceTooSmall,
    check_flashinfer_head_dim,
    workspace_bytes,
)

__all__ = [
    "FlashInferDecodeWrapper",
    "FlashInferMixedWrapper",
    "FlashInferPrefillWrapper",
    "Workspace",
    "WorkspacePool",
    "WorkspaceTooSmall",
    "check_flashinfer_head_dim",
    "workspace_bytes",
]
