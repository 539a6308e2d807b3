"""Cuts a model of transformers to the layers of a stage, and moves hidden states in and out of them.

The model keeps its own code. Layers outside of the stage stay in their list without weights: one before the
stage returns the rows that the stage receives, the first one behind it ends the forward pass with the hidden
states. Weights that the model uses before its layers are zeros in later stages, where their results are
replaced by the received rows; all other weights of other stages are on the meta device, so that a use fails.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dflop._description.decoder import innermost
from dflop._description.parts import parameter_count
from dflop.errors import ModelError
from dflop.torch.model_parts import WORDS, ModelParts, find_parts, head_of

LLM = "llm"
EARLY = ("embed", "conv", "patch", "position", "class_", "cls_")
"""Words in names of weights that an encoder uses before its layers, wherever it registers them."""
LATE = ("merger", "layernorm_post", "ln_post")
"""Words in names of weights that an encoder uses behind its layers, wherever it registers them."""


class Left(Exception):
    """Ends a forward pass behind the last layer of a stage.

    - `hidden`: hidden states that the layer returned
    """

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__("hidden states have left the stage")
        self.hidden = hidden


@dataclass(frozen=True)
class Place:
    """Where a model uses a weight.

    - `module`: ``llm``, ``vision`` or ``audio``
    - `layer`: number of the layer; None outside of the layers
    - `is_early`: whether it is used before the layers, if outside of them
    """

    module: str
    layer: int | None
    is_early: bool


@dataclass(frozen=True)
class Share:
    """What a stage has of a model: layers of a module, and what is before the first or behind the last."""

    module: str
    layers: range
    is_first: bool
    is_last: bool

    def has(self, place: Place) -> bool:
        """Returns whether the stage has the weights of a place."""
        if place.module != self.module:
            return False
        if place.layer is not None:
            return place.layer in self.layers
        return self.is_first if place.is_early else self.is_last


class Structure:
    """Modules of a model with their lists of layers.

    - `parts`: encoders, LLM and head
    - `roots`, `layers`: by module, the decoder or tower and its list of layers; `layer_paths`: its name
    - `places`: where the model uses each parameter and each buffer in a checkpoint, by name
    - `tied`: names of weights that others are tied to
    """

    def __init__(self, model: Any) -> None:
        found = find_parts(model)
        self.parts = ModelParts(model, innermost(model), head_of(model), {}) if found is None else found
        self.roots = {LLM: self.parts.llm, **{kind: one.tower for kind, one in self.parts.encoders.items()}}
        self.layers = {name: _layers(name, root) for name, root in self.roots.items()}
        paths = {id(one): path for path, one in model.named_modules()}
        self._names = {name: [f"{paths[id(root)]}."] for name, root in self.roots.items()}
        for kind, encoder in self.parts.encoders.items():
            self._names[kind] += [f"{paths[id(one)]}." for one in encoder.projectors]
        if self.parts.head is not None:
            self._names[LLM].append(f"{paths[id(self.parts.head)]}.")
        self.layer_paths = {name: paths[id(one)] for name, one in self.layers.items()}
        self.tied = set((getattr(model, "all_tied_weights_keys", None) or {}).values())
        is_behind: set[str] = set()
        self.places: dict[str, Place] = {}
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        kept = model.state_dict()
        names += [name for name, _ in model.named_buffers() if name in kept]
        for name in names:
            self.places[name] = self._place(name, is_behind)

    def _place(self, name: str, is_behind: set[str]) -> Place:
        """Returns the place of a weight, in the order of the names in the model."""
        module = self._module(name)
        path = f"{self.layer_paths[module]}."
        if name.startswith(path):
            is_behind.add(module)
            return Place(module, int(name.removeprefix(path).split(".")[0]), False)
        tower = self._names[module][0]
        own = name.removeprefix(tower)
        is_early = name.startswith(tower) and not any(word in own for word in LATE)
        is_early &= module not in is_behind or any(word in own for word in EARLY)
        return Place(module, None, is_early)

    def _module(self, name: str) -> str:
        for module, paths in self._names.items():
            if name.startswith(tuple(paths)):
                return module
        kinds = list(self.parts.encoders)
        named = [kind for kind in kinds if any(word in name for word in WORDS[kind])]
        if len(named or kinds) != 1:
            raise ModelError(f"`{name}` belongs to none of {', '.join(self._names)}")
        return (named or kinds)[0]


def _layers(name: str, root: torch.nn.Module) -> torch.nn.ModuleList:
    """Returns the longest list of modules outside of other lists; of equally long ones, the larger one."""
    lists: dict[str, torch.nn.ModuleList] = {}
    for path, module in root.named_modules():
        if isinstance(module, torch.nn.ModuleList) and not path.startswith(tuple(f"{one}." for one in lists)):
            lists[path] = module
    found = max(lists.values(), key=lambda one: (len(one), parameter_count(list(one))), default=None)
    if not found:
        raise ModelError(f"`{type(root).__name__}` of `{name}` has no list of layers to cut")
    return found


class Passage:
    """Way of hidden states through the layers of a stage.

    Rows are ``[rows, width]``; layers may have further leading dimensions.
    """

    def __init__(self, layers: torch.nn.ModuleList, own: range) -> None:
        self.own = own
        self._first = [layers[own.start]]
        self._rows: torch.Tensor | None = None
        self._taken = 0
        self._returned: int | None = None
        self._early: list[tuple[torch.nn.Module, str, torch.Tensor]] = []
        for number, layer in enumerate(layers):
            if number < own.start:
                layer.forward = functools.partial(self._enter, number)
            elif number >= own.stop:
                layer.forward = self._leave

    def begin(self, rows: torch.Tensor | None) -> None:
        """Starts a forward pass.

        - `rows`: received rows; None in the first stage
        """
        self._rows, self._taken = rows, 0

    def approach(self) -> None:
        """Lets the weights before the layers be zeros until the model has reached the layers.

        Called before each run of the model: a forward pass has one for each kind of media.
        """
        device = None if self._rows is None else self._rows.device
        for module, name, weight in self._early:
            zero = torch.zeros((), dtype=weight.dtype, device=device)
            object.__setattr__(module, name, zero.expand(weight.shape))

    def leave_out(self, module: torch.nn.Module, name: str, is_early: bool) -> None:
        """Removes a weight, which stays as a tensor on the meta device."""
        kind = module._parameters if name in module._parameters else module._buffers
        removed = kind.pop(name)
        if removed is None:
            return
        weight = torch.empty_like(removed, device="meta", requires_grad=False)
        object.__setattr__(module, name, weight)
        if is_early and self.own.start:
            self._early.append((module, name, weight))

    def rows_behind(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        """Returns the received rows that a layer before the stage has returned, ``[rows, width]``.

        - `number`: number of the layer
        - `rows`: received rows
        """
        del number
        return rows

    def _enter(self, number: int, *args: Any, **kwargs: Any) -> Any:
        hidden = _hidden(args, kwargs)
        if self._rows is None:
            raise RuntimeError("a stage that is not the first one has received no rows")
        count = hidden.shape[:-1].numel()
        if self._taken + count > len(self._rows):
            raise RuntimeError(
                f"the layers read {self._taken + count} rows, the stage has received {len(self._rows)}: "
                "a model that runs its layers more than once for a microbatch cannot be split"
            )
        rows = self.rows_behind(number, self._rows[self._taken : self._taken + count])
        # Models view the states of a layer in other shapes.
        rows = rows.reshape(hidden.shape).contiguous()
        if self._returned is None:
            # Without hooks, which count the layers that run.
            with torch.no_grad():
                returned = self._first[0].forward(*args, **kwargs)
            self._returned = len(returned) if isinstance(returned, tuple) else 0
        if number + 1 == self.own.start:
            self._taken += count
            for module, name, weight in self._early:
                object.__setattr__(module, name, weight)
        return (rows, *[None] * (self._returned - 1)) if self._returned else rows

    def _leave(self, *args: Any, **kwargs: Any) -> Any:
        raise Left(_hidden(args, kwargs))


def _hidden(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    hidden = args[0] if args else kwargs["hidden_states"]
    if not isinstance(hidden, torch.Tensor):
        raise TypeError(f"expected hidden states of a layer, found {type(hidden).__name__}")
    return hidden


def cut(model: Any, structure: Structure, share: Share, passage: Passage) -> None:
    """Leaves out all weights of a model that a stage does not have.

    Of two tied weights, a stage that has the one which follows the other has both.
    """
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    kept = {name for name, place in structure.places.items() if share.has(place)}
    kept |= {source for target, source in tied.items() if target in kept and source in structure.places}
    model.all_tied_weights_keys = {target: source for target, source in tied.items() if target in kept}
    modules = dict(model.named_modules())
    for name, place in structure.places.items():
        if name not in kept:
            path, _, own = name.rpartition(".")
            passage.leave_out(modules[path], own, place.module == share.module and place.is_early)
    for module, layers in structure.layers.items():
        for number, layer in enumerate(layers):
            if module != share.module or number not in share.layers:
                _leave_out_buffers(layer, passage)
        root = structure.roots[module]
        if module != share.module and next(root.parameters(), None) is None:
            _place_with(root, model)


def _place_with(root: torch.nn.Module, model: torch.nn.Module) -> None:
    """Makes a module without weights be where a model is, of its type, for code that asks."""
    own = type(root)
    names = ("device", "dtype")
    asked = {name: property(lambda _, name=name: getattr(next(model.parameters()), name)) for name in names}
    root.__class__ = type(own.__name__, (own,), {**asked, "__module__": own.__module__})


def _leave_out_buffers(layer: torch.nn.Module, passage: Passage) -> None:
    for module in layer.modules():
        for name in list(module._buffers):
            passage.leave_out(module, name, False)
