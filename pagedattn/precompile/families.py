"""What to compile: the kernel families of FlashInfer that a kind of layer runs on."""

from __future__ import annotations

from dataclasses import dataclass

from pagedattn.backends.flashinfer.head_dim import FA3_HEAD_DIMS


@dataclass(frozen=True)
class Family:
    """One shared library of FlashInfer's: all its masks, page sizes and numbers of heads.

    Attributes:
        kernel: "fa2" or "fa3".
        dtype: Of queries, keys, values and output: "bf16" or "fp16".
        head_dim: Elements of one head.
        window: For layers with a window; those without have a family of their own.
        soft_cap: Likewise for a cap of the scores.
    """

    kernel: str
    dtype: str
    head_dim: int
    window: bool
    soft_cap: bool

    def __str__(self) -> str:
        options = ", window" * self.window + ", soft cap" * self.soft_cap
        return f"{self.kernel} {self.dtype} head_dim {self.head_dim}{options}"


def families_of(
    head_dims: tuple[int, ...],
    dtypes: tuple[str, ...],
    kernels: tuple[str, ...],
    arch: str,
    window: bool,
    soft_cap: bool,
) -> list[Family]:
    """The families of every head size and dtype.

    Args:
        head_dims: Head sizes.
        dtypes: "bf16", "fp16".
        kernels: "fa2", "fa3"; empty: fa2, which decodes everywhere, and fa3 where it exists.
        arch: GPU architecture, such as "9.0a".
        window: As for `Family`.
        soft_cap: As for `Family`.
    """
    hopper = arch.startswith("9.")
    return [
        Family(kernel, dtype, head_dim, window, soft_cap)
        for head_dim in dict.fromkeys(head_dims)
        for dtype in dict.fromkeys(dtypes)
        for kernel in dict.fromkeys(kernels or ("fa2", "fa3"))
        if kernels or kernel == "fa2" or (hopper and head_dim in FA3_HEAD_DIMS)
    ]
