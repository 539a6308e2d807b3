"""Makes the subjects of a profile from the arguments of `dflop.torch.profile`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, TypeVar

import torch

from dflop.torch._clock import Clock
from dflop.torch._inputs import MakeInputs, default_inputs
from dflop.torch._layers import cut_to, full_attention_layers, layer_count
from dflop.torch._sequences import Sequences
from dflop.torch._stage_chain import StageChain
from dflop.torch._subject import Subject, borrowed
from dflop.torch._whole import EncoderPart, LlmPart
from dflop.torch.model_parts import find_parts

T = TypeVar("T")
ItemTokens = int | Literal["free"]
Loss = Callable[[Any], torch.Tensor]


def modules_of(
    module: torch.nn.Module | None,
    llm: torch.nn.Module | None,
    encoder: torch.nn.Module | None,
    audio: torch.nn.Module | None,
) -> dict[str, torch.nn.Module]:
    """Returns the modules to measure by name: those of a whole model, or the ones that were given.

    Raises `TypeError` if there are none, or the same one twice.
    """
    if module is not None and llm is not None:
        raise TypeError("pass the LLM once: without a name, or as `llm`")
    parts = find_parts(module) if module is not None else None
    if parts is not None:
        if encoder is not None or audio is not None:
            raise TypeError(
                "a whole model has its own encoders: pass it alone, or modules as `llm`, `encoder`"
            )
        encoders = {kind: EncoderPart(kind, parts) for kind in parts.encoders}
        return {**encoders, "llm": LlmPart(parts)}
    found = {"vision": encoder, "audio": audio, "llm": module if module is not None else llm}
    modules = {kind: one for kind, one in found.items() if one is not None}
    if not modules:
        raise TypeError("pass a whole model, or a module to measure: `llm`, `encoder` or `audio`")
    return modules


def refuse_beside_split(arguments: Mapping[str, Any]) -> None:
    """Raises `TypeError` for an argument that a split does not take."""
    found = [name for name, value in arguments.items() if value is not None]
    if found:
        raise TypeError(f"a split has its own modules, layers, loss and ranks: leave out `{found[0]}`")


def make_subject(
    kind: str,
    module: torch.nn.Module,
    clock: Callable[[torch.device], Clock],
    agree: Callable[[list[float]], list[float]],
    *,
    device: str | torch.device | None,
    dtype: torch.dtype | None,
    make_inputs: MakeInputs | None,
    item_tokens: ItemTokens | None,
    loss: Loss | None,
    layers: int | None,
) -> Subject:
    """Returns a module with the settings to run it with, on its device."""
    if device is not None:
        module.to(device)
    make, sequences = _inputs(kind, module, make_inputs, item_tokens)
    first = next(module.parameters(), None)
    place = first.device if first is not None else torch.device(device or "cpu")
    if isinstance(module, EncoderPart):
        with borrowed(module, place):
            module.choose_way(make([sequences.short]))
        make = _as_argument(make)
    chain = module if isinstance(module, StageChain) else None
    if chain is not None:
        make = chain.as_microbatches(make)
        with borrowed(chain, place):
            chain.try_out(*make([sequences.short]))
    count = layers or layer_count(module)
    own = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    return Subject(
        name=kind,
        module=module,
        sequences=sequences,
        make_inputs=make,
        layers=count,
        cut=chain.cut_to if chain else partial(cut_to, module),
        attention_layers=chain.attention_layers if chain else partial(full_attention_layers, kind, module),
        clock=clock(place),
        device=place,
        autocast=None if dtype is None or own == {dtype} else dtype,
        loss=loss,
        agree=agree,
    )


def setting_of(setting: Mapping[str, T] | T | None, kind: str, modules: Mapping[str, Any]) -> T | None:
    """Returns the setting of one module.

    Raises `ValueError` for a setting of a module that is not measured, and `TypeError` for one setting of
    several modules.
    """
    if isinstance(setting, Mapping):
        unknown = [name for name in setting if name not in modules]
        if unknown:
            raise ValueError(f"expected settings for {', '.join(modules)}, found one for {unknown[0]}")
        return setting.get(kind)
    if setting is not None and len(modules) > 1:
        raise TypeError(f"several modules are measured: give each setting by name, as in {{{kind!r}: ...}}")
    return setting


def agreement(
    group: Any, device: str | torch.device | None
) -> tuple[Callable[[list[float]], list[float]], int]:
    """Returns a function that gives all ranks of a group the slowest rank's times, and the group's size."""
    if group is None:
        return list, 1
    import torch.distributed as dist

    place = torch.device("cuda") if "nccl" in dist.get_backend(group) else torch.device("cpu")

    def agree(times: list[float]) -> list[float]:
        slowest = torch.tensor(times, dtype=torch.float64, device=place)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        return [float(time) for time in slowest.tolist()]

    return agree, dist.get_world_size(group)


def _inputs(
    kind: str, module: torch.nn.Module, make: MakeInputs | None, item_tokens: ItemTokens | None
) -> tuple[MakeInputs, Sequences]:
    if make is None:
        if isinstance(module, StageChain):
            return default_inputs(kind, module.source, needs_ids=True)
        return default_inputs(kind, module.tower if isinstance(module, EncoderPart) else module)
    if kind == "llm" or item_tokens == "free":
        return make, Sequences.text()
    if item_tokens is None:
        raise TypeError(
            f"{kind}: make_inputs needs item_tokens: the tokens of an item, or 'free' where items differ"
        )
    return make, Sequences.items(item_tokens)


def _as_argument(make: MakeInputs) -> MakeInputs:
    """Returns inputs as the one argument of an `EncoderPart`."""
    return lambda lengths: (make(lengths),)
