"""Measures what reading local shards by system calls costs against mapping them, as CPU time of whole passes.

    python3 benches/read_mode.py --dflop target/dist/dflop --corpus DIRECTORY [--pairs 9] [--out FILE]

Runs both ways in turn, so that both see the same machine, and prints the ratio of every pair and their median.
"""

import argparse
import json
import pathlib
import statistics
import subprocess

PASSES = {"rgb224": ["--decode", "rgb224"], "raw, 20 epochs": ["--decode", "raw", "--epochs", "20"]}


def cpu_seconds(dflop: str, corpus: str, options: list[str], mode: str) -> float:
    command = [dflop, "stream", corpus, *options, "--batch", "32", "--set", "read.workers=2", "--set", f"store.read={mode}", "--json"]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["cpu_seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dflop", required=True)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--out", type=pathlib.Path)
    arguments = parser.parse_args()
    lines = []
    for name, options in PASSES.items():
        pairs = []
        for pair in range(arguments.pairs):
            order = ["mmap", "pread"] if pair % 2 == 0 else ["pread", "mmap"]
            seconds = {mode: cpu_seconds(arguments.dflop, arguments.corpus, options, mode) for mode in order}
            pairs.append((seconds["pread"], seconds["mmap"]))
        ratios = [round(pread / mmap, 3) for pread, mmap in pairs]
        medians = [round(statistics.median(column), 3) for column in zip(*pairs)]
        lines.append(f"{name}: pread {medians[0]} s, mmap {medians[1]} s, pread / mmap {statistics.median(ratios)} {ratios}")
        print(lines[-1], flush=True)
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
