"""Estimates the start of a run, plan and profile, as a share of an epoch."""

from typing import Any

from commands import Command, Runner
from simulated import DEVICE, GLOBAL_BATCH, GPUS, MODELS, SCHEDULE, SEED

# Default time limit of `dflop profile`.
PROFILE_SECONDS = 300


def run(runner: Runner, models: list[dict[str, Any]], samples: int, batches: int) -> dict[str, Any]:
    """Plans every model; `models` are simulations of the same models, which have the step times."""
    rows = []
    for row in models:
        ours = row["methods"].get("dflop")
        if ours is None:
            continue
        arguments = [
            "plan",
            "--model",
            row["model"],
            "--device",
            DEVICE,
            "--shapes",
            f"{MODELS[row['model']]}.csv",
        ]
        arguments += ["--gpus", str(GPUS), "--global-batch-size", str(GLOBAL_BATCH)]
        arguments += ["--set", f"plan.schedule={SCHEDULE}"]
        done = runner.run(Command([*arguments, "--batches", str(batches), "--seed", str(SEED)]))
        epoch_seconds = samples / GLOBAL_BATCH * ours["step_seconds"]
        rows.append(
            {
                "model": row["model"],
                "command": done["command"],
                "plan_wall_seconds": done["wall_seconds"],
                "plan_cpu_seconds": done["cpu_seconds"],
                "epoch_seconds": epoch_seconds,
                "share": (PROFILE_SECONDS + done["cpu_seconds"]) / epoch_seconds,
            }
        )
    return {"samples": samples, "profile_seconds": PROFILE_SECONDS, "rows": rows}
