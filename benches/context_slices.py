"""Compares the loader's CPU time and memory for slices of split samples with those for whole samples.

Long documents with images, over 4 ranks: every rank of both plans in turn, in processes of their own. CPU
seconds of all ranks together, samples per CPU second, and the largest resident memory of a rank.

Usage: python benches/context_slices.py [SAMPLES]
"""

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import dflop
from dflop import example

RANKS, STEPS, BATCH, PASSES = 4, 6, 8, 3
PLANS = {"whole": {}, "slices": {"context": 4, "tokens_max": 900}}


def write(directory: Path, samples: int) -> None:
    chance = random.Random(1)
    with dflop.Writer(directory / "shards") as writer:
        for _ in range(samples):
            images = chance.randint(4, 12)
            fields = {
                f"{at}.png": example._png(392, 392, at % 8) for at in range(images)
            }
            text = "<image> " * images + " ".join(
                f"w{chance.randrange(400)}" for _ in range(600)
            )
            turns = [
                {"from": "human", "value": text},
                {"from": "gpt", "value": "w1 w2 w3"},
            ]
            writer.write(fields | {"json": {"conversations": turns}})
    example.write_model(directory / "model")


def run(directory: Path, name: str, rank: int) -> None:
    """Reads all steps of a rank and prints CPU seconds and memory."""
    loader = dflop.BalancedLoader(
        directory / "shards",
        model=directory / "model",
        global_batch_size=BATCH,
        dp_rank=rank,
        dp_size=RANKS,
        steps=STEPS,
        plan=dflop.Plan(schedule="microbatch", **PLANS[name]),
        read=dflop.Read(workers=1),
    )
    tokens = sum(
        microbatch.tokens for step in loader for microbatch in step.microbatches
    )
    used = resource.getrusage(resource.RUSAGE_SELF)
    found = {
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "mib": used.ru_maxrss / 1024,
        "tokens": tokens,
    }
    print(json.dumps(found))


def measure(directory: Path, name: str) -> dict[str, float]:
    found = []
    for rank in range(RANKS):
        command = [sys.executable, __file__, "--run", str(directory), name, str(rank)]
        found.append(
            json.loads(
                subprocess.run(
                    command, check=True, capture_output=True, text=True
                ).stdout
            )
        )
    tokens = sum(one["tokens"] for one in found)
    seconds = sum(one["cpu_seconds"] for one in found)
    return {
        "cpu_seconds": seconds,
        "mib": max(one["mib"] for one in found),
        "tokens": tokens,
    }


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        return run(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    samples = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS * BATCH
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), samples)
        print(
            f"{RANKS} ranks, {STEPS} steps of {BATCH} documents with 4 to 12 images; load {os.getloadavg()[0]:.0f}"
        )
        for attempt in range(PASSES):
            found = {plan: measure(Path(name), plan) for plan in PLANS}
            whole, slices = found["whole"], found["slices"]
            print(
                f"pass {attempt}: CPU s whole {whole['cpu_seconds']:.2f}, slices {slices['cpu_seconds']:.2f}, ratio "
                f"{slices['cpu_seconds'] / whole['cpu_seconds']:.2f}; MiB {whole['mib']:.0f}, {slices['mib']:.0f}; "
                f"tokens {whole['tokens']}, {slices['tokens']}",
                flush=True,
            )
    return None


if __name__ == "__main__":
    main()
