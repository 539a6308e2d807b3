"""Scenarios that kill a command at one of its system calls: every writer, and both loaders with their states.

A kill at a random moment mostly strikes while data are read. Here the moment is a call that changes files, as `strace`
counts them: the first, the last, and random ones between. What is visible afterwards is whole, the next run is right, and
runs that resume deliver the rest, on another number of ranks and at the very end as well.
"""

import collections
import json
import pathlib
import shutil
import subprocess

from common import REPOSITORY, Chaos, check, check_account, lines_of, make_shards, sha256

CALLS = (
    "openat", "write", "pwrite64", "writev", "rename", "renameat", "renameat2", "fsync", "fdatasync", "unlink", "unlinkat",
    "ftruncate", "fallocate", "link", "linkat", "mkdir", "mkdirat", "flock", "fchmod", "close",
)  # fmt: skip


def traced(chaos: Chaos, *options: str) -> list[str]:
    return ["strace", "-f", "-qq", "-o", str(chaos.place / "calls"), *options, chaos.dflop]


def calls_of(chaos: Chaos, command: list[str]) -> dict[str, int]:
    """Counts the calls of a command that may change files."""
    subprocess.run([*traced(chaos), *command], env=chaos.environment, capture_output=True, check=True)
    counts: collections.Counter[str] = collections.Counter()
    for line in (chaos.place / "calls").read_text(errors="replace").splitlines():
        name = line.split(None, 1)[-1].split("(")[0]
        if name in CALLS:
            counts[name] += 1
    return counts


def killed(chaos: Chaos, command: list[str], counts: dict[str, int]) -> bool:
    """Runs a command that is killed at one of its calls; returns whether it was."""
    call = chaos.random.choice(sorted(counts))
    number = chaos.random.choice([1, counts[call], chaos.random.randint(1, counts[call])])
    options = ("-e", f"inject={call}:signal=KILL:when={number}")
    done = subprocess.run([*traced(chaos, *options), *command], env=chaos.environment, capture_output=True, timeout=120)
    return done.returncode not in (0, 1, 2)


def is_temporary(path: pathlib.Path) -> bool:
    name = path.name
    return name.startswith(".") or name.endswith((".lock", ".tmp", ".partial")) or ".partial" in str(path)


def digests(directory: pathlib.Path) -> dict[str, str]:
    """Returns the digests of the visible files below a directory."""
    files = [path for path in directory.rglob("*") if path.is_file() and not is_temporary(path)]
    return {str(path.relative_to(directory)): sha256(path) for path in files}


def has_strace(name: str) -> bool:
    if shutil.which("strace"):
        return True
    print(f"skipped: {name}, which needs strace", flush=True)
    return False


def writers(chaos: Chaos) -> None:
    """Writers of indexes, shards, tensors and checkpoints: visible files are whole, and the next run writes the rest."""
    if not has_strace("kills at system calls"):
        return
    data, source, out = chaos.place / "calls-data", chaos.place / "calls-source", chaos.place / "calls-out"
    make_shards(data, 3, 24, 11)
    source.mkdir()
    for number in range(40):
        (source / f"{number:04}.txt").write_text(f"text {number} " * (1 + number))
    tokenizer = REPOSITORY / "tests/golden/model_inputs/chatml"
    model = ("--tokenizer", tokenizer, "--model", "qwen2-vl-7b", "--global-batch-size", 6, "--dp-size", 1, "--steps", 3)
    commands = {
        "index": ("index", data, "--out", out),
        "pack": ("pack", source, out / "packed", "--shard-samples", 9),
        "pack --zstd": ("pack", source, out / "packed", "--shard-samples", 9, "--zstd"),
        "batches": ("batches", data, *model, "--out", out / "batches"),
        "train": (
            *("train", REPOSITORY / "tests/chaos/train.toml", "--set", f"plan.stages={1}", "--steps", 6),
            *("--checkpoints", out / "states", "--resume"),
        ),
    }
    for name, command in commands.items():
        command = [str(word) for word in command]
        fresh(out)
        counts = calls_of(chaos, command)
        reference = digests(out)
        check(len(reference) > 0, "the scenario writes files")
        # Lines of steps have times, and the index of shards that were just packed has those of the shards.
        timed = (".jsonl", ".arrow") if command[0] == "pack" else (".jsonl",)
        stable = {path: digest for path, digest in reference.items() if not path.endswith(timed)}

        def once(command=command, counts=counts, stable=stable) -> bool:
            fresh(out)
            struck = killed(chaos, command, counts)
            for path, digest in digests(out).items():
                # A checkpoint of a step before the last is gone at the end.
                check(stable.get(path, digest) == digest, f"`{path}` is visible and differs")
            if command[0] == "pack":
                fresh(out)
            again = subprocess.run([chaos.dflop, *command], env=chaos.environment, capture_output=True, timeout=120)
            check(again.returncode == 0, f"the next run ended with {again.returncode}: {again.stderr.decode()[-300:]}")
            found = digests(out)
            wrong = [path for path, digest in stable.items() if found.get(path) != digest]
            check(not wrong, f"after the next run, {wrong} differ")
            return struck

        chaos.scenario(f"calls of {name}", chaos.kills, once)


def loaders(chaos: Chaos) -> None:
    """Both loaders save states while they are killed: the delivered keys and the rest are the dataset, once each."""
    if not has_strace("states of killed loaders"):
        return
    data, state = chaos.place / "loaders-data", chaos.place / "loaders.json"
    keys = make_shards(data, 4, 60, 12)
    stream = ("stream", data, "--decode", "raw", "--set", f"read.workers={1}", "--batch", 6)
    order = ("order", data, "--global-batch-size", 12, "--epochs", 1)
    chaos.run("index", data)

    def keys_of(*command: object) -> list[str]:
        rows = lines_of(chaos.run(*command, "--json").stdout)
        ranks = [rank for row in rows for rank in row.get("keys", [])]
        return [key for rank in ranks for microbatch in rank for key in microbatch]

    whole = keys_of(*order, "--dp-size", 2)
    for name in ("stream", "order"):

        def once(name=name) -> bool:
            # Also the very end, after which nothing is left.
            part = chaos.random.choice([5, 10, 15, 20])
            state.unlink(missing_ok=True)
            if name == "stream":
                command = [*stream, "--samples", 12 * part, "--state-out", state]
            else:
                command = [*order, "--dp-size", 2, "--steps", part, "--state-out", state]
            command = [str(word) for word in command]
            struck = killed(chaos, command, calls_of(chaos, command))
            if not state.exists():
                chaos.run(*command)
            if name == "stream":
                delivered = json.loads(state.read_text())["delivered"]
                rest = json.loads(chaos.run(*stream, "--json", "--resume", state).stdout)["samples"]
                check(delivered + rest == len(keys), f"{delivered} samples and {rest} are not {len(keys)}")
            else:
                ranks = chaos.random.choice([1, 2, 3, 4])
                rest = keys_of(*order, "--dp-size", ranks, "--resume", state)
                check_account(whole[: 12 * part] + rest, keys)
            return struck

        chaos.scenario(f"states of {name}", chaos.kills, once)


def fresh(directory: pathlib.Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()


SCENARIOS = {"calls": writers, "calls-states": loaders}
