"""Applies a plan for PyTorch to stages of a split model: recomputed layers, state that replicas share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from dflop.errors import ConfigError
from dflop.plan_schedule import PlanSource, read_plan, schedule_from_plan


@dataclass(frozen=True)
class StagePlan:
    """Treatment of stages.

    - `recomputed`: modules whose layers run again in the backward pass
    - `is_sharded`: whether the replicas of a stage share weights and optimizer state, in 32 bits
    """

    recomputed: frozenset[str] = frozenset()
    is_sharded: bool = False

    @classmethod
    def read(cls, plan: PlanSource, modules: Iterable[str]) -> StagePlan:
        """Reads a plan.

        - `modules`: modules of the model

        Raises:
            ConfigError: it is no plan, or not for PyTorch, or for another model.
        """
        schedule_from_plan(plan)
        fields = read_plan(plan)
        trainer = fields.get("trainer") or {}
        if not isinstance(trainer, dict) or trainer.get("name") != "torch":
            raise ConfigError(
                "plan: it was not made for PyTorch: plan with `dflop plan --trainer torch`, or leave `plan` out",
                "config",
            )
        recomputed = {module["name"] for module in fields["modules"] if module.get("recompute")}
        others = sorted({module["name"] for module in fields["modules"]} ^ set(modules))
        if others:
            raise ConfigError(
                f"plan: its modules and those of the model differ in {', '.join(others)}", "config"
            )
        return cls(frozenset(recomputed), bool(trainer.get("is_sharded")))

    def apply(
        self, stage: Any, module: str, layers: Iterable[torch.nn.Module], mesh: DeviceMesh | None
    ) -> None:
        """Turns on recomputation, and shards a stage over its replicas.

        - `stage`: the stage, with the cut model as ``stage.model``
        - `layers`: layers of the stage
        - `mesh`: ranks of the stage, ``dp`` by ``tp``; None for one rank without a process group
        """
        if module in self.recomputed:
            _recompute(stage.model)
        if self.is_sharded and mesh is not None:
            self._shard(stage, layers, mesh)

    def _shard(self, stage: Any, layers: Iterable[torch.nn.Module], mesh: DeviceMesh) -> None:
        types = {one.dtype for one in stage.parameters() if one.is_floating_point()}
        computed = max(types, key=lambda one: one.itemsize, default=torch.float32)
        with torch.no_grad():
            for parameter in stage.parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.float()
        policy = MixedPrecisionPolicy(param_dtype=computed if computed != torch.float32 else None)
        for layer in layers:
            fully_shard(layer, mesh=mesh["dp"], mp_policy=policy)
        # A weight that another stage has a copy of stays whole, and so does what runs beside the layers.
        if not getattr(stage, "tied_weights", None):
            # A cast would turn the microbatch into a plain dictionary; the model casts its pixels.
            fully_shard(stage, mesh=mesh["dp"], mp_policy=replace(policy, cast_forward_inputs=False))


def _recompute(model: Any) -> None:
    """Turns on recomputation of all layers, whose name changes in transformers 6."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
