"""HTML of datasets, cost models and steps."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from dflop._html.charts import Part, bars, histogram, scale_of
from dflop._html.page import COLORS, block, facts, legend, note, short, side_by_side, size, table, time

if TYPE_CHECKING:
    from dflop.batches import Step

# Ranks of a timeline, and samples of a tooltip.
RANKS_MAX, SAMPLES_MAX = 16, 12


def dataset(of: dict[str, Any]) -> str:
    """Returns the HTML of a dataset.

    - `of`: its description by the compiled part: counts, `keys`, `bytes` and `text_tokens` of some samples
    """
    kinds = zip(("image", "audio clip", "video"), of["media"], strict=True)
    described = len(of["bytes"])
    media = ", ".join(f"{count:,} {kind}{'s' * (count > 1)}" for kind, count in kinds if count) or "none"
    spread = "" if described == of["samples"] else f" (of {described:,} samples)"
    rows = [
        ("samples", f"{of['samples']:,}" + (f" of the split {of['split']}" if of["split"] else "")),
        ("shards", f"{of['shards']:,}"),
        ("payload", size(of["payload_bytes"]) + (" of the whole index" if of["split"] else "")),
        ("skipped", f"{of['skipped']:,}"),
        (f"media{spread}", media),
        ("first keys", ", ".join(of["keys"])),
    ]
    charts = [histogram(f"bytes of a sample{spread}", of["bytes"], size)]
    if any(of["text_tokens"]):
        charts.append(histogram(f"text tokens of a sample{spread}", of["text_tokens"], short))
    return block(f"Dataset {of['name']}", facts(rows), side_by_side(charts))


def cost_model(name: str, shown: str, modules: Sequence[tuple[str, int, int, int, int]]) -> str:
    """Returns the HTML of a cost model.

    - `shown`: its `repr`
    - `modules`: name, layers, width, heads and parameters of each module
    """
    rows = [
        (module, f"{layers:,}", f"{width:,}", f"{heads:,}", f"{parameters:,}")
        for module, layers, width, heads, parameters in modules
    ]
    listed = table(("module", "layers", "width", "heads", "parameters"), rows)
    return block(f"CostModel {name}", listed, f"<code>{escape(shown)}</code>")


def step(of: Step) -> str:
    """Returns the HTML of a step: the microbatches of each DP rank one after the other, as predicted."""
    over = of.makespan_seconds / of.lower_bound_seconds - 1 if of.lower_bound_seconds > 0 else 0.0
    rows = [
        ("target tokens", f"{of.target_tokens:,}"),
        ("predicted makespan", time(of.makespan_seconds)),
        ("over the lower bound", f"{100 * over:.2f} %"),
        ("digest", of.digest),
    ]
    timeline = "" if of.plan is None else _timeline(of.plan)
    return block(f"Step {of.step}", facts(rows), timeline)


def _timeline(plan: Any) -> str:
    """Draws each rank as its microbatches by predicted time; a microbatch has a part for each module."""
    longest = max((sum(map(sum, rank)) for rank in plan.module_seconds), default=0.0)
    shown = min(len(plan.module_seconds), RANKS_MAX)
    modules = max((len(parts) for rank in plan.module_seconds for parts in rank), default=0)
    rows = []
    for rank in range(shown):
        drawn: list[Part] = []
        both = zip(plan.module_seconds[rank], plan.ranks[rank], strict=True)
        for number, (seconds, places) in enumerate(both):
            tip = _tip(number, sum(seconds), [plan.samples[place] for place in places])
            drawn += [(length, COLORS[place], tip) for place, length in enumerate(seconds) if length > 0]
            # A gap, by which microbatches are told apart.
            drawn.append((longest / 250, "", ""))
        rows.append((f"rank {rank}", drawn, ""))
    gaps = max((len(rank) for rank in plan.module_seconds), default=0) * longest / 250
    more = len(plan.module_seconds) - shown
    parts = [
        bars(rows, longest + gaps, "timeline of microbatches by rank"),
        scale_of(time(longest)),
        legend(_module_names(modules)),
        note("predicted time of this step's microbatches, in their order; a gap ends a microbatch"),
    ]
    return "".join(parts) + (note(f"and {more:,} more ranks") if more else "")


def _module_names(modules: int) -> list[str]:
    """Returns names of modules by their order: a plan has encoders first, and none of their names."""
    encoders = ["encoder"] if modules <= 2 else [f"encoder {number}" for number in range(1, modules)]
    return [*encoders[: modules - 1], "LLM"] if modules else []


def _tip(number: int, seconds: float, samples: Sequence[tuple[int, int]]) -> str:
    has_mixture = any(dataset for dataset, _ in samples)
    names = [
        f"{dataset}:{sample}" if has_mixture else f"{sample}" for dataset, sample in samples[:SAMPLES_MAX]
    ]
    more = [f"and {len(samples) - SAMPLES_MAX} more"] if len(samples) > SAMPLES_MAX else []
    listed = ", ".join(names + more)
    return f"microbatch {number}: {time(seconds)}, {len(samples)} samples of the index: {listed}"
