"""What the ranks of a pipeline agree on: failures with their rank and action, equal plans, sums of counts."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dflop._native import RoleStep, Schedule
from dflop.errors import ConfigError, Error, PipelineError
from dflop.plan_schedule import PlanSource, schedule_from_plan
from dflop.schedule import Action

# Time that a rank with a broken connection waits for the failure that broke it, in seconds.
NOTE_SECONDS = 1.0
ENDED, READY, FAILED = range(3)
_jobs = itertools.count()


class Job:
    """The ranks of a job on the host, and the first failure among them.

    Args:
        plan: the schedule, or a plan that has one, whose world is all ranks.
        timeout: time that ranks wait for each other.
    """

    def __init__(self, plan: Schedule | PlanSource, timeout: timedelta) -> None:
        if not dist.is_initialized():
            raise ConfigError("no process group: call torch.distributed.init_process_group first", "config")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.step: int | None = None
        self.action: Action | str = "start"
        host = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(host, dist.ProcessGroup)
        self.host = host
        # Public names reach the store only through its address, which not every store has.
        store = dist.distributed_c10d._get_default_store()
        self._notes = dist.PrefixStore(f"dflop-pipeline-{next(_jobs)}", store)
        self.schedule = self._agreed(plan)

    def _agreed(self, plan: Schedule | PlanSource) -> Schedule:
        """Returns the schedule, which all ranks have."""
        failure: Error | None = None
        digest = ""
        try:
            schedule = plan if isinstance(plan, Schedule) else schedule_from_plan(plan)
            digest = schedule.digest
        except Error as error:
            failure = error
        found = self.gather((digest, None if failure is None else str(failure)))
        if failure is not None:
            raise failure
        others = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(found) if text is not None]
        if others:
            raise ConfigError(others[0], "config")
        self.refuse_differences([digest for digest, _ in found], "schedule")
        if schedule.world_size != self.size:
            raise ConfigError(
                f"schedule: it has {schedule.world_size} ranks, the process group {self.size}", "config"
            )
        return schedule

    def gather(self, own: Any) -> list[Any]:
        """Returns an object of every rank."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, own, group=self.host)
        return found

    def refuse_differences(self, found: Sequence[Any], name: str) -> None:
        """Refuses values that differ from those of rank 0."""
        others = [rank for rank, own in enumerate(found) if own != found[0]]
        if others:
            raise ConfigError(
                f"{name}: {_ranks(others)} found {found[others[0]]}, rank 0 {found[0]}; every rank needs the "
                "same settings",
                "config",
            )

    def failed(self, error: Exception) -> PipelineError:
        """Returns the error of this rank, with the first failure of the job, and notes it for other ranks."""
        if isinstance(error, PipelineError):
            return error
        own = {"rank": self.rank, "step": self.step, "action": str(self.action)}
        text = f"{_where(own)}: {type(error).__name__}: {error}"
        first = self._first(own, text, is_waiting=isinstance(error, RuntimeError))
        if first is None or first[0] == own:
            return PipelineError(text, "pipeline", own)
        return PipelineError(f"{first[1]}\nthen {text}", "pipeline", first[0])

    def _first(
        self, own: dict[str, Any], text: str, *, is_waiting: bool
    ) -> tuple[dict[str, Any], str] | None:
        """Notes a failure unless there is one; returns the first, or None if the store is gone."""
        deadline = time.monotonic() + (NOTE_SECONDS if is_waiting else 0.0)
        try:
            while not self._notes.check(["failure"]):
                if time.monotonic() >= deadline:
                    self._notes.set("failure", json.dumps([own, text]))
                    return own, text
                time.sleep(0.05)
            fields, message = json.loads(self._notes.get("failure"))
        except (RuntimeError, ValueError, OSError):
            return None
        return fields, message

    def exchange(
        self, steps: Sequence[RoleStep | None], error: Exception | None, trained: list[bool]
    ) -> list[bool]:
        """Checks that all ranks are at the same step of the same plan; returns which stages are trained.

        An empty list means that all ranks have ended.
        """
        state = FAILED if error is not None else ENDED if None in steps else READY
        ready = [step for step in steps if step is not None]
        number, digest = (ready[0].step, int(ready[0].digest, 16)) if ready else (-1, 0)
        # Digests are unsigned.
        own = torch.tensor([state, number, digest - (1 << 63), *map(int, trained)], dtype=torch.int64)
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own, group=self.host)
        rows = [row.tolist() for row in found]
        states = [row[0] for row in rows]
        if FAILED in states:
            texts = self.gather(None if error is None else f"{type(error).__name__}: {error}")
            rank = states.index(FAILED)
            fields = {"rank": rank, "step": self.step, "action": "read"}
            raise PipelineError(f"{_where(fields)}: {texts[rank]}", "pipeline", fields) from error
        if ENDED in states:
            if READY not in states:
                return []
            ended = [rank for rank, own in enumerate(states) if own == ENDED]
            raise ConfigError(f"steps: the loader of {_ranks(ended)} has ended, others go on", "config")
        self.refuse_differences([row[1] for row in rows], "step")
        self.refuse_differences([f"{row[2] + (1 << 63):016x}" for row in rows], "digest of the plan")
        return [any(column) for column in zip(*(row[3:] for row in rows), strict=True)]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sums numbers of the host over all ranks, in place."""
        dist.all_reduce(values, group=self.host)
        return values


def _where(fields: dict[str, Any]) -> str:
    step = "" if fields["step"] is None else f", step {fields['step']}"
    return f"rank {fields['rank']}{step}, {fields['action']}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
