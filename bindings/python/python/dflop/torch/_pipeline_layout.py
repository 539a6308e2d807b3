"""What a schedule says about one rank: modules of stages, links between them, layers, and process groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dflop._native import Schedule
from dflop.errors import ConfigError
from dflop.schedule import RankRole

LLM = "llm"


@dataclass(frozen=True)
class StageGroups:
    """Process groups of a rank for a stage.

    - `replicas`: ranks that run the stage with the same TP rank
    - `mesh`: ranks of the stage, ``dp`` by ``tp``
    """

    replicas: dist.ProcessGroup
    mesh: DeviceMesh


class RankLayout:
    """Stages of a job as one rank sees them."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule, self.rank = schedule, rank
        self.roles: list[RankRole] = schedule.roles(rank)
        self.own = sorted(stage for role in self.roles for stage in role.stages)
        self.modules = [self._module(stage) for stage in range(schedule.stages)]
        self.first_llm = self.modules.index(LLM)

    def _module(self, stage: int) -> str:
        roles = self.schedule.roles(self.schedule.stage_ranks(stage)[0][0])
        return next(role.module for role in roles if stage in role.stages)

    def is_first(self, stage: int) -> bool:
        """Returns whether the stage is the first one of its module."""
        return stage == 0 or self.modules[stage - 1] != self.modules[stage]

    def is_last(self, stage: int) -> bool:
        """Returns whether the stage is the last one of its module."""
        return stage + 1 == len(self.modules) or self.modules[stage + 1] != self.modules[stage]

    def last_stage(self, module: str) -> int:
        """Returns the last stage of a module."""
        return len(self.modules) - 1 - self.modules[::-1].index(module)

    def number(self, stage: int) -> int:
        """Returns the number of a stage in its module, from 0."""
        return stage - self.modules.index(self.modules[stage])

    def sources(self, stage: int) -> list[int]:
        """Returns the stages whose rows a stage reads."""
        if not self.is_first(stage):
            return [stage - 1]
        if self.modules[stage] != LLM:
            return []
        return [other for other in range(stage) if self.is_last(other)]

    def is_encoder_link(self, stage: int, other: int) -> bool:
        """Returns whether two stages are of one encoder."""
        return self.modules[stage] == self.modules[other] != LLM

    def needs_gradient(self, trainable: Sequence[bool]) -> list[bool]:
        """Returns by stage whether the output has a gradient: the stage or a stage before it is trained."""
        needs: list[bool] = []
        for stage, is_trained in enumerate(trainable):
            needs.append(is_trained or any(needs[source] for source in self.sources(stage)))
        return needs

    def layers(self, stage: int, layers: Mapping[str, int] | None) -> range | None:
        """Returns the layers of a stage in its module.

        - `layers`: number of layers by module, cut evenly; without a number, the cut of the schedule counts
        """
        module = self.modules[stage]
        count, number = self.modules.count(module), self.number(stage)
        if layers is not None and module in layers:
            total = layers[module]
            if total < count:
                reason = f"`{module}` has {total} layers, expected at least {count}"
                raise ConfigError(f"layers: {reason}", "config")
            return range(total * number // count, total * (number + 1) // count)
        # The arguments of a schedule, as pickled.
        cut = self.schedule.__reduce__()[0].keywords["modules"][module].get("layers")
        if not isinstance(cut, Sequence):
            return None
        cut = [own for own in cut if own > 0]
        start = sum(cut[:number])
        return range(start, start + cut[number])

    def groups(self, device: torch.device, timeout: timedelta) -> dict[int, StageGroups]:
        """Creates the process groups of all stages, on all ranks in one order; returns those of this rank."""
        made: dict[tuple[tuple[int, ...], ...], StageGroups | None] = {}
        found: dict[int, StageGroups] = {}
        for stage in range(len(self.modules)):
            table = tuple(map(tuple, self.schedule.stage_ranks(stage)))
            if table not in made:
                made[table] = self._stage_groups(table, device, timeout)
            own = made[table]
            if own is not None:
                found[stage] = own
        return found

    def _stage_groups(
        self, table: tuple[tuple[int, ...], ...], device: torch.device, timeout: timedelta
    ) -> StageGroups | None:
        own: list[dist.ProcessGroup] = []
        for groups in (zip(*table, strict=True), table):
            for ranks in groups:
                group = dist.new_group(list(ranks), timeout=timeout)
                if self.rank in ranks:
                    own.append(group)
        if not own:
            return None
        names = ("dp", "tp")
        mesh = DeviceMesh.from_group(own, device.type, mesh=torch.tensor(table), mesh_dim_names=names)
        return StageGroups(own[0], mesh)
