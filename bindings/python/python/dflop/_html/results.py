"""HTML of the answers of planning commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dflop._html.charts import bars, counted, scale_of
from dflop._html.page import COLORS, block, facts, note, short, side_by_side, table, time

GIB = 1 << 30
# Histograms of `stats` that are shown, in this order, and outliers.
SHOWN = ("cost_seconds", "tokens", "text_tokens", "target_tokens", "images", "audio_seconds", "frames")
OUTLIERS_MAX = 8


def simulation(of: Any) -> str:
    """Returns the HTML of a `Simulation`."""
    source = "measured" if of.get("is_measured") else "a stated rate"
    rows = [("simulated", f"{of['steps']:,} steps of {of['model']}"), ("times", f"{of['device']}, {source}")]
    compared = [
        (one["name"], one["step_seconds"], f"{time(one['step_seconds'])}, {one['speedup']:.2f} x")
        for one in of["strategies"]
    ]
    if "lower_bound_seconds" in of:
        compared.append(("lower bound", of["lower_bound_seconds"], time(of["lower_bound_seconds"])))
    parts = [
        facts(rows),
        _compared(compared, "mean step by strategy"),
        note("mean time of a step, and how many times as fast as data-blind"),
    ]
    if of.get("layouts"):
        head = ("layout", "data-blind", "dflop", "gain", "memory")
        layouts = [
            (
                _layout_name(one["layout"]),
                time(one["blind_step_seconds"]),
                time(one["step_seconds"]),
                f"{one['blind_step_seconds'] / one['step_seconds']:.2f} x",
                f"{one['memory_bytes'] / GIB:.3g} GiB" + ("" if one["fits"] else ", too large"),
            )
            for one in of["layouts"]
        ]
        parts.append(table(head, layouts))
    return block(f"Simulation: {of['layout']}", *parts)


def plan(of: Any) -> str:
    """Returns the HTML of a `ParallelismPlan`."""
    memory = of.get("memory") or {}
    modules = [
        (
            name,
            *(f"{of[name][degree]:,}" for degree in ("tp", "pp", "dp")),
            f"{memory[name]['gib']:.1f} GiB" if memory.get(name) else "",
        )
        for name in ("encoder", "llm")
        if of.get(name)
    ]
    rows = [
        ("model", f"{of['model']}, times from {of['times_from']}"),
        ("GPUs", f"{of['gpus_used']:,}, {memory.get('limit_gib', 0):.3g} GiB each"),
        ("schedule", f"{of['schedule']}, {of['placement']}, {of['microbatches']:,} microbatches"),
        ("step", f"{time(of['step_seconds'])}, in 95 % at most {time(of['step_seconds_p95'])}"),
        ("fastest layout", of["fastest"]),
    ]
    compared = [("this plan", of["step_seconds"], time(of["step_seconds"]))]
    for one in of.get("data_parallel", ()):
        misfit = "" if one["fits"] else ", too large"
        compared.append(
            (_layout_name(one["layout"]), one["step_seconds"], time(one["step_seconds"]) + misfit)
        )
    head = ("module", "tensor", "pipeline", "replicas", "memory")
    chart = _compared(compared, "mean step by layout")
    return block("Parallelism plan", facts(rows), table(head, modules), chart, note("mean time of a step"))


def stats(of: Any) -> str:
    """Returns the HTML of `DatasetStats`."""
    idle = of["data_parallel"]
    rows = [
        ("samples", f"{of['samples']:,}, costs of {of['model']} on {of['device']}"),
        ("idle if batches are random", f"{100 * idle['idle_fraction']:.0f} % of {idle['gpus']} GPUs"),
    ]
    if of["refused"]:
        rows.append(("rejected by the model", f"{len(of['refused']):,}"))
    charts = []
    for name in SHOWN:
        counts = of["histograms"].get(name)
        if counts is None or counts["min"] == counts["max"]:
            continue
        shown: Callable[[float], str] = time if name.endswith("_seconds") else short
        median = shown(of["quantiles"][name]["p50"])
        title = f"{name.removesuffix('_seconds').replace('_', ' ')} of a sample, median {median}"
        charts.append(counted(title, counts["min"], counts["max"], counts["counts"], shown))
    outliers = [
        (
            one["key"],
            one["shard"].rpartition("/")[2],
            time(one["cost_seconds"]),
            f"{one['times_median']:.1f} x",
        )
        for one in of["outliers"][:OUTLIERS_MAX]
    ]
    head = ("most expensive samples", "shard", "cost", "of the median")
    return block(
        "Dataset statistics", facts(rows), side_by_side(charts), table(head, outliers) if outliers else ""
    )


def models(of: Any) -> str:
    """Returns the HTML of `ModelSupport`, of one model or of all families."""
    if "families" in of:
        head = ("family", "level", "presets", "model types")
        rows = [
            (one["family"], one["level"], _some(one["presets"]), _some(one["model_types"]))
            for one in of["families"]
        ]
        return block(f"{len(rows)} model families", table(head, rows, numbers=False))
    active = of["active_parameters"]
    parameters = short(of["parameters"]) + (f", {short(active)} active" if active != of["parameters"] else "")
    rows_of_model = [
        ("family", of["family"]),
        ("supported for", ", ".join(of["levels"])),
        ("parameters", parameters),
    ]
    modules = [(one["module"], short(one["parameters"])) for one in of["modules"]]
    examples = [
        (one["medium"], "rejected" if one["tokens"] is None else f"{one['tokens']:,}")
        for one in of["examples"]
    ]
    parts = [facts(rows_of_model), table(("module", "parameters"), modules)]
    if examples:
        parts.append(table(("medium", "tokens"), examples))
    return block(f"Model {of['model']}", *parts)


def _compared(rows: list[tuple[str, float, str]], label: str) -> str:
    """Returns bars from the same start: names, lengths in seconds, texts."""
    longest = max((seconds for _, seconds, _ in rows), default=0.0)
    drawn = [
        (
            name,
            [(seconds, COLORS[1] if name in ("dflop", "this plan") else COLORS[0], f"{name}: {shown}")],
            shown,
        )
        for name, seconds, shown in rows
    ]
    return bars(drawn, longest, label) + scale_of(time(longest), has_text=True)


def _layout_name(layout: str) -> str:
    """Returns the name of a layout without its GPUs, which are the same for all."""
    name, _, group = layout.partition(" in shard groups of ")
    return name.partition(" over ")[0] + (f", by {group}" if group else "")


def _some(names: list[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
