"""Turns a plan into a schedule: `schedule_from_plan`, for modules of any framework."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflop._native import Schedule
from dflop.errors import ConfigError

PlanSource = Mapping[str, Any] | str | os.PathLike[str]


def schedule_from_plan(plan: PlanSource, *, encoder: str = "vision") -> Schedule:
    """Returns the schedule of a plan: placement, degrees, layers by stage, microbatches.

    `dflop.torch.Pipeline` accepts the plan itself. The plan's ``recompute`` is up to the modules: where it is
    true, each layer runs under activation checkpointing.

    Args:
        plan: what `plan_parallelism` returned, or a file with the output of ``dflop plan --json``.
        encoder: name of the only encoder, which such plans call ``encoder``: ``vision`` or ``audio``.

    Returns:
        Schedule: the schedule, for as many ranks as the plan uses.

    Raises:
        ConfigError: the file is no plan, or the plan divides experts over ranks.

    Examples:
        >>> plan = {
        ...     "modules": [
        ...         {"name": "encoder", "tp": 1, "dp": 2, "layers": [32]},
        ...         {"name": "llm", "tp": 1, "dp": 3, "layers": [15, 13]},
        ...     ],
        ...     "microbatches": 4,
        ...     "placement": "disaggregated",
        ...     "schedule": "1f1b-ahead:1",
        ... }
        >>> schedule = dflop.schedule_from_plan(plan)
        >>> schedule.world_size, schedule.stages, schedule.microbatches
        (8, 3, 4)
    """
    fields = read_plan(plan)
    try:
        modules = {_name(module["name"], encoder): _degrees(module) for module in fields["modules"]}
        settings = {name: fields[name] for name in ("microbatches", "schedule", "placement")}
        return Schedule(modules, **settings)
    except KeyError as error:
        raise _refused(f"`{error.args[0]}` is missing") from error
    except (TypeError, AttributeError) as error:
        raise _refused(str(error)) from error


def read_plan(plan: PlanSource) -> Mapping[str, Any]:
    """Returns the fields of a plan, or of a file with the output of ``dflop plan --json``.

    Raises:
        ConfigError: the file cannot be read.
    """
    return plan if isinstance(plan, Mapping) else _read(plan)


def _read(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    try:
        fields = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise _refused(f"could not read `{os.fspath(path)}`: {error}") from error
    if not isinstance(fields, dict):
        raise _refused(f"`{os.fspath(path)}` has no fields")
    return fields


def _name(name: str, encoder: str) -> str:
    return encoder if name == "encoder" else name


def _degrees(module: Mapping[str, Any]) -> dict[str, Any]:
    experts = module.get("ep") or 1
    if experts > 1:
        reason = f"divides the experts of `{module['name']}` over {experts} ranks, which no schedule does"
        raise ConfigError(f"plan: it {reason}; plan with `space.expert_parallel=1`", "config")
    return {name: module[name] for name in ("layers", "dp", "tp")}


def _refused(reason: str) -> ConfigError:
    return ConfigError(f"plan: expected the output of `dflop plan --json`: {reason}", "config")
