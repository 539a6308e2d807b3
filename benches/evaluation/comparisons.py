"""Sections about simulated steps: throughput, idle time, nodes, ablation, mixtures, global batches."""

from pathlib import Path
from typing import Any

import plots
import shapes
from partitions import cost_variation
from plots import Series
from text import fence, filled, percent, span, table, times

OURS, BY_HAND, LPT, UNIFORM, PAPER = (
    "dflop",
    "by hand, joint",
    "lpt, sorted",
    "data-blind, uniform",
    "paper, sorted",
)
# Compared methods in the order of the tables, each with the color and mark in figures.
METHODS = {
    BY_HAND: ("orange", "s"),
    LPT: ("green", "^"),
    "data-blind, joint": ("red", "v"),
    UNIFORM: ("gray", "D"),
    PAPER: ("violet", "P"),
}
OURS_STYLE = ("blue", "o")
NO_ROOM = "*"


def step_seconds(row: dict[str, Any], method: str) -> float | None:
    """Returns the mean step time of a method, if it has a plan."""
    found = row["methods"].get(method)
    return found and found["step_seconds"]


def idle(row: dict[str, Any], method: str) -> float | None:
    """Returns the idle fraction of a method, if it has a plan."""
    found = row["methods"].get(method)
    return found and found["bubble_fraction"]


def over_ours(row: dict[str, Any], method: str) -> float | None:
    """Returns the step time of a method over that of dflop."""
    seconds = step_seconds(row, method)
    return seconds and seconds / row["methods"][OURS]["step_seconds"]


def ratios(rows: list[dict[str, Any]], method: str) -> list[float]:
    """Returns the ratios of all rows that have the method."""
    return [ratio for row in rows if (ratio := over_ours(row, method)) is not None]


def _planned(study: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in study["rows"] if OURS in row["methods"]]


def _mark(row: dict[str, Any], method: str) -> str:
    return _unfit(row["methods"].get(method))


def _unfit(found: dict[str, Any] | None) -> str:
    """Marks a method that does not fit into memory."""
    return NO_ROOM if found and not found["fits"] else ""


def _label(row: dict[str, Any]) -> str:
    """Returns the first cell of a row: a model, which may be broken at hyphens, a count, or words."""
    return f"{int(row['label']):,}" if row["label"].isdigit() else row["label"]


def _gains(rows: list[dict[str, Any]], header: str) -> str:
    """Returns the table with the speed-up of dflop over every method."""
    lines = []
    for row in rows:
        ours = row["methods"][OURS]["step_seconds"]
        line = [_label(row), f"{ours:.2f}"]
        line.append(f"{row['global_batch'] / ours:.1f}")
        line += [times(over_ours(row, method)) + _mark(row, method) for method in METHODS]
        lines.append([*line, f"{row['bound_seconds'] / ours:.2f}"])
    names = [f"over {name}" for name in METHODS]
    return table([header, "dflop step, s", "samples / s", *names, "bound / step"], lines)


def _dots(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws the throughput of all methods, with dflop as 1."""

    def inverse(row: dict[str, Any], method: str) -> float | None:
        ratio = over_ours(row, method)
        return ratio and 1 / ratio

    series = [Series(name, *style, [inverse(row, name) for row in rows]) for name, style in METHODS.items()]
    series.append(Series(OURS, *OURS_STYLE, [1.0] * len(rows)))
    plots.dots(path, [row["label"] for row in rows], series, "Throughput, dflop = 1", (0, None))


def _block(row: dict[str, Any]) -> str:
    return fence(row["command"])


def throughput(study: dict[str, Any], figures: Path) -> list[str]:
    """Throughput of the models."""
    rows = _planned(study)
    _dots(rows, figures / "throughput.svg")
    waits = [idle(row, UNIFORM) for row in rows if idle(row, UNIFORM) is not None]
    most = 1 / (1 - max(waits))
    faster = [row for row in rows if (over_ours(row, PAPER) or 1) < 1 and not row["methods"][PAPER]["fits"]]
    return [
        "## Throughput",
        filled(
            f"""Input: seven models, {rows[0]["gpus"]} GPUs, global batch {rows[0]["global_batch"]}, all
            dataset parts, {study["steps"]} steps. The command for the first row:"""
        ),
        _block(rows[0]),
        "![Throughput of seven models by method](evaluation/throughput.svg)",
        _gains(rows, "model"),
        filled(
            f"""The paper reports 1.2 to 3.6 times; here dflop is {span(ratios(rows, UNIFORM))} times as
            fast as the uniform plan, the paper's kind of baseline. That plan is idle
            {percent(min(waits), 0)} to {percent(max(waits), 0)} of the time, so on the same plan no
            scheduler gains more than {most:.2f} times, and a larger ratio needs a slower baseline or a
            better plan. Over a plan by hand with both modules on all ranks, which fits for
            {len(ratios(rows, BY_HAND))} of {len(rows)} models, the gain is
            {span(ratios(rows, BY_HAND))}, and over LPT on the dflop plan {span(ratios(rows, LPT))}:
            most of the gain comes from the plan and from balancing by cost at all, little from the
            makespan search."""
        ),
        *_too_large(faster),
    ]


def _too_large(rows: list[dict[str, Any]]) -> list[str]:
    """Explains plans of the paper's method that are faster and do not fit."""
    if not rows:
        return []
    names = " and ".join(f"`{row['label']}`" for row in rows)
    return [
        filled(
            f"""For {names} the paper's plan is faster and does not fit into memory on some batch: Algorithm 1
            checks memory for the mean sample, and dflop for every batch."""
        )
    ]


def idle_time(study: dict[str, Any], figures: Path) -> list[str]:
    """Idle time of the models."""
    rows = _planned(study)
    names = [*METHODS, OURS]
    styles = METHODS | {OURS: OURS_STYLE}

    def shown(row: dict[str, Any], name: str) -> float | None:
        fraction = idle(row, name)
        return None if fraction is None else 100 * fraction

    series = [Series(name, *styles[name], [shown(row, name) for row in rows]) for name in names]
    plots.dots(figures / "idle.svg", [row["label"] for row in rows], series, "Idle GPU time, %", (-2, None))
    lines = [[_label(row), *(percent(idle(row, name)) for name in names)] for row in rows]
    less = [1 - idle(row, OURS) / idle(row, UNIFORM) for row in rows if idle(row, UNIFORM)]
    return [
        "## Idle time",
        "Input: the runs above. Idle time is the fraction of GPU time without computation.",
        "![Idle time of seven models by method](evaluation/idle.svg)",
        table(["model", *names], lines),
        filled(
            f"""The paper reports 82 and 84 % less idle time than its baselines (8B, 32 GPUs); here it is
            {percent(min(less), 0)} to {percent(max(less), 0)} less than with the uniform plan.
            Simulated ranks wait neither for data nor for launches, so idle time on a cluster is larger
            for every method."""
        ),
    ]


def nodes(study: dict[str, Any], figures: Path) -> list[str]:
    """Throughput by cluster size."""
    rows = _planned(study)
    positions = [row["gpus"] for row in rows]
    styles = METHODS | {OURS: OURS_STYLE}

    def per_gpu(row: dict[str, Any], name: str) -> float | None:
        seconds = step_seconds(row, name)
        return seconds and row["global_batch"] / seconds / row["gpus"]

    series = [Series(name, *style, [per_gpu(row, name) for row in rows]) for name, style in styles.items()]
    plots.lines(figures / "nodes.svg", positions, series, ("GPUs", "Samples/s per GPU"))
    kept = per_gpu(rows[-1], OURS) / per_gpu(rows[0], OURS)
    return [
        "## Nodes",
        filled(
            f"""Input: `{rows[0]["model"]}`, 1 to 32 nodes with 8 GPUs, 8 samples per GPU, all dataset
            parts, {study["steps"]} steps. The command for the last row:"""
        ),
        _block(rows[-1]),
        "![Samples per second and GPU by cluster size](evaluation/nodes.svg)",
        _gains(rows, "GPUs"),
        filled(
            f"""The paper measures up to 8 nodes and projects 16 and 32; here all are simulated. Throughput
            per GPU at {positions[-1]} GPUs is {kept:.2f} of that at {positions[0]}, and the gain over
            the uniform plan is {times(over_ours(rows[0], UNIFORM))} at {positions[0]} and
            {times(over_ours(rows[-1], UNIFORM))} at {positions[-1]}, because the slowest of more
            data-blind ranks is slower."""
        ),
    ]


def rebalanced(row: dict[str, Any], plan: str, method: str = OURS) -> dict[str, Any] | None:
    """Returns a method that balances the plan of a baseline, if there is one."""
    return row["rebalanced"].get(plan, {}).get("methods", {}).get(method)


def ablation(study: dict[str, Any], figures: Path) -> list[str]:
    """Optimizer and scheduler alone and together."""
    rows = _planned(study)
    columns = {
        "by hand, dealt": ("orange", "s", [row["methods"].get(BY_HAND) for row in rows]),
        "by hand, balanced": ("orange", "s", [rebalanced(row, BY_HAND) for row in rows]),
        "uniform, dealt": ("gray", "D", [row["methods"].get(UNIFORM) for row in rows]),
        "uniform, balanced": ("gray", "D", [rebalanced(row, UNIFORM) for row in rows]),
        "our plan, dealt": ("green", "^", [row["methods"].get("data-blind") for row in rows]),
        "both (dflop)": (*OURS_STYLE, [row["methods"][OURS] for row in rows]),
    }
    ours = [row["methods"][OURS]["step_seconds"] for row in rows]
    ratios = {
        name: [one and one["step_seconds"] / base for one, base in zip(found, ours, strict=True)]
        for name, (_, _, found) in columns.items()
    }
    series = [
        Series(name, color, mark, ratios[name], is_open=name.endswith("balanced"))
        for name, (color, mark, _) in columns.items()
    ]
    plots.dots(
        figures / "ablation.svg", [row["label"] for row in rows], series, "Step time, dflop = 1", (0.9, None)
    )
    lines = [
        [_label(row)]
        + [times(ratios[name][at]) + _unfit(found[at]) for name, (_, _, found) in columns.items()]
        for at, row in enumerate(rows)
    ]
    return [
        "## Ablation",
        filled(
            """Input: the runs above, as step time over dflop. *Optimizer only* is the dflop plan with dealt
            samples; *scheduler only*, the plan of a baseline with microbatches by dflop, on the same
            batches and with the same number of microbatches. The command for the first row, whose file has
            the baseline's plan, which is in the results:"""
        ),
        fence(next(iter(rows[0]["rebalanced"].values()))["command"]),
        "![Step time with optimizer, scheduler and both](evaluation/ablation.svg)",
        table(["model", *columns], lines),
        filled(_ablated(rows, ratios)),
    ]


def _ablated(rows: list[dict[str, Any]], ratios: dict[str, list[float | None]]) -> str:
    """Judges optimizer and scheduler alone."""

    def known(name: str) -> list[float]:
        return [value for value in ratios[name] if value is not None]

    alone = zip(rows, ratios["our plan, dealt"], ratios["uniform, balanced"], strict=True)
    scheduler = [row["label"] for row, plan, balance in alone if balance and plan and balance < plan]
    gain = f"""In the paper the optimizer dominates for 8B, the scheduler for 32B, and 72B needs both. Here the
        optimizer alone takes {span(known("our plan, dealt"))} times the dflop step, and the scheduler alone
        {span(known("by hand, balanced"))} on the plan by hand and {span(known("uniform, balanced"))} on the
        uniform plan: it is the better half for {_named(scheduler)}, and the optimizer for the others."""
    full = [row for row in rows if (lpt := rebalanced(row, UNIFORM, LPT)) and not lpt["fits"]]
    if not full:
        return gain
    without = [
        rebalanced(row, UNIFORM, LPT)["step_seconds"] / row["methods"][OURS]["step_seconds"] for row in full
    ]
    return f"""{gain} For {_named([row["label"] for row in full])} memory limits the scheduler: on the uniform
        plan LPT would take {span(without)} and does not fit on some batch, and the microbatches that dflop
        finds to fit are little faster than dealt ones. There a scheduler needs a plan that leaves it room."""


def _named(labels: list[str]) -> str:
    """Lists models in words."""
    names = [f"`{label}`" for label in labels]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names) or "none"


def mixtures(study: dict[str, Any], figures: Path) -> list[str]:
    """Dataset mixtures."""
    variation = {name: cost_variation(rows) for name, rows in shapes.tables().items()}
    rows = _planned(study)
    _dots(rows, figures / "mixtures.svg")
    by_gain = sorted(rows, key=lambda row: over_ours(row, BY_HAND) or 0)
    least, most = by_gain[0], by_gain[-1]
    return [
        "## Dataset mixtures",
        filled(
            f"""Input: `{rows[0]["model"]}`, {rows[0]["gpus"]} GPUs, global batch {rows[0]["global_batch"]},
            {study["steps"]} steps, dataset parts alone and together. The command for the first row:"""
        ),
        _block(rows[0]),
        "![Throughput by dataset mixture](evaluation/mixtures.svg)",
        _gains(rows, "samples"),
        filled(
            f"""The gain over the plan by hand is smallest for {least["label"]}
            ({times(over_ours(least, BY_HAND))}) and largest for {most["label"]}
            ({times(over_ours(most, BY_HAND))}); sample costs have a coefficient of variation of
            {variation[least["shapes"]]:.2f} and {variation[most["shapes"]]:.2f} there. The paper's bars
            differ, because its datasets do."""
        ),
    ]


def batches(study: dict[str, Any], figures: Path) -> list[str]:
    """Global batches."""
    rows = _planned(study)
    positions = [row["global_batch"] for row in rows]
    series = [Series(name, *style, [over_ours(row, name) for row in rows]) for name, style in METHODS.items()]
    names = ("Global batch", "Step time, dflop = 1")
    plots.lines(figures / "batches.svg", positions, series, names, starts_at_zero=False)
    first, last = rows[0], rows[-1]
    return [
        "## Global batches",
        filled(
            f"""Input: `{first["model"]}`, {first["gpus"]} GPUs, all dataset parts, {study["steps"]} steps.
            The command for the first row:"""
        ),
        _block(first),
        "![Step time over dflop by global batch](evaluation/batches.svg)",
        _gains(rows, "global batch"),
        filled(
            f"""At {positions[0]} samples, {positions[0] / first["gpus"]:g} per GPU, the longest samples
            bound the step and the gain over the plan by hand is {times(over_ours(first, BY_HAND))}; at
            {positions[-1]:,} it is {times(over_ours(last, BY_HAND))}, since sums of more samples differ
            less even when they are dealt."""
        ),
    ]


# Rules of peers: names in the results, names on the page.
FSDP_RULES = {
    "dealt": "dealt",
    "VeOmni": "VeOmni: dealt, media by greedy on squares",
    "verl": "verl: tokens by largest differencing",
    "OrchMLLM": "OrchMLLM: media and tokens apart, greedy",
    "dflop": "dflop",
    "dflop, media apart": "dflop, then media by greedy",
}
PAIR_RULES = {
    "dealt": "dealt",
    "MegatronMIMO": "MegatronMIMO: tiles, equal counts",
    "MegatronMIMO, both weights": "MegatronMIMO: tiles and tokens",
    "dflop": "dflop",
}
PEER_COLORS = [("orange", "s"), ("blue", "o")]


def peer_rules(study: dict[str, Any], figures: Path) -> list[str]:
    """Rules of other trainers on ranks with the whole model, and on encoder and LLM apart."""
    fsdp, pairs = study["fsdp"], study["pairs"]
    sizes = [f"{row['global_batch']:,}" for row in fsdp]
    labels = [f"FSDP: {name}" for name in FSDP_RULES] + [f"pairs: {name}" for name in PAIR_RULES]
    series = [
        Series(
            f"global batch {size}",
            *style,
            [whole["over_bound"][name] for name in FSDP_RULES]
            + [apart["over_bound"][name] for name in PAIR_RULES],
        )
        for size, style, whole, apart in zip(sizes, PEER_COLORS, fsdp, pairs, strict=True)
    ]
    plots.dots(figures / "peers.svg", labels, series, "Step time, equal work = 1", (0.9, None))
    tables = [
        table(
            [header, *(f"batch {size}" for size in sizes)],
            [[shown, *(times(row["over_bound"][name]) for row in rows)] for name, shown in rules.items()],
        )
        for header, rules, rows in (("FSDP", FSDP_RULES, fsdp), ("pairs", PAIR_RULES, pairs))
    ]
    small, large = (row["over_bound"] for row in fsdp)
    small_pairs, large_pairs = (row["over_bound"] for row in pairs)
    return [
        "## Rules of other trainers",
        filled(
            f"""Input: the four image datasets above, {study["samples"]:,} samples, `{study["model"]}`,
            {study["steps"]} steps; predicted times, without communication. *FSDP*: {study["ranks"]} ranks
            with {study["microbatches"]} microbatches, which meet after encoder and LLM of each. *Pairs*:
            {study["pair_count"]} encoder ranks and {study["pair_count"]} LLM ranks under 1F1B with
            {study["pair_microbatches"]} microbatches, GPUs split by work. The rules are written after
            published code and papers in `benches/evaluation/peers.py`, which checks dflop's steps
            against dflop's own prediction. Step time over that of equal work on all ranks; the paper
            compares none of them:"""
        ),
        "![Step time by rule](evaluation/peers.svg)",
        *tables,
        filled(
            f"""With {fsdp[0]["global_batch"] // study["ranks"]} samples per rank dflop takes
            {times(small["dflop"])}, verl's rule {times(small["verl"])} and OrchMLLM's
            {times(small["OrchMLLM"])}: verl's knows only tokens, and OrchMLLM's, applied to every
            microbatch, moves no sample to another one. With {fsdp[1]["global_batch"] // study["ranks"]}, OrchMLLM's rule takes
            {times(large["OrchMLLM"], 3)}, dflop {times(large["dflop"], 3)}, and
            {times(large["dflop, media apart"], 3)} if media move between ranks as well
            (`dflop.torch.assign_media`): there, balancing the modules apart is as good or better, at the
            cost of an exchange of samples in every microbatch, which is not counted. VeOmni's rule leaves
            the LLM as it is, so it gains little where the LLM has most of the work."""
        ),
        filled(
            f"""MegatronMIMO's reordering takes {times(small_pairs["MegatronMIMO"])} and
            {times(large_pairs["MegatronMIMO"])}, dealt samples {times(small_pairs["dealt"])} and
            {times(large_pairs["dealt"])}. With 2 samples per rank and microbatch, at 512, equal counts cannot offset
            an infographic, and the rule hands the largest sample of every microbatch to the first rank, which
            so is the slowest in all of them."""
        ),
        "Sources:\n\n" + "\n".join(f"- {one}" for one in PEER_SOURCES),
    ]


PEER_SOURCES = [
    "verl at `0d04d640`, `verl/utils/seqlen_balancing.py`: equal counts over ranks, then microbatches; sorted",
    "VeOmni at `2be2da44`, `veomni/utils/data_balance/balance_sorting_algo.py`: its default, squared lengths",
    "OrchMLLM, arXiv:2503.23830: post-balancing for each module apart, here greedy and without padding",
    "Megatron-Bridge at `4058f1b1`, `data/megatron_mimo/reorder_buffer.py`: its weights, and equal ones",
]
