"""Measures the peak memory of steps of the balanced loader, each setting in a process of its own.

    python benches/step_memory.py --shards DIRECTORY --model DIRECTORY [--out FILE]

Prints, for every setting, the tensors that two steps deliver, the peak resident memory and the CPU time, or
the error that refuses the setting. PYTHON needs the package `dflop`.
"""

import argparse
import json
import pathlib
import subprocess
import sys

PROGRAM = """
import json, resource, sys, time, dflop
settings = json.loads(sys.argv[1])
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
begin, delivered, microbatches = time.process_time(), 0, 0
try:
    groups = {"order": dflop.Order, "read": dflop.Read, "processor": dflop.Processor}
    settings |= {name: of(**settings[name]) for name, of in groups.items() if name in settings}
    for step in dflop.BalancedLoader(steps=2, plan=dflop.Plan(strategy="lpt"), **settings):
        for microbatch in step.microbatches:
            microbatches += 1
            delivered += sum(value.nbytes for value in microbatch.values() if hasattr(value, "nbytes"))
    seconds = time.process_time() - begin
    print(f"{microbatches} microbatches, {delivered / 1e9:.2f} GB delivered, peak {peak():.3f} GB, CPU {seconds:.1f} s")
except dflop.Error as error:
    print(f"{type(error).__name__}, peak {peak():.3f} GB: {error}")
"""
MIB = 1 << 20
SETTINGS = [
    {"global_batch_size": 10_000, "microbatches": 1},
    {"global_batch_size": 10_000, "microbatches": 1, "order": {"tail": "repeat"}},
    {"global_batch_size": 10_000, "microbatches": 100, "order": {"tail": "repeat"}},
    {"global_batch_size": 10_000, "microbatches": 1_000, "order": {"tail": "repeat"}},
    {"global_batch_size": 128, "microbatches": 16, "read": {"buffered_bytes": 32 * MIB}},
    {"global_batch_size": 128, "microbatches": 16, "read": {"buffered_bytes": 100 * MIB}},
    {"global_batch_size": 128, "microbatches": 16},
    {"global_batch_size": 128, "microbatches": 16, "processor": {"dtype": "uint8"}},
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=pathlib.Path)
    arguments = parser.parse_args()
    lines = []
    for settings in SETTINGS:
        text = json.dumps({"dataset": arguments.shards, "model": arguments.model} | settings)
        command = [sys.executable, "-c", PROGRAM, text]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        lines.append(f"{settings}: {printed}")
        print(lines[-1], flush=True)
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
