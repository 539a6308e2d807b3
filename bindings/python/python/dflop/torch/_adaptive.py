"""Chooses the shapes to measure, so that predictions between them are within an error bound.

Starts with a coarse geometric grid. Then, level by level, the middle of every interval is measured and
compared with the curve through the points on both sides; if the error is above the bound, both halves are
examined in the next level. Points of earlier levels are measured again with the new ones, so that a machine
that becomes slower meanwhile does not look like a bend of the curve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

RATIO = 4.0
"""Ratio between points of the first grid."""
POINTS_MAX = 24
"""Maximum number of points of one axis."""


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


def choose(
    low: int,
    high: int,
    *,
    error_bound: float,
    snap: Callable[[int], int],
    measure: Callable[[Sequence[int]], list[float]],
    draw: Callable[[list[tuple[int, float]]], Callable[[int], float]],
    is_spent: Callable[[], bool],
) -> Chosen:
    """Chooses sizes between `low` and `high` tokens or items.

    - `snap`: returns the possible size nearest to a wanted one
    - `measure`: returns the times of sizes that run together, all above 0, in one unit
    - `draw`: returns a predictor of the time of a size, from sizes and their times
    - `is_spent`: returns whether measuring should stop; the first grid is always measured
    """
    sizes = _first_grid(low, high, snap)
    times = measure(sizes)
    intervals: list[tuple[int, int, float | None]] = [(a, b, None) for a, b in pairwise(sizes)]
    closed: list[float] = []
    unmet: list[float | None] = []
    while not is_spent():
        looked_at: list[tuple[tuple[int, int, float | None], int]] = []
        waiting: list[tuple[int, int, float | None]] = []
        for interval in intervals:
            middle = snap(round(math.sqrt(interval[0] * interval[1])))
            if not interval[0] < middle < interval[1]:
                if interval[2] is not None:
                    unmet.append(interval[2])
            elif len(sizes) + len(looked_at) < POINTS_MAX:
                looked_at.append((interval, middle))
            else:
                waiting.append(interval)
        intervals = waiting
        if not looked_at:
            break
        before = len(sizes)
        sizes = sizes + [middle for _, middle in looked_at]
        times = measure(sizes)
        predicted = draw(list(zip(sizes[:before], times[:before], strict=True)))
        for ((left, right, _), middle), time in zip(looked_at, times[before:], strict=True):
            error = abs(predicted(middle) / time - 1)
            if error <= error_bound:
                closed.append(error)
            else:
                intervals += [(left, middle, error), (middle, right, error)]
    errors = [error for error in [*closed, *unmet, *(error for *_, error in intervals)] if error is not None]
    return Chosen(tuple(sorted(sizes)), max(errors, default=None), len(intervals) + len(unmet))


def _first_grid(low: int, high: int, snap: Callable[[int], int]) -> list[int]:
    """Returns sizes at equal ratios, including both ends."""
    low, high = max(low, 1), max(low, high, 1)
    steps = max(math.ceil(math.log(high / low) / math.log(RATIO)), 1)
    return sorted({snap(round(low * (high / low) ** (step / steps))) for step in range(steps + 1)})
