"""Simulates the paper's comparisons: models, clusters, dataset mixtures, global batches, balancing alone."""

import json
from typing import Any, NamedTuple

from commands import Command, Runner

DEVICE = "a100"
SEED = 0
MODEL = "llava-ov-qwen2.5-7b"
# The seven models of the paper, each with the shape table of its token rule.
MODELS = {
    "llava-ov-qwen2.5-7b": "onevision",
    "llava-ov-llama3-8b": "onevision",
    "llava-ov-qwen2.5-32b": "onevision",
    "llava-ov-llama3-70b": "onevision",
    "llava-ov-qwen2.5-72b": "onevision",
    "internvl2.5-qwen2.5-72b": "internvl",
    "qwen2-audio-7b": "audio",
}
GPUS, GLOBAL_BATCH = 64, 512
NODES = [1, 2, 4, 8, 16, 32]
BATCHES = [64, 128, 256, 512, 1024, 2048]
MIXTURES = {
    "single images": "single-image",
    "documents": "documents",
    "several images": "several-images",
    "videos": "video",
    "images and videos": "images-and-video",
    "all parts": "onevision",
}
# Fields of a plan file, without the schedule.
PLAN_FIELDS = ("placement", "modules", "microbatches", "rounds_ahead", "is_run")
# Schedule of every simulated plan.
SCHEDULE = "1f1b"
# Methods whose plans are balanced by others as well.
REBALANCED = ["by hand, joint", "data-blind, uniform"]


class Case(NamedTuple):
    """Input of a simulation."""

    label: str
    model: str
    shapes: str
    gpus: int
    global_batch: int


def cases() -> dict[str, list[Case]]:
    """Returns the simulations of each study."""
    return {
        "models": [Case(model, model, shapes, GPUS, GLOBAL_BATCH) for model, shapes in MODELS.items()],
        "nodes": [Case(str(8 * nodes), MODEL, "onevision", 8 * nodes, 64 * nodes) for nodes in NODES],
        "mixtures": [Case(name, MODEL, shapes, GPUS, GLOBAL_BATCH) for name, shapes in MIXTURES.items()],
        "batches": [Case(str(batch), MODEL, "onevision", GPUS, batch) for batch in BATCHES],
    }


def command(case: Case, steps: int, plan: str | None = None) -> Command:
    """Returns the command line of a simulation: of the methods, or of a plan in a file."""
    arguments = ["simulate", "--model", case.model, "--device", DEVICE, "--shapes", f"{case.shapes}.csv"]
    arguments += ["--gpus", str(case.gpus), "--global-batch-size", str(case.global_batch)]
    arguments += ["--set", f"plan.schedule={SCHEDULE}"] if plan is None else ["--plan", plan]
    return Command([*arguments, "--steps", str(steps), "--seed", str(SEED)])


def run(runner: Runner, name: str, steps: int) -> list[dict[str, Any]]:
    """Runs the simulations of a study; for models, the plans of baselines are balanced by others as well."""
    chosen = cases()[name]
    done = runner.run_all([command(case, steps) for case in chosen])
    rows = [_row(case, result) for case, result in zip(chosen, done, strict=True)]
    if name == "models":
        plans = [_plans(result) for result in done]
        _rebalance(runner, chosen, rows, plans, steps)
    return rows


def _plans(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the baselines' plans as plan files."""
    methods = result.get("answer", {}).get("strategies", [])
    return {
        one["name"]: {key: one["plan"][key] for key in PLAN_FIELDS} | {"schedule": SCHEDULE}
        for one in methods
        if one["name"] in REBALANCED
    }


def _rebalance(
    runner: Runner,
    chosen: list[Case],
    rows: list[dict[str, Any]],
    plans: list[dict[str, dict[str, Any]]],
    steps: int,
) -> None:
    """Adds `rebalanced` to the rows: for the plan of each baseline, all methods that balance a given plan.

    Raises:
        ValueError: another plan was simulated.
    """
    wanted = []
    for case, row, own in zip(chosen, rows, plans, strict=True):
        row["rebalanced"] = {}
        for name, plan in own.items():
            file = f"{case.model}-{name.replace(', ', '-').replace(' ', '-')}.json"
            (runner.directory / file).write_text(json.dumps(plan), encoding="utf-8")
            wanted.append((row, name, plan, command(case, steps, file)))
    done = runner.run_all([one for *_, one in wanted])
    for (row, name, plan, _), result in zip(wanted, done, strict=True):
        found = {key: value for key, value in result.items() if key != "answer"} | {"plan": plan}
        answer = result.get("answer")
        if answer is not None:
            if any(answer["plan"][key] != plan[key] for key in PLAN_FIELDS):
                raise ValueError(f"{result['command']} simulated {answer['plan']}, not {plan}")
            found["bound_seconds"] = answer["ideal_seconds"]
            found["methods"] = {one["name"]: _method(one) for one in answer["strategies"]}
        row["rebalanced"][name] = found


def _row(case: Case, result: dict[str, Any]) -> dict[str, Any]:
    """Keeps the fields of an answer that the page needs."""
    row = case._asdict() | {key: value for key, value in result.items() if key != "answer"}
    answer = result.get("answer")
    if answer is None:
        return row | {"methods": {}}
    methods = {method["name"]: _method(method) for method in answer["strategies"]}
    return row | {
        "bound_seconds": answer["ideal_seconds"],
        "searched": answer["searched"],
        "methods": methods,
    }


def _method(method: dict[str, Any]) -> dict[str, Any]:
    kept = {
        key: method[key] for key in ("step_seconds", "step_seconds_p95", "bubble_fraction", "waits", "fits")
    }
    plan = method["plan"]
    modules = [f"{one['name']} TP {one['tp']} PP {one['pp']} DP {one['dp']}" for one in plan["modules"]]
    shown = f"{plan['placement']}, {', '.join(modules)}, {plan['microbatches']} microbatches"
    return kept | {"plan": shown}
