"""Writes `docs/evaluation.md` and the figures from stored results, so that text and numbers agree."""

from pathlib import Path
from typing import Any

import comparisons
import overheads
import shapes
from text import fence, filled, table

# Sections in page order: study and function.
SECTIONS = [
    ("models", comparisons.throughput),
    ("models", comparisons.idle_time),
    ("nodes", comparisons.nodes),
    ("models", comparisons.ablation),
    ("mixtures", comparisons.mixtures),
    ("batches", comparisons.batches),
    ("partitions", overheads.partition),
    ("peers", comparisons.peer_rules),
    ("corrections", overheads.adaptive),
    ("start", overheads.first_minutes),
]
PYTHON_RUN, TRAIN_RUN, GPU_RUN = (
    "2026-11-22-python.txt",
    "2026-11-22-training.txt",
    "2026-11-28-predict-recorded.txt",
)
# Measured gains: run, simulated, measured, file in `benches/results`.
MEASURED = [
    ("CPU: DDP on two ranks, mostly short texts, wall time", "1.20", "1.17", PYTHON_RUN),
    ("CPU: `dflop train`, encoder and LLM stage, tokens per second", "1.27", "1.22", TRAIN_RUN),
    ("H200: `qwen2.5-vl-7b`, 8 ranks, dflop by stated rates", "1.24", "1.26", GPU_RUN),
    ("H200: the same, dflop by a profile", "1.15", "1.14", GPU_RUN),
    ("H200: the same, LPT by stated rates", "1.26", "1.28", GPU_RUN),
    ("H200: `qwen2.5-vl-3b`, limited by launches, dflop by stated rates", "1.06", "1.07", GPU_RUN),
    ("H200: the same, equal tokens", "1.04", "1.27", GPU_RUN),
]


def write(results: dict[str, Any], stored: Path, docs: Path) -> None:
    """Writes the page and the figures of all studies that the results contain."""
    studies = results["studies"]
    blocks = [*_head(results, stored), *_inputs(results)]
    for name, section in SECTIONS:
        if name in studies:
            blocks += section(studies[name], docs / "evaluation")
    blocks += [*_measured(), *_missing(studies)]
    (docs / "evaluation.md").write_text("\n\n".join(blocks) + "\n", encoding="utf-8")


def _head(results: dict[str, Any], stored: Path) -> list[str]:
    dates = sorted({study["date"] for study in results["studies"].values()})
    quick = [name for name, study in results["studies"].items() if study["effort"] == "quick"]
    spent = sum(study["cpu_seconds"] for study in results["studies"].values())
    only = "**These figures come from a quick run with few steps.** " if quick else ""
    return [
        "# Evaluation",
        filled(
            """This page repeats the evaluation in the DFLOP paper (An et al., PACMMOD 2026,
            arXiv:2603.25120, section 5) with dflop, as far as it can be simulated. **Step times are
            simulated from stated A100 rates; no cluster was measured**; [measured
            gains](#measured-gains) are at the end."""
        ),
        filled(
            f"""{only}`{results["version"]}`, {results["machine"]}, {" and ".join(dates)}; all figures and
            command lines are in [the results](../benches/results/{stored.name}). This command writes
            the page, the figures and the results, in {spent / 60:.1f} minutes of CPU time without builds:"""
        ),
        fence("make evaluation"),
        *_methods(),
    ]


def _methods() -> list[str]:
    rows = [
        [
            "by hand, joint",
            "the smallest TP, then the fewest stages that fit, encoder first",
            "dealt, one sample each",
        ],
        ["lpt, sorted", "the dflop plan", "LPT, sorted by size"],
        ["data-blind, joint", "both modules on every rank, tuned", "dealt"],
        ["data-blind, uniform", "equal TP and DP degrees for both modules, tuned", "dealt"],
        ["paper, sorted", "the paper's Algorithm 1 on even layers", "min-max, sorted by size"],
        ["dflop", "the dflop plan, any placement, ZeRO-1", "by makespan"],
    ]
    return [
        "## Methods",
        table(["method", "plan", "microbatches"], rows),
        filled(
            """[Planning](planning.md) describes them. Every simulation has the A100 preset with 80 GiB per
            GPU, 8 GPUs per node, the links of the preset, and the default search space under 1F1B, the
            paper's schedule; by default `dflop plan` tries others as well. Columns *over*
            show the step time of a method over that of dflop. \\* marks methods that do not fit into
            memory on some batch, which figures show as well; a dash, methods without a plan that fits. *bound / step* is a lower bound
            for every searched plan over the dflop step: 1 would be optimal. A baseline that is busy half
            of the time can be beaten at most 2 times on the same plan."""
        ),
    ]


def _inputs(results: dict[str, Any]) -> list[str]:
    parts = [[name, f"{part.thousands},000", part.distribution] for name, part in shapes.PARTS.items()]
    tables = [
        [name, *(" / ".join(f"{one:,}" for one in found[column]) for column in shapes.Shape._fields)]
        for name, found in results["shapes"].items()
    ]
    return [
        "## Samples",
        filled(
            f"""The paper's datasets are not included. Samples are drawn with seed {results["shapes_seed"]}
            from log-normal distributions (sigma in parentheses), in proportion to the paper's dataset
            sizes, {shapes.SAMPLES:,} in a table, and the models' token rules turn them into encoder
            tiles and LLM positions:"""
        ),
        table(["dataset", "samples in the paper", "drawn as"], [*parts, ["audio", "", shapes.AUDIO]]),
        filled(
            """Median, 95th percentile and maximum of the shape tables, which the first command writes; a
            video is one medium:"""
        ),
        fence("python3 benches/evaluation/shapes.py shapes/"),
        table(["table", "tiles", "LLM positions", "media"], tables),
    ]


def _measured() -> list[str]:
    rows = [
        [run, simulated, measured, f"[{name}](../benches/results/{name})"]
        for run, simulated, measured, name in MEASURED
    ]
    return [
        "## Measured gains",
        filled(
            """Speed-up of a balanced over a data-blind cut, predicted and measured; [Measured](measured.md)
            has more:"""
        ),
        table(["run", "predicted", "measured", "output"], rows),
        filled(
            """Gains on the CPU are 2 to 4 % smaller than predicted, and those on the H200 agree within 2 %
            where the device is the limit; it computes ranks one after another, so gradient sums are
            missing. On these samples LPT is as good as the search, and where launches are the limit
            equal tokens are better than both."""
        ),
    ]


def _missing(studies: dict[str, Any]) -> list[str]:
    missing = [
        "the training hours of the paper: its datasets and its A100 cluster are not available",
        "Megatron-LM and PyTorch: the plans `by hand, joint` and `data-blind, uniform` represent them",
        "the memory and throughput profiles of an A100, and the cost of tracking on a GPU",
    ]
    if "corrections" not in studies:
        missing.append("corrections with slow inputs: the Python package was not installed for this run")
    if "peers" not in studies:
        missing.append("rules of other trainers: the Python package was not installed for this run")
    return ["## Not simulated", "\n".join(f"- {one}" for one in missing)]
