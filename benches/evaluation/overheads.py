"""Sections about the cost of planning: partitions, corrections, the start of a run."""

from pathlib import Path
from typing import Any

import corrections
import plots
from plots import Series
from text import fence, filled, percent, span, table

# Gaps below this cannot be drawn on a logarithmic axis.
GAP_FLOOR_PERCENT, MILLISECONDS_FLOOR = 1e-4, 1e-2
SOLVERS = {
    "ilp": ("ILP, CP-SAT", "violet", "P"),
    "data-blind": ("dealt", "gray", "D"),
    "lpt": ("LPT", "green", "^"),
    "multi_lpt": ("LPT by module", "orange", "s"),
    "search": ("dflop", "blue", "o"),
    "long search": ("dflop, 10 x effort", "red", "v"),
}


def partition(study: dict[str, Any], figures: Path) -> list[str]:
    """ILP, LPT and search over the global batch; ranks of trainers without a pipeline."""
    rows = study["microbatches"]
    positions = [row["global_batch"] for row in rows]

    def column(key: str, factor: float, field: str) -> list[float | None]:
        values = (row["methods"][key].get(field) for row in rows)
        return [None if value is None else factor * value for value in values]

    gaps = [
        Series(name, color, mark, column(key, 100, "gap")) for key, (name, color, mark) in SOLVERS.items()
    ]
    spent = [
        Series(name, color, mark, column(key, 1e3, "seconds")) for key, (name, color, mark) in SOLVERS.items()
    ]
    panels = [("Above the bound, %", gaps), ("Time, ms", spent)]
    floors = (GAP_FLOOR_PERCENT, MILLISECONDS_FLOOR)
    plots.two_panels(figures / "partitions.svg", positions, panels, "Global batch", floors)
    lines = [
        [
            f"{row['global_batch']:,}",
            str(row["microbatches"]),
            *(_solved(row["methods"][key]) for key in SOLVERS),
        ]
        for row in rows
    ]
    unsolved = [f"{row['global_batch']:,}" for row in rows if row["methods"]["ilp"]["gap"] is None]
    last = rows[-1]["methods"]
    without = f" It has no answer in time at {' and '.join(unsolved)} samples." if unsolved else ""
    full = study["threads"] * study["limit_seconds"]
    spent = min(row["methods"]["ilp"]["cpu_seconds"] for row in rows)
    if spent < 0.8 * full:
        without += f" Other work on this machine left it down to {spent:.0f} of {full:g} s of CPU time."
    return [
        "## Partitions over the global batch",
        filled(
            f"""Input: the first samples of all dataset parts, times from FLOPs of `llava-ov-qwen2.5-7b`
            with GPUs split so that both modules have equal work, {study["samples_per_microbatch"]}
            samples per microbatch on average. The ILP is the paper's model in OR-tools CP-SAT with
            {study["threads"]} threads and {study["limit_seconds"]:g} s, the others the shortest of 3
            runs on one thread; times exclude reading and model construction. The command for the last row:"""
        ),
        fence(last["search"]["command"]),
        "![Gap to the lower bound, and time, by global batch](evaluation/partitions.svg)",
        table(["global batch", "microbatches", *(name for name, _, _ in SOLVERS.values())], lines),
        filled(
            f"""As in the paper, the ILP reaches its time limit as batches grow, and a greedy rule takes
            over.{without} At {positions[-1]:,} samples LPT by module is
            {percent(last["multi_lpt"]["gap"], 2)} above the bound after
            {1e3 * last["multi_lpt"]["seconds"]:.1f} ms, where the paper reports below 1 % in 1 s on
            other samples; dflop is {percent(last["search"]["gap"], 2)} above it after
            {1e3 * last["search"]["seconds"]:.0f} ms and {percent(last["long search"]["gap"], 2)} after
            {1e3 * last["long search"]["seconds"]:.0f} ms, and needs no fallback."""
        ),
        *_ranks(study["ranks"]),
    ]


def _solved(method: dict[str, Any]) -> str:
    if method["gap"] is None:
        return f"no answer, {method['seconds']:.1f} s"
    seconds = method["seconds"]
    spent = f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.{2 if seconds < 0.01 else 0}f} ms"
    return f"{percent(method['gap'], 3)}, {spent}"


def _ranks(rows: list[dict[str, Any]]) -> list[str]:
    names = {
        "data-blind": "dealt",
        "kk on tokens": "largest differencing on tokens (verl)",
        "lpt": "LPT by time",
        "dflop": "dflop",
    }
    lines = [
        [str(row["samples_per_rank"]), *(f"{row['imbalance'][key]:.3f}" for key in names)] for row in rows
    ]
    eight = next(row["imbalance"] for row in rows if row["samples_per_rank"] == 8)
    return [
        "### Ranks without a pipeline",
        filled(
            """Input: the same samples on 64 ranks that compute all modules, as with DDP; time of the
            slowest rank over the mean. verl balances tokens by largest differencing, here without its
            equal sample counts:"""
        ),
        table(["samples per rank", *names.values()], lines),
        filled(
            f"""At 8 samples per rank, tokens alone leave {eight["kk on tokens"]:.3f} because they do not
            know the encoder, and cost-based methods {eight["lpt"]:.3f} and {eight["dflop"]:.3f}; at 1
            sample no partition helps."""
        ),
    ]


def adaptive(study: dict[str, Any], figures: Path) -> list[str]:
    """Corrections with few slow inputs."""
    rows = [row for row in study["rows"] if row["share"]]
    labels = [f"{percent(row['share'], 0)} of inputs, +{percent(row['added'], 0)}" for row in rows]
    series = [
        Series("without", "gray", "D", [100 * (row["without"] - 1) for row in rows]),
        Series("with corrections", "blue", "o", [100 * (row["with"] - 1) for row in rows]),
    ]
    plots.dots(figures / "corrections.svg", labels, series, "Slowest rank above the mean, %", (0, None))
    lines = [
        [
            percent(row["share"], 0),
            f"+{percent(row['added'], 0)}",
            *(f"{row[key]:.3f}" for key in ("without", "with")),
        ]
        + [" → ".join(_runs(row["modes"]))]
        for row in study["rows"]
    ]
    milliseconds = [1e3 * row["report_seconds"] for row in rows]
    few = [row["without"] / row["with"] for row in rows if row["share"] <= 0.01 and row["added"] <= 0.5]
    many = [row for row in rows if row["share"] >= 0.03]
    removed = [100 * (row["without"] - row["with"]) / (row["without"] - 1) for row in many]
    low, high = corrections.BAND
    return [
        "## Corrections with few slow inputs",
        filled(
            f"""Input: texts, `{study["model"]}`, {study["ranks"]} ranks with {study["microbatches"]}
            microbatches, global batch {study["global_batch"]}, {study["steps"]} steps, intervals of
            {study["interval_steps"]}. Texts of {low:,} to {high:,} words take the stated factor longer than
            predicted. Times are replayed: predictions with {percent(study["noise"], 0)} noise. Slowest
            rank over the mean, in the last third of the steps, from
            `BalancedLoader.report_stage_seconds`; the script is `benches/evaluation/corrections.py`."""
        ),
        "![Imbalance with and without corrections](evaluation/corrections.svg)",
        table(["slow inputs", "additional time", "without", "with", "mode after each interval"], lines),
        filled(
            f"""In the paper, tracking stays off at 1 % with up to 50 % of additional time, and at 3 % with
            up to 25 %. Here corrections change little at 1 % with up to 50 % either: steps without them
            are {span(few, 3)} times as long. From 3 % on, also with 25 %, they remove {span(removed, 0)} %
            of the imbalance. A report takes {span(milliseconds, 2)} ms of a step on one core, with an
            unoptimized build, where the paper's tracking costs 4 %; timing on a GPU is not included."""
        ),
    ]


def _runs(modes: list[str]) -> list[str]:
    """Returns the modes, with repeats counted."""
    runs: list[tuple[str, int]] = []
    for mode in modes:
        if runs and runs[-1][0] == mode:
            runs[-1] = (mode, runs[-1][1] + 1)
        else:
            runs.append((mode, 1))
    return [f"{mode} x {count}" if count > 1 else mode for mode, count in runs]


def first_minutes(study: dict[str, Any], _figures: Path) -> list[str]:
    """The start of a run."""
    rows = study["rows"]
    lines = [
        [
            row["model"],
            f"{row['plan_cpu_seconds']:.1f}",
            f"{row['epoch_seconds'] / 3600:.2f}",
            percent(row["plan_cpu_seconds"] / row["epoch_seconds"], 2),
            percent(row["share"], 1),
        ]
        for row in rows
    ]
    shares = [100 * row["share"] for row in rows]
    return [
        "## Start",
        filled(
            f"""Input: the models above, an epoch of {study["samples"]:,} samples at the simulated step
            times. A start is a profile, at its default limit of {study["profile_seconds"]} s on a GPU
            (not measured here), and a plan, in CPU time on this machine. The command for the first row:"""
        ),
        fence(rows[0]["command"]),
        table(
            ["model", "plan, CPU s", "simulated epoch, h", "plan / epoch", "plan and profile / epoch"],
            lines,
        ),
        filled(
            f"""The paper reports 7.6 to 10 minutes, 0.5 to 2.1 % of training; here it is {span(shares, 1)}
            % of one epoch, nearly all of it the profile, which a stated rate or a stored profile
            replaces. The share is larger for small models because a simulated epoch is shorter than the
            paper's training (6.1 hours for 7B). The paper's optimizer takes 4 ms, because it evaluates
            a formula at the mean sample; dflop simulates finalists on whole batches."""
        ),
    ]
