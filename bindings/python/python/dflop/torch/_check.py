"""Compares predictions with measured times of microbatches of mixed lengths.

Microbatches are drawn from a seed and run through whole modules several times, each once per round. The time
of a microbatch is the median of its runs; its spread is 1.4826 times their median absolute deviation, over
the median. The error of a prediction is its distance from the median, over the median.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dflop.torch._curve import Curve, median
from dflop.torch._rows import Row
from dflop.torch._sequences import Sequences
from dflop.torch._subject import Lengths, Subject

MEDIAN_BOUND = 0.05
"""Bound of the median error."""
P95_BOUND = 0.12
"""Bound of the 95th percentile of errors if runs agree."""
P95_SPREADS = 1.5
"""Bound of the 95th percentile of errors otherwise, over the 95th percentile of spreads."""
MAD_TO_DEVIATION = 1.4826
TEXT_MEDIAN, TEXT_DEVIATION = 120.0, 0.9
"""Median tokens of a sample, and the standard deviation of their logarithm."""


class Prediction:
    """Predicts times of one module from its rows with the most layers, as the cost model does."""

    def __init__(self, rows: Iterable[Row], name: str) -> None:
        of_module = [row for row in rows if row.module == name and row.phase != "optimizer"]
        is_split = any(row.part == "linear" for row in of_module)
        first = "linear" if is_split else "whole"
        self.layers = max(row.layers for row in of_module if row.part == first)
        self._first: list[Curve] = []
        self._attention: list[Curve] = []
        for phase in ("forward", "backward"):
            mine = [row for row in of_module if row.phase == phase]
            deepest = [row for row in mine if row.part == first and row.layers == self.layers]
            self._first.append(_curve((row.batch * row.tokens, row.microseconds) for row in deepest))
            if is_split:
                apart = [row for row in mine if row.part == "attention"]
                self._attention.append(_curve(((row.tokens, row.microseconds) for row in apart), power=2))

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
    - `p95_bound`: bound of the 95th percentile
    """

    module: str
    microbatches: tuple[Checked, ...]
    bias: float
    median: float
    p95: float
    spread_p95: float
    p95_bound: float

    @property
    def is_within(self) -> bool:
        """Whether median and 95th percentile are within their bounds."""
        return self.median <= MEDIAN_BOUND and self.p95 <= self.p95_bound

    def __str__(self) -> str:
        verdict = "within bounds" if self.is_within else "OUT OF BOUNDS"
        return (
            f"{self.module}: error of {len(self.microbatches)} microbatches median {self.median:.1%} "
            f"(bound {MEDIAN_BOUND:.0%}), p95 {self.p95:.1%} (bound {self.p95_bound:.1%}), "
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
    checked = []
    for lengths, taken in zip(drawn, times, strict=True):
        measured = median(taken)
        deviation = median(abs(time - measured) for time in taken)
        predicted = prediction.microseconds(lengths)
        checked.append(Checked(lengths, predicted, measured, MAD_TO_DEVIATION * deviation / measured))
    sizes = [abs(one.error) for one in checked]
    spread_p95 = _p95(one.spread for one in checked)
    return ModuleCheck(
        module=subject.name,
        microbatches=tuple(checked),
        bias=sum(one.error for one in checked) / len(checked),
        median=median(sizes),
        p95=_p95(sizes),
        spread_p95=spread_p95,
        p95_bound=max(P95_BOUND, P95_SPREADS * spread_p95),
    )


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


def _curve(pairs: Iterable[tuple[int, float]], *, power: int = 1) -> Curve:
    """Returns the curve through the medians of repeats."""
    times: dict[int, list[float]] = {}
    for size, time in pairs:
        times.setdefault(size, []).append(time)
    return Curve(((size, median(repeats)) for size, repeats in times.items()), power=power)


def _p95(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[max(math.ceil(len(ordered) * 0.95), 1) - 1]
