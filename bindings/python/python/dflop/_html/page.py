"""Elements of pages: blocks, tables, rows of boxes, numbers with units."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

# Readable on light and dark pages.
COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
FAINT = "opacity:.7;font-size:12px"
_CELL = "text-align:left;padding:2px 12px 2px 0;vertical-align:top;white-space:normal;max-width:560px"
_NAME = _CELL.replace("white-space:normal", "white-space:nowrap")
_NUMBER = "text-align:right;padding:2px 12px 2px 0;vertical-align:top;white-space:nowrap"


def block(title: str, *parts: str) -> str:
    """Returns parts below a title."""
    head = f'<div style="font-weight:bold;margin:0 0 4px">{escape(title)}</div>'
    return f'<div style="line-height:1.4">{head}{"".join(parts)}</div>'


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Returns a table of names and values."""
    return table((), rows, numbers=False)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = True) -> str:
    """Returns a table that scrolls within itself where it is wider than the page.

    - `numbers`: whether all columns but the first are aligned as numbers
    """

    def row(cells: Sequence[str], name: str) -> str:
        styles = [_NUMBER if numbers and place else _CELL for place in range(len(cells))]
        if not numbers:
            styles[0] = _NAME
        shown = (
            f'<{name} style="{style}">{escape(cell)}</{name}>'
            for style, cell in zip(styles, cells, strict=True)
        )
        return f'<tr style="background:none">{"".join(shown)}</tr>'

    names = row(head, "th") if head else ""
    body = "".join(row(cells, "td") for cells in rows)
    return (
        f'<div style="overflow-x:auto;max-width:100%"><table style="margin:0;border-collapse:collapse">'
        f"{names}{body}</table></div>"
    )


def note(text: str) -> str:
    """Returns a line of small text."""
    return f'<div style="{FAINT}">{escape(text)}</div>'


def side_by_side(parts: Iterable[str], gap: int = 16) -> str:
    """Returns parts in a row, which becomes several rows where the page is narrow."""
    return f'<div style="display:flex;flex-wrap:wrap;gap:{gap}px;margin:6px 0">{"".join(parts)}</div>'


def legend(names: Sequence[str], colors: Sequence[str] = COLORS) -> str:
    """Returns what the colors of a chart stand for."""
    if not names:
        return ""
    squares = (
        f'<span style="white-space:nowrap"><span style="display:inline-block;width:10px;height:10px;'
        f'background:{color};margin-right:4px"></span><span style="opacity:.7">{escape(name)}</span></span>'
        for name, color in zip(names, colors, strict=False)
    )
    return f'<div style="display:flex;flex-wrap:wrap;gap:4px 14px;font-size:12px">{"".join(squares)}</div>'


def short(value: float) -> str:
    """Returns a number with three digits, and ``k``, ``M`` or ``B``."""
    for unit, factor in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.3g}"


def size(count: float) -> str:
    """Returns bytes with a unit."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


def time(seconds: float) -> str:
    """Returns seconds with a unit."""
    if seconds >= 1 or seconds == 0:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"
