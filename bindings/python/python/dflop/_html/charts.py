"""Charts as SVG: histograms with axes, bars that fill their page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

from dflop._html.page import COLORS, FAINT

BINS = 24
# Histogram with room for the axes, in pixels. Two are beside each other on a wide page, one fits a phone.
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 340, 130, 34, 12, 8, 20
# Length of a bar before it is stretched to its page.
_LENGTH = 1000.0
Part = tuple[float, str, str]


def histogram(title: str, values: Sequence[float], shown: Callable[[float], str]) -> str:
    """Returns a histogram of values.

    - `shown`: text of a value
    """
    low, high = min(values, default=0), max(values, default=0)
    counts = [0] * BINS
    for value in values:
        counts[min(int((value - low) * BINS / (high - low)), BINS - 1) if high > low else 0] += 1
    middle = sorted(values)[len(values) // 2] if values else 0
    caption = f"{title}: {shown(low)} to {shown(high)}, median {shown(middle)}"
    return counted(caption, low, high, counts, shown)


def counted(
    caption: str, low: float, high: float, counts: Sequence[int], shown: Callable[[float], str]
) -> str:
    """Returns a histogram of counts in bins of equal width from `low` to `high`."""
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    base, tallest, step = _TOP + height, max(counts, default=0), width / max(len(counts), 1)
    parts = []
    for tick in _ticks(tallest):
        at = base - height * tick / tallest if tallest else base
        parts.append(_line(_LEFT, at, _WIDTH - _RIGHT, at, 0.15))
        parts.append(_text(_LEFT - 4, at + 4, "end", f"{tick:,}"))
    for number, count in enumerate(counts):
        if count:
            start, end = (low + (high - low) * edge / len(counts) for edge in (number, number + 1))
            tall = height * count / tallest
            tip = f"{shown(start)} to {shown(end)}: {count:,} samples"
            parts.append(_rect(_LEFT + number * step, base - tall, step - 1, tall, COLORS[0], tip))
    parts.append(_line(_LEFT, base, _WIDTH - _RIGHT, base, 0.6))
    ends = [(0.0, "start"), (0.5, "middle"), (1.0, "end")] if high > low else [(0.0, "start")]
    for share, anchor in ends:
        at = _LEFT + share * width
        parts.append(_line(at, base, at, base + 3, 0.6))
        parts.append(_text(at, base + 14, anchor, shown(low + share * (high - low))))
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
    drawing = (
        f'<svg {_HEAD} aria-label="{escape(caption)}" {size} style="max-width:100%">{"".join(parts)}</svg>'
    )
    return (
        f'<div style="max-width:{_WIDTH}px"><div style="{FAINT}">{escape(caption)}; '
        f"height: samples</div>{drawing}</div>"
    )


def bars(rows: Iterable[tuple[str, Sequence[Part], str]], longest: float, label: str) -> str:
    """Returns a row for each name: bars of parts one after the other, and a text behind.

    - `rows`: name, parts (length, color, tip), text; a part without a color is a gap
    - `longest`: length that fills the page
    """
    scale = _LENGTH / longest if longest > 0 else 0.0
    lines = []
    for name, parts, text in rows:
        at, drawn = 0.0, []
        for length, color, tip in parts:
            if color:
                drawn.append(_rect(at, 0, length * scale - 1, 16, color, tip))
            at += length * scale
        size = f'viewBox="0 0 {_LENGTH:.0f} 16" preserveAspectRatio="none" width="100%" height="16"'
        drawing = (
            f'<svg {_HEAD} aria-label="{escape(name)}" {size} style="display:block">{"".join(drawn)}</svg>'
        )
        cells = [
            f'<div style="width:78px;flex:none;white-space:nowrap;{FAINT}">{escape(name)}</div>',
            f'<div style="flex:1;min-width:0">{drawing}</div>',
        ]
        if text:
            cells.append(f'<div style="width:118px;flex:none;{FAINT}">{escape(text)}</div>')
        lines.append(
            f'<div style="display:flex;align-items:center;gap:6px;margin:2px 0">{"".join(cells)}</div>'
        )
    listed = "".join(lines)
    return (
        f'<div role="group" aria-label="{escape(label)}" style="max-width:720px;margin:6px 0">{listed}</div>'
    )


def scale_of(end: str, has_text: bool = False) -> str:
    """Returns the axis below `bars`: 0 on the left and a text on the right."""
    right = 124 if has_text else 0
    style = f"display:flex;justify-content:space-between;max-width:720px;{FAINT}"
    inner = f"<div>0</div><div>{escape(end)}</div>"
    return (
        f'<div style="box-sizing:border-box;max-width:720px;padding:0 {right}px 0 84px">'
        f'<div style="{style};border-top:1px solid">{inner}</div></div>'
    )


_HEAD = 'xmlns="http://www.w3.org/2000/svg" role="img"'


def _ticks(tallest: int) -> list[int]:
    """Returns three to six round counts from 0 to the largest."""
    if tallest <= 0:
        return [0]
    step = 10 ** math.floor(math.log10(tallest))
    step = next(it for it in (step // 5, step // 2, step, 2 * step, 5 * step) if it and tallest <= 5 * it)
    return list(range(0, tallest + 1, step))


def _rect(x: float, y: float, width: float, height: float, color: str, tip: str) -> str:
    place = f'x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.5):.2f}" height="{height:.2f}"'
    return f'<rect {place} fill="{color}"><title>{escape(tip)}</title></rect>'


def _line(x1: float, y1: float, x2: float, y2: float, opacity: float) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="currentColor" stroke-opacity="{opacity}"></line>'


def _text(x: float, y: float, anchor: str, text: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="11"'
    return f'<text {place} fill="currentColor" fill-opacity="0.75">{escape(text)}</text>'
