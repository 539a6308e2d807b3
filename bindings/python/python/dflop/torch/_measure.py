"""Measures one module into rows of a profile.

First, shapes are chosen, with few runs of each. Then all shapes run in rounds, each once per round, and these
runs go into the profile: other load on the machine affects all shapes equally, and every shape finds caches
and memory as another one left them, as in training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from statistics import median

import torch

from dflop._native import TimeCurve, choose_sizes
from dflop.torch._layers import cut_to, full_attention_layers
from dflop.torch._rows import MICROSECONDS_MIN, Row
from dflop.torch._split import attention_times, linear_times, short_attention
from dflop.torch._subject import Lengths, Run, Subject

CHOOSING_RUNS = 3
"""Runs per shape while shapes are chosen."""
ROUNDS_MIN = 3
"""Minimum number of rounds, even if the time is over: a spread needs this many repeats."""
CHOOSING_SHARES = (0.3, 0.5)
"""Shares of a module's time after which no more packs, and then no more lengths, are chosen."""
PHASES = ("forward", "backward")

MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Settings:
    """Settings of measuring a module; see `dflop.torch.profile`."""

    tokens_max: int
    error_bound: float
    seconds: float
    repeats: int
    tp: int
    cut_layers: tuple[int, ...]
    optimizer: MakeOptimizer | None


@dataclass(frozen=True)
class Chosen:
    """Chosen sizes, and the errors between them.

    - `points`: sizes, ascending
    - `error_max`: largest relative error in the middle of an interval; `None` if no middle was measured
    - `open`: number of intervals whose error is not known to be within the bound
    """

    points: tuple[int, ...]
    error_max: float | None
    open: int


@dataclass(frozen=True)
class ModuleReport:
    """Measured shapes of a module, and the errors between them.

    - `layers`: numbers of transformer layers that ran
    - `shapes`: total tokens of the packs, or numbers of items; `lengths`: tokens of the single sequences,
      `None` if all items are equal
    - `rounds`: runs of every shape in the profile
    """

    module: str
    layers: tuple[int, ...]
    shapes: Chosen
    lengths: Chosen | None
    rounds: int

    @property
    def error_max(self) -> float | None:
        """Largest known relative error between shapes or lengths."""
        chosen = [self.shapes, *([self.lengths] if self.lengths else [])]
        return max((of.error_max for of in chosen if of.error_max is not None), default=None)


class Measurer:
    """Measures one module; its time limit starts with its creation."""

    def __init__(self, subject: Subject, settings: Settings) -> None:
        self._subject, self._settings = subject, settings
        self._start = time.perf_counter()
        self._warm: set[tuple[int, Lengths]] = set()
        counts = settings.cut_layers or (subject.layers,)
        self._depths = [(count, self._attention_layers(count)) for count in sorted(set(counts), reverse=True)]

    def measure(self) -> tuple[list[Row], ModuleReport]:
        """Chooses shapes and measures them.

        Returns rows, including the raw times of whole passes, and a report about them.
        """
        sequences, settings = self._subject.sequences, self._settings
        shapes, drawn = self._choose_shapes()
        lengths = None if sequences.is_fixed else self._choose_lengths(drawn)
        packs = [self._pack(size) for size in shapes.points]
        singles: list[Lengths] = [(length,) for length in lengths.points] if lengths else []
        optimizers = self._optimizers()
        runs: dict[tuple[int, Lengths], list[Run]] = {}
        rows: list[Row] = []
        rounds = 0
        while rounds < settings.repeats and (rounds < ROUNDS_MIN or not self._is_spent(1.0)):
            for depth, (count, _) in enumerate(self._depths):
                with self._cut(count):
                    # Single sequences run with the most layers only; attention scales with layers.
                    wanted = list(dict.fromkeys([*packs, *singles])) if depth == 0 else packs
                    for lengths_, run in zip(wanted, self._runs(count, wanted), strict=True):
                        runs.setdefault((count, lengths_), []).append(run)
                    rows += self._optimizer_row(count, optimizers)
            rounds += 1
        rows += self._whole_rows(runs)
        if not sequences.is_fixed:
            rows += self._split_rows(runs, packs, singles)
        counts = tuple(count for count, _ in self._depths)
        return rows, ModuleReport(self._subject.name, counts, shapes, lengths, rounds)

    def _choose_shapes(self) -> tuple[Chosen, Callable[[int], float]]:
        """Chooses packs, or numbers of items; also returns a predictor of their time."""
        sequences, settings = self._subject.sequences, self._settings
        seen: dict[int, float] = {}
        is_fixed = sequences.is_fixed
        sizes, error_max, open_ = choose_sizes(
            1 if is_fixed else sequences.short,
            max(settings.tokens_max // sequences.short, 2) * (1 if is_fixed else sequences.short),
            error_bound=settings.error_bound,
            snap=(lambda items: max(items, 1)) if is_fixed else sequences.snap_packed,
            measure=lambda sizes: self._times([self._pack(size) for size in sizes], sizes, seen),
            is_spent=lambda: self._is_spent(CHOOSING_SHARES[1] if is_fixed else CHOOSING_SHARES[0]),
        )
        return Chosen(tuple(sizes), error_max, open_), TimeCurve(seen.items()).at

    def _choose_lengths(self, pack: Callable[[int], float]) -> Chosen:
        """Chooses single sequences, given the time of packs."""
        sequences, settings = self._subject.sequences, self._settings

        def predict(points: list[tuple[int, float]], sizes: list[int]) -> list[float]:
            single = {tokens: [time] for tokens, time in points}
            packed = {tokens: [pack(tokens)] for tokens in single}
            of_short = short_attention(packed, single, sequences.short)
            linear = {tokens: [pack(tokens) - tokens / sequences.short * of_short] for tokens in single}
            attention = attention_times(single, linear, sequences.short, of_short)
            curve = TimeCurve(
                ((tokens, median(times)) for tokens, times in attention.items()), is_squared=True
            )
            return [pack(size) - size / sequences.short * of_short + curve.at(size) for size in sizes]

        sizes, error_max, open_ = choose_sizes(
            sequences.short,
            sequences.snap_length(max(settings.tokens_max, 2 * sequences.short)),
            error_bound=settings.error_bound,
            snap=sequences.snap_length,
            measure=lambda sizes: self._times([(size,) for size in sizes], sizes, {}),
            is_spent=lambda: self._is_spent(CHOOSING_SHARES[1]),
            predict=predict,
        )
        return Chosen(tuple(sizes), error_max, open_)

    def _times(self, shapes: list[Lengths], sizes: Sequence[int], seen: dict[int, float]) -> list[float]:
        """Returns medians of a few runs of both passes, with the most layers."""
        count = self._depths[0][0]
        totals: list[list[float]] = [[] for _ in shapes]
        with self._cut(count):
            for run in range(CHOOSING_RUNS):
                if run > 0 and self._is_spent(CHOOSING_SHARES[1]):
                    break
                for times, one in zip(totals, self._runs(count, shapes), strict=True):
                    times.append(max(one.total, MICROSECONDS_MIN))
        seen.update(zip(sizes, map(median, totals), strict=True))
        return [median(times) for times in totals]

    def _runs(self, count: int, shapes: list[Lengths]) -> list[Run]:
        """Runs shapes, after a warm-up run of those that have not run yet."""
        cold = [shape for shape in dict.fromkeys(shapes) if (count, shape) not in self._warm]
        if cold:
            self._subject.runs(cold)
            self._warm.update((count, shape) for shape in cold)
        return self._subject.runs(shapes)

    def _pack(self, size: int) -> Lengths:
        """Returns a pack of `size` tokens, or `size` items."""
        sequences = self._subject.sequences
        return (sequences.short,) * size if sequences.is_fixed else sequences.packed(size)

    def _is_spent(self, share: float) -> bool:
        elapsed = self._subject.agree([time.perf_counter() - self._start])[0]
        return elapsed >= share * self._settings.seconds

    def _cut(self, count: int) -> AbstractContextManager[None]:
        return cut_to(self._subject.module, count) if self._settings.cut_layers else nullcontext()

    def _attention_layers(self, count: int) -> int:
        if not self._settings.cut_layers:
            return self._subject.attention_layers
        return full_attention_layers(self._subject.name, self._subject.module, count)

    def _row(self, part: str, phase: str, layers: int, shape: tuple[int, int], microseconds: float) -> Row:
        time_ = max(microseconds, MICROSECONDS_MIN)
        return Row(self._subject.name, part, phase, self._settings.tp, layers, *shape, time_)

    def _whole_rows(self, runs: dict[tuple[int, Lengths], list[Run]]) -> list[Row]:
        rows = []
        for (count, lengths), repeats in runs.items():
            shape = (len(lengths), lengths[0])
            for run in repeats:
                forward = self._row("whole", "forward", count, shape, run.forward)
                rows += [
                    replace(forward, bytes=run.bytes),
                    self._row("whole", "backward", count, shape, run.backward),
                ]
        return rows

    def _split_rows(
        self, runs: dict[tuple[int, Lengths], list[Run]], packs: list[Lengths], singles: list[Lengths]
    ) -> list[Row]:
        rows, short = [], self._subject.sequences.short
        deepest, deepest_attention = self._depths[0]
        for phase in PHASES:

            def times(count: int, shapes: list[Lengths], phase: str = phase) -> dict[int, list[float]]:
                return {sum(shape): [getattr(run, phase) for run in runs[count, shape]] for shape in shapes}

            single = times(deepest, singles)
            of_short = short_attention(times(deepest, packs), single, short)
            for count, attention_layers in self._depths:
                share = of_short * attention_layers / deepest_attention
                linear = linear_times(times(count, packs), short, share)
                rows += [
                    self._row("linear", phase, count, (tokens // short, short), time_)
                    for tokens, repeats in linear.items()
                    for time_ in repeats
                ]
                if count == deepest:
                    attention = attention_times(single, linear, short, share)
            rows += [
                self._row("attention", phase, deepest_attention, (1, tokens), time_)
                for tokens, repeats in attention.items()
                for time_ in repeats
            ]
        return rows

    def _optimizers(self) -> dict[int, tuple[torch.optim.Optimizer, int]]:
        """Returns an optimizer per layer count, after a first step, and the bytes of its state."""
        made = {}
        for count, _ in self._depths:
            if self._settings.optimizer is None:
                continue
            with self._cut(count):
                trained = [
                    parameter for parameter in self._subject.module.parameters() if parameter.requires_grad
                ]
                optimizer = self._settings.optimizer(trained)
                for group in optimizer.param_groups:
                    group["lr"] = 0.0
                _zero_gradients(optimizer)
                optimizer.step()
                made[count] = (optimizer, _state_bytes(self._subject.module, optimizer))
        return made

    def _optimizer_row(
        self, count: int, optimizers: dict[int, tuple[torch.optim.Optimizer, int]]
    ) -> list[Row]:
        if count not in optimizers:
            return []
        optimizer, held = optimizers[count]
        _zero_gradients(optimizer)
        clock = self._subject.clock
        start = clock.mark()
        optimizer.step()
        end = clock.mark()
        clock.settle()
        taken = self._subject.agree([clock.microseconds(start, end)])[0]
        part = "whole" if self._subject.sequences.is_fixed else "linear"
        return [replace(self._row(part, "optimizer", count, (0, 0), taken), bytes=held)]


def _zero_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Sets all gradients to 0, so that a step at a learning rate of 0 does not change the weights."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)


def _state_bytes(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Returns the bytes of weights, gradients and optimizer state."""
    tensors = [tensor for state in optimizer.state.values() for tensor in state.values()]
    tensors += [*module.parameters(), *(parameter.grad for parameter in module.parameters())]
    return sum(one.numel() * one.element_size() for one in tensors if isinstance(one, torch.Tensor))
