"""Runs commands that are killed at random moments, and counts what was found afterwards."""

import collections
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
from collections.abc import Callable, Iterable

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
MIB = 1 << 20


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
        # The standard library waits for its own lock if memory runs out while it prints a backtrace.
        settings = {"XDG_CACHE_HOME": str(self.place / "cache-home"), "RUST_BACKTRACE": "0"}
        self.environment = {**os.environ, **settings}

    def close(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)

    def share(self, fraction: float, least: int = 1) -> int:
        """Returns a share of the faults of a scenario."""
        return max(int(self.kills * fraction), least)

    def start(self, *args: object, **options) -> subprocess.Popen:
        options.setdefault("stdout", subprocess.DEVNULL)
        options.setdefault("stderr", subprocess.PIPE)
        command = [self.dflop, *map(str, args)]
        return subprocess.Popen(command, env=self.environment, start_new_session=True, **options)

    def run(
        self, *args: object, status: int | None = 0, seconds: float = 120, **options
    ) -> subprocess.CompletedProcess:
        process = self.start(*args, stdout=subprocess.PIPE, **options)
        done = finish(process, seconds)
        if status is not None:
            shown, reason = " ".join(map(str, args)), done.stderr.decode()[-500:]
            check(done.returncode == status, f"`{shown}` ended with {done.returncode}: {reason}")
        return done

    def run_measured(self, *args: object, seconds: float) -> tuple[subprocess.CompletedProcess, int]:
        """Runs a command; returns its outcome and the most memory that was resident, in bytes."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = self.start(*args, stdout=out, stderr=err)
            deadline, peak = time.monotonic() + seconds, 0
            while process.poll() is None:
                peak = max(peak, status_bytes(process.pid, "VmHWM"))
                if time.monotonic() > deadline:
                    kill(process)
                    raise Violation(f"`{' '.join(map(str, args))}` did not end within {seconds} s")
                time.sleep(0.01)
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(args, process.returncode, out.read(), err.read()), peak

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

    def scenario(self, name: str, faults: int, once: Callable[[], bool], counts: dict[str, int] | None = None) -> None:
        """Repeats a scenario; `once` returns whether the fault struck, and may count other things in `counts`."""
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
        row = {"scenario": name, "faults": struck, "violations": violations, **(counts or {})}
        row["seconds"] = round(time.monotonic() - started, 1)
        if first:
            row["first"] = first
        self.rows.append(row)
        print(json.dumps(row), flush=True)


def finish(process: subprocess.Popen, seconds: float) -> subprocess.CompletedProcess:
    """Waits for a process and its output; kills it after a time, which is a violation."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        kill(process)
        raise Violation(f"`{' '.join(map(str, process.args[1:]))}` did not end within {seconds} s") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out or b"", err or b"")


def kill(process: subprocess.Popen) -> None:
    """Ends a process and its children at once."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe:
            pipe.close()


def status_bytes(process: int, field: str) -> int:
    """Returns a size from the status of a process, 0 if it has ended."""
    try:
        lines = pathlib.Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)


def children(process: int) -> list[int]:
    try:
        listed = pathlib.Path(f"/proc/{process}/task/{process}/children").read_text()
    except OSError:
        return []
    return [int(word) for word in listed.split()]


def is_running(process: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def sha256(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def flip_bit(content: bytes, at: int) -> bytes:
    damaged = bytearray(content)
    damaged[at // 8] ^= 1 << at % 8
    return bytes(damaged)


def make_shards(
    directory: pathlib.Path,
    shards: int,
    samples: int,
    seed: int,
    *,
    prefix: str = "k",
    text: str = "a kite over the sea ",
    repeats: tuple[int, int] = (1, 400),
) -> list[str]:
    """Writes shards of texts of uneven lengths; returns the keys in order."""
    source = random.Random(seed)
    directory.mkdir(parents=True, exist_ok=True)
    keys = []
    for shard in range(shards):
        with tarfile.open(directory / f"shard-{shard:03}.tar", "w") as archive:
            for _ in range(samples):
                key = f"{prefix}{len(keys):06}"
                keys.append(key)
                content = (text * source.randint(*repeats)).encode()
                for name, payload in ((f"{key}.txt", content), (f"{key}.json", json.dumps({"key": key}).encode())):
                    entry = tarfile.TarInfo(name)
                    entry.size = len(payload)
                    archive.addfile(entry, io.BytesIO(payload))
    return keys


def lines_of(output: bytes) -> list[dict]:
    """Returns the JSON objects that a command printed; a line that a killed process left unfinished is none."""
    rows = []
    for line in output.splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def check_account(found: Iterable[str], expected: Iterable[str]) -> None:
    """Compares delivered keys with those of an undisturbed run."""
    found, expected = collections.Counter(list(found)), collections.Counter(list(expected))
    lost, doubled = (expected - found).total(), (found - expected).total()
    check(lost == 0 and doubled == 0, f"{lost} samples were lost, {doubled} came twice or from elsewhere")
