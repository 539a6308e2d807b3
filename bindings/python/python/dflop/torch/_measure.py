"""Measures one module into rows of a profile.

First, shapes are chosen, with few runs of each. Then all shapes run in rounds, each once per round, and these
runs go into the profile: other load on the machine affects all shapes equally, and every shape finds caches
and memory as another one left them, as in training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from statistics import median

import torch

from dflop._native import TimeCurve, choose_sizes
from dflop.torch._budget import Budget, now
from dflop.torch._held_out import Budgeted, seconds_wanted
from dflop.torch._rows import MICROSECONDS_MIN, Row
from dflop.torch._split import attention_times, linear_times, short_attention
from dflop.torch._stage_chain import StageTimes
from dflop.torch._subject import Lengths, Run, Subject, borrowed

CHOOSING_RUNS = 3
"""Runs per shape while shapes are chosen."""
ROUNDS_MIN = 3
"""Minimum number of rounds, even if the time is over: a spread needs this many repeats."""
CHOOSING_SHARES = (0.33, 0.5)
"""Shares of a module's time after which no more packs, and then no more lengths, are chosen."""
LAUNCH_MARGIN = 1.1
"""Times up to this factor of the host's time for launches are limited by it."""
GRID_RATIO = 4.0
"""Ratio of neighboring sizes of the first grid."""
LEVEL_RUNS = 2 * CHOOSING_RUNS + 1 + ROUNDS_MIN
"""Runs that another level of choosing adds, of as many shapes as are known: old and new ones while choosing,
warm-up of new ones and their rounds."""
PHASES = ("forward", "backward")

MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Settings:
    """Settings of measuring a module; see `dflop.torch.profile`."""

    tokens_max: int
    error_bound: float
    repeats: int
    seed: int
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
    - `seconds`: time that measuring them took; `seconds_max`: its limit
    - `stages`: times of the stages of a split in the largest pack; empty for other modules
    - `launch_microseconds`: time in which the host queues a forward and backward pass; shapes of at most
      `launch_tokens` tokens take no less, because the device waits for the host; `None` off CUDA
    """

    module: str
    layers: tuple[int, ...]
    shapes: Chosen
    lengths: Chosen | None
    rounds: int
    seconds: float
    seconds_max: float
    launch_microseconds: float | None
    launch_tokens: int
    stages: tuple[StageTimes, ...] = ()

    @property
    def error_max(self) -> float | None:
        """Largest known relative error between shapes or lengths."""
        chosen = [self.shapes, *([self.lengths] if self.lengths else [])]
        return max((of.error_max for of in chosen if of.error_max is not None), default=None)


@dataclass(frozen=True)
class Plan:
    """The shapes of a profile: packs of short sequences, single sequences, and packs of longer sequences."""

    shapes: Chosen
    lengths: Chosen | None
    longer: tuple[Lengths, ...] = ()


class Measurer:
    """Measures one module within its budget."""

    def __init__(self, subject: Subject, settings: Settings) -> None:
        self._subject, self._settings = subject, settings
        self.budget = Budget(subject.agree)
        self.budgeted = Budgeted(subject, self.budget)
        self._warm: set[tuple[int, Lengths]] = set()
        self._packs: list[Lengths] = []
        counts = settings.cut_layers or (subject.layers,)
        counts = sorted(set(counts), reverse=True)
        self._depths = [(count, subject.attention_layers(count)) for count in counts]

    def probe(self) -> float:
        """Runs the smallest and a larger shape, and returns the estimated seconds of a first grid.

        Modules share the time in proportion to it.
        """
        count, sizes = self._depths[0][0], self._grid()
        with self._cut(count):
            for size in dict.fromkeys([sizes[0], sizes[len(sizes) // 2]]):
                self._runs(count, [self.pack(size)])
        return self.budget.seconds_of([self.pack(size) for size in sizes])

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Borrows the module with the most layers that are measured."""
        subject = self._subject
        with borrowed(subject.module, subject.device), self._cut(self._depths[0][0]):
            yield

    def held_out_seconds(self) -> float:
        """Returns the estimated seconds that the module needs of held-out microbatches."""
        return seconds_wanted(self.budgeted, self._settings.tokens_max, self._settings.seed)

    def measure(self) -> tuple[list[Row], ModuleReport]:
        """Chooses shapes and measures them.

        Returns rows, including the raw times of whole passes, and a report.
        """
        settings, budget = self._settings, self.budget
        plan = self._plan()
        packs = [self.pack(size) for size in plan.shapes.points]
        singles: list[Lengths] = [(length,) for length in plan.lengths.points] if plan.lengths else []
        deepest = list(dict.fromkeys([*packs, *singles, *plan.longer]))
        optimizers = self._optimizers()
        runs: dict[tuple[int, Lengths], list[Run]] = {}
        rows: list[Row] = []
        rounds = 0
        while rounds < settings.repeats and (
            rounds < ROUNDS_MIN or budget.fits(self._round_seconds(packs, deepest))
        ):
            for depth, (count, _) in enumerate(self._depths):
                with self._cut(count):
                    # Single sequences run with the most layers only; attention scales with layers.
                    wanted = deepest if depth == 0 else packs
                    for lengths_, run in zip(wanted, self._runs(count, wanted), strict=True):
                        runs.setdefault((count, lengths_), []).append(run)
                    rows += self._optimizer_row(count, optimizers)
            rounds += 1
        rows += self._whole_rows(runs)
        if not self._subject.sequences.is_fixed:
            rows += self._split_rows(runs, packs, singles)
        counts = tuple(count for count, _ in self._depths)
        name, seconds = self._subject.name, budget.elapsed()
        launch, tokens = _launches({shape: runs[self._depths[0][0], shape] for shape in deepest})
        report = ModuleReport(
            module=name,
            layers=counts,
            shapes=plan.shapes,
            lengths=plan.lengths,
            rounds=rounds,
            seconds=seconds,
            seconds_max=budget.seconds,
            launch_microseconds=launch,
            launch_tokens=tokens,
        )
        return rows, report

    def _plan(self) -> Plan:
        """Chooses shapes: by the errors between them if there is time, else as many of a grid as fit."""
        sequences, sizes, lengths = self._subject.sequences, self._grid(), self._length_grid()
        longer = self._longer()
        first = [*(self.pack(size) for size in sizes), *((length,) for length in lengths), *longer]
        if self.budget.fits((1 + CHOOSING_RUNS) * self.budget.seconds_of(first), CHOOSING_SHARES[0]):
            shapes, pack = self._choose_shapes()
            chosen = None if sequences.is_fixed else self._choose_lengths(pack)
            return Plan(shapes, chosen, tuple(longer))
        return self._small_plan(sizes, lengths, longer)

    def _small_plan(self, sizes: list[int], lengths: list[int], longer: list[Lengths]) -> Plan:
        """Takes the ends of the grids in any case, and of the rest what fits, the middle first."""
        taken = [self.pack(sizes[0]), self.pack(sizes[-1]), *((length,) for length in lengths[-1:])]
        taken = list(dict.fromkeys(taken))
        middle, long = sizes[len(sizes) // 2], lengths[len(lengths) // 2 :]
        rest = [self.pack(middle), *longer, *((length,) for length in long)]
        rest += [*(self.pack(size) for size in sizes), *((length,) for length in lengths)]
        count = self._depths[0][0]
        with self._cut(count):
            for shape in taken:
                self._warm_up(count, [shape])
            for shape in dict.fromkeys(rest):
                wanted = [*taken, shape]
                needed = ROUNDS_MIN * self._round_seconds(wanted, wanted) + self.budget.seconds_of([shape])
                if shape not in taken and self.budget.fits(needed):
                    self._warm_up(count, [shape])
                    taken = wanted
        packs = sorted(size for size in sizes if self.pack(size) in taken)
        singles = sorted(length for length in lengths if (length,) in taken)
        return Plan(
            Chosen(tuple(packs), None, len(packs) - 1),
            Chosen(tuple(singles), None, max(len(singles) - 1, 0)) if lengths else None,
            tuple(shape for shape in longer if shape in taken),
        )

    def _grid(self) -> list[int]:
        """Returns the sizes of a first grid of packs, or numbers of items."""
        low, high = self._size_range()
        sequences = self._subject.sequences
        snap = (lambda items: max(items, 1)) if sequences.is_fixed else sequences.snap_packed
        return _geometric(low, high, snap)

    def _length_grid(self) -> list[int]:
        """Returns the lengths of a first grid of single sequences; none if all items are equal."""
        sequences = self._subject.sequences
        if sequences.is_fixed:
            return []
        return _geometric(sequences.short, self._length_max(), sequences.snap_length)

    def _longer(self) -> list[Lengths]:
        """Returns packs of sequences that are longer than the short ones, as microbatches have them."""
        sequences, tokens_max = self._subject.sequences, self._settings.tokens_max
        if sequences.is_fixed:
            return []
        middle = sequences.snap_length(round((sequences.short * tokens_max) ** 0.5))
        lengths = (sequences.snap_length(2 * sequences.short), middle)
        packs = [
            (length,) * (tokens // length) for length in lengths for tokens in (tokens_max // 3, tokens_max)
        ]
        return [pack for pack in dict.fromkeys(packs) if len(pack) > 1 and pack[0] > sequences.short]

    def _size_range(self) -> tuple[int, int]:
        sequences, count = self._subject.sequences, max(self._settings.tokens_max, 1)
        count = max(count // sequences.short, 2)
        return (1, count) if sequences.is_fixed else (sequences.short, count * sequences.short)

    def _length_max(self) -> int:
        sequences = self._subject.sequences
        return sequences.snap_length(max(self._settings.tokens_max, 2 * sequences.short))

    def _round_seconds(self, packs: list[Lengths], deepest: list[Lengths]) -> float:
        """Returns the estimated seconds of one round: `deepest` with the most layers, packs with fewer."""
        most = self._depths[0][0]
        fewer = sum(count for count, _ in self._depths[1:]) / most
        return self.budget.seconds_of(deepest) + fewer * self.budget.seconds_of(packs)

    def _is_spent(self, shapes: list[Lengths], later: list[Lengths], share: float) -> bool:
        """Returns whether another level of choosing, and at least the minimum of rounds, end too late.

        - `shapes`: of the axis that is being chosen; `later`: the others
        """
        level = LEVEL_RUNS * self.budget.seconds_of(shapes)
        rounds = ROUNDS_MIN * self._round_seconds(shapes, [*shapes, *later])
        return not (self.budget.fits(level, share) and self.budget.fits(level + rounds))

    def _choose_shapes(self) -> tuple[Chosen, Callable[[int], float]]:
        """Chooses packs, or numbers of items; also returns a predictor of their time."""
        sequences, settings = self._subject.sequences, self._settings
        seen: dict[int, float] = {}
        later = [*((length,) for length in self._length_grid()), *self._longer()]
        sizes, error_max, open_ = choose_sizes(
            *self._size_range(),
            error_bound=settings.error_bound,
            snap=(lambda items: max(items, 1)) if sequences.is_fixed else sequences.snap_packed,
            measure=lambda sizes: self._times([self.pack(size) for size in sizes], sizes, seen),
            is_spent=lambda: self._is_spent(
                [self.pack(size) for size in seen], later, CHOOSING_SHARES[1 if sequences.is_fixed else 0]
            ),
        )
        self._packs = [self.pack(size) for size in sizes]
        return Chosen(tuple(sizes), error_max, open_), TimeCurve(seen.items()).at

    def _choose_lengths(self, pack: Callable[[int], float]) -> Chosen:
        """Chooses single sequences, given the time of packs."""
        sequences, settings = self._subject.sequences, self._settings
        seen: dict[int, float] = {}

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
            self._length_max(),
            error_bound=settings.error_bound,
            snap=sequences.snap_length,
            measure=lambda sizes: self._times([(size,) for size in sizes], sizes, seen),
            is_spent=lambda: self._is_spent(
                [(size,) for size in seen], [*self._packs, *self._longer()], CHOOSING_SHARES[1]
            ),
            predict=predict,
        )
        return Chosen(tuple(sizes), error_max, open_)

    def _times(self, shapes: list[Lengths], sizes: Sequence[int], seen: dict[int, float]) -> list[float]:
        """Returns medians of a few runs of both passes, with the most layers."""
        count = self._depths[0][0]
        totals: list[list[float]] = [[] for _ in shapes]
        with self._cut(count):
            for _ in range(CHOOSING_RUNS):
                for times, one in zip(totals, self._runs(count, shapes), strict=True):
                    times.append(max(one.total, MICROSECONDS_MIN))
        seen.update(zip(sizes, map(median, totals), strict=True))
        return [median(times) for times in totals]

    def _runs(self, count: int, shapes: list[Lengths]) -> list[Run]:
        """Runs shapes, after a warm-up run of those that have not run yet."""
        self._warm_up(count, shapes)
        return self._timed(count, shapes)

    def _warm_up(self, count: int, shapes: list[Lengths]) -> None:
        """Runs those shapes once that have not run yet."""
        cold = [shape for shape in dict.fromkeys(shapes) if (count, shape) not in self._warm]
        if cold:
            self._timed(count, cold)
            self._warm.update((count, shape) for shape in cold)

    def _timed(self, count: int, shapes: list[Lengths]) -> list[Run]:
        """Runs shapes; runs with the most layers teach the budget."""
        start = now()
        runs = self._subject.runs(shapes)
        if count == self._depths[0][0]:
            self.budget.note(shapes, runs, now() - start)
        return runs

    def pack(self, size: int) -> Lengths:
        """Returns a pack of `size` tokens, or `size` items."""
        sequences = self._subject.sequences
        return (sequences.short,) * size if sequences.is_fixed else sequences.packed(size)

    def _cut(self, count: int) -> AbstractContextManager[None]:
        return self._subject.cut(count) if self._settings.cut_layers else nullcontext()

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


def _launches(runs: Mapping[Lengths, list[Run]]) -> tuple[float | None, int]:
    """Returns the host's time for queuing both passes, and the most tokens whose time it limits.

    The host needs about the same time for every shape, but waits where its queue is full: the shortest time
    counts.
    """
    hosts = [run.host for repeats in runs.values() for run in repeats if run.host is not None]
    if not hosts:
        return None, 0
    launch = min(hosts)
    times = {sum(shape): min(run.total for run in repeats) for shape, repeats in runs.items()}
    limited = [tokens for tokens, time in times.items() if time <= LAUNCH_MARGIN * launch]
    return launch, max(limited, default=0)


def _geometric(low: int, high: int, snap: Callable[[int], int]) -> list[int]:
    """Returns possible sizes at equal ratios of at most `GRID_RATIO`, including both ends."""
    steps = max(math.ceil(math.log(max(high / low, 1.0)) / math.log(GRID_RATIO)), 1)
    return sorted({snap(round(low * (high / low) ** (step / steps))) for step in range(steps + 1)})


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
