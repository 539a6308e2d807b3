"""Weights that two stages have copies of, such as tied embeddings of the first and the last LLM stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dflop.errors import ConfigError
from dflop.torch._pipeline_job import Job
from dflop.torch._pipeline_layout import RankLayout


@dataclass(frozen=True)
class _Tied:
    """Copies of a weight on this rank.

    - `group`: ranks with a copy and the same TP rank
    - `copies`: weight and number of replicas of its stage, by stage
    """

    group: dist.ProcessGroup
    copies: Mapping[int, tuple[torch.nn.Parameter, int]]


def _state(weight: torch.nn.Parameter) -> tuple[bool, bool]:
    """Returns whether a weight is trained, and whether it is sharded."""
    return weight.requires_grad, isinstance(weight, DTensor)


class TiedWeights:
    """Sums the gradients of weights over the stages that have copies of them.

    A stage has their names in its attribute ``tied_weights``, as in its ``named_parameters``. All ranks
    create one.

    Raises:
        ConfigError: a weight is sharded, or frozen in some of its stages only.
    """

    def __init__(
        self, layout: RankLayout, stages: Mapping[int, torch.nn.Module], job: Job, timeout: timedelta
    ) -> None:
        own = {
            stage: {name: _state(module.get_parameter(name)) for name in module.tied_weights}
            for stage, module in stages.items()
            if hasattr(module, "tied_weights")
        }
        owners: dict[str, set[int]] = {}
        trained: dict[str, set[bool]] = {}
        sharded: set[str] = set()
        for found in job.gather(own):
            for stage, names in found.items():
                for name, (is_trained, is_sharded) in names.items():
                    sharded |= {name} if is_sharded else set()
                    owners.setdefault(name, set()).add(stage)
                    trained.setdefault(name, set()).add(is_trained)
        if sharded:
            raise ConfigError(f"`{min(sharded)}` is sharded, expected whole copies in stages", "config")
        for name, flags in trained.items():
            if len(flags) > 1:
                stages_text = ", ".join(map(str, sorted(owners[name])))
                raise ConfigError(f"`{name}` is frozen in some of the stages {stages_text} only", "config")
        self._own: list[_Tied] = []
        self._later: set[int] = set()
        for name in sorted(owners):
            tables = {stage: layout.schedule.stage_ranks(stage) for stage in sorted(owners[name])}
            for ranks in zip(*(row for table in tables.values() for row in table), strict=True):
                group = dist.new_group(sorted(set(ranks)), timeout=timeout)
                if layout.rank in ranks:
                    copies = {
                        stage: (stages[stage].get_parameter(name), len(tables[stage]))
                        for stage in tables
                        if stage in stages
                    }
                    self._own.append(_Tied(group, copies))
                    self._later |= {
                        id(copy) for stage, (copy, _) in copies.items() if stage > min(owners[name])
                    }

    def sum(self) -> None:
        """Sums gradients, which are those of all replicas of each stage."""
        for tied in self._own:
            trained = [one for one in tied.copies.values() if one[0].requires_grad]
            parts = [copy.grad / replicas for copy, replicas in trained if copy.grad is not None]
            if not parts:
                continue
            total = torch.stack(parts).sum(0)
            dist.all_reduce(total, group=tied.group)
            for copy, _ in trained:
                copy.grad = total.clone()

    def once(self, module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
        """Returns the parameters of a stage without copies of those of a stage before it."""
        return (one for one in module.parameters() if id(one) not in self._later)
