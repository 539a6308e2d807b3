"""Measures one reader for several ranks against a loader on every rank: CPU time and memory of the group.

    python benches/shared_reader.py --shards DIRECTORY --model DIRECTORY [--ranks 4] [--rounds 3] [--out FILE]

Every rank is a process that takes the same microbatches and reads every value of their tensors once. A round
runs both ways, in turn. Memory is the sum over ranks of the proportional set size at its highest, in which
shared pages count once.
"""

import argparse
import json
import multiprocessing
import pathlib
import statistics
import time
import uuid

WAYS = ("a loader on every rank", "one reader")


def proportional_bytes() -> int:
    for line in pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def run_rank(way: str, rank: int, ranks: int, name: str, settings: dict, results: object) -> None:
    import dflop
    import numpy as np

    def make() -> dflop.BalancedLoader:
        return dflop.BalancedLoader(
            global_batch_size=64,
            microbatches=16,
            plan=dflop.Plan(strategy="lpt"),
            array_type="numpy",
            **settings,
        )

    loader = make() if way == WAYS[0] else dflop.SharedLoader(make, rank=rank, size=ranks, name=name)
    peak, checksum, delivered = 0, 0.0, 0
    for step in loader:
        for microbatch in step.microbatches:
            for value in microbatch.values():
                if isinstance(value, np.ndarray):
                    checksum += float(value.sum(dtype=np.float64))
                    delivered += value.nbytes
        peak = max(peak, proportional_bytes())
    results.put(
        {"rank": rank, "cpu": time.process_time(), "peak": peak, "checksum": checksum, "delivered": delivered}
    )


def run(way: str, ranks: int, settings: dict) -> dict:
    context = multiprocessing.get_context("spawn")
    results, name = context.Queue(), uuid.uuid4().hex
    processes = [
        context.Process(target=run_rank, args=(way, rank, ranks, name, settings, results))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    measured = [results.get() for _ in processes]
    for process in processes:
        process.join()
    if len({one["checksum"] for one in measured}) != 1:
        raise SystemExit(f"{way}: ranks got different tensors")
    return {
        "way": way,
        "cpu_seconds": round(sum(one["cpu"] for one in measured), 2),
        "cpu_seconds_of_ranks_above_0": round(sum(one["cpu"] for one in measured if one["rank"] > 0), 2),
        "peak_bytes": sum(one["peak"] for one in measured),
        "delivered_bytes": measured[0]["delivered"],
        "checksum": measured[0]["checksum"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=pathlib.Path)
    arguments = parser.parse_args()
    settings = {"dataset": arguments.shards, "model": arguments.model, "steps": arguments.steps}
    lines, runs = [], []
    for _ in range(arguments.rounds):
        for way in WAYS:
            runs.append(run(way, arguments.ranks, settings))
            lines.append(json.dumps(runs[-1]))
            print(lines[-1], flush=True)
    if len({one["checksum"] for one in runs}) != 1:
        raise SystemExit("both ways deliver different tensors")
    for what in ("cpu_seconds", "peak_bytes"):
        separate, shared = (statistics.median(one[what] for one in runs if one["way"] == way) for way in WAYS)
        lines.append(
            f"{what} of {arguments.ranks} ranks: {separate:g} and {shared:g}, ratio {shared / separate:.2f}"
        )
        print(lines[-1])
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
