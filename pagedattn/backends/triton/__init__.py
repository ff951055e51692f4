"""The Triton backend: launches and tile choices for the kernels under `pagedattn/kernels`."""
