"""Runs commands that are killed at random moments, and counts what was found afterwards."""

import hashlib
import io
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time


class Violation(Exception):
    """A promise that did not hold."""


def check(holds: bool, message: str) -> None:
    if not holds:
        raise Violation(message)


class Chaos:
    """What all scenarios share: the program, a random source, a directory, and the counts."""

    def __init__(self, dflop: str, seed: int, kills: int) -> None:
        self.dflop = dflop
        self.random = random.Random(seed)
        self.kills = kills
        self.rows: list[dict] = []
        self.place = pathlib.Path(tempfile.mkdtemp(prefix="dflop-chaos-"))
        self.environment = {**os.environ, "XDG_CACHE_HOME": str(self.place / "cache-home"), "DFLOP_LOG": "off"}

    def close(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)

    def start(self, *args: object, **options) -> subprocess.Popen:
        options.setdefault("stdout", subprocess.DEVNULL)
        options.setdefault("stderr", subprocess.PIPE)
        command = [self.dflop, *map(str, args)]
        return subprocess.Popen(command, env=self.environment, start_new_session=True, **options)

    def run(self, *args: object, status: int | None = 0, seconds: float = 120) -> subprocess.CompletedProcess:
        process = self.start(*args, stdout=subprocess.PIPE)
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            kill(process)
            raise Violation(f"`{' '.join(map(str, args))}` did not end within {seconds} s") from None
        done = subprocess.CompletedProcess(args, process.returncode, out, err)
        if status is not None:
            check(done.returncode == status, f"`{' '.join(map(str, args))}` ended with {done.returncode}: {err.decode()[-500:]}")
        return done

    def time_of(self, *args: object) -> float:
        """Returns the seconds that a command takes when nobody kills it."""
        started = time.monotonic()
        self.run(*args)
        return time.monotonic() - started

    def kill_within(self, process: subprocess.Popen, seconds: float) -> bool:
        """Kills a process at a random moment; returns whether it was still running."""
        deadline = time.monotonic() + self.random.uniform(0, seconds)
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        was_running = process.poll() is None
        kill(process)
        return was_running

    def scenario(self, name: str, faults: int, once) -> None:
        """Repeats a scenario; `once` returns whether the fault struck."""
        struck, violations, first = 0, 0, ""
        started = time.monotonic()
        tries = 0
        while struck < faults and tries < 4 * faults:
            tries += 1
            try:
                struck += bool(once())
            except Violation as violation:
                struck += 1
                violations += 1
                first = first or str(violation)
        row = {"scenario": name, "faults": struck, "violations": violations, "seconds": round(time.monotonic() - started, 1)}
        if first:
            row["first"] = first
        self.rows.append(row)
        print(json.dumps(row), flush=True)


def kill(process: subprocess.Popen) -> None:
    """Ends a process and its children at once."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    if process.stderr:
        process.stderr.close()


def sha256(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make_shards(directory: pathlib.Path, shards: int, samples: int, seed: int) -> list[str]:
    """Writes shards of texts of uneven lengths; returns the keys in order."""
    source = random.Random(seed)
    directory.mkdir(parents=True, exist_ok=True)
    keys = []
    for shard in range(shards):
        with tarfile.open(directory / f"shard-{shard:03}.tar", "w") as archive:
            for _ in range(samples):
                key = f"k{len(keys):06}"
                keys.append(key)
                text = ("a kite over the sea " * source.randint(1, 400)).encode()
                for name, content in ((f"{key}.txt", text), (f"{key}.json", json.dumps({"key": key}).encode())):
                    entry = tarfile.TarInfo(name)
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))
    return keys
