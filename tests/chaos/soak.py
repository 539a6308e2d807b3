"""Runs streaming, balanced loading and training for long, and checks that they use no more as time passes.

    python3 tests/chaos/soak.py --dflop target/release/dflop [--minutes 30] [--only stream,batches] [--out FILE]

Each run lasts `--minutes`. Memory, descriptors, threads and throughput of all its processes are sampled; the rule of
the verdict is in `trend.py`. Prints a JSON object per run, and exits with 1 if one of them is not flat. `--out` takes
every sample, too. `--self-check` feeds made series to the rule and needs no program.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

from common import REPOSITORY, children
from media import make_media_shards, write_tar
from trend import SAMPLES_MIN, Trend, is_flat_count, is_flat_memory, trend_of

# Interval between two samples; short runs have a shorter one.
INTERVAL_SECONDS_MAX = 10.0
# Number of samples of a short run.
SAMPLES_LEAST = 60
ENDLESS = 1_000_000_000
BATCHES_SAMPLES = 1_000_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dflop", help="the program")
    parser.add_argument("--minutes", type=float, default=30, help="length of each run")
    parser.add_argument("--only", help="names of runs, separated by commas")
    parser.add_argument("--out", type=pathlib.Path, help="file for samples and results")
    parser.add_argument("--self-check", action="store_true", help="check the rule of the verdict only")
    arguments = parser.parse_args()
    if arguments.self_check:
        self_check()
        print("the rule finds leaks, and no leak where there is none")
        return 0
    if not arguments.dflop:
        parser.error("--dflop is needed")
    names = arguments.only.split(",") if arguments.only else list(RUNS)
    if unknown := [name for name in names if name not in RUNS]:
        parser.error(f"no run {', '.join(unknown)}; there are {', '.join(RUNS)}")
    self_check()
    place = pathlib.Path(tempfile.mkdtemp(prefix="dflop-soak-"))
    rows, are_flat = [], True
    try:
        for name in names:
            samples, result = soak(name, str(pathlib.Path(arguments.dflop).resolve()), place, 60 * arguments.minutes)
            rows += [*samples, result]
            are_flat &= result["verdict"] == "flat"
            print(json.dumps(result), flush=True)
    finally:
        shutil.rmtree(place, ignore_errors=True)
        if arguments.out:
            arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0 if are_flat else 1


def soak(name: str, dflop: str, place: pathlib.Path, seconds: float) -> tuple[list[dict], dict]:
    """Runs a command for some time; returns the samples and the result."""
    command = RUNS[name](place / name)
    environment = {**os.environ, "XDG_CACHE_HOME": str(place / "cache-home")}
    with tempfile.TemporaryFile() as err:
        options = {"stdout": subprocess.PIPE, "stderr": err, "env": environment, "start_new_session": True}
        process = subprocess.Popen([dflop, *map(str, command)], **options)
        lines = Lines(process)
        try:
            samples = watch(name, process, lines, seconds)
            if process.poll() is not None:
                err.seek(max(err.tell() - 2_000, 0))
                reason = err.read().decode(errors="replace")
                raise SystemExit(f"{name} ended with {process.returncode} before its time: {reason}")
        finally:
            end(process)
    shutil.rmtree(place / name, ignore_errors=True)
    return samples, {"run": name, "seconds": round(samples[-1]["seconds"]), **judge(samples)}


class Lines:
    """Counts the lines that a process prints."""

    def __init__(self, process: subprocess.Popen) -> None:
        self.count = 0
        threading.Thread(target=self.read, args=(process.stdout,), daemon=True).start()

    def read(self, out) -> None:
        for _ in out:
            self.count += 1


def watch(name: str, process: subprocess.Popen, lines: Lines, seconds: float) -> list[dict]:
    """Samples a job until its time is over or it ends."""
    interval = min(INTERVAL_SECONDS_MAX, seconds / SAMPLES_LEAST)
    started, samples = time.monotonic(), []
    before_lines, before_bytes, before = 0, 0, 0.0
    while process.poll() is None and time.monotonic() - started < seconds:
        time.sleep(interval)
        jobs = [usage for pid in (process.pid, *descendants(process.pid)) if (usage := usage_of(pid))]
        if not jobs:
            break
        now = time.monotonic() - started
        total = {field: sum(job[field] for job in jobs) for field in jobs[0]}
        read_bytes = total.pop("read_bytes")
        samples.append({
            "run": name,
            "seconds": round(now, 2),
            "processes": len(jobs),
            **total,
            "lines_per_second": round((lines.count - before_lines) / (now - before), 2),
            "read_bytes_per_second": round(max(read_bytes - before_bytes, 0) / (now - before)),
        })
        before_lines, before_bytes, before = lines.count, read_bytes, now
    return samples


def usage_of(process: int) -> dict | None:
    """Returns what a process uses, `None` if it has ended."""
    place = pathlib.Path(f"/proc/{process}")
    try:
        status = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines())
        io = dict(line.split(": ") for line in (place / "io").read_text().splitlines())
        return {
            "anonymous_bytes": 1024 * int(status["RssAnon"].split()[0]),
            "descriptors": len(list((place / "fd").iterdir())),
            "threads": int(status["Threads"]),
            "read_bytes": int(io["rchar"]),
        }
    except (OSError, KeyError):
        return None


def descendants(process: int) -> list[int]:
    return [found for child in children(process) for found in (child, *descendants(child))]


def end(process: subprocess.Popen) -> None:
    """Ends a job and its processes."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def judge(samples: list[dict]) -> dict:
    """Returns the trends of a run and the verdict."""
    seconds = [sample["seconds"] for sample in samples]
    trend = lambda field: trend_of(seconds, [sample[field] for sample in samples])
    memory, descriptors, threads = map(trend, ("anonymous_bytes", "descriptors", "threads"))
    growing = [
        name
        for name, is_flat in (
            ("memory", is_flat_memory(memory)),
            ("descriptors", is_flat_count(descriptors)),
            ("threads", is_flat_count(threads)),
        )
        if not is_flat
    ]
    # `stream` prints nothing until its end.
    speed = "lines_per_second" if any(sample["lines_per_second"] for sample in samples) else "read_bytes_per_second"
    return {
        "samples": len(samples),
        "processes": samples[-1]["processes"],
        "anonymous_mib": shown(memory, 1 << 20),
        "descriptors": shown(descriptors),
        "threads": shown(threads),
        speed: shown(trend(speed)),
        "verdict": f"not flat: {', '.join(growing)}" if growing else "flat",
    }


def shown(trend: Trend, unit: int = 1) -> dict:
    numbers = dataclasses.asdict(trend)
    return {name: round(value / unit, 3) for name, value in numbers.items()} | {
        "relative_growth": round(trend.relative_growth, 4)
    }


def stream_run(place: pathlib.Path) -> tuple:
    """Decodes and shuffles 20,000 samples of images, audio, text and JSON, of which one in ten is damaged."""
    make_media_shards(place, 20, 1_000, 1, damaged_every=10)
    shuffles = ("--shuffle-buffer", 256, "--shuffle-shards")
    return ("stream", place, "--decode", "media", *shuffles, "--epochs", ENDLESS, "--set", f"read.error_budget={0.5}")


def batches_run(place: pathlib.Path) -> tuple:
    """Loads balanced microbatches of a million small texts, which an index locates."""
    place.mkdir(parents=True)
    source = random.Random(2)
    texts = [b"a kite over the sea " * source.randint(1, 24) for _ in range(64)]
    shards = 20
    for shard in range(shards):
        numbers = range(BATCHES_SAMPLES // shards)
        entries = ((f"{shard:02}{number:06}.txt", texts[number * 7 % 64]) for number in numbers)
        write_tar(place / f"shard-{shard:03}.tar", entries)
    model = ("--tokenizer", REPOSITORY / "tests/golden/model_inputs/chatml", "--model", "qwen2-vl-7b")
    size = ("--global-batch-size", 128, "--dp-size", 2, "--microbatches", 4)
    return ("batches", place, *model, *size, "--steps", ENDLESS, "--json")


def train_run(place: pathlib.Path) -> tuple:
    """Trains a small model on two ranks; a checkpoint every 50 steps, of which two are kept."""
    place.mkdir(parents=True)
    config = place / "train.toml"
    text = pathlib.Path(__file__).with_name("train.toml").read_text()
    config.write_text(text.replace("steps = 40\n", f"steps = {ENDLESS}\n").replace("every = 4\n", "every = 50\n"))
    return ("train", config, "--checkpoints", place / "checkpoints", "--json")


RUNS: dict[str, Callable[[pathlib.Path], tuple]] = {"stream": stream_run, "batches": batches_run, "train": train_run}


def self_check() -> None:
    """Feeds series to the rule of the verdict: with noise, with a step in the warm-up, and with leaks."""
    source = random.Random(3)
    seconds = [10.0 * number for number in range(180)]
    noise = lambda mean, spread: [mean * (1 + source.uniform(-spread, spread)) for _ in seconds]
    flat, large = noise(50 << 20, 0.02), noise(500 << 20, 0.05)
    warming = [value * min(1, 0.2 + at / 300) for at, value in zip(seconds, flat)]
    leaking = lambda values, bytes_per_second: [value + at * bytes_per_second for at, value in zip(seconds, values)]
    cases = [
        ("noise", flat, True),
        ("noise of a large process", large, True),
        ("a warm-up", warming, True),
        ("a leak of 8 KiB/s", leaking(flat, 8 << 10), False),
        ("a leak of 64 KiB/s of a large process", leaking(large, 64 << 10), False),
        ("memory that is returned", leaking(large, -64 << 10), False),
    ]
    for name, values, is_flat in cases:
        found = is_flat_memory(trend_of(seconds, values))
        assert found == is_flat, f"{name} is {'flat' if found else 'not flat'}"
    steady = [9.0 + (number % 7 == 0) for number in range(180)]
    assert is_flat_count(trend_of(seconds, steady)), "descriptors that come and go are flat"
    growing = [9.0 + number // 60 for number in range(180)]
    assert not is_flat_count(trend_of(seconds, growing)), "two descriptors more are not flat"
    try:
        trend_of(seconds[:SAMPLES_MIN], flat[:SAMPLES_MIN])
    except ValueError:
        return
    raise AssertionError("a trend of few samples was found")


if __name__ == "__main__":
    sys.exit(main())
