"""Interpolates times between measured shapes as the cost model does: monotone, and linear in work beyond.

Isotonic regression first, then a monotone piecewise cubic (Fritsch and Butland 1984, in the form of Brodlie).
Measuring compares new points with these curves to choose further shapes. Predictions in training come from
the Rust cost model, which a test compares with these curves.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

Place = tuple[float, float]


def median(values: Iterable[float]) -> float:
    """Returns the median of values, NaN without values."""
    ordered = sorted(values)
    if not ordered:
        return float("nan")
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


class Curve:
    """A monotone curve through points of work and time.

    - `points`: `(x, time)` with `x` above 0, at least one; the last of several points with the same `x`
      counts
    - `power`: work is `x ** power`, for instance 2 for attention over the length of a sequence; only used
      beyond the points
    """

    def __init__(self, points: Iterable[Place], *, power: int = 1) -> None:
        ordered = sorted(dict(points).items())
        if not ordered:
            raise ValueError("expected at least one point for a curve, found none")
        self._power = power
        self._xs = [x for x, _ in ordered]
        self._places = list(zip(self._xs, _pooled([time for _, time in ordered]), strict=True))

    def at(self, x: float) -> float:
        """Returns the time at `x`, in the unit of the points; 0 at 0."""
        if x <= 0:
            return 0.0
        places, after = self._places, bisect_right(self._xs, x)
        if after == 0:
            return _below(self._work(0), self._work(1) if len(places) > 1 else None, x**self._power)
        if after == len(places):
            return self._beyond(x)
        low, high = places[after - 1], places[after]
        before = places[after - 2] if after > 1 else None
        following = places[after + 1] if after + 1 < len(places) else None
        slope, square, cube = _cubic(before, low, high, following)
        u = x - low[0]
        return min(max(low[1] + u * (slope + u * (square + u * cube)), low[1]), high[1])

    def _work(self, at: int) -> Place:
        x, time = self._places[at]
        return x**self._power, time

    def _beyond(self, x: float) -> float:
        last = self._work(len(self._places) - 1)
        earlier = [self._work(at) for at in range(len(self._places))]
        half = next((place for place in reversed(earlier) if 2 * place[0] <= last[0]), earlier[0])
        slope = _interval(half, last)[1] if half[0] < last[0] else last[1] / last[0]
        return last[1] + max(slope, 0.0) * (x**self._power - last[0])


def _pooled(times: list[float]) -> list[float]:
    """Makes times non-decreasing (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for time in times:
        pools.append((time, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (high, many), (low, few) = pools.pop(-2), pools.pop()
            pools.append(((high * many + low * few) / (many + few), many + few))
    return [time for time, count in pools for _ in range(count)]


def _interval(low: Place, high: Place) -> Place:
    width = high[0] - low[0]
    return width, (high[1] - low[1]) / width


def _cubic(before: Place | None, low: Place, high: Place, after: Place | None) -> tuple[float, float, float]:
    width, rise = _interval(low, high)
    left = _interval(before, low) if before else None
    right = _interval(high, after) if after else None
    at_low = at_high = rise
    if left:
        at_low = _inner_slope(left, (width, rise))
    elif right:
        at_low = _end_slope((width, rise), right)
    if right:
        at_high = _inner_slope((width, rise), right)
    elif left:
        at_high = _end_slope((width, rise), left)
    return at_low, (3 * rise - 2 * at_low - at_high) / width, (at_low + at_high - 2 * rise) / (width * width)


def _inner_slope(left: Place, right: Place) -> float:
    if left[1] * right[1] <= 0:
        return 0.0
    left_weight, right_weight = 2 * right[0] + left[0], right[0] + 2 * left[0]
    return (left_weight + right_weight) / (left_weight / left[1] + right_weight / right[1])


def _below(first: Place, second: Place | None, x: float) -> float:
    proportional = first[1] * (x / first[0])
    slope = _interval(first, second)[1] if second else first[1] / first[0]
    return min(max(first[1] - slope * (first[0] - x), min(proportional, first[1])), first[1])


def _end_slope(own: Place, neighbor: Place) -> float:
    slope = ((2 * own[0] + neighbor[0]) * own[1] - own[0] * neighbor[1]) / (own[0] + neighbor[0])
    if slope * own[1] <= 0:
        return 0.0
    return 3 * own[1] if own[1] * neighbor[1] <= 0 and abs(slope) > 3 * abs(own[1]) else slope
