"""`Picture`: what every drawing function returns, as text for a terminal and as SVG."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.text import Text


@dataclass(frozen=True, eq=False, repr=False)
class Picture:
    """A drawing. Notebooks show the SVG, terminals the text, `rich` the text in colour.

    Args:
        styled: The text, at most 80 columns wide, with its colours.
        svg: A whole SVG document; the same input gives the same characters.
    """

    styled: Text
    svg: str

    @property
    def text(self) -> str:
        """The text without colours; it says everything that the colours say."""
        return self.styled.plain

    def save(self, path: str | Path) -> None:
        """Write the SVG, or the text where `path` ends in ".txt"."""
        content = self.text if str(path).endswith(".txt") else self.svg
        Path(path).write_text(content, encoding="utf-8")

    def __rich__(self) -> Text:
        return self.styled

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return self.text
