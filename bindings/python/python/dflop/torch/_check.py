"""Compares predictions with measured times of microbatches of mixed lengths.

Microbatches are drawn from a seed and run through whole modules several times, each once per round. Times,
spreads, errors and their bounds are those of `dflop profile --check`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from dflop._native import MicrobatchCurve, check_predictions
from dflop.torch._held_out import draw
from dflop.torch._subject import Lengths, Subject


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
    subject: Subject, curve: MicrobatchCurve, *, microbatches: int, repeats: int, tokens_max: int, seed: int
) -> ModuleCheck:
    """Compares the times of random microbatches with predictions; the first round is not counted."""
    rng = random.Random(f"{seed} {subject.name}")
    drawn = [draw(subject.sequences, tokens_max, rng) for _ in range(microbatches)]
    times: list[list[float]] = [[] for _ in drawn]
    for round_ in range(repeats + 1):
        for taken, run in zip(times, subject.runs(drawn), strict=True):
            if round_ > 0:
                taken.append(run.total)
    predicted = [curve.microseconds(lengths) for lengths in drawn]
    report = check_predictions(predicted, times)
    runs = zip(drawn, predicted, report.pop("measured"), report.pop("spreads"), strict=True)
    return ModuleCheck(module=subject.name, microbatches=tuple(Checked(*run) for run in runs), **report)
