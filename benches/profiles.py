"""Measures CPU time of the command built with the profile `release` over the same with `dist`, in turn.

    cargo build --release -p dflop-cli && cargo build --profile dist -p dflop-cli
    python3 benches/profiles.py [--python VENV/bin/python] [--pairs 7] [--out FILE]

The data are those of `dflop demo`, and 100,000 samples of one text of 20 bytes. `--python` names an interpreter with
webdataset, whose loop over the tiny samples then takes part; its imports are not counted. Figures are user + system seconds
of a process and all its children; ratios are medians of those of the pairs, which are printed, too.
"""

import argparse
import io
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import tarfile
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROFILES = ("release", "dist")
TINY_SAMPLES = 100_000
SHAPES = "tiles,seq_len\n" + "".join(f"{1 + n * n % 13},{200 + n * 7919 % 3000}\n" for n in range(2000))
WEBDATASET = """
import json, resource, sys
import webdataset
cpu = lambda: sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
begin = cpu()
samples = sum(1 for _ in webdataset.WebDataset(sys.argv[1], shardshuffle=False, empty_check=False))
print(json.dumps([samples, cpu() - begin]))
"""


def write_tiny(path: pathlib.Path) -> None:
    """Writes a shard of samples of 20 bytes."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as shard:
        for number in range(TINY_SAMPLES):
            entry = tarfile.TarInfo(f"{number:08}.txt")
            entry.size = 20
            shard.addfile(entry, io.BytesIO(f"sample number {number:06}".encode()))


def cpu_seconds(command: list[str], place: pathlib.Path) -> float:
    """Runs a command to its end and returns its user + system time."""
    shutil.rmtree(place / "kept", ignore_errors=True)
    process = subprocess.Popen(command, cwd=place, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        raise SystemExit(f"{' '.join(command)}: {errors.decode()}")
    return usage.ru_utime + usage.ru_stime


def webdataset_seconds(python: str, shard: str, place: pathlib.Path) -> float:
    done = subprocess.run([python, "-c", WEBDATASET, shard], cwd=place, capture_output=True, check=True, text=True)
    samples, seconds = json.loads(done.stdout)
    if samples != TINY_SAMPLES:
        raise SystemExit(f"webdataset read {samples} samples")
    return seconds


def commands(place: pathlib.Path) -> dict[str, list[str]]:
    """Returns the arguments of every measured command."""
    config = ROOT / "executor/examples/train-cpu.toml"
    plan = ["--model", "llava-ov-qwen2.5-7b", "--shapes", "shapes.csv", "--gpus", "256", "--global-batch-size", "512"]
    order = ["--global-batch-size", "512", "--dp-size", "8", "--microbatches", "8", "--steps", "100", "--json"]
    return {
        "stream, decoded": ["stream", "demo/shards", "--decode", "rgb224", "--set", "read.workers=1", "--epochs", "2"],
        "stream, media": ["stream", "demo/shards", "--decode", "media", "--set", "read.workers=1", "--epochs", "2"],
        "stream, raw, tiny": ["stream", "tiny.tar", "--decode", "raw", "--set", "read.workers=1", "--epochs", "5"],
        "order, tiny": ["order", "tiny.tar", *order],
        "order": ["order", "demo/shards", *order, "--model", "qwen2.5-vl-7b"],
        "plan": ["plan", *plan],
        "train": ["train", str(config), "--steps", "24", "--checkpoints", "kept"],
    }


def measure(programs: dict[str, str], name: str, arguments: list[str], pairs: int, place: pathlib.Path) -> str:
    """Runs both programs in turn and returns a line of the result."""
    seconds: dict[str, list[float]] = {profile: [] for profile in PROFILES}
    for pair in range(pairs):
        for profile in PROFILES if pair % 2 == 0 else reversed(PROFILES):
            seconds[profile].append(cpu_seconds([programs[profile], *arguments], place))
    ratios = [release / dist for release, dist in zip(*seconds.values(), strict=True)]
    medians = ", ".join(f"{profile} {statistics.median(values):.2f} s" for profile, values in seconds.items())
    listed = " ".join(f"{ratio:.2f}" for ratio in ratios)
    return f"{name}: {medians}, release / dist {statistics.median(ratios):.3f}  [{listed}]"


def compare_tiny(programs: dict[str, str], python: str, pairs: int, place: pathlib.Path) -> list[str]:
    """Measures both programs and webdataset on the tiny samples, in turn."""
    ratios: dict[str, list[float]] = {profile: [] for profile in PROFILES}
    for _ in range(pairs):
        peer = webdataset_seconds(python, "tiny.tar", place)
        for profile, program in programs.items():
            command = [program, "stream", "tiny.tar", "--decode", "raw", "--set", "read.workers=1"]
            ratios[profile].append(cpu_seconds(command, place) / peer)
    rows = ratios.items()
    return [
        f"tiny samples, {profile} / webdataset: {statistics.median(values):.3f}  [{' '.join(f'{v:.3f}' for v in values)}]"
        for profile, values in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    for profile in PROFILES:
        parser.add_argument(f"--{profile}", default=str(target / profile / "dflop"))
    parser.add_argument("--python", help="an interpreter with webdataset")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--only", default="", help="words that a measured command contains")
    parser.add_argument("--out", type=pathlib.Path)
    arguments = parser.parse_args()
    programs = {profile: str(pathlib.Path(vars(arguments)[profile]).resolve()) for profile in PROFILES}
    lines = []
    with tempfile.TemporaryDirectory() as directory:
        place = pathlib.Path(directory)
        (place / "shapes.csv").write_text(SHAPES)
        write_tiny(place / "tiny.tar")
        cpu_seconds([programs["release"], "demo", "--out", "demo"], place)
        cpu_seconds([programs["release"], "index", "tiny.tar"], place)
        for name, command in commands(place).items():
            if arguments.only in name:
                lines.append(measure(programs, name, command, arguments.pairs, place))
                print(lines[-1], flush=True)
        if arguments.python:
            lines += compare_tiny(programs, arguments.python, arguments.pairs, place)
            print("\n".join(lines[-2:]), flush=True)
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
