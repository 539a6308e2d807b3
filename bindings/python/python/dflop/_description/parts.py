"""Finds the parts of a model by structure: encoders with their layers and connectors, the decoder, the head.

An encoder is what a function such as ``get_image_features`` runs. Its layers are the list of modules with the
most parameters among those that run; its connectors are the modules outside the layers that run after the
first layer and return vectors as wide as the LLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from dflop.errors import ModelError


@dataclass(frozen=True)
class Layers:
    """A list of layers.

    Attributes:
        path: of the list in the model.
        modules: the layers in order.
    """

    path: str
    modules: tuple[nn.Module, ...]


def parameter_count(modules: Sequence[nn.Module]) -> int:
    """Returns the number of parameters in modules, those that are shared once."""
    return sum({id(one): one.numel() for module in modules for one in module.parameters()}.values())


def find_layers(
    root: nn.Module,
    within: str = "",
    ran: Sequence[str] | None = None,
    work: Callable[[Sequence[Layers]], Sequence[int]] | None = None,
) -> Layers | None:
    """Returns the list of layers: that with the most parameters or work, outside of other such lists.

    A list with one module is chosen only if there is no longer one: connectors have such lists.

    Args:
        root: module to search.
        within: path of the root in the model.
        ran: paths of the modules that run; all by default.
        work: counts the work of lists if there are several. Default: their parameters.
    """
    candidates: list[Layers] = []
    for path, module in root.named_modules():
        whole = ".".join(part for part in (within, path) if part)
        if not isinstance(module, nn.ModuleList) or len(module) == 0:
            continue
        if ran is not None and not any(name.startswith(f"{whole}.") for name in ran):
            continue
        if any(whole.startswith(f"{outer.path}.") for outer in candidates):
            continue
        candidates.append(Layers(whole, tuple(module)))
    longer = [one for one in candidates if len(one.modules) > 1]
    candidates = longer or candidates
    if not candidates:
        return None
    if work is None or len(candidates) == 1:
        counts: Sequence[int] = [parameter_count(one.modules) for one in candidates]
    else:
        counts = work(candidates)
    return max(zip(counts, candidates, strict=True), key=lambda one: one[0])[1]


def whole_tower(model: nn.Module, ran: Sequence[str], excluded: Sequence[str]) -> Layers | None:
    """Returns the module with the most parameters among those that ran as one layer, for a tower without a list.

    Args:
        model: the whole model.
        ran: paths of the modules that run, in order.
        excluded: paths that hold other parts of the model as well.
    """
    modules = dict(model.named_modules())
    paths = [path for path in ran if path and path not in excluded]
    counts = {path: parameter_count([modules[path]]) for path in paths}
    if not any(counts.values()):
        return None
    path = max(paths, key=lambda one: counts[one])
    return Layers(path, (modules[path],))


def find_connectors(model: nn.Module, layers: Layers, ran: dict[str, int], width: int) -> list[str]:
    """Returns the paths of an encoder's connectors.

    Args:
        model: the whole model.
        layers: layers of the encoder.
        ran: modules that ran in order, with the width of their output.
        width: width of the LLM.
    """
    order = list(ran)
    first = next((at for at, path in enumerate(order) if path.startswith(f"{layers.path}.")), 0)
    modules = dict(model.named_modules())
    found: list[str] = []
    for path in order[first:]:
        is_layer = path.startswith(f"{layers.path}.") or layers.path.startswith(f"{path}.") or not path
        is_inside = any(path.startswith(f"{outer}.") for outer in found)
        if is_layer or is_inside or ran[path] != width or parameter_count([modules[path]]) == 0:
            continue
        found.append(path)
    beside = [path for path in found if not _shares_tower(path, layers.path)]
    return beside or found


def _shares_tower(path: str, layers: str) -> bool:
    """Whether a module is in the same tower as the layers: below the module where both paths separate."""
    own, other = path.split("."), layers.split(".")
    common = 0
    while common < min(len(own), len(other)) and own[common] == other[common]:
        common += 1
    return common > 0 and own[:common] not in (["model"], [])


def roots_beside(path: str, ran: Sequence[str]) -> list[str]:
    """Returns the highest modules that ran, below those that hold the module of a path."""
    holds = {".".join(path.split(".")[:end]) for end in range(path.count(".") + 2)}
    found = []
    for one in ran:
        pieces = one.split(".")
        heads = (".".join(pieces[:end]) for end in range(1, len(pieces) + 1))
        head = next((head for head in heads if head not in holds), None)
        if head is not None and head not in found:
            found.append(head)
    return sorted(found)


def runs_of_equal(values: Sequence[Any]) -> list[tuple[int, int, Any]]:
    """Groups equal values in a row: the first position, the number, the value."""
    found: list[tuple[int, int, Any]] = []
    for at, value in enumerate(values):
        if found and found[-1][2] == value:
            first, count, _ = found[-1]
            found[-1] = (first, count + 1, value)
        else:
            found.append((at, 1, value))
    return found


@dataclass(frozen=True)
class Experts:
    """Experts of a layer.

    Attributes:
        module: holds all of them.
        count: number of experts.
        parameters_each: parameters of one.
        weights_each: parameters of one that are matrices.
    """

    module: nn.Module
    count: int
    parameters_each: int
    weights_each: int


def find_experts(layer: nn.Module) -> Experts | None:
    """Returns the experts of a layer; nothing without experts."""
    for path, module in layer.named_modules():
        if path.split(".")[-1] not in ("experts", "expert"):
            continue
        parameters = list(module.parameters())
        if isinstance(module, nn.ModuleList) and len(module):
            count, least = len(module), 2
        else:
            sizes = {one.shape[0] for one in parameters if one.dim() >= 3}
            if len(sizes) != 1:
                continue
            count, least = sizes.pop(), 3
        weights = sum(one.numel() for one in parameters if one.dim() >= least)
        return Experts(module, count, sum(one.numel() for one in parameters) // count, weights // count)
    return None


def owners(model: nn.Module, modules: dict[str, Sequence[str]]) -> dict[str, dict[int, int]]:
    """Divides the parameters over modules: sizes by identity, under ``""`` those that belong to none.

    Args:
        model: the whole model.
        modules: paths of parts by module; a parameter belongs to the first module with a path that leads to
            it, or else to the first whose paths are in the same child of the model.
    """
    taken: dict[int, str] = {}
    sizes = {id(one): one.numel() for one in model.parameters()}
    for name, paths in modules.items():
        for path, parameter in model.named_parameters(remove_duplicate=False):
            if any(path == own or path.startswith(f"{own}.") for own in paths):
                taken.setdefault(id(parameter), name)
    divided: dict[str, dict[int, int]] = {name: {} for name in (*modules, "")}
    for identity, size in sizes.items():
        divided[taken.get(identity, "")][identity] = size
    if sum(map(len, divided.values())) != len(sizes):
        raise ModelError("parameters do not add up over modules")
    return divided
