"""HTML of objects for notebooks: no scripts, no network, everything from data escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflop.batches import Step

BINS = 24
WIDTH, BAR_HEIGHT, HISTOGRAM_HEIGHT = 640, 18, 60
# Ranks of a timeline, and samples of a tooltip.
RANKS_MAX, SAMPLES_MAX = 16, 12
# Readable on light and dark pages.
_BARS, _OTHER_BARS, _LINE = "#4c78a8", "#f58518", "#888888"


def dataset(of: dict[str, Any]) -> str:
    """Returns the HTML of a dataset.

    - `of`: its description by the compiled part: counts, `keys`, `bytes` and `text_tokens` of some samples
    """
    kinds = zip(("images", "audio clips", "videos"), of["media"], strict=True)
    described = len(of["bytes"])
    media = ", ".join(f"{count:,} {kind}" for kind, count in kinds if count) or "none"
    spread = "" if described == of["samples"] else f" (of {described:,} samples)"
    rows = [
        ("samples", f"{of['samples']:,}" + (f" of the split {of['split']}" if of["split"] else "")),
        ("shards", f"{of['shards']:,}"),
        ("payload", _bytes(of["payload_bytes"]) + (" of the whole index" if of["split"] else "")),
        ("skipped", f"{of['skipped']:,}"),
        (f"media{spread}", media),
        ("first keys", ", ".join(of["keys"])),
    ]
    charts = [_histogram(f"bytes of a sample{spread}", of["bytes"], _bytes)]
    if any(of["text_tokens"]):
        charts.append(
            _histogram(f"text tokens of a sample{spread}", of["text_tokens"], lambda it: f"{it:,.0f}")
        )
    return _block(f"Dataset {of['name']}", _table((), rows), *charts)


def cost_model(name: str, shown: str, modules: Sequence[tuple[str, int, int, int, int]]) -> str:
    """Returns the HTML of a cost model.

    - `shown`: its `repr`
    - `modules`: name, layers, width, heads and parameters of each module
    """
    rows = [
        (module, f"{layers:,}", f"{width:,}", f"{heads:,}", f"{parameters:,}")
        for module, layers, width, heads, parameters in modules
    ]
    table = _table(("module", "layers", "width", "heads", "parameters"), rows)
    return _block(f"CostModel {name}", table, f"<code>{escape(shown)}</code>")


def step(of: Step) -> str:
    """Returns the HTML of a step: the microbatches of each DP rank one after the other, as predicted."""
    over = of.makespan_seconds / of.lower_bound_seconds - 1 if of.lower_bound_seconds > 0 else 0.0
    rows = [
        ("target tokens", f"{of.target_tokens:,}"),
        ("predicted makespan", _seconds(of.makespan_seconds)),
        ("over the lower bound", f"{100 * over:.2f} %"),
        ("digest", of.digest),
    ]
    timeline = "" if of.plan is None else _timeline(of.plan)
    return _block(f"Step {of.step}", _table((), rows), timeline)


def _timeline(plan: Any) -> str:
    seconds = [[sum(modules) for modules in rank] for rank in plan.module_seconds]
    longest = max((sum(rank) for rank in seconds), default=0.0)
    shown = min(len(seconds), RANKS_MAX)
    scale = (WIDTH - 60) / longest if longest > 0 else 0.0
    parts = []
    for rank in range(shown):
        at, top = 60.0, rank * (BAR_HEIGHT + 4)
        middle = top + BAR_HEIGHT - 5
        parts.append(f'<text x="0" y="{middle}" font-size="11" fill="{_LINE}">rank {rank}</text>')
        for number, (taken, places) in enumerate(zip(seconds[rank], plan.ranks[rank], strict=True)):
            color = _OTHER_BARS if number % 2 else _BARS
            tip = _tip(number, taken, [plan.samples[place] for place in places])
            parts.append(_rect(at, top, taken * scale, BAR_HEIGHT, color, tip))
            at += taken * scale
    more = len(seconds) - shown
    note = f"<div>and {more:,} more ranks</div>" if more else ""
    caption = f"<div>microbatches by predicted time, all modules; {_seconds(longest)} to the right edge</div>"
    return _svg(shown * (BAR_HEIGHT + 4), "timeline of microbatches by rank", parts) + caption + note


def _tip(number: int, seconds: float, samples: Sequence[tuple[int, int]]) -> str:
    has_mixture = any(dataset for dataset, _ in samples)
    names = [
        f"{dataset}:{sample}" if has_mixture else f"{sample}" for dataset, sample in samples[:SAMPLES_MAX]
    ]
    more = [f"and {len(samples) - SAMPLES_MAX} more"] if len(samples) > SAMPLES_MAX else []
    listed = ", ".join(names + more)
    return f"microbatch {number}: {_seconds(seconds)}, {len(samples)} samples of the index: {listed}"


def _histogram(title: str, values: Sequence[float], shown: Any) -> str:
    low, high = min(values, default=0), max(values, default=0)
    counts = [0] * BINS
    for value in values:
        counts[min(int((value - low) * BINS / (high - low)), BINS - 1) if high > low else 0] += 1
    tallest, width = max(counts), WIDTH / BINS
    parts = []
    for number, count in enumerate(counts):
        height = HISTOGRAM_HEIGHT * count / tallest if tallest else 0.0
        start, end = (low + (high - low) * edge / BINS for edge in (number, number + 1))
        tip = f"{shown(start)} to {shown(end)}: {count:,} samples"
        parts.append(_rect(number * width, HISTOGRAM_HEIGHT - height, width - 1, height, _BARS, tip))
    middle = sorted(values)[len(values) // 2] if values else 0
    caption = f"{title}: {shown(low)} to {shown(high)}, median {shown(middle)}"
    return f"<div>{escape(caption)}</div>" + _svg(HISTOGRAM_HEIGHT, title, parts)


def _rect(x: float, y: float, width: float, height: float, color: str, tip: str) -> str:
    place = f'x="{x:.2f}" y="{y:.2f}" width="{max(width - 0.5, 0):.2f}" height="{height:.2f}"'
    return f'<rect {place} fill="{color}"><title>{escape(tip)}</title></rect>'


def _svg(height: float, label: str, parts: Iterable[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(label)}"'
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" style="max-width:100%"'
    return f"{head} {size}>{''.join(parts)}</svg>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    names = f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>" if head else ""
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>{names}{body}</table>"


def _block(title: str, *parts: str) -> str:
    return f"<div><strong>{escape(title)}</strong>{''.join(parts)}</div>"


def _bytes(count: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


def _seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"
