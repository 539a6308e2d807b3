"""A trace of any training loop, for Perfetto: waits, microbatches, stages beside their predictions."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import isnan
from typing import Any, Protocol, Self

from dflop.batches import Microbatch, Step
from dflop.monitor._loader import Wrapper
from dflop.torch._trace_file import TraceFile, laid_out

# Keys of a microbatch that are written; the number of its samples is always exact.
KEYS_MAX = 32
# Steps that wait for their measured times; older ones are written without.
STEPS_WAITING_MAX = 8
# Tracks of a rank; those of the modules follow, two each.
STEPS, DATA, MICROBATCHES, FIRST_MODULE = 1, 2, 3, 4


class Timer(Protocol):
    """The part of a `dflop.torch.StageTimer` that passes times on."""

    def listen(self, listener: Any) -> None:
        """Passes the times of every step to a function."""


class Trace(Wrapper[Step]):
    """Iterates a balanced loader and writes a trace of the run, which Perfetto (ui.perfetto.dev) shows.

    Tracks: the steps; waits for data; microbatches as the host runs them, with keys, tokens and predicted
    seconds; and for each module its measured times beside the predicted ones, which one factor a step scales
    so that both sum to the same. Counters: depths of the loader's queues, its bytes, the share of waiting.
    Steps, waits and microbatches have times of the host's clock. Of the bars of a module the lengths are
    measured and not the starts: each starts with its microbatch, or after the bar before it.

    The file is written step by step and holds whole events at any moment. The trace keeps the steps that wait
    for their times only: as many as the timer delays, at most 8.

    Args:
        loader: a `dflop.BalancedLoader`, or a `dflop.monitor.Record` or `dflop.monitor.Progress` of one; its
            steps are delivered unchanged, but that their microbatches are watched. All else that it has is
            an attribute of the trace.
        timer: the `dflop.torch.StageTimer` of the loop, or ``None`` for a trace without stages.
        path: file of trace events in JSON, one for each rank, whose directory is created; an existing file is
            replaced.

    Raises:
        OSError: the file cannot be written.
        TypeError: the loader is not a balanced one.

    Examples:
        >>> import json, torch
        >>> llm = torch.nn.Embedding(640, 8)
        >>> settings = {"model": "model/", "global_batch_size": 8, "microbatches": 2}
        >>> loader = dflop.BalancedLoader("shards/", steps=2, **settings)
        >>> timer = dflop.torch.StageTimer(loader, llm=llm)
        >>> with dflop.torch.Trace(loader, timer, "trace.json") as trace:
        ...     for step in trace:
        ...         for microbatch in step.microbatches:
        ...             llm(microbatch["input_ids"]).sum().backward()
        ...         timer.step(step)
        ...     timer.close()
        >>> events = json.load(open("trace.json"))
        >>> sorted({event["name"] for event in events if event["ph"] == "X"})
        ['mb 0', 'mb 1', 'step 0', 'step 1', 'wait for data']
    """

    def __init__(self, loader: Any, timer: Timer | None, path: str | os.PathLike[str]) -> None:
        if not (hasattr(loader, "metrics") and hasattr(loader, "steps_per_epoch")):
            raise TypeError(f"loader: expected a dflop.BalancedLoader, found {type(loader).__name__}")
        super().__init__(loader)
        self._rank = int(loader.dp_rank)
        self._modules: list[str] = list(loader.modules)
        self._file = TraceFile(path)
        self._origin_ns = time.perf_counter_ns()
        self._waiting: deque[_StepTimes] = deque()
        self._current: _StepTimes | None = None
        self._is_closed, self._has_timer = False, timer is not None
        self._file.write(self._names())
        if timer is not None:
            timer.listen(self._measured)

    def __iter__(self) -> Iterator[Step]:
        # Not with the first step: `iter` of a restored loader sets its step.
        return self._traced(iter(self.loader))

    def _traced(self, steps: Iterator[Step]) -> Iterator[Step]:
        while True:
            began = self._now()
            step = next(steps, None)
            self._end_step(began)
            if step is None:
                return
            predicted = [] if step.plan is None else step.plan.module_seconds[self._rank]
            times = _StepTimes(step.step, began, step.digest, step.makespan_seconds, predicted)
            self._current = times
            times.waits.append((began, self._now()))
            yield replace(step, microbatches=_Watched(step.microbatches, times, self._now))

    def close(self) -> None:
        """Writes what is left and ends the file; a timer that delays its reports is closed before."""
        if self._is_closed:
            return
        self._is_closed = True
        self._end_step(self._now())
        while self._waiting:
            self._write(self._waiting.popleft(), {})
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _now(self) -> float:
        """Microseconds since the trace was made."""
        return (time.perf_counter_ns() - self._origin_ns) / 1e3

    def _end_step(self, now: float) -> None:
        """Ends the step at work."""
        times, self._current = self._current, None
        if times is None:
            return
        times.end(now)
        times.counters = self._counters(now)
        self._waiting.append(times)
        if times.seconds is not None:
            self._flush(times)
        elif not self._has_timer or len(self._waiting) > STEPS_WAITING_MAX:
            self._write(self._waiting.popleft(), {})

    def _measured(self, step: Step, seconds: dict[str, list[float]]) -> None:
        """Takes the measured times of a step; those of the step at work are kept until it ends."""
        if self._is_closed:
            return
        known = [*self._waiting, *([self._current] if self._current else [])]
        times = next((one for one in known if one.step == step.step), None)
        if times is None:
            return
        times.seconds = seconds
        if times is not self._current:
            self._flush(times)

    def _flush(self, until: _StepTimes) -> None:
        """Writes the steps up to one, in order."""
        while self._waiting:
            times = self._waiting.popleft()
            self._write(times, times.seconds or {})
            if times is until:
                return

    def _counters(self, now: float) -> list[dict[str, Any]]:
        from dflop.errors import Error

        try:
            metrics = self.loader.metrics()
        except Error:
            # The loader was closed before the trace.
            return []
        depths = {stage["stage"]: stage["depth"] for stage in metrics["stages"]}
        waited = metrics["consumer_wait_seconds"] / metrics["seconds"] if metrics["seconds"] else 0.0
        held = {"undecoded": metrics["undecoded_bytes"], "decoded": metrics["decoded_bytes"]}
        shown = {"queue depth": depths, "bytes": held, "data wait": {"share": waited}}
        return [self._event("C", name, STEPS, now, args=args) for name, args in shown.items()]

    def _event(self, kind: str, name: str, track: int, at: float, **more: Any) -> dict[str, Any]:
        return {"ph": kind, "name": name, "pid": self._rank, "tid": track, "ts": round(at, 3), **more}

    def _bar(self, name: str, track: int, start: float, length: float, **args: Any) -> dict[str, Any]:
        return self._event("X", name, track, start, dur=round(max(length, 0.0), 3), args=args)

    def _names(self) -> list[dict[str, Any]]:
        """Names the rank and its tracks."""
        names = {STEPS: "steps", DATA: "data wait", MICROBATCHES: "microbatches (host)"}
        if self._has_timer:
            for at, module in enumerate(self._modules):
                track = FIRST_MODULE + 2 * at
                names |= {track: f"{module}, measured", track + 1: f"{module}, predicted (scaled)"}
        rank = self._event("M", "process_name", 0, 0.0, args={"name": f"DP rank {self._rank}"})
        events = [rank]
        for track, name in names.items():
            events.append(self._event("M", "thread_name", track, 0.0, args={"name": name}))
            events.append(self._event("M", "thread_sort_index", track, 0.0, args={"sort_index": track}))
        return events

    def _write(self, times: _StepTimes, seconds: dict[str, list[float]]) -> None:
        """Writes all events of a step."""
        waited = sum(end - start for start, end in times.waits)
        events = [
            self._bar(
                f"step {times.step}",
                STEPS,
                times.began,
                times.ended - times.began,
                data_wait_seconds=waited / 1e6,
                digest=times.digest,
                makespan_seconds=times.makespan_seconds,
            )
        ]
        events += [self._bar("wait for data", DATA, start, end - start) for start, end in times.waits]
        for one in times.microbatches:
            events.append(
                self._bar(f"mb {one.index}", MICROBATCHES, one.began, one.ended - one.began, **one.sizes)
            )
        events += self._stages(times, seconds)
        events += times.counters
        # Of events at the same time the longer one is the outer one.
        events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
        self._file.write(events)

    def _stages(self, times: _StepTimes, seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
        """Makes the bars of modules, measured and predicted."""
        runs = [one for one in times.microbatches if one.index < len(times.predicted)]
        measured: dict[str, dict[int, float]] = {}
        for name, row in seconds.items():
            measured[name] = {at: value for at, value in enumerate(row) if not isnan(value)}
        places = [place for place, name in enumerate(self._modules) if name in measured]
        predicted_all = sum(times.predicted[one.index][place] for one in runs for place in places)
        measured_all = sum(measured[self._modules[p]].get(one.index, 0.0) for one in runs for p in places)
        scale = measured_all / predicted_all if predicted_all > 0 else 0.0
        events = []
        for place in places:
            name, track = self._modules[place], FIRST_MODULE + 2 * place
            of_module = measured[name]
            both = [one for one in runs if one.index in of_module]
            starts = [one.began for one in both]
            pairs = [(of_module[one.index], times.predicted[one.index][place]) for one in both]
            bars = laid_out(starts, [1e6 * seconds for seconds, _ in pairs], times.ended)
            shadows = laid_out(starts, [1e6 * scale * seconds for _, seconds in pairs], times.ended)
            for one, (taken, expected), bar, shadow in zip(both, pairs, bars, shadows, strict=True):
                args = {"seconds": taken, "predicted_seconds": expected, "tokens": one.sizes["tokens"]}
                events.append(self._bar(f"mb {one.index}", track, *bar, **args))
                events.append(self._bar(f"mb {one.index}", track + 1, *shadow, scale=scale, **args))
        return events


@dataclass
class _Run:
    """A microbatch on the host, in microseconds."""

    index: int
    began: float
    sizes: dict[str, Any]
    ended: float = 0.0


@dataclass
class _StepTimes:
    """A step whose events are not written yet."""

    step: int
    began: float
    digest: str
    makespan_seconds: float
    predicted: list[list[float]]
    ended: float = 0.0
    waits: list[tuple[float, float]] = field(default_factory=list)
    microbatches: list[_Run] = field(default_factory=list)
    counters: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, list[float]] | None = None

    def end(self, now: float) -> None:
        self.ended = now
        if self.microbatches and self.microbatches[-1].ended == 0.0:
            self.microbatches[-1].ended = now


class _Watched(Sequence[Microbatch]):
    """The microbatches of a step, whose times are noted as they are iterated."""

    def __init__(self, microbatches: Sequence[Microbatch], times: _StepTimes, now: Any) -> None:
        self._microbatches, self._times, self._now = microbatches, times, now

    def __len__(self) -> int:
        return len(self._microbatches)

    def __getitem__(self, index: Any) -> Any:
        return self._microbatches[index]

    def __iter__(self) -> Iterator[Microbatch]:
        iterator, times = iter(self._microbatches), self._times
        # A second pass over a step adds no events: the first one was its training.
        is_first = not times.microbatches
        for index in range(len(self._microbatches)):
            began = self._now()
            microbatch = next(iterator)
            if is_first:
                arrived = self._now()
                times.waits.append((began, arrived))
                times.microbatches.append(_Run(index, arrived, _sizes(microbatch)))
            yield microbatch
            if is_first:
                times.microbatches[-1].ended = self._now()

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)

    def __repr__(self) -> str:
        return repr(self._microbatches)


def _sizes(microbatch: Microbatch) -> dict[str, Any]:
    """Returns the arguments of a microbatch's event."""
    keys = microbatch.sample_keys
    more = [f"and {len(keys) - KEYS_MAX} more"] if len(keys) > KEYS_MAX else []
    return {
        "samples": len(keys),
        "tokens": microbatch.tokens,
        "padding_tokens": microbatch.padding_tokens,
        "target_tokens": microbatch.target_tokens,
        "predicted_seconds": microbatch.cost_seconds,
        "module_seconds": dict(microbatch.module_seconds),
        "sample_keys": keys[:KEYS_MAX] + more,
    }
