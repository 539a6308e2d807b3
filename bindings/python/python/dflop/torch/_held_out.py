"""Runs held-out microbatches: sequences of mixed lengths, packed as a loader packs them.

Their times are no part of the fit. A profile keeps them in comment lines, from which the cost model computes
the errors of its predictions.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import median

from dflop.torch._budget import Budget, now
from dflop.torch._sequences import Sequences
from dflop.torch._subject import Lengths, Run, Subject

TEXT_MEDIAN, TEXT_DEVIATION = 120.0, 0.9
"""Median tokens of a sample, and the standard deviation of their logarithm."""
MICROBATCHES_WANTED, MICROBATCHES_MAX = 20, 40
"""Number of held-out microbatches of a module that time is reserved for, and their maximum number."""
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


def seconds_wanted(subject: Subject, budget: Budget, tokens_max: int, seed: int) -> float:
    """Returns the estimated seconds of `MICROBATCHES_WANTED` microbatches."""
    drawn = _drawn(subject, tokens_max, seed)[:MICROBATCHES_WANTED]
    return (1 + RUNS_MIN) * budget.seconds_of(drawn)


def measure_held_out(subject: Subject, budget: Budget, tokens_max: int, seed: int) -> list[HeldOut]:
    """Runs as many microbatches as the rest of the budget allows, none if it is spent.

    Each runs once to warm up, and then at least `RUNS_MIN` times, once per round.
    """
    warm: list[Lengths] = []
    for drawn in _drawn(subject, tokens_max, seed):
        wanted = [*warm, drawn]
        if not budget.fits(RUNS_MIN * budget.seconds_of(wanted) + budget.seconds_of([drawn])):
            break
        _noted(subject, budget, [drawn])
        warm = wanted
    times: list[list[float]] = [[] for _ in warm]
    while warm and len(times[0]) < RUNS_MAX:
        if len(times[0]) >= RUNS_MIN and not budget.fits(budget.seconds_of(warm)):
            break
        for taken, run in zip(times, _noted(subject, budget, warm), strict=True):
            taken.append(run.total)
    return [
        HeldOut(index, subject.name, lengths, median(taken))
        for index, (lengths, taken) in enumerate(zip(warm, times, strict=True))
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


def _noted(subject: Subject, budget: Budget, shapes: list[Lengths]) -> list[Run]:
    start = now()
    runs = subject.runs(shapes)
    budget.note(shapes, runs, now() - start)
    return runs
