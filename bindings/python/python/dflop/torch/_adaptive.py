"""Which shapes to measure: those between which a prediction would be wrong.

Begins with a coarse geometric grid. Then, level by level, the middle of every interval is measured and held
against the curve through the points on both sides of it; where the curve misses by more than the bound, both
halves are looked at in the next level. Points of former levels are measured again together with the new ones,
so that a machine that becomes slower meanwhile does not look like a curve that bends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

RATIO = 4.0
"""From one point of the first grid to the next."""
POINTS_MAX = 24
"""Points of one axis, at most."""


@dataclass(frozen=True)
class Chosen:
    """What was chosen, and what is known of the rest.

    - `points`: sizes, ascending
    - `error_max`: the largest relative error in the middle of an interval; `None` if no middle was measured
    - `open`: intervals that the bound has not been shown for
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

    - `snap`: the size nearest to one that is wanted that there can be
    - `measure`: times of sizes that run together, all above 0, in one unit
    - `draw`: what predicts the time of a size from sizes and their times
    - `is_spent`: whether nothing more should be measured; the first grid is, whatever it says
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
    """Sizes at equal ratios, both ends among them."""
    low, high = max(low, 1), max(low, high, 1)
    steps = max(math.ceil(math.log(high / low) / math.log(RATIO)), 1)
    return sorted({snap(round(low * (high / low) ** (step / steps))) for step in range(steps + 1)})
