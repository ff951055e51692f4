"""The few SVG elements that pictures are made of, as strings."""

from __future__ import annotations

from xml.sax.saxutils import escape

from pagedattn.draw.palette import FAINT_INK, FAINT_LINE, INK, LINE, PAPER

FONT = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"
WIDTH = 760
MARGIN = 12

HATCH = "url(#unused)"
"""A fill: slots that hold nothing."""

# Every picture defines the same pattern: where a page shows many, it does not matter which is used.
_DEFINITIONS = (
    '<defs><pattern id="unused" width="5" height="5" patternUnits="userSpaceOnUse" '
    f'patternTransform="rotate(45)"><rect width="5" height="5" fill="{PAPER}"/>'
    f'<line x1="0" y1="0" x2="0" y2="5" stroke="{LINE}" stroke-width="1.6"/></pattern></defs>'
)


def document(width: float, height: float, elements: list[str], title: str) -> str:
    """A whole SVG on white paper."""
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="{FONT}">'
    paper = f'<rect width="{width:g}" height="{height:g}" fill="{PAPER}"/>'
    body = [head, f"<title>{escape(title)}</title>", _DEFINITIONS, paper, *elements, "</svg>"]
    return "\n".join(body) + "\n"


def box(
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str = "none",
    stroke: str = FAINT_LINE,
    stroke_width: float = 1,
) -> str:
    """A rectangle."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" '
        f'stroke="{stroke}" stroke-width="{stroke_width:g}"/>'
    )


def words(
    x: float,
    y: float,
    text: str,
    *,
    size: float = 12,
    fill: str = INK,
    anchor: str = "start",
    bold: bool = False,
    halo: bool = False,
) -> str:
    """One line of text, standing on `y`; with a halo it is readable on any ground."""
    weight = ' font-weight="bold"' if bold else ""
    if halo:
        weight += f' stroke="{PAPER}" stroke-width="3" stroke-linejoin="round" paint-order="stroke"'
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{fill}" '
        f'text-anchor="{anchor}"{weight} xml:space="preserve">{escape(text)}</text>'
    )


def faint(x: float, y: float, text: str, anchor: str = "start") -> str:
    """A line of small grey text."""
    return words(x, y, text, size=11, fill=FAINT_INK, anchor=anchor)


def group(elements: list[str], hint: str) -> str:
    """Elements that show `hint` where the mouse rests on them."""
    return f"<g><title>{escape(hint)}</title>{''.join(elements)}</g>"
