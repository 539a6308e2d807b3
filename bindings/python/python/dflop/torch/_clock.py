"""Measures time on a device.

On CUDA: events on the current stream, read after one synchronization, so that nothing waits while modules
run. On the CPU: CPU time of the calling thread if PyTorch computes with one thread, which other load on the
machine hardly affects; else wall time, because threads divide an operation and a module takes as long as the
last of them. The backward pass of CPU tensors runs in the calling thread.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

Mark = Any
"""A point in time: nanoseconds, or a CUDA event."""


class Clock(Protocol):
    """Takes marks, and returns the time between them.

    - `is_queued`: whether a device runs later what the host queues
    """

    name: str
    is_queued: bool

    def mark(self) -> Mark:
        """Takes a mark; never waits."""

    def wait(self, mark: Mark) -> None:
        """Waits until the mark has been reached."""

    def is_reached(self, mark: Mark) -> bool:
        """Returns whether the device has reached the mark; never waits."""

    def settle(self) -> None:
        """Waits until all marks have been reached."""

    def microseconds(self, start: Mark, end: Mark) -> float:
        """Returns the time between two marks that have been reached."""


class CpuClock:
    """CPU time of this thread, or wall time."""

    is_queued = False

    def __init__(self) -> None:
        is_single = torch.get_num_threads() == 1
        self.name = "thread CPU time" if is_single else "wall time"
        self.mark = time.thread_time_ns if is_single else time.perf_counter_ns

    def wait(self, mark: Mark) -> None:
        return None

    def is_reached(self, mark: Mark) -> bool:
        return True

    def settle(self) -> None:
        return None

    def microseconds(self, start: Mark, end: Mark) -> float:
        return float(end - start) / 1000


class CudaClock:
    """Events on the current stream of one device."""

    name = "CUDA events"
    is_queued = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Mark:
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, mark: Mark) -> None:
        mark.synchronize()

    def is_reached(self, mark: Mark) -> bool:
        return bool(mark.query())

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)

    def microseconds(self, start: Mark, end: Mark) -> float:
        return float(start.elapsed_time(end)) * 1000


def clock_of(device: torch.device) -> Clock:
    """Returns the clock of a device: events on CUDA, this process's clocks elsewhere."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()


def device_name(device: torch.device) -> str:
    """Returns the name of a device in profiles; profiles of different devices are not combined."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    threads = torch.get_num_threads()
    return f"{_processor()}, {threads} thread{'' if threads == 1 else 's'}"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    import platform

    return platform.processor() or platform.machine()
