"""Describes how modules were measured, for the metadata of a profile."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from dflop.torch._clock import device_name
from dflop.torch._layers import watched
from dflop.torch._measure import ModuleReport
from dflop.torch._stage_chain import StageChain
from dflop.torch._subject import Subject, call_module
from dflop.torch._tensors import tensors_of
from dflop.torch._whole import EncoderPart, LlmPart
from dflop.torch.model_parts import head_of
from dflop.torch.token_loss import IGNORED

SEPARATE_KERNELS = ("flash", "varlen", "flex", "paged")
"""Words in names of attention implementations that skip pairs of different sequences."""


def metadata_of(
    subjects: Sequence[Subject],
    dtype: torch.dtype | None,
    recomputes: Mapping[str, str],
    measured: Mapping[str, str],
) -> dict[str, str]:
    """Returns device, versions, and what was measured of each module."""

    def of_each(value: Callable[[Subject], str]) -> str:
        values = {subject.name: value(subject) for subject in subjects}
        return next(iter(values.values())) if len(set(values.values())) == 1 else _pairs(values)

    first = subjects[0]
    metadata = {
        "device": device_name(first.device),
        "torch": str(torch.__version__),
        "dtype": of_each(lambda subject: str(dtype or _dtype(subject.module)).removeprefix("torch.")),
        "trained": of_each(lambda subject: _trained(subject.module)),
        "recompute": of_each(lambda subject: recomputes[subject.name]),
        "clock": first.clock.name,
        "measured": _pairs(measured),
        "attention": of_each(_attention),
    }
    packs = {subject.name: subject.packs for subject in subjects if subject.packs is not None}
    chains = {one.name: one.module for one in subjects if isinstance(one.module, StageChain)}
    stages = {
        name: ",".join(f"{own.start}-{own.stop - 1}" for own in one.ranges) for name, one in chains.items()
    }
    metadata |= {"packs": _pairs(packs)} if packs else {}
    return metadata | ({"stages": _pairs(stages)} if stages else {})


def launches_of(reports: Iterable[ModuleReport]) -> dict[str, str]:
    """Returns the microseconds in which the host queues both passes of each module; empty off CUDA."""
    times = {one.module: one.launch_microseconds for one in reports if one.launch_microseconds is not None}
    return {"launches": _pairs({name: f"{time:.0f}" for name, time in times.items()})} if times else {}


def recompute_of(subject: Subject) -> str:
    """Runs the shortest sequence once to detect whether the backward pass recomputes layers."""
    with watched(subject.module) as seen:
        subject.runs([(subject.sequences.short,)])
    return "layers" if True in seen else "none"


def packs_of(subject: Subject) -> str | None:
    """Returns what becomes of the boundaries in a packed row of an LLM; `None` if that is not known.

    - ``separate``: attention computes no pairs of different sequences
    - ``masked``: it computes them, and masks them
    - ``joined``: sequences attend to those before them in the row

    Changes the first of two sequences, and compares what the module returns for the second one.
    """
    length = 8
    made = subject.make_inputs([length, length])
    is_chain = isinstance(subject.module, StageChain)
    inputs = made[0] if is_chain else made
    changed = next((name for name in ("input_ids", "inputs_embeds") if name in _keys(inputs)), None)
    if subject.name != "llm" or changed is None:
        return None
    if is_chain:
        # Stages return a loss only: of the second sequence.
        inputs["labels"][:, : length + 1] = IGNORED
    other = copy.copy(inputs)
    other[changed] = inputs[changed].clone()
    other[changed][:, :length] = other[changed][:, :length].flip(1)
    subject.module.eval()
    try:
        with torch.no_grad(), subject.casting():
            if is_chain:
                found: list[torch.Tensor | None] = [subject.module(one) for one in (inputs, other)]
            else:
                found = [_second_rows(call_module(subject.module, one), length) for one in (inputs, other)]
    finally:
        subject.module.train()
    if found[0] is None or found[1] is None:
        return None
    tolerance = 8 * torch.finfo(found[0].dtype).eps * float(found[0].abs().max())
    if float((found[0] - found[1]).abs().max()) > tolerance:
        return "joined"
    return "separate" if any(word in _attention(subject) for word in SEPARATE_KERNELS) else "masked"


def _keys(inputs: Any) -> Sequence[str]:
    return list(inputs) if isinstance(inputs, Mapping) else []


def _second_rows(output: Any, length: int) -> torch.Tensor | None:
    """Returns the rows of the second sequence in the first output with a row per token."""
    floating = (tensor for tensor in tensors_of(output) if tensor.is_floating_point() and tensor.dim() > 2)
    return next((tensor[:, length:] for tensor in floating if tensor.shape[1] == 2 * length), None)


def measured_of(subject: Subject) -> str:
    """Returns the classes of the parts that ran, and where the backward pass started."""
    module = subject.module
    if isinstance(module, StageChain):
        return module.measured
    if isinstance(module, EncoderPart):
        parts = [module.tower, *(module.projectors if module.runs_projector else ())]
        return "+".join(type(part).__name__ for part in parts)
    inner = module.llm if isinstance(module, LlmPart) else module
    head = module.head if isinstance(module, LlmPart) else head_of(module)
    inputs = subject.make_inputs([subject.sequences.short])
    ends = [f"head({type(head).__name__})"] if head is not None else []
    ends += ["loss"] if subject.loss is not None or "labels" in _keys(inputs) else []
    return "+".join([type(inner).__name__, *ends])


def _attention(subject: Subject) -> str:
    config = getattr(subject.module, "config", None)
    return str(getattr(config, "_attn_implementation", None) or "own")


def _pairs(values: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


def _dtype(module: torch.nn.Module) -> torch.dtype:
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.get_default_dtype())


def _trained(module: torch.nn.Module) -> str:
    asks = {parameter.requires_grad for parameter in module.parameters()}
    return "partly" if len(asks) > 1 else ("all" if asks == {True} else "nothing")
