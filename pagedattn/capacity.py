"""The largest step an object must be ready for.

With a `Capacity` every buffer is made once and keeps its address, so `run` may be captured in a
CUDA graph and replayed after later plans.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Capacity:
    """Upper bounds of a step.

    Args:
        max_batch_size: Requests in one step.
        max_tokens: Query tokens in one step, over all requests. `run` then takes `q` with exactly
            this many rows; rows past the planned ones are padding whose output is finite and
            unused.
        max_pages: Entries of `kv_indices` in one step, over all requests.

    Raises:
        ValueError: A bound is below 1, or fewer tokens than requests are allowed.
    """

    max_batch_size: int
    max_tokens: int
    max_pages: int

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_tokens", "max_pages"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_tokens < self.max_batch_size:
            raise ValueError(
                f"max_tokens={self.max_tokens} must be at least "
                f"max_batch_size={self.max_batch_size}: a decode step has one token a request"
            )

    def check_fits(self, *, batch_size: int, num_tokens: int, num_pages: int) -> None:
        """Raise a `ValueError` that names every bound which the step exceeds."""
        sizes = (
            ("max_batch_size", batch_size, self.max_batch_size),
            ("max_tokens", num_tokens, self.max_tokens),
            ("max_pages", num_pages, self.max_pages),
        )
        over = [
            f"{name}={bound} but the step has {size}" for name, size, bound in sizes if size > bound
        ]
        if over:
            raise ValueError(f"the step does not fit its Capacity: {'; '.join(over)}")
