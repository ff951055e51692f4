"""FlashInfer wrappers that are safe to serve with; see `pagedattn.backends.flashinfer`."""

from pagedattn.backends.flashinfer import (
    DeviceFacts,
    FlashInferDecodeWrapper,
    FlashInferMixedWrapper,
    FlashInferPrefillWrapper,
    KnownDefectWarning,
    Workspace,
    WorkspaceNeed,
    WorkspacePool,
    WorkspaceTooSmall,
    check_flashinfer_head_dim,
    workspace_bytes,
    workspace_need,
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
