"""What a case must move and multiply at least, and how near a time comes to what a GPU can do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.cases import Case


@dataclass(frozen=True)
class Ceilings:
    """What was measured to be the most on one GPU."""

    read_gb_per_s: float
    product_tflops: float  # a large bfloat16 matrix product


H200 = Ceilings(read_gb_per_s=4418, product_tflops=733)


@dataclass(frozen=True)
class Work:
    """The least that a case needs."""

    num_bytes: int  # K and V of every token that some query sees, once; queries; outputs
    flops: int  # two products over the visible pairs of query and key

    @classmethod
    def of(cls, case: Case) -> Work:
        """Count a causal case's work."""
        keys = pairs = 0
        for kv_len, qo_len in zip(case.kv_lens, case.qo_lens, strict=True):
            position = np.arange(kv_len - qo_len, kv_len, dtype=np.int64)
            first = np.zeros_like(position)
            if case.window_left >= 0:
                first = np.maximum(position - case.window_left, 0)
            pairs += int((position + 1 - first).sum())
            keys += kv_len - int(first[0])
        row_bytes = case.num_qo_heads * case.head_dim * case.dtype.itemsize
        num_bytes = keys * case.token_bytes + 2 * case.num_tokens * row_bytes
        return cls(num_bytes, 4 * pairs * case.num_qo_heads * case.head_dim)

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.flops / self.num_bytes

    def bound_ms(self, ceilings: Ceilings) -> float:
        """The least time: that of the bytes or of the operations, whichever is more."""
        memory = self.num_bytes / (ceilings.read_gb_per_s * 1e6)
        return max(memory, self.flops / (ceilings.product_tflops * 1e9))


def ceilings_of(gpu: str) -> Ceilings | None:
    """The ceilings of a GPU by its name; `None` where they were not measured."""
    return H200 if "H200" in gpu else None
