"""Runs held-out microbatches: sequences of mixed lengths, packed as a loader packs them.

Their times are no part of the fit. A profile keeps them in comment lines, from which the cost model computes
the errors of its predictions.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from dflop.torch._budget import Budget, now
from dflop.torch._sequences import Sequences
from dflop.torch._subject import Lengths, Run, Subject

TEXT_MEDIAN, TEXT_DEVIATION = 120.0, 0.9
"""Median tokens of a sample, and the standard deviation of their logarithm."""
MICROBATCHES_WANTED, MICROBATCHES_MAX = 20, 40
"""Number of held-out microbatches that time is reserved for, and their maximum number."""
RUNS_MIN, RUNS_MAX = 3, 5
"""Minimum and maximum number of counted runs of each."""


@dataclass(frozen=True)
class HeldOut:
    """A held-out microbatch of one module: its index, sequences, and the median time of both passes."""

    microbatch: int
    module: str
    lengths: Lengths
    microseconds: float

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(self.lengths)

    @property
    def pairs(self) -> int:
        """Sum of the squares of the lengths."""
        return sum(length * length for length in self.lengths)


@dataclass(frozen=True)
class Budgeted:
    """A module whose shapes have been measured, and the budget that estimates what microbatches take."""

    subject: Subject
    budget: Budget


def seconds_wanted(one: Budgeted, tokens_max: int, seed: int) -> float:
    """Returns the estimated seconds that a module needs of `MICROBATCHES_WANTED` microbatches."""
    drawn = _drawn(one.subject, tokens_max, seed)[:MICROBATCHES_WANTED]
    return (1 + RUNS_MIN) * one.budget.seconds_of(drawn)


def measure_held_out(
    modules: Sequence[Budgeted], seconds: float, tokens_max: int, seed: int
) -> list[HeldOut]:
    """Runs as many microbatches as the time allows, none if there is too little.

    The modules run one after another in every microbatch, as in a whole model: each finds the caches that
    another one has used. A microbatch runs once to warm up, and then at least `RUNS_MIN` times, once per round.
    """
    clock = modules[0].budget
    clock.allow(seconds)
    microbatches = list(zip(*(_drawn(one.subject, tokens_max, seed) for one in modules), strict=True))

    def seconds_of(wanted: Sequence[Sequence[Lengths]]) -> float:
        columns = zip(modules, zip(*wanted, strict=True), strict=True)
        return sum(one.budget.seconds_of(column) for one, column in columns)

    warm: list[tuple[Lengths, ...]] = []
    for drawn in microbatches:
        if not clock.fits(RUNS_MIN * seconds_of([*warm, drawn]) + seconds_of([drawn])):
            break
        _run(modules, drawn)
        warm.append(drawn)
    times: list[list[list[float]]] = [[[] for _ in modules] for _ in warm]
    rounds = 0
    while warm and rounds < RUNS_MAX and (rounds < RUNS_MIN or clock.fits(seconds_of(warm))):
        for taken, drawn in zip(times, warm, strict=True):
            for of_module, run in zip(taken, _run(modules, drawn), strict=True):
                of_module.append(run.total)
        rounds += 1
    return [
        HeldOut(index, one.subject.name, drawn[at], median(times[index][at]))
        for at, one in enumerate(modules)
        for index, drawn in enumerate(warm)
    ]


def _drawn(subject: Subject, tokens_max: int, seed: int) -> list[Lengths]:
    rng = random.Random(f"held out {seed} {subject.name}")
    return [draw(subject.sequences, tokens_max, rng) for _ in range(MICROBATCHES_MAX)]


def draw(sequences: Sequences, tokens_max: int, rng: random.Random) -> Lengths:
    """Draws sequences until one more would exceed the number of tokens drawn for the microbatch."""
    low = max(tokens_max / 6, 1.0)
    budget = low * (tokens_max / low) ** rng.random()
    if sequences.is_fixed:
        return (sequences.short,) * max(int(budget / sequences.short), 1)
    lengths: list[int] = []
    while True:
        wanted = TEXT_MEDIAN * math.exp(TEXT_DEVIATION * rng.gauss(0, 1))
        length = sequences.snap_length(int(min(max(wanted, 4), budget)))
        if lengths and sum(lengths) + length > budget:
            return tuple(lengths)
        lengths.append(length)


def _run(modules: Sequence[Budgeted], drawn: Sequence[Lengths]) -> list[Run]:
    """Runs a microbatch, module by module."""
    runs = []
    for one, lengths in zip(modules, drawn, strict=True):
        start = now()
        runs += one.subject.runs([lengths])
        one.budget.note([lengths], runs[-1:], now() - start)
    return runs
