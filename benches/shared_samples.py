#!/usr/bin/env python3
"""Measures the balanced loader when ranks share long samples, beside whole samples from the same data.

Every round runs all ranks of a job, one after the other in processes of their own, for two plans:
`Plan(context=N)` under a token cap that splits the long documents, and whole samples without a cap. Both
deliver the same global batches. Ratios are taken within a round.

    pip install ./bindings/python pillow numpy                                   # into VENV
    VENV/bin/python benches/shared_samples.py --out out.txt
    VENV/bin/python benches/shared_samples.py --ranks 8 --rounds 3

One document in eight is long: many pages of photo-like JPEGs and text between them; the rest are short, most
with a page. CPU figures are user + system time of all ranks without imports; *read* is the bytes that all
ranks read; *peak* is the memory of the rank that needs the most, in addition to imports; *longest* is the
maximum number of tokens in a microbatch.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PLANS = ("whole", "shared")
MICROBATCHES = 2
BATCH_PER_RANK = 4
PAGE_SIDES = (560, 420)
LONG_PAGES, LONG_WORDS, SHORT_WORDS = 12, 6000, 120


def main() -> None:
    """Writes the documents, runs the rounds and prints the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="file for a copy of the output")
    parser.add_argument("--run", nargs=3, metavar=("PLAN", "DIRECTORY", "RANK"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        plan, directory, rank = args.run
        print(json.dumps(one_rank(plan, Path(directory), int(rank), args.ranks, args.steps)))
        return
    lines: list[str] = []

    def tell(line: str) -> None:
        lines.append(line)
        print(line, flush=True)
        if args.out:
            args.out.write_text("\n".join(lines) + "\n")

    with tempfile.TemporaryDirectory() as scratch:
        samples = args.ranks * BATCH_PER_RANK * args.steps
        write(Path(scratch), samples)
        size = sum(path.stat().st_size for path in Path(scratch, "shards").glob("*.tar"))
        tell(f"{samples} documents, {size / 1e6:.0f} MB, {args.ranks} ranks with a decoding thread each")
        rounds = []
        for number in range(args.rounds):
            order = PLANS[number % 2 :] + PLANS[: number % 2]
            rounds.append({plan: job(plan, Path(scratch), args) for plan in order})
            for plan in PLANS:
                tell(shown(plan, rounds[-1][plan]))
    if len({one["tokens"] for figures in rounds for one in figures.values()}) != 1:
        sys.exit("the plans delivered different tokens")
    for name in ("CPU s", "read MB", "peak MB", "longest"):
        ratios = [one["shared"][name] / one["whole"][name] for one in rounds]
        low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
        tell(f"{name:8} shared / whole {low:.2f} {middle:.2f} {high:.2f}")


def write(directory: Path, count: int) -> None:
    """Writes documents with pages, and a small model."""
    import dflop
    import numpy as np
    from PIL import Image

    rng, noise = random.Random(3), np.random.default_rng(3)

    def page() -> bytes:
        width, height = (round(side * rng.uniform(0.7, 1.3)) for side in PAGE_SIDES)
        shapes = noise.integers(0, 255, (height // 24 + 2, width // 24 + 2, 3), dtype=np.uint8)
        Image.fromarray(shapes).resize((width, height), Image.Resampling.BICUBIC).save(
            file := io.BytesIO(), "jpeg", quality=90
        )
        return file.getvalue()

    with dflop.Writer(directory / "shards", shard_samples=max(count // 4, 1)) as writer:
        for number in range(count):
            is_long = number % 8 == 0
            pages = rng.randint(LONG_PAGES // 2, LONG_PAGES) if is_long else rng.randint(0, 2)
            words = [f"w{rng.randrange(400)}" for _ in range(LONG_WORDS if is_long else SHORT_WORDS)]
            for at in range(pages):
                words.insert(at * len(words) // pages, "<image>")
            turns = [{"from": "human", "value": " ".join(words)}, {"from": "gpt", "value": "w1 w2 w3"}]
            fields = {f"{at}.jpg": page() for at in range(pages)}
            writer.write({"__key__": f"{number:06}", **fields, "json": {"conversations": turns}})
    dflop.example.write_model(directory / "model")


def job(plan: str, directory: Path, args: argparse.Namespace) -> dict[str, float]:
    """Runs all ranks, and adds up their figures."""
    found = []
    for rank in range(args.ranks):
        command = [sys.executable, __file__, "--run", plan, str(directory), str(rank)]
        command += ["--ranks", str(args.ranks), "--steps", str(args.steps)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{plan} failed:\n{done.stderr}")
        found.append(json.loads(done.stdout.splitlines()[-1]))
    if len({one["digests"] for one in found}) != 1:
        sys.exit(f"{plan}: ranks planned differently")
    sums = {name: sum(one[name] for one in found) for name in ("CPU s", "read MB", "tokens", "split")}
    return sums | {name: max(one[name] for one in found) for name in ("peak MB", "longest", "wall s")}


def one_rank(plan: str, directory: Path, rank: int, ranks: int, steps: int) -> dict[str, float | str]:
    """Delivers the microbatches of a rank."""
    import dflop
    import numpy as np  # noqa: F401 imports do not count

    settings = {"context": ranks, "tokens_max": 6000} if plan == "shared" else {}
    before, memory = cpu_seconds(), peak_mb()
    began = time.perf_counter()
    tokens, longest, split, digests = 0, 0, 0, []
    with dflop.BalancedLoader(
        directory / "shards",
        model=directory / "model",
        global_batch_size=ranks * BATCH_PER_RANK,
        microbatches=MICROBATCHES,
        dp_rank=rank,
        dp_size=ranks,
        seed=1,
        steps=steps,
        plan=dflop.Plan(schedule="microbatch", **settings),
        read=dflop.Read(workers=1, error_budget=0.0),
    ) as loader:
        for step in loader:
            digests.append(step.digest)
            for microbatch in step.microbatches:
                tokens += microbatch.tokens
                longest = max(longest, microbatch["input_ids"].shape[-1])
                split += sum(len(group.lengths) for group in microbatch.context.groups) if settings else 0
        read = sum(stage["bytes"] for stage in loader.metrics()["stages"] if stage["stage"] == "read")
    return {
        "CPU s": cpu_seconds() - before,
        "wall s": time.perf_counter() - began,
        "read MB": read / 1e6,
        "peak MB": peak_mb() - memory,
        "tokens": tokens,
        "longest": longest,
        "split": split,
        "digests": " ".join(map(str, digests)),
    }


def cpu_seconds() -> float:
    """Returns the CPU time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def peak_mb() -> float:
    """Returns the largest memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def shown(plan: str, figures: dict[str, float]) -> str:
    """Formats a line."""
    return (
        f"{plan:7} {figures['CPU s']:7.2f} CPU s {figures['wall s']:6.2f} s on the slowest rank "
        f"{figures['read MB']:7.1f} MB read {figures['peak MB']:6.0f} MB peak "
        f"{figures['longest']:6.0f} longest {figures['tokens']:8.0f} tokens {figures['split']:4.0f} slices  load {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
