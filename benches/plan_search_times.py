"""CPU seconds and seconds of `dflop plan` without further flags, by preset.

    cargo build --release --locked -p dflop-cli --features dflop-cli/full
    python3 benches/plan_search_times.py target/release/dflop 64    # every preset
    python3 benches/plan_search_times.py target/release/dflop 1024 qwen3-omni-30b-a3b llava-ov-qwen2.5-72b

Shapes are 2,000 samples with a heavy tail (Pareto) of images and speech; a table has the columns of every kind of encoder. A
batch has 8 samples per GPU, or 4 from 4,096 GPUs. Prints CPU seconds (user) of all threads, seconds, GPUs, preset, placement, seconds
of a step and the runner-up; the search with the most CPU time comes first.
"""

import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SAMPLES = 2000
COLUMNS = "tiles,patches,tokens,seq_len,vision_tiles,vision_patches,audio_tiles,audio_tokens"


def main():
    dflop, gpus, presets = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    with tempfile.TemporaryDirectory() as folder:
        shapes = Path(folder) / "shapes.csv"
        shapes.write_text(shape_table(), encoding="utf-8")
        rows = [searched(dflop, gpus, preset, shapes) for preset in presets or all_presets(dflop)]
    for cpu, seconds, line in sorted(rows, reverse=True):
        print(f"{cpu:6.2f} {seconds:6.2f} {gpus} {line}")


def all_presets(dflop):
    listed = subprocess.run([dflop, "models", "--json"], capture_output=True, check=True)
    return [preset for family in json.loads(listed.stdout)["families"] for preset in family["presets"]]


def shape_table():
    """Returns rows whose images have 729 LLM positions per tile and four patches per position, and speech of 750 per 30 s."""
    draw = random.Random(7)
    rows = [COLUMNS]
    for _ in range(SAMPLES):
        tiles = min(40, int(draw.paretovariate(1.1)))
        windows = min(8, int(draw.paretovariate(1.5))) - 1
        text = min(4096, int(60 * draw.paretovariate(1.0)))
        patches, tokens, positions = tiles * 2916, windows * 1500, tiles * 729 + windows * 750 + text
        rows.append(f"{tiles},{patches},{max(tokens, 1500)},{positions},{tiles},{patches},{windows},{tokens}")
    return "\n".join(rows) + "\n"


def searched(dflop, gpus, preset, shapes):
    """Returns the CPU seconds and the seconds of a search, and its line."""
    batch = gpus * (8 if gpus < 4096 else 4)
    command = [
        dflop,
        "plan",
        "--model",
        preset,
        "--device",
        "h100",
        "--shapes",
        str(shapes),
        "--gpus",
        str(gpus),
    ]
    command += ["--global-batch-size", str(batch), "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    start = time.perf_counter()
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    cpu = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    if run.returncode:
        return cpu, seconds, f"{preset} {run.stderr.strip()[:100]}"
    plan = json.loads(run.stdout)
    return cpu, seconds, f"{preset} {summary(plan)}"


def summary(plan):
    """Returns the placement, the seconds of a step and the runner-up of a plan."""
    second = plan["runner_up"]
    return (
        f"{plan['placement']} {plan['step_seconds']:.4f} s, {second['reason'] if second else 'no runner-up'}"
    )


if __name__ == "__main__":
    main()
