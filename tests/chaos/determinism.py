"""Runs commands again and again on one core, on two, and on loaded ones: output and files are the same, byte for byte.

    python3 tests/chaos/determinism.py --dflop target/release/dflop [--repeats 100] [--only order,pack] [--out FILE]

Prints a row per command and condition: repetitions, and the number of distinct outputs, which must be 1; exits with 1
otherwise. Fields that hold measured times or memory are left out of JSON; the table names them.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from common import REPOSITORY
from media import make_media_shards

# Time limit of one run.
SECONDS_MAX = 120


@dataclasses.dataclass(frozen=True)
class Command:
    """A command with the fields that it measures, and the directory or file that it writes."""

    arguments: tuple
    measured: frozenset[str] = frozenset()
    written: pathlib.Path | None = None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dflop", required=True, help="the program")
    parser.add_argument("--repeats", type=int, default=100, help="runs of every command under every condition")
    parser.add_argument("--only", help="names of commands, separated by commas")
    parser.add_argument("--out", type=pathlib.Path, help="file for the rows")
    arguments = parser.parse_args()
    dflop = str(pathlib.Path(arguments.dflop).resolve())
    place = pathlib.Path(tempfile.mkdtemp(prefix="dflop-determinism-"))
    environment = {**os.environ, "XDG_CACHE_HOME": str(place / "cache-home")}
    rows: list[dict] = []
    try:
        commands = commands_in(place)
        names = arguments.only.split(",") if arguments.only else list(commands)
        if unknown := [name for name in names if name not in commands]:
            parser.error(f"no command {', '.join(unknown)}; there are {', '.join(commands)}")
        subprocess.run([dflop, "index", place / "data"], env=environment, check=True, capture_output=True)
        print(f"{'command':<24} {'condition':<20} {'runs':>5} {'distinct':>8}  fields left out", flush=True)
        for name in names:
            rows += compare(name, commands[name], dflop, environment, arguments.repeats)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    differing = sorted({row["command"] for row in rows if row["distinct"] != 1 or row["distinct_of_all"] != 1})
    runs = sum(row["runs"] for row in rows)
    print(f"{runs} runs of {len(names)} commands; not equal: {', '.join(differing) or 'none'}")
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 1 if differing else 0


def compare(name: str, command: Command, dflop: str, environment: dict[str, str], repeats: int) -> list[dict]:
    """Runs a command under every condition; returns a row for each."""
    cores = sorted(os.sched_getaffinity(0))
    two = set(cores[:2])
    conditions = {"one core": (cores[:1], set()), "two cores": (two, set()), "two loaded cores": (two, two)}
    found: set[str] = set()
    rows = []
    for condition, (used, loaded) in conditions.items():
        started = time.monotonic()
        with busy(loaded):
            outputs = {digest_of(command, dflop, environment, set(used)) for _ in range(repeats)}
        found |= outputs
        row = {"command": name, "condition": condition, "runs": repeats, "distinct": len(outputs)}
        row |= {"seconds": round(time.monotonic() - started, 1), "left_out": sorted(command.measured)}
        rows.append(row)
        left_out = ", ".join(row["left_out"])
        print(f"{name:<24} {condition:<20} {repeats:>5} {len(outputs):>8}  {left_out}", flush=True)
    if len(found) != 1:
        print(f"{name:<24} {'all conditions':<20} {len(rows) * repeats:>5} {len(found):>8}", flush=True)
    return [{**row, "distinct_of_all": len(found)} for row in rows]


@contextlib.contextmanager
def busy(cores: set[int]) -> Iterator[None]:
    """Keeps cores busy with a loop on each."""
    loop = [sys.executable, "-c", "while True: pass"]
    loops = []
    try:
        for core in cores:
            loops.append(subprocess.Popen(loop, preexec_fn=lambda core=core: os.sched_setaffinity(0, {core})))
        yield
    finally:
        for process in loops:
            process.kill()
            process.wait()


def digest_of(command: Command, dflop: str, environment: dict[str, str], cores: set[int]) -> str:
    """Runs a command on some cores; returns a digest of its output and of the files that it wrote."""
    if command.written:
        remove(command.written)
    pin = lambda: os.sched_setaffinity(0, cores)
    options = {"env": environment, "capture_output": True, "timeout": SECONDS_MAX, "preexec_fn": pin}
    done = subprocess.run([dflop, *map(str, command.arguments)], **options)
    if done.returncode:
        shown = " ".join(map(str, command.arguments))
        raise SystemExit(f"`{shown}` ended with {done.returncode}: {done.stderr.decode()}")
    digest = hashlib.sha256()
    for line in done.stdout.splitlines():
        digest.update(json.dumps(without(json.loads(line), command.measured)).encode() + b"\n")
    for path in files_of(command.written):
        digest.update(f"{path} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def without(value: object, measured: frozenset[str]) -> object:
    """Returns a JSON value without some fields, at any depth."""
    if isinstance(value, dict):
        return {name: without(inner, measured) for name, inner in value.items() if name not in measured}
    if isinstance(value, list):
        return [without(inner, measured) for inner in value]
    return value


def files_of(written: pathlib.Path | None) -> list[pathlib.Path]:
    if written is None:
        return []
    files = [written] if written.is_file() else sorted(path for path in written.rglob("*") if path.is_file())
    if not files:
        raise SystemExit(f"nothing was written to `{written}`")
    return files


def remove(written: pathlib.Path) -> None:
    if written.is_dir():
        shutil.rmtree(written)
    written.unlink(missing_ok=True)


def commands_in(place: pathlib.Path) -> dict[str, Command]:
    """Writes small inputs and returns the commands that read them."""
    data, source = place / "data", place / "source"
    make_media_shards(data, 4, 120, 1)
    make_media_shards(place / "damaged", 4, 120, 2, damaged_every=10)
    numbers = random.Random(2)
    source.mkdir()
    for number in range(150):
        (source / f"{number:04}.txt").write_text(f"text {number} " * numbers.randint(1, 300))
    shapes = place / "shapes.csv"
    rows = [f"{numbers.randint(0, 12)},{numbers.randint(50, 4_000)}" for _ in range(300)]
    shapes.write_text("\n".join(["tiles,seq_len", *rows]) + "\n")
    instance = place / "instance.json"
    costs = [[numbers.randint(1, 10**9) for _ in range(2)] for _ in range(96)]
    instance.write_text(json.dumps({"name": "small", "n": 96, "m": 8, "c": 2, "d": costs}))
    profiles = REPOSITORY / "costmodel/profiles"
    config = pathlib.Path(__file__).with_name("train.toml")
    batch = ("--global-batch-size", 16, "--dp-size", 2, "--microbatches", 2)
    tokenizer = REPOSITORY / "tests/golden/model_inputs/chatml"
    model = ("--tokenizer", tokenizer, "--model", "qwen2-vl-7b", "--set", "processor.dtype=none")
    plan = ("plan", "--shapes", shapes, "--gpus", 8, "--global-batch-size", 32, "--model", "internvl3-8b", "--batches", 8)
    stream = ("stream", place / "damaged", "--decode", "media", "--set", f"read.error_budget={1}", "--shuffle-buffer", 50)
    seconds = frozenset({"seconds"})
    measured_stream = seconds | {"cpu_seconds", "kernel_cpu_seconds", "first_batch_seconds", "peak_rss_bytes"}
    measured_train = seconds | {"tokens_per_second", "mfu", "bubble_fraction", "data_wait_seconds"}
    measured_train |= {"replayed_seconds", "pipeline_seconds", "pass_seconds", "update_seconds", "input_seconds"}
    measured_train |= {"plan_seconds", "result_seconds", "report_seconds", "checkpoint_seconds"}
    measured_train |= {"communication_seconds", "exposed_communication_seconds", "start"}
    balance = ("balance", "--instance", instance, "--json")
    # An index holds the time at which its shards were written.
    pack = ("pack", source, place / "packed", "--shard-samples", 40, "--no-index", "--json")
    return {
        "order": Command(("order", data, *batch, "--steps", 10, "--json")),
        "order --state-out": Command(
            ("order", data, *batch, "--steps", 10, "--json", "--state-out", place / "order.json"),
            written=place / "order.json",
        ),
        "batches": Command(("batches", data, *batch, *model, "--steps", 4, "--values", "--json")),
        "batches --out": Command(
            ("batches", data, *batch, *model, "--steps", 4, "--json", "--out", place / "tensors"),
            written=place / "tensors",
        ),
        "simulate": Command(("simulate", data, *batch, "--json")),
        "balance": Command(balance, frozenset({"solve_ms"})),
        "balance pipeline": Command(
            (*balance, "--objective", "pipeline", "--dp", 2, "--stages", "1,3"), frozenset({"solve_ms"})
        ),
        "plan": Command((*plan, "--json"), frozenset({"search_seconds"})),
        "stats": Command(("stats", data, "--json")),
        "memory": Command(("memory", "--tokens", "1000,500,2000", "--json")),
        "accuracy": Command(
            (
                "accuracy",
                "--profile",
                profiles / "cpu-miniature.csv",
                "--observed",
                profiles / "cpu-miniature-held-out.csv",
                "--json",
            )
        ),
        "index --out": Command(
            ("index", place / "damaged", "--out", place / "index", "--verify", "--json"), seconds, place / "index"
        ),
        "pack": Command(pack, written=place / "packed"),
        "pack --zstd": Command((*pack, "--zstd"), written=place / "packed"),
        "list": Command(("list", data, "--json")),
        "stream --state-out": Command(
            (*stream, "--shuffle-shards", "--samples", 300, "--json", "--state-out", place / "stream.json"),
            measured_stream,
            place / "stream.json",
        ),
        "train": Command(
            ("train", config, "--steps", 4, "--checkpoints", place / "checkpoints", "--json"),
            measured_train,
            place / "checkpoints",
        ),
    }


if __name__ == "__main__":
    sys.exit(main())
