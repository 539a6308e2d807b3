"""Runs `dflop` commands and keeps command line, answer, wall time and CPU time."""

import json
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple


class Command(NamedTuple):
    """A call; the answer is JSON on standard output."""

    arguments: list[str]

    def shown(self) -> str:
        """Returns the command line as printed on the page."""
        return " ".join(["dflop", *self.arguments])


class Runner:
    """Runs commands in a directory with input files."""

    def __init__(self, dflop: Path, directory: Path, jobs: int) -> None:
        self.dflop, self.directory, self.jobs = dflop, directory, jobs

    def version(self) -> str:
        """Returns what `--version` prints."""
        done = subprocess.run([self.dflop, "--version"], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def run(self, command: Command) -> dict[str, Any]:
        """Returns `command`, `answer`, `wall_seconds`, `cpu_seconds`.

        A command that fails has its message as `refused` in place of an answer.
        """
        start = time.perf_counter()
        with subprocess.Popen(
            [self.dflop, *command.arguments, "--json"],
            cwd=self.directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as child:
            with ThreadPoolExecutor(1) as pool:
                errors = pool.submit(child.stderr.read)
                printed = child.stdout.read()
                refused = errors.result()
            _, status, usage = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
        row = {
            "command": command.shown(),
            "wall_seconds": round(time.perf_counter() - start, 3),
            "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 3),
        }
        if child.returncode == 0:
            return row | {"answer": json.loads(printed)}
        print(f"refused: {command.shown()}: {refused.strip()}")
        return row | {"refused": refused.strip()}

    def run_all(self, commands: list[Command]) -> list[dict[str, Any]]:
        """Runs commands beside each other; results have the order of the commands."""
        with ThreadPoolExecutor(self.jobs) as pool:
            return list(pool.map(self.run, commands))
