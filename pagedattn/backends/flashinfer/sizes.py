"""Sizes of a wrapper in graph mode: which it needs, and whether a step fits them."""

from __future__ import annotations

from dataclasses import dataclass

from pagedattn.backends.flashinfer.host_step import HostStep


@dataclass(frozen=True)
class Capacity:
    """Sizes of a graph-mode wrapper, those of FlashInfer's static buffers."""

    batch_size: int
    num_tokens: int
    num_pages: int


def require_sizes(accelerator_graph: bool, **sizes: int | None) -> None:
    """In graph mode, require every size."""
    missing = [name for name, size in sizes.items() if size is None]
    if accelerator_graph and missing:
        raise ValueError(f"accelerator_graph=True needs {', '.join(missing)}")
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")


def check_step_fits(step: HostStep, capacity: Capacity, **others: tuple[int, int]) -> None:
    """Like `check_fits`, for the sizes of any step and for others."""
    check_fits(
        batch_size=(step.batch_size, capacity.batch_size),
        max_total_tokens=(step.num_tokens, capacity.num_tokens),
        max_num_pages=(len(step.kv_indices), capacity.num_pages),
        **others,
    )


def check_fits(**sizes: tuple[int, int]) -> None:
    """Raise a `ValueError` that names every size, (has, capacity), that the step exceeds."""
    over = [
        f"{name}={most} but the step has {has}" for name, (has, most) in sizes.items() if has > most
    ]
    if over:
        raise ValueError(
            f"the step does not fit the wrapper: {'; '.join(over)}: build it with larger sizes"
        )
