"""Pictures of page tables and of what queries see, for terminals, notebooks and files.

Everything is drawn twice from one model: as text of at most 80 columns, which needs no colour, and
as SVG. Large pools are summarised.
"""

from pagedattn.draw.draw import draw_allocator, draw_mask, draw_pages, page_table_html
from pagedattn.draw.picture import Picture

__all__ = ["Picture", "draw_allocator", "draw_mask", "draw_pages", "page_table_html"]
