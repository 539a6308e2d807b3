"""Compares predictions with measured times of microbatches of mixed lengths.

Microbatches are drawn from a seed and run through whole modules several times, each once per round. Times,
spreads, errors and their bounds are those of `dflop profile --check`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from dflop._native import TimeCurve, check_predictions
from dflop.torch._rows import Row
from dflop.torch._sequences import Sequences
from dflop.torch._subject import Lengths, Subject

TEXT_MEDIAN, TEXT_DEVIATION = 120.0, 0.9
"""Median tokens of a sample, and the standard deviation of their logarithm."""


class Prediction:
    """Predicts times of one module from its rows with the most layers, as the cost model does."""

    def __init__(self, rows: Iterable[Row], name: str) -> None:
        of_module = [row for row in rows if row.module == name and row.phase != "optimizer"]
        is_split = any(row.part == "linear" for row in of_module)
        first = "linear" if is_split else "whole"
        self.layers = max(row.layers for row in of_module if row.part == first)
        self._first: list[TimeCurve] = []
        self._attention: list[TimeCurve] = []
        for phase in ("forward", "backward"):
            mine = [row for row in of_module if row.phase == phase]
            deepest = [row for row in mine if row.part == first and row.layers == self.layers]
            self._first.append(_curve((row.batch * row.tokens, row.microseconds) for row in deepest))
            if is_split:
                apart = [row for row in mine if row.part == "attention"]
                self._attention.append(
                    _curve(((row.tokens, row.microseconds) for row in apart), is_squared=True)
                )

    def microseconds(self, lengths: Sequence[int]) -> float:
        """Returns the time of forward and backward over sequences, or items, of these tokens."""
        total = sum(curve.at(sum(lengths)) for curve in self._first)
        return total + sum(curve.at(length) for curve in self._attention for length in lengths)


@dataclass(frozen=True)
class Checked:
    """One microbatch: its sequences, predicted time, median time and spread of its runs, in microseconds."""

    lengths: Lengths
    predicted: float
    measured: float
    spread: float

    @property
    def error(self) -> float:
        """Relative error of the prediction, above 0 where it is too long."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class ModuleCheck:
    """Errors of the predictions of one module; errors and spreads are fractions.

    - `bias`: mean signed error; `median`, `p95`: of absolute errors
    - `spread_p95`: 95th percentile of the spreads
    - `median_bound`, `p95_bound`: bounds of the median and of the 95th percentile
    - `is_within`: whether both are within their bounds
    """

    module: str
    microbatches: tuple[Checked, ...]
    bias: float
    median: float
    p95: float
    spread_p95: float
    median_bound: float
    p95_bound: float
    is_within: bool

    def __str__(self) -> str:
        verdict = "within bounds" if self.is_within else "OUT OF BOUNDS"
        return (
            f"{self.module}: error of {len(self.microbatches)} microbatches median {self.median:.1%} "
            f"(bound {self.median_bound:.0%}), p95 {self.p95:.1%} (bound {self.p95_bound:.1%}), "
            f"bias {self.bias:+.1%}; p95 of the spread of runs {self.spread_p95:.1%}: {verdict}"
        )


def check_module(
    subject: Subject, prediction: Prediction, *, microbatches: int, repeats: int, tokens_max: int, seed: int
) -> ModuleCheck:
    """Compares the times of random microbatches with predictions; the first round is not counted."""
    rng = random.Random(f"{seed} {subject.name}")
    drawn = [draw(subject.sequences, tokens_max, rng) for _ in range(microbatches)]
    times: list[list[float]] = [[] for _ in drawn]
    for round_ in range(repeats + 1):
        for taken, run in zip(times, subject.runs(drawn), strict=True):
            if round_ > 0:
                taken.append(run.total)
    predicted = [prediction.microseconds(lengths) for lengths in drawn]
    report = check_predictions(predicted, times)
    runs = zip(drawn, predicted, report.pop("measured"), report.pop("spreads"), strict=True)
    return ModuleCheck(module=subject.name, microbatches=tuple(Checked(*run) for run in runs), **report)


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


def _curve(pairs: Iterable[tuple[int, float]], *, is_squared: bool = False) -> TimeCurve:
    """Returns the curve through the medians of repeats."""
    times: dict[int, list[float]] = {}
    for size, time in pairs:
        times.setdefault(size, []).append(time)
    return TimeCurve(((size, median(repeats)) for size, repeats in times.items()), is_squared=is_squared)
