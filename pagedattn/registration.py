"""Which strategies hypothesis uses for this package's types: what `st.from_type(PageTable)` draws.

Called once both packages are imported: by hypothesis's entry point (`_pagedattn_hypothesis.py`) or
at the end of `import pagedattn`, whichever comes later. It costs neither of them an import.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pagedattn.page_table import PageTable
from pagedattn.spec import AttentionSpec

if TYPE_CHECKING:
    from hypothesis import strategies as st


def register_strategies() -> None:
    """Register a strategy for `PageTable` and `AttentionSpec`.

    `pagedattn.testing` does so for its own types. `HYPOTHESIS_NO_PLUGINS` in the environment turns
    it off, as it does all of hypothesis's entry points.
    """
    if os.environ.get("HYPOTHESIS_NO_PLUGINS"):
        return
    from hypothesis.strategies import register_type_strategy

    register_type_strategy(PageTable, _page_tables)
    register_type_strategy(AttentionSpec, _specs)


def _page_tables(_: type[PageTable]) -> st.SearchStrategy[PageTable]:
    from pagedattn.testing import page_tables  # imported here: only who draws pays for it

    return page_tables()


def _specs(_: type[AttentionSpec]) -> st.SearchStrategy[AttentionSpec]:
    from pagedattn.testing import specs

    return specs()
