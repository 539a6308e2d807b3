"""State of a pipeline under names that do not depend on the cut into stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from dflop.torch._pipeline_layout import RankLayout

Entries = dict[str, Any]
OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
GROUPS = ("state.", "param_groups.")


class StageNames:
    """Names of parameters in a checkpoint: ``llm.…``, or ``llm.1.…`` if two stages use a name.

    - `layout`: stages of the rank
    - `found`: by rank, the names in each of its stages
    """

    def __init__(self, layout: RankLayout, found: Sequence[Mapping[int, Sequence[str]]]) -> None:
        uses: dict[str, Counter[str]] = {}
        for stage, names in {stage: names for own in found for stage, names in own.items()}.items():
            uses.setdefault(layout.modules[stage], Counter()).update(names)
        self._prefixes: dict[str, str] = {}
        for stage in layout.own:
            module = layout.modules[stage]
            numbered = f"{module}.{layout.number(stage)}."
            is_unique = max(uses.get(module, Counter()).values(), default=0) <= 1
            self._prefixes[numbered] = f"{module}." if is_unique else numbered

    def saved(self, name: str) -> str:
        """Returns the name in a checkpoint."""
        module, number, rest = name.split(".", 2)
        return self._prefixes[f"{module}.{number}."] + rest


def stage_names(stage: torch.nn.Module) -> list[str]:
    """Returns the names in the state of a stage."""
    return list(get_model_state_dict(stage))


def model_state(module: torch.nn.Module, names: StageNames) -> Entries:
    """Returns the state of all stages by saved name."""
    return {names.saved(name): value for name, value in get_model_state_dict(module).items()}


def load_model(module: torch.nn.Module, names: StageNames, state: Mapping[str, Any]) -> None:
    """Sets the state of all stages; a name that is missing or unexpected is an error."""
    own = {names.saved(name): name for name in get_model_state_dict(module)}
    set_model_state_dict(module, {own.get(name, name): value for name, value in state.items()})


class OptimizerState:
    """State of an optimizer of a pipeline, for ``torch.distributed.checkpoint``."""

    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, names: StageNames) -> None:
        self._module, self._optimizer, self._names = module, optimizer, names

    def state_dict(self) -> Entries:
        """Returns the state of every parameter, such as ``state.llm.….exp_avg``, and its settings."""
        return {self._saved(name): value for name, value in self._own().items()}

    def load_state_dict(self, state_dict: Entries) -> None:
        """Sets the state of every parameter and its settings."""
        own = {self._saved(name): name for name in self._own()}
        entries = {own.get(name, name): value for name, value in state_dict.items()}
        set_optimizer_state_dict(self._module, self._optimizer, entries, options=OPTIONS)

    def _own(self) -> Entries:
        return get_optimizer_state_dict(self._module, self._optimizer, options=OPTIONS)

    def _saved(self, name: str) -> str:
        group = next(group for group in GROUPS if name.startswith(group))
        return group + self._names.saved(name.removeprefix(group))
