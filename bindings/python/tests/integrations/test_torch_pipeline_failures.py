"""A failure on one rank of a pipeline ends all ranks, with its rank, step and action."""

from __future__ import annotations

import multiprocessing
import os
import time
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dflop
import dflop.torch.pipeline
import torch
import torch.distributed as dist
from pipeline_stages import LAYERS, build
from trainers import WithData

SETTINGS: dict[str, Any] = {"global_batch_size": 12, "steps": 3}
MODULES = {"vision": {}, "llm": {"stages": 2}}
TIMEOUT_SECONDS = 30


class Stage(torch.nn.Module):
    """A stage that fails in a pass."""

    def __init__(self, stage: torch.nn.Module, fail: Callable[[], Any], passes: int) -> None:
        super().__init__()
        self.stage, self.fail, self.passes = stage, fail, passes

    def forward(self, rows: Any, microbatch: Any) -> Any:
        self.passes -= 1
        if self.passes == 0:
            found = self.fail()
            if found is not None:
                return found
        return self.stage(rows, microbatch)


def raised() -> None:
    raise ValueError("no kites today")


class Job:
    """What is special about one rank: each method is the usual way."""

    schedule = dflop.Schedule(MODULES, microbatches=2)
    settings = SETTINGS

    def build(self, *arguments: Any) -> torch.nn.Module:
        return build(*arguments[:4])

    def run(self, directory: Path) -> None:
        def loader(role: dflop.RankRole) -> dflop.BalancedLoader:
            shards, model = directory / "shards", directory / "model"
            return dflop.BalancedLoader(shards, model=model, role=role, array_type="torch", **self.settings)

        pipeline = dflop.torch.Pipeline(
            self.build, self.schedule, loader, layers=LAYERS, timeout=TIMEOUT_SECONDS
        )
        for step in pipeline:
            pipeline.step(step)


class FailingStage(Job):
    def __init__(self, fail: Callable[[], Any], passes: int = 4) -> None:
        self.fail, self.passes = fail, passes

    def build(self, *arguments: Any) -> torch.nn.Module:
        return Stage(super().build(*arguments), self.fail, self.passes)


class FailingBuild(Job):
    def build(self, *arguments: Any) -> torch.nn.Module:
        raise ValueError("no layers today")


class Other(Job):
    def __init__(self, settings: dict[str, Any] | None = None, **schedule: Any) -> None:
        self.settings = SETTINGS | (settings or {})
        self.schedule = dflop.Schedule(**{"modules": MODULES, "microbatches": 2, **schedule})


def rank_of_job(rank: int, directory: Path, job: Job) -> None:
    torch.set_num_threads(1)
    size = Job.schedule.world_size
    store = dist.FileStore(str(directory / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        job.run(directory.parent)
    except dflop.Error as error:
        (directory / f"error-{rank}").write_text(f"{type(error).__name__}: {error}")
        os._exit(3)
    os._exit(0)


class Failures(WithData):
    def errors(self, failing: int, job: Job) -> dict[int, str]:
        """Runs three ranks, of which one is special; returns the errors, empty for a rank that was killed."""
        directory = self.directory / str(time.monotonic_ns())
        directory.mkdir()
        context = multiprocessing.get_context("fork")
        ranks = [
            context.Process(target=rank_of_job, args=(rank, directory, job if rank == failing else Job()))
            for rank in range(Job.schedule.world_size)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + 2 * TIMEOUT_SECONDS
        for process in ranks:
            process.join(max(deadline - time.monotonic(), 0.1))
            if process.is_alive():
                process.kill()
                self.fail("a rank hangs")
        self.assertNotIn(0, [process.exitcode for process in ranks])
        found = {}
        for rank in range(len(ranks)):
            path = directory / f"error-{rank}"
            found[rank] = path.read_text() if path.exists() else ""
        return found

    def test_an_exception_in_a_stage(self) -> None:
        for rank in range(3):
            with self.subTest(rank=rank):
                found = self.errors(rank, FailingStage(raised))
                for error in found.values():
                    place = f"rank {rank}, step 1, forward 1 in stage {rank}"
                    self.assertRegex(error, f"^PipelineError: {place}: ValueError: no kites today")

    def test_a_rank_that_is_killed(self) -> None:
        for rank in range(3):
            with self.subTest(rank=rank):
                found = self.errors(rank, FailingStage(lambda: os.kill(os.getpid(), 9)))
                self.assertEqual(found.pop(rank), "")
                for error in found.values():
                    self.assertRegex(error, r"PipelineError: rank \d, step 1, .* in stage \d (from|to) \d: ")

    def test_rows_that_are_not_those_of_the_route(self) -> None:
        found = self.errors(0, FailingStage(lambda: torch.zeros(3, 24, requires_grad=True)))
        for error in found.values():
            self.assertRegex(error, r"rank 0, step 1, forward 1 in stage 0: .*\[3, 24\], expected \d+ rows")

    def test_an_exception_in_build(self) -> None:
        for error in self.errors(1, FailingBuild()).values():
            self.assertRegex(error, "PipelineError: rank 1, build stage 1 of `llm`: ValueError: no layers")

    def test_another_schedule(self) -> None:
        for job in (Other(schedule="gpipe"), Other(microbatches=3)):
            for error in self.errors(2, job).values():
                self.assertRegex(error, "ConfigError: schedule: rank 2 found .*, rank 0 .*same settings")

    def test_more_ranks_than_the_process_group(self) -> None:
        schedule = dflop.Schedule({**MODULES, "vision": {"dp": 2}}, microbatches=2)
        store = dist.FileStore(str(self.directory / "alone"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)
        with self.assertRaisesRegex(dflop.ConfigError, "it has 4 ranks, the process group 1"):
            dflop.torch.Pipeline(build, schedule, None)  # type: ignore[arg-type]

    def test_another_plan(self) -> None:
        for error in self.errors(1, Other({"seed": 7})).values():
            self.assertRegex(error, "digest of the plan: rank 1 found .*, rank 0 ")

    def test_a_loader_that_ends_before_others(self) -> None:
        for error in self.errors(2, Other({"steps": 2})).values():
            self.assertRegex(error, "ConfigError: steps: the loader of rank 2 has ended")


if __name__ == "__main__":
    unittest.main()
