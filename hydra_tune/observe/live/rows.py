"""Composes lines of a fixed width from cells, for a screen that is redrawn all the time.

rich's own tables measure every cell anew each time, at ten times the cost; here columns have fixed widths, and long
text is cut with an ellipsis. Wide characters take two columns; control characters, which could move the cursor, are
replaced by spaces. `screen.py` composes all lines of each picture here while a sweep runs; `paint.py` sends the lines to a
terminal, and `notebook.py` to a cell. The module must not know sweeps: only cells of text come in.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style

_GAP = 1
_FULL, _REST = "━", "─"  # distinguishable without colours


class ScreenCell(NamedTuple):
    """A piece of text with its style, by rich's name."""

    text: str
    style: str = ""


class ScreenColumn(NamedTuple):
    """A column.

    Args:
        width: in columns of the screen; the last column of a line gets the rest.
    """

    title: str
    width: int
    is_right: bool = False


Line = list[Segment]


def fit(text: str, width: int, *, is_right: bool = False) -> str:
    """Fit text into an exact number of columns."""
    if width <= 0:
        return ""
    # Rarely needed, so the test for the whole text comes before the loop over its characters.
    if not text.isprintable():
        text = "".join(char if char.isprintable() else " " for char in text)
    length = cell_len(text)
    if length > width:
        return set_cell_size(text, width - 1) + "…"
    return " " * (width - length) + text if is_right else text + " " * (width - length)


def bar(share: float, width: int) -> str:
    """Draw a bar for a share from 0 to 1."""
    full = round(min(1.0, max(0.0, share)) * width)
    return _FULL * full + _REST * (width - full)


def one_line(cells: Iterable[ScreenCell], width: int) -> Line:
    """Join cells to a line, cut at a width."""
    line: Line = []
    for text, style in cells:
        printable = text if text.isprintable() else fit(text, cell_len(text))
        length = cell_len(printable)
        if length > width:
            printable, length = fit(printable, width), width
        if printable:
            line.append(Segment(printable, _style(style)))
        width -= length
    return line


def heads(columns: Sequence[ScreenColumn], width: int) -> Line:
    """Make the line of column titles above a table."""
    return row(columns, [ScreenCell(column.title, "dim") for column in columns], width)


def row(columns: Sequence[ScreenColumn], cells: Sequence[ScreenCell], width: int) -> Line:
    """Make a line of a table, cut at a width."""
    line: Line = []
    last = len(columns) - 1
    for index, (column, cell) in enumerate(zip(columns, cells, strict=True)):
        room = width if index == last else min(column.width, width)
        cell_text = fit(cell.text, room, is_right=column.is_right)
        if cell_text:
            line.append(Segment(cell_text, _style(cell.style)))
        width -= room
        if index < last and width > 0:
            line.append(Segment(" " * _GAP))
            width -= _GAP
    return line


_STYLES: dict[str, Style] = {}


def _style(name: str) -> Style | None:
    if not name:
        return None
    style = _STYLES.get(name)
    if style is None:
        style = _STYLES[name] = Style.parse(name)
    return style
