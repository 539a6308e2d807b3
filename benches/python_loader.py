#!/usr/bin/env python3
"""Compares the Python package with the Rust loader under it, and with other loaders, on one corpus in one run.

Every round measures, one after the other: webdataset, the Rust loader (`dflop stream --decode rgb224`), the same images
from Python (`dflop.Loader(image=dflop.Image(size=224))`), spdl, datago, webdataset again. Ratios are taken within a round.

    pip install ./bindings/python               # into VENV
    python3 benches/python_loader.py --corpus shards/ --python VENV/bin/python --peers DIR --peers-python PEERS/bin/python
    python3 benches/python_loader.py ... --with spdl,datago --corpus-images shards-without-audio/ --json out.json

CPU figures are user + system time of all processes of a loader, in milliseconds per sample; of Python from just before the
loader is made, of the Rust loader from the start of its process. `bench_PEER.py` in DIR prints one JSON line with `n`, `sps`, `cpu_ms`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from compare import served
from rounds import spread

WORKERS = 2
BATCH = 32
PYTHON_LOADER = """
import json, resource, sys, time
import numpy
import dflop

def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime

shards, epochs, workers, batch_size = sys.argv[1], *map(int, sys.argv[2:])
cpu_before, before = cpu(), time.perf_counter()
samples = 0
settings = {"image": dflop.Image(size=224), "read": dflop.Read(workers=workers), "array_type": "numpy"}
loader = dflop.Loader(shards, batch_size=batch_size, epochs=epochs, **settings)
for batch in loader:
    samples += len(batch.samples)
    assert batch["image"].shape[1:] == (3, 224, 224)
seconds = time.perf_counter() - before
print(json.dumps({"n": samples, "sps": samples / seconds, "cpu_ms": 1e3 * (cpu() - cpu_before) / samples}))
"""


def main() -> None:
    """Runs the rounds and prints the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--corpus", type=Path, required=True, help="directory of uncompressed shards with .jpg entries"
    )
    parser.add_argument("--python", default=sys.executable, help="interpreter that has dflop")
    parser.add_argument("--peers", type=Path, help="directory of the peers' scripts")
    parser.add_argument("--peers-python", help="interpreter that has the peers")
    parser.add_argument(
        "--with", dest="others", default="", help="peers in addition to webdataset: spdl,datago"
    )
    parser.add_argument("--corpus-images", type=Path, help="the corpus without audio, for datago")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=2, help="passes over the corpus of dflop's loaders")
    parser.add_argument("--json", type=Path, help="JSON file for the figures of every run")
    args = parser.parse_args()
    others = [name for name in args.others.split(",") if name]
    with served(argparse.Namespace(extra=others, corpus_images=args.corpus_images)):
        rounds = [one_round(args, others) for _ in range(args.rounds)]
    if args.json:
        args.json.write_text(json.dumps(rounds, indent=1) + "\n")
    report(rounds, others)


def one_round(args: argparse.Namespace, others: list[str]) -> dict[str, dict]:
    """Measures every loader once."""
    runs = {}
    if args.peers:
        runs["webdataset before"] = peer(args, "webdataset", args.corpus)
    runs["rust"] = rust(args)
    runs["python"] = python(args)
    # Alternate the order, so that neither always runs on a warmer machine.
    runs["python again"] = python(args)
    runs["rust again"] = rust(args)
    for name in others:
        runs[name] = peer(args, name, args.corpus_images if name == "datago" else args.corpus)
    if args.peers:
        runs["webdataset after"] = peer(args, "webdataset", args.corpus)
    for name, run in runs.items():
        print(
            f"{name:18} {run['sps']:8.1f} samples/s {run['cpu_ms']:8.3f} ms CPU  load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    return runs


def rust(args: argparse.Namespace) -> dict:
    """Measures the Rust loader, as the command line of the same package."""
    command = [args.python, "-m", "dflop", "stream", args.corpus, "--decode", "rgb224", "--batch", BATCH]
    report = run([*command, "--set", f"read.workers={WORKERS}", "--epochs", args.epochs, "--json"])
    samples = report["samples"]
    return {"n": samples, "sps": samples / report["seconds"], "cpu_ms": 1e3 * report["cpu_seconds"] / samples}


def python(args: argparse.Namespace) -> dict:
    """Measures the same images as batches in Python."""
    return run([args.python, "-c", PYTHON_LOADER, args.corpus, args.epochs, WORKERS, BATCH])


def peer(args: argparse.Namespace, name: str, corpus: Path) -> dict:
    """Measures another loader, by its script."""
    command = [
        args.peers_python or args.python,
        args.peers / f"bench_{name}.py",
        "--mode",
        "decode",
        "--workers",
        WORKERS,
    ]
    return run(command, CORPUS=str(corpus.resolve()), OMP_NUM_THREADS="1")


def run(command: list, **variables: str) -> dict:
    """Runs a command and reads its last line."""
    words = [str(word) for word in command]
    done = subprocess.run(words, env=os.environ | variables, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(words[:4])} failed:\n{done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def report(rounds: list[dict[str, dict]], others: list[str]) -> None:
    """Prints medians, minima and maxima of the rounds."""

    def mean(one: dict[str, dict], names: list[str], figure: str) -> float:
        return statistics.mean(one[name][figure] for name in names)

    python, rust = ["python", "python again"], ["rust", "rust again"]
    webdataset = ["webdataset before", "webdataset after"]
    rows = {"python / rust, CPU": [mean(one, python, "cpu_ms") / mean(one, rust, "cpu_ms") for one in rounds]}
    rows["python / rust, samples/s"] = [mean(one, python, "sps") / mean(one, rust, "sps") for one in rounds]
    if webdataset[0] in rounds[0]:
        faster = [mean(one, python, "sps") / mean(one, webdataset, "sps") for one in rounds]
        rows["python / webdataset, samples/s"] = faster
        rows["python / webdataset, CPU"] = [
            mean(one, python, "cpu_ms") / mean(one, webdataset, "cpu_ms") for one in rounds
        ]
    for name in others:
        rows[f"python / {name}, CPU"] = [mean(one, python, "cpu_ms") / one[name]["cpu_ms"] for one in rounds]
    print(f"\n{'ratio':34} {'median':>8} {'least':>8} {'largest':>8}")
    for name, ratios in rows.items():
        least, middle, largest = spread(ratios)
        print(f"{name:34} {middle:8.3f} {least:8.3f} {largest:8.3f}")


if __name__ == "__main__":
    main()
