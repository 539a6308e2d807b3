"""Partitions the samples of a global batch by an ILP solver, LPT, largest differencing and the dflop search.

`microbatches`: the paper's problem, encoder and LLM time of every microbatch below a common maximum, by the
global batch. `ranks`: a single time per sample and rank, for trainers whose ranks compute all modules.
"""

import json
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from commands import Command, Runner
from shapes import Shape

sys.path.insert(0, str(Path(__file__).parents[1]))
from partition import makespan, run_cp_sat

GLOBAL_BATCHES = [64, 128, 256, 512, 1024, 2048]
SAMPLES_PER_MICROBATCH = 16
SAMPLES_PER_RANK = [1, 2, 4, 8, 16]
RANKS = 64
THREADS = 2
# Runs of dflop, whose shortest time counts; the answer is the same.
REPEATS = 3
# Sizes of SigLIP-so400m and Qwen2.5-7B; FLOPs forward and backward run at a common rate in FLOP/s.
ENCODER = {"layers": 27, "hidden": 1152, "ffn": 4304, "patches": 729}
LLM = {"layers": 28, "hidden": 3584, "kv_share": 4 / 28, "ffn": 18944, "vocabulary": 152_064}
FLOPS_PER_SECOND = 150e12
# Strategies for microbatches: name here, strategy, and work units if not the default.
STRATEGIES = {
    "data-blind": ("data-blind", None),
    "lpt": ("lpt", None),
    "multi_lpt": ("multi_lpt", None),
    "search": ("search", None),
    "long search": ("search", 200_000),
}


def encoder_ns(tiles: int) -> int:
    """Returns the encoder time of a sample on one GPU, in nanoseconds."""
    h, f, s = ENCODER["hidden"], ENCODER["ffn"], ENCODER["patches"]
    flops = 3 * tiles * ENCODER["layers"] * (8 * h * h * s + 4 * s * s * h + 4 * s * h * f)
    return round(1e9 * flops / FLOPS_PER_SECOND)


def llm_ns(tokens: int) -> int:
    """Returns the LLM time of a sample on one GPU, in nanoseconds."""
    h, f = LLM["hidden"], LLM["ffn"]
    linear = LLM["layers"] * (h * h * (4 + 4 * LLM["kv_share"]) + 6 * h * f) + 2 * h * LLM["vocabulary"]
    flops = 3 * (tokens * linear + LLM["layers"] * 2 * tokens * tokens * h)
    return round(1e9 * flops / FLOPS_PER_SECOND)


def run(runner: Runner, rows: list[Shape], seconds: float) -> dict[str, Any]:
    """Runs both problems on the samples; `seconds` is the time limit of the ILP solver."""
    return {
        "model": "llava-ov-qwen2.5-7b, FLOPs at a common rate",
        "samples_per_microbatch": SAMPLES_PER_MICROBATCH,
        "limit_seconds": seconds,
        "threads": THREADS,
        "microbatches": [_microbatches(runner, rows[:size], seconds) for size in GLOBAL_BATCHES],
        "ranks": [_ranks(runner, rows[: RANKS * size]) for size in SAMPLES_PER_RANK],
    }


def cost_variation(rows: list[Shape]) -> float:
    """Returns the coefficient of variation of the sample times."""
    times = [encoder_ns(tiles) + llm_ns(tokens) for tiles, tokens, _ in rows]
    return statistics.pstdev(times) / statistics.mean(times)


def _balanced(
    runner: Runner, instance: dict[str, Any], strategy: str, work: int | None = None
) -> dict[str, Any]:
    path = runner.directory / f"{instance['name']}.json"
    path.write_text(json.dumps(instance), encoding="utf-8")
    effort = [] if work is None else ["--search-effort", str(work)]
    command = Command(["balance", "--instance", path.name, "--strategy", strategy, *effort])
    runs = [runner.run(command) for _ in range(REPEATS)]
    fastest = min((one["answer"] for one in runs), key=lambda answer: answer["solve_ms"])
    return {"command": command.shown(), **fastest}


def _microbatches(runner: Runner, rows: list[Shape], seconds: float) -> dict[str, Any]:
    groups = len(rows) // SAMPLES_PER_MICROBATCH
    times = [[encoder_ns(tiles), llm_ns(tokens)] for tiles, tokens, _ in rows]
    # GPUs are split by work, as a plan does: both modules have the same mean.
    share = sum(llm for _, llm in times) / sum(encoder for encoder, _ in times)
    times = [[round(encoder * share), llm] for encoder, llm in times]
    instance = {"name": f"microbatches-{len(rows)}", "n": len(rows), "m": groups, "c": 2, "d": times}
    found = {name: _balanced(runner, instance, *strategy) for name, strategy in STRATEGIES.items()}
    bound = max(one["lower_bound_ns"] for one in found.values())
    methods = {
        name: {
            "seconds": one["solve_ms"] / 1e3,
            "gap": one["makespan_ns"] / bound - 1,
            "command": one["command"],
        }
        for name, one in found.items()
    }
    for name, one in found.items():
        assert one["makespan_ns"] == makespan(instance, one["groups"]), name
    methods["ilp"] = _ilp(instance, bound, seconds)
    return {"global_batch": len(rows), "microbatches": groups, "methods": methods}


def _ilp(instance: dict[str, Any], bound: int, seconds: float) -> dict[str, Any]:
    """Returns the answer of CP-SAT within the limit, in a process of its own, which gives its memory back."""
    start, cpu_start = time.perf_counter(), _children_cpu_seconds()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        report = pool.apply(run_cp_sat, (instance, seconds, THREADS))
    gap = report["makespan_ns"] / bound - 1 if "makespan_ns" in report else None
    return {
        "status": report["status"],
        "seconds": report["seconds"],
        "seconds_with_model": time.perf_counter() - start,
        "cpu_seconds": _children_cpu_seconds() - cpu_start,
        "gap": gap,
        "command": f"OR-tools CP-SAT, {THREADS} threads, {seconds:g} s",
    }


def _children_cpu_seconds() -> float:
    """Returns the CPU time of child processes that have ended."""
    spent = os.times()
    return spent.children_user + spent.children_system


def _ranks(runner: Runner, rows: list[Shape]) -> dict[str, Any]:
    """Balances whole ranks by tokens and by time; every answer is judged by time."""
    times = [[encoder_ns(tiles) + llm_ns(tokens)] for tiles, tokens, _ in rows]
    tokens = [[row.positions] for row in rows]
    mean = sum(time for [time] in times) / RANKS

    def imbalance(weights: list[list[int]], strategy: str, kind: str) -> float:
        name = f"ranks-{kind}-{len(rows)}"
        found = _balanced(runner, {"name": name, "n": len(rows), "m": RANKS, "c": 1, "d": weights}, strategy)
        return max(sum(times[item][0] for item in group) for group in found["groups"]) / mean

    return {
        "samples_per_rank": len(rows) // RANKS,
        "command": "dflop balance --instance FILE --strategy data-blind, kk, lpt, search",
        "imbalance": {
            "data-blind": imbalance(times, "data-blind", "time"),
            "kk on tokens": imbalance(tokens, "kk", "tokens"),
            "lpt": imbalance(times, "lpt", "time"),
            "dflop": imbalance(times, "search", "time"),
        },
    }
