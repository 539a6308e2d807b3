"""Runs the stages of a split one after another, as a profile measures them.

A module is a chain of three stages, as ranks of a `Pipeline` build them: the first one has what is before the
layers too, the last one what is behind them, the one between has layers only. Without it the chain has fewer
layers, and the difference is the time of layers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch

from dflop._description.decoder import innermost
from dflop.errors import ModelError
from dflop.schedule import RoleMicrobatch
from dflop.torch._inputs import MakeInputs, config_of
from dflop.torch._launches import Launches
from dflop.torch._layers import full_attention_count
from dflop.torch._spans import ModuleSpans
from dflop.torch._stage_modules import MEDIA
from dflop.torch._subject import Lengths, Subject
from dflop.torch._tensors import tensors_of
from dflop.torch._whole import feature_arguments
from dflop.torch.model_parts import find_parts, head_of
from dflop.torch.splitting import LLM, Split

StageBuild = Callable[[str, range, bool, bool, None], torch.nn.Module]
STAGE_RUNS = 3
"""Runs of the largest pack that stages are timed in."""


@dataclass(frozen=True)
class StageTimes:
    """Time of a stage in the largest pack.

    - `layers`: numbers of its layers in the module
    - `microseconds`: mean time of both passes; stages run one after another
    """

    layers: range
    microseconds: float


class StageChain(torch.nn.Module):
    """Stages of one module.

    - `kind`: ``llm``, ``vision`` or ``audio``
    - `own_layers`: all layers that run, in order
    - `ranges`: numbers of the layers of each stage
    """

    def __init__(self, kind: str, split: Split, ranges: Sequence[range], build: StageBuild) -> None:
        super().__init__()
        self.kind, self.ranges = kind, list(ranges)
        count = split.layers[kind]
        stages = []
        for own in ranges:
            stage = build(kind, own, own.start == 0, own.stop == count, None)
            if not isinstance(stage, torch.nn.Module) or not hasattr(stage, "model"):
                found = type(stage).__name__
                raise TypeError(f"build returned {found}, expected a stage with the cut model as `model`")
            stages.append(stage)
        pairs = zip(stages, ranges, strict=True)
        layers = [layer for one, own in pairs for layer in split._layers_in(one, kind, own)]
        # Before the stages: the list of a stage also has the layers of others, without weights.
        self.own_layers = torch.nn.ModuleList(layers)
        self.stages = torch.nn.ModuleList(stages)
        model: Any = stages[0].model
        self._parts = find_parts(model)
        self.model_name = type(model).__name__
        self.config = model.config if kind == LLM else config_of(kind, self.source)

    @property
    def source(self) -> torch.nn.Module:
        """Tower, or model of an LLM, whose inputs are generated."""
        if self.kind == LLM or self._parts is None:
            model: torch.nn.Module = self.stages[0].model  # type: ignore[assignment]
            return model
        return self._parts.encoders[self.kind].tower

    @property
    def measured(self) -> str:
        """Classes of the parts that run, and where the backward pass starts."""
        if self.kind != LLM and self._parts is not None:
            encoder = self._parts.encoders[self.kind]
            return "+".join(type(part).__name__ for part in (encoder.tower, *encoder.projectors))
        model: Any = self.stages[0].model
        head = head_of(model)
        llm = innermost(model) if self._parts is None else self._parts.llm
        ends = [f"head({type(head).__name__})"] if head is not None else []
        return "+".join([type(llm).__name__, *ends, "loss"])

    def forward(self, microbatch: RoleMicrobatch) -> torch.Tensor:
        rows: torch.Tensor | None = None
        for stage in self.stages:
            if rows is not None:
                rows = _with_levels(rows, getattr(stage, "levels_read", 0))
            rows = stage(rows, microbatch)
        assert rows is not None
        return rows

    @contextmanager
    def cut_to(self, count: int) -> Iterator[None]:
        """Leaves out the stage between the first and the last one temporarily.

        Raises `ValueError` if the chain then does not have `count` layers.
        """
        stages, layers = self.stages, self.own_layers
        if count != len(layers):
            first, last = len(self.ranges[0]), len(self.ranges[-1])
            if len(stages) < 3 or first + last != count:
                raise ValueError(f"cannot cut the stages of {self.kind} to {count} layers")
            self.own_layers = torch.nn.ModuleList([*layers[:first], *layers[len(layers) - last :]])
            self.stages = torch.nn.ModuleList([stages[0], stages[-1]])
        try:
            yield
        finally:
            self.stages, self.own_layers = stages, layers

    def attention_layers(self, count: int) -> int:
        """Returns how many layers of the chain, cut to `count`, have attention over whole images."""
        is_whole = count == sum(map(len, self.ranges))
        ranges = self.ranges if is_whole else [self.ranges[0], self.ranges[-1]]
        return full_attention_count(self.kind, self, [number for own in ranges for number in own])

    def as_microbatches(self, make: MakeInputs) -> MakeInputs:
        """Returns inputs as the one argument of the chain."""

        def made(lengths: list[int]) -> tuple[RoleMicrobatch]:
            inputs = make(lengths)
            if not isinstance(inputs, Mapping):
                found = type(inputs).__name__
                raise TypeError(f"{self.kind}: make_inputs returned {found}, expected a mapping")
            return (self._microbatch(lengths, inputs),)

        return made

    def _microbatch(self, lengths: Sequence[int], inputs: Mapping[str, Any]) -> RoleMicrobatch:
        is_llm = self.kind == LLM
        if not is_llm:
            media = list(MEDIA[self.kind].values())
            if not any(name in inputs for name in media) or self.kind == "audio":
                inputs = {**feature_arguments(self.kind, inputs, media[0]), **inputs}
        microbatch = RoleMicrobatch(inputs)
        device = next(tensors_of(inputs)).device
        ends = torch.tensor([0, *lengths], device=device).cumsum(0).int()
        microbatch.sample_keys = [str(number) for number in range(len(lengths))]
        microbatch.tokens = sum(lengths) if is_llm else 0
        microbatch.cu_seqlens = ends if is_llm else None
        microbatch.max_seqlen = max(lengths) if is_llm else 0
        microbatch.media_rows = torch.empty(0, dtype=torch.long, device=device) if is_llm else None
        microbatch.media_runs = []
        return microbatch

    def try_out(self, microbatch: RoleMicrobatch) -> None:
        """Runs the chain on its smallest inputs without gradients.

        Raises `TypeError` if the stages refuse them.
        """
        try:
            with torch.no_grad():
                self(microbatch)
        except Exception as error:
            raise TypeError(
                f"{self.kind}: the stages refuse the inputs ({type(error).__name__}: {error}); pass "
                "make_inputs, which returns the tensors of a microbatch, and item_tokens"
            ) from error


def chains_of(
    split: Split,
    build: StageBuild | None,
    device: str | torch.device | None,
    cut_layers: Sequence[int] | None,
) -> dict[str, StageChain]:
    """Builds the stages of all modules on a device, encoders first.

    Raises:
        ValueError: the stages cannot have these layers.
    """
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    names = sorted(split.layers, key=lambda name: name == LLM)
    chains = {name: _chain(name, split, cut_layers, build or split).to(device) for name in names}
    if any(one.requires_grad for name in names if name != LLM for one in chains[name].parameters()):
        _pass_gradients_on(chains[LLM])
    return chains


def _chain(name: str, split: Split, cut_layers: Sequence[int] | None, build: StageBuild) -> StageChain:
    layers = split.layers[name]
    try:
        return StageChain(name, split, stage_layers(name, layers, cut_layers), build)
    except ModelError:
        # The last stage of an encoder may need hidden states of many layers.
        if name == LLM or cut_layers is not None:
            raise
        return StageChain(name, split, [range(layers)], build)


def layer_counts(chain: StageChain) -> tuple[int, ...]:
    """Returns the numbers of layers that a chain is measured with: with and without its inner stage."""
    counts = [len(own) for own in chain.ranges]
    return (sum(counts),) if len(counts) < 3 else (counts[0] + counts[-1], sum(counts))


def stage_layers(name: str, layers: int, counts: Sequence[int] | None) -> list[range]:
    """Returns the layers of the stages that a module is measured in.

    - `counts`: numbers of layers that run, with and without the stage between the first and the last one;
      `None` for all and half of them

    Raises:
        ValueError: there are more than two counts, or the module has fewer layers.
    """
    if counts is None:
        counts = (max(layers // 2, min(layers, 2)), layers)
    low, high = min(counts), max(counts)
    if not 1 <= len(set(counts)) <= 2:
        raise ValueError(f"cut_layers: a split is measured with one or two counts, found {len(set(counts))}")
    if low < min(layers, 2) or high > layers:
        raise ValueError(
            f"cut_layers: {name} has {layers} layers, expected {min(layers, 2)} to {layers}, found "
            f"{low if low < min(layers, 2) else high}"
        )
    if layers == 1:
        return [range(1)]
    front = (low + 1) // 2
    back = low - front
    start = front + (layers - high) // 2
    middle = [range(start, start + high - low)] if high > low else []
    return [range(front), *middle, range(layers - back, layers)]


def stage_times(subject: Subject, shape: Lengths) -> tuple[StageTimes, ...]:
    """Times the stages of a chain, which run one after another in every pass.

    - `shape`: tokens of the sequences or items
    """
    chain: Any = subject.module
    spans = [ModuleSpans(stage, subject.clock, Launches(subject.clock)) for stage in chain.stages]
    try:
        subject.runs([shape] * STAGE_RUNS)
    finally:
        for one in spans:
            one.close()
    times = [
        mean(sum(subject.clock.microseconds(*span) for span in run.spans) for run in one.passes)
        for one in spans
    ]
    return tuple(map(StageTimes, chain.ranges, subject.agree(times)))


def _with_levels(rows: torch.Tensor, levels: int) -> torch.Tensor:
    """Returns rows as another stage than the next one reads them, with zeros in further levels."""
    if rows.ndim == (2 if levels == 0 else 3) and (levels == 0 or rows.shape[1] == levels):
        return rows
    hidden = rows if rows.ndim == 2 else rows[:, 0]
    if levels == 0:
        return hidden
    zeros = hidden.new_zeros(len(hidden), levels - 1, hidden.shape[-1])
    return torch.cat([hidden[:, None], zeros], 1)


def _pass_gradients_on(chain: StageChain) -> None:
    """Lets the rows of a frozen embedding need gradients, as rows of a trained encoder among them do."""
    model: Any = chain.stages[0].model
    embedding = model.get_input_embeddings()
    if not any(one.requires_grad for one in embedding.parameters()):
        embedding.register_forward_hook(lambda _module, _args, rows: rows.requires_grad_())
