"""`pagedattn precompile`: kernels compiled before a service needs them."""
