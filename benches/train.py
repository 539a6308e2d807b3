"""Trains the example's model, alternating balanced and data-blind batches, and prints the speed-up.

    cargo build --profile dist -p dflop-cli
    python3 benches/train.py [--runs 5] [--steps 30] [--config executor/examples/train-cpu.toml] [--dflop target/dist/dflop]

Both use the same global batches and the same initial weights. The first step of every run is left out. Prints tokens per
second of every run, best over best and median over median, and the ratio that the simulator gives for the same
batches. With `--json FILE` the raw figures are kept.
"""

import argparse
import json
import statistics
import subprocess
import sys

STRATEGIES = ("balanced", "data-blind")


def run(arguments, strategy):
    """Returns throughput, simulated seconds and the losses of one run."""
    command = [arguments.dflop, "train", arguments.config, "--strategy", strategy, "--steps", str(arguments.steps), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: {done.stderr.strip()}")
    steps = [json.loads(line) for line in done.stdout.splitlines()]
    timed = steps[1:]
    seconds = sum(step["seconds"] for step in timed)
    return {
        "strategy": strategy,
        "tokens_per_second": sum(step["tokens"] for step in timed) / seconds,
        "seconds": seconds,
        "simulated_seconds": sum(step["predicted_seconds"] for step in timed),
        "data_wait_fraction": sum(step["data_wait_seconds"] for step in timed) / seconds,
        "losses": [step["loss"] for step in steps],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--config", default="executor/examples/train-cpu.toml")
    parser.add_argument("--dflop", default="target/dist/dflop")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    runs = []
    for turn in range(arguments.runs):
        for strategy in STRATEGIES if turn % 2 == 0 else STRATEGIES[::-1]:
            runs.append(run(arguments, strategy))
            print(f"{strategy:>10}: {runs[-1]['tokens_per_second']:.0f} tokens/s", flush=True)
    of = {name: [one for one in runs if one["strategy"] == name] for name in STRATEGIES}
    rates = {name: [one["tokens_per_second"] for one in of[name]] for name in STRATEGIES}
    simulated = statistics.median(one["simulated_seconds"] for one in of["data-blind"]) / statistics.median(
        one["simulated_seconds"] for one in of["balanced"]
    )
    best = max(rates["balanced"]) / max(rates["data-blind"])
    median = statistics.median(rates["balanced"]) / statistics.median(rates["data-blind"])
    apart = max(
        abs(one - other) / abs(one)
        for one, other in zip(of["balanced"][0]["losses"], of["data-blind"][0]["losses"], strict=True)
    )
    waits = max(one["data_wait_fraction"] for one in runs)
    print(f"balanced over data-blind: {best:.3f} best, {median:.3f} median; simulated {simulated:.3f}")
    print(f"measured over simulated: {best / simulated:.3f} best, {median / simulated:.3f} median")
    print(f"losses differ by {apart:.1e} at most; waiting for data {100 * waits:.2f} % of the time at most")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"runs": runs, "best": best, "median": median, "simulated": simulated}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
