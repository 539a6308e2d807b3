"""Simulates the evaluation of the DFLOP paper and writes results, figures and `docs/evaluation.md`.

    make evaluation                                  # all studies
    python3 benches/evaluation/evaluate.py --quick   # few steps, for a look at the page
    python3 benches/evaluation/evaluate.py --only partitions corrections
    python3 benches/evaluation/evaluate.py --page    # page and figures from the stored results

Needs the packages of `requirements.txt`, the command `dflop`, and for peers and corrections the Python package
`dflop`.
"""

import argparse
import datetime
import importlib.util
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import corrections
import page
import partitions
import peers
import shapes
import simulated
import start
from commands import Runner

ROOT = Path(__file__).resolve().parents[2]
SIMULATED = ["models", "nodes", "mixtures", "batches"]
# Studies that need the Python package.
PACKAGED = ["peers", "corrections"]
STUDIES = [*SIMULATED, "partitions", "start", *PACKAGED]
# Simulated steps of a method, seconds of the ILP solver, steps with peers' rules, steps with corrections.
EFFORT = {"full": (50, 10.0, 20, 96), "quick": (2, 1.0, 2, 48)}


def main() -> None:
    """Runs the chosen studies and writes the page."""
    options = _options()
    results = (
        json.loads(options.results.read_text(encoding="utf-8"))
        if options.results.exists()
        else {"studies": {}}
    )
    if not options.page:
        with tempfile.TemporaryDirectory() as directory:
            _run(options, results, Path(directory))
    page.write(results, options.results, options.docs)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dflop", type=Path, default=ROOT / "target/release/dflop", help="the command")
    parser.add_argument(
        "--results", type=Path, help="JSON with all figures [default: today's in benches/results]"
    )
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="directory of the page")
    parser.add_argument("--only", nargs="+", choices=STUDIES, default=STUDIES, help="studies to run")
    parser.add_argument("--quick", action="store_true", help="few steps and short limits")
    parser.add_argument("--page", action="store_true", help="run nothing, only write the page")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="simulations at a time")
    options = parser.parse_args()
    stored = ROOT / "benches/results"
    if options.results is None and options.page:
        options.results = max(stored.glob("*-evaluation.json"))
    options.results = options.results or stored / f"{datetime.date.today()}-evaluation.json"
    return options


def _run(options: argparse.Namespace, results: dict[str, Any], directory: Path) -> None:
    """Runs the studies in order; results are written after each."""
    effort = "quick" if options.quick else "full"
    steps, ilp_seconds, peer_steps, correction_steps = EFFORT[effort]
    drawn = shapes.write(directory)
    runner = Runner(options.dflop.resolve(), directory, options.jobs)
    results |= {
        "version": runner.version(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}",
        "shapes_seed": shapes.SEED,
        "shapes": {name: {"samples": len(rows), **shapes.described(rows)} for name, rows in drawn.items()},
    }
    for name in options.only:
        begin, cpu_begin = time.perf_counter(), _cpu_seconds()
        if name in PACKAGED and importlib.util.find_spec("dflop") is None:
            print(f"{name}: skipped, the Python package dflop is not installed")
            continue
        if name in SIMULATED:
            found: Any = {"steps": steps, "rows": simulated.run(runner, name, steps)}
        elif name == "partitions":
            found = partitions.run(runner, drawn["onevision"], ilp_seconds)
        elif name == "start":
            samples = 1_000 * sum(part.thousands for part in shapes.PARTS.values())
            found = start.run(runner, results["studies"]["models"]["rows"], samples, steps)
        elif name == "peers":
            found = peers.run(directory, peer_steps)
        else:
            found = corrections.run(directory, correction_steps)
        study = {
            "date": str(datetime.date.today()),
            "effort": effort,
            "wall_seconds": time.perf_counter() - begin,
            "cpu_seconds": _cpu_seconds() - cpu_begin,
        }
        results["studies"][name] = study | found
        options.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {study['wall_seconds']:.0f} s, CPU {study['cpu_seconds']:.0f} s", flush=True)


def _cpu_seconds() -> float:
    """Returns the CPU time of this process and its children."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


if __name__ == "__main__":
    main()
