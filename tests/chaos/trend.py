"""Decides whether what a long run used stayed flat.

A series is judged after a warm-up, the first fifth of its time. Its growth is the slope of the least-squares line times
the time that the line spans. Memory is flat if it grows, or shrinks, by less than 5 % of its mean or less than 4 MiB;
descriptors and threads, if it is less than one.
"""

import dataclasses

WARM_UP_SHARE = 0.2
GROWTH_SHARE_MAX = 0.05
GROWTH_BYTES_MAX = 4 << 20
SAMPLES_MIN = 10


@dataclasses.dataclass(frozen=True)
class Trend:
    """A series after its warm-up."""

    mean: float
    first_third: float
    last_third: float
    slope_per_hour: float
    growth: float

    @property
    def relative_growth(self) -> float:
        return self.growth / self.mean if self.mean else 0.0


def trend_of(seconds: list[float], values: list[float]) -> Trend:
    """Fits a line to a series; `seconds` ascend."""
    start = seconds[0] + WARM_UP_SHARE * (seconds[-1] - seconds[0])
    points = [(at, value) for at, value in zip(seconds, values) if at >= start]
    if len(points) < SAMPLES_MIN:
        raise ValueError(f"{len(points)} samples after the warm-up are too few for a trend; {SAMPLES_MIN} are needed")
    mean_at = sum(at for at, _ in points) / len(points)
    mean = sum(value for _, value in points) / len(points)
    spread = sum((at - mean_at) ** 2 for at, _ in points)
    slope = sum((at - mean_at) * (value - mean) for at, value in points) / spread
    third = len(points) // 3
    first = sum(value for _, value in points[:third]) / third
    last = sum(value for _, value in points[-third:]) / third
    return Trend(mean, first, last, 3_600 * slope, slope * (points[-1][0] - points[0][0]))


def is_flat_memory(trend: Trend) -> bool:
    return abs(trend.growth) < max(GROWTH_SHARE_MAX * trend.mean, GROWTH_BYTES_MAX)


def is_flat_count(trend: Trend) -> bool:
    return abs(trend.growth) < 1
