"""Hypothesis's entry point: tells it of pagedattn's strategies for `st.from_type`.

Hypothesis loads this whenever it is imported, in every project of an environment where pagedattn is
installed. So it lies outside the package, whose import brings in torch, and imports nothing of it
that was not imported before. Where hypothesis comes first, `import pagedattn` does the same.
"""

from __future__ import annotations

import sys


def register() -> None:
    """Register the strategies, where pagedattn was imported before hypothesis."""
    if hasattr(sys.modules.get("pagedattn"), "PageTable"):
        from pagedattn.registration import register_strategies

        register_strategies()
