"""Finds out whether the device waits for the host: whether launches limit the passes of modules.

The host queues the kernels of a pass, and the device runs them. While the device is the limit, it is still
busy with a pass when the host begins to queue the next one; where launches are, it has finished.
"""

from __future__ import annotations

from dflop.torch._clock import Clock, Mark

PASSES_MIN = 64
"""Number of passes that are looked at before launches are called the limit."""
WAITING_SHARE = 0.6
"""Share of the passes after which the device was idle, above which launches are the limit."""


class Launches:
    """Counts passes that the device had finished before the host began to queue the next one.

    Only a device that runs what is queued, such as CUDA, can wait for the host: elsewhere nothing is counted.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last: Mark = None
        self.passes = 0
        self.waits = 0

    def begins(self) -> None:
        """Notes that the host begins to queue a pass; asks once whether the last one has ended."""
        if self._last is not None:
            self.passes += 1
            self.waits += self._clock.is_reached(self._last)
            self._last = None

    def ends(self, mark: Mark) -> None:
        """Takes the mark at the end of a pass."""
        if self._clock.is_queued:
            self._last = mark

    def forget(self) -> None:
        """Leaves out the pass before a pause, such as the end of a step."""
        self._last = None

    @property
    def limit(self) -> str | None:
        """A sentence if launches are the limit, else `None`."""
        if self.passes < PASSES_MIN or self.waits < WAITING_SHARE * self.passes:
            return None
        return (
            f"limited by launches: the device had finished {self.waits / self.passes:.0%} of {self.passes} "
            f"passes before the host queued the next; larger microbatches cost no more time (or use "
            f"torch.compile or CUDA graphs)"
        )
