"""Scenarios of training on two ranks whose processes are killed, stopped and continued: losses stay the same."""

import os
import pathlib
import shutil
import signal
import subprocess
import time
from collections.abc import Callable

from common import Chaos, Violation, check, children, finish, is_running, kill, lines_of

CONFIG = pathlib.Path(__file__).with_name("train.toml")
STEPS = 40
# Of the configuration: longest wait for another rank.
TIMEOUT_SECONDS = 3
# From a fault that ends a job to the end of all its processes: the longest wait, a second for each of two ranks that
# wait for each other, three for ranks to end by themselves, and as much again for a loaded machine.
END_SECONDS = 2 * (TIMEOUT_SECONDS + 2 + 3)


class Job:
    """A training job with its launcher and ranks, and what it computes when nothing happens to it."""

    def __init__(self, chaos: Chaos, name: str) -> None:
        self.chaos = chaos
        self.directory = chaos.place / name
        started = time.monotonic()
        self.expected = results(chaos.run(*self.command()).stdout)
        self.seconds = time.monotonic() - started
        check(len(self.expected) == STEPS, f"the scenario trains {STEPS} steps")

    def command(self, *options: object) -> tuple:
        return ("train", CONFIG, "--steps", STEPS, "--checkpoints", self.directory, "--json", *options)

    def start(self) -> tuple[subprocess.Popen, list[int]]:
        """Starts a job, waits for a random moment of its run, and returns its launcher and the ranks."""
        shutil.rmtree(self.directory, ignore_errors=True)
        process = self.chaos.start(*self.command(), stdout=subprocess.PIPE)
        deadline = time.monotonic() + self.chaos.random.uniform(0.1, 0.9) * self.seconds
        while process.poll() is None and (time.monotonic() < deadline or len(children(process.pid)) < 2):
            time.sleep(0.002)
        return process, children(process.pid)

    def check_results(self, out: bytes) -> set[int]:
        """Compares steps with those of the undisturbed run; returns which there are."""
        found = results(out)
        differing = [step for step, result in found.items() if self.expected[step] != result]
        check(not differing, f"steps {differing[:5]} have another loss, or other samples")
        return set(found)

    def check_resumed(self, found: set[int]) -> None:
        resumed = self.check_results(self.chaos.run(*self.command("--resume")).stdout)
        check(max(found | resumed) == STEPS - 1, "the resumed run did not reach the last step")


def results(out: bytes) -> dict[int, tuple]:
    return {row["step"]: (row["loss"], row["samples"], row["tokens"]) for row in lines_of(out) if "loss" in row}


def wait_for_end(ranks: list[int]) -> None:
    deadline = time.monotonic() + END_SECONDS
    while any(is_running(rank) for rank in ranks):
        if time.monotonic() > deadline:
            for rank in ranks:
                signal_process(rank, signal.SIGKILL)
            raise Violation(f"a rank was left {END_SECONDS} s after the end of its job")
        time.sleep(0.005)


def signal_process(process: int, number: int) -> None:
    try:
        os.kill(process, number)
    except ProcessLookupError:
        pass


def kills(chaos: Chaos) -> None:
    """The launcher, one rank or all processes are killed; the job ends and resumes to the same losses."""
    job = Job(chaos, "ranks-killed")

    def once(victims_of: Callable[[int, list[int]], list[int]]) -> bool:
        process, ranks = job.start()
        victims = victims_of(process.pid, ranks)
        struck = process.poll() is None
        for victim in victims:
            signal_process(victim, signal.SIGKILL)
        done = finish(process, END_SECONDS)
        wait_for_end(ranks)
        # A rank that had printed its last step may end before the launcher notices.
        check(not struck or done.returncode != 0 or process.pid not in victims, "a killed job ended with success")
        found = job.check_results(done.stdout)
        check(not struck or done.returncode != 0 or len(found) == STEPS, "a job that was cut short ended with success")
        job.check_resumed(found)
        return struck

    victims = {
        "the launcher": lambda launcher, ranks: [launcher],
        "one rank": lambda launcher, ranks: [chaos.random.choice(ranks)] if ranks else [],
        "launcher and ranks": lambda launcher, ranks: [launcher, *ranks],
    }
    for name, victims_of in victims.items():
        chaos.scenario(f"train, {name} killed", chaos.share(0.13), lambda victims_of=victims_of: once(victims_of))


def stops(chaos: Chaos) -> None:
    """The launcher or one rank is stopped: for a moment, which changes nothing, or for good, which ends the job."""
    job = Job(chaos, "ranks-stopped")

    def moment(is_rank: bool) -> bool:
        process, ranks = job.start()
        victim = chaos.random.choice(ranks) if is_rank and ranks else process.pid
        struck = process.poll() is None and is_running(victim)
        signal_process(victim, signal.SIGSTOP)
        time.sleep(chaos.random.uniform(0.02, TIMEOUT_SECONDS / 4))
        signal_process(victim, signal.SIGCONT)
        done = finish(process, 60)
        check(done.returncode == 0, f"the job ended with {done.returncode}: {done.stderr[-300:]!r}")
        check(len(job.check_results(done.stdout)) == STEPS, "steps are missing")
        return struck

    def for_good() -> bool:
        process, ranks = job.start()
        if process.poll() is not None or len(ranks) < 2:
            kill(process)
            return False
        number = chaos.random.randrange(2)
        signal_process(ranks[number], signal.SIGSTOP)
        try:
            done = finish(process, END_SECONDS)
        finally:
            signal_process(ranks[number], signal.SIGKILL)
        wait_for_end(ranks)
        found = job.check_results(done.stdout)
        if done.returncode == 0:
            # It was stopped after its last step.
            check(len(found) == STEPS, "a job that was cut short ended with success")
            return False
        check(f"rank {number}".encode() in done.stderr, f"the stopped rank is not named: {done.stderr[-500:]!r}")
        job.check_resumed(found)
        return True

    faults = chaos.share(0.1)
    chaos.scenario("train, the launcher stopped for a moment", faults, lambda: moment(is_rank=False))
    chaos.scenario("train, one rank stopped for a moment", chaos.share(0.13), lambda: moment(is_rank=True))
    chaos.scenario("train, one rank stopped for good", faults, for_good)


SCENARIOS = {"ranks-killed": kills, "ranks-stopped": stops}
