"""Keeps a time limit: estimates what sequences take before they run, from the runs so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from dflop.torch._subject import Lengths, Run

MARGIN = 1.1
"""Factor of estimates, because a run that was not expected to be slow ends after the limit."""
SINGLE_POWER = 1.5
"""Power of the length that a single sequence's time is extrapolated with: between linear and quadratic."""


def now() -> float:
    """Returns the seconds of the clock that limits are kept by."""
    return time.perf_counter()


class Budget:
    """The time limit of one module, and the times of what it has run.

    - `agree`: converts values of this process to the values that all processes of its group use
    """

    def __init__(self, agree: Callable[[list[float]], list[float]]) -> None:
        self._agree = agree
        self._seen: dict[Lengths, float] = {}
        self._factor: float | None = None
        self.allow(0.0)

    def allow(self, seconds: float) -> None:
        """Sets the limit, which counts from now."""
        self.seconds, self._start = seconds, now()

    def elapsed(self) -> float:
        """Returns the seconds since the limit was set."""
        return self._agree([now() - self._start])[0]

    def fits(self, seconds: float, share: float = 1.0) -> bool:
        """Returns whether so many seconds more end within a share of the limit."""
        return self.elapsed() + seconds <= share * self.seconds

    def note(self, shapes: Sequence[Lengths], runs: Sequence[Run], seconds: float) -> None:
        """Takes the runs of shapes, which took so many seconds together."""
        counted = sum(run.total for run in runs)
        factor = self._agree([seconds])[0] / max(counted, 1e-3)
        # The machine may become slower meanwhile.
        self._factor = factor if self._factor is None else (self._factor + factor) / 2
        self._seen.update(zip(shapes, (run.total for run in runs), strict=True))

    def seconds_of(self, shapes: Sequence[Lengths]) -> float:
        """Returns the estimated seconds of running shapes once; 0 before the first run."""
        if self._factor is None:
            return 0.0
        return MARGIN * self._factor * sum(map(self._microseconds, shapes))

    def _microseconds(self, shape: Lengths) -> float:
        if shape in self._seen:
            return self._seen[shape]
        tokens = sum(shape)
        smaller = [one for one in self._seen if sum(one) <= tokens] or [min(self._seen, key=sum)]
        near = max(smaller, key=lambda one: (sum(one), -abs(len(one) - len(shape))))
        power = SINGLE_POWER if len(near) == len(shape) == 1 else 1.0
        return self._seen[near] * max(tokens / sum(near), 1.0) ** power
