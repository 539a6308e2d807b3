"""Times modules while they train, and reports the times to the loader, whose predictions they correct.

On a GPU, marks are CUDA events, which the host does not wait for during a step; elsewhere the thread's CPU
time if PyTorch has one thread, or wall time. At the end of a step the times of all data-parallel ranks are
gathered, so that every rank reports and learns the same.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isnan
from typing import Any, Protocol, Self

import torch

from dflop.torch._clock import Clock, clock_of
from dflop.torch._launches import Launches
from dflop.torch._spans import ModuleSpans, Pass

NAN = float("nan")
SECONDS_PER_MICROSECOND = 1e-6


class ReportsSeconds(Protocol):
    """The part of a `dflop.BalancedLoader` that takes stage times."""

    def report_stage_seconds(
        self, step: Any, seconds: dict[str, list[list[float]]], *, interval: int = 32
    ) -> Any:
        """Takes the times of a step in seconds, by module, DP rank and microbatch; NaN if not measured."""


Listener = Callable[[Any, dict[str, list[float]]], None]
"""Takes a step and the seconds of its microbatches on this rank, by module; NaN if not measured."""


class StageTimer:
    """Measures forward and backward of modules in every microbatch and reports them to the loader.

    The calls of a module are assigned to the step's microbatches in order. If a module does not run exactly
    once per microbatch, such as an encoder that is skipped without images, call ``timer.microbatch(index)``
    before each microbatch; otherwise all times of that module and step are NaN. Evaluate under
    ``timer.paused()``.

    A module without gradients has a forward time only. Recomputed activations are part of the backward time.
    Times on a GPU are times of its stream, including waits in it, such as gathering sharded parameters.

    Hooks do not work inside modules compiled by ``torch.compile``: pass the compiled modules themselves.

    On CUDA, the timer warns once if launches are the limit: if the device is idle after most passes because
    the host has not queued the next one. ``timer.limit`` has the sentence.

    ``timer.module_seconds`` has the totals of this rank, ``timer.listen`` passes the times on, as
    `dflop.torch.Trace` does. ``timer.close()`` reports the remaining steps and removes the hooks; so does
    leaving ``with``.

    Args:
        loader: a `dflop.BalancedLoader`; the timer calls ``report_stage_seconds(step, seconds)``, ``seconds``
            by module (``vision``, ``audio``, ``llm``), DP rank and microbatch: forward plus backward of the
            whole module, NaN if it was not measured.
        encoder: module of images, reported as ``vision``.
        audio: module of audio.
        llm: language model.
        group: process group of the data-parallel ranks, in the order of their DP ranks. Default: all
            processes if ``torch.distributed`` is initialized, else this process only. All its ranks create a
            timer at the same time.
        delay_steps: number of steps by which reports are delayed, the same on all ranks. Default: 1 on CUDA,
            so that the host does not wait for events of the current step, and 0 elsewhere.
        interval: steps after which the times change later plans, the same on all ranks.

    Raises:
        TypeError: there is no module.
        ValueError: ``delay_steps`` is negative, or there is a ``group`` without ``torch.distributed``.

    Examples:
        >>> import torch
        >>> llm = torch.nn.Embedding(640, 8)
        >>> settings = {"model": "model/", "global_batch_size": 8, "microbatches": 2}
        >>> loader = dflop.BalancedLoader("shards/", steps=2, **settings)
        >>> with dflop.torch.StageTimer(loader, llm=llm) as timer:
        ...     timer.listen(lambda step, seconds: print(step.step, len(seconds["llm"])))
        ...     for step in loader:
        ...         for index, microbatch in enumerate(step.microbatches):
        ...             timer.microbatch(index)
        ...             llm(microbatch["input_ids"]).sum().backward()
        ...         with timer.paused(), torch.no_grad():
        ...             evaluated = llm(torch.arange(640))
        ...         timer.step(step)
        0 2
        1 2
        >>> timer.module_seconds["llm"] > 0
        True
    """

    def __init__(
        self,
        loader: ReportsSeconds,
        *,
        encoder: torch.nn.Module | None = None,
        audio: torch.nn.Module | None = None,
        llm: torch.nn.Module | None = None,
        group: Any = None,
        delay_steps: int | None = None,
        interval: int = 32,
    ) -> None:
        given = {"vision": encoder, "audio": audio, "llm": llm}
        modules = {name: module for name, module in given.items() if module is not None}
        if not modules:
            raise TypeError("pass a module to time: `encoder`, `audio` or `llm`")
        parameters = (parameter for module in modules.values() for parameter in module.parameters())
        device = next((parameter.device for parameter in parameters), torch.device("cpu"))
        self._delay = (1 if device.type == "cuda" else 0) if delay_steps is None else delay_steps
        if self._delay < 0:
            raise ValueError(f"delay_steps: must be at least 0, found {delay_steps}")
        self._loader, self._interval = loader, interval
        self._clock: Clock = clock_of(device)
        self._exchange = _Exchange(group)
        self._launches, self._has_warned = Launches(self._clock), False
        self._spans = {
            name: ModuleSpans(module, self._clock, self._launches) for name, module in modules.items()
        }
        self._waiting: deque[tuple[Any, dict[str, list[Pass]]]] = deque()
        self._listeners: list[Listener] = []
        self._module_seconds = dict.fromkeys(modules, 0.0)

    @property
    def module_seconds(self) -> dict[str, float]:
        """Measured seconds of each module on this rank, over all reported steps."""
        return dict(self._module_seconds)

    @property
    def limit(self) -> str | None:
        """``limited by launches: ...`` if the device waits for the host after most passes, else ``None``;
        always ``None`` on the CPU."""
        return self._launches.limit

    def listen(self, listener: Listener) -> None:
        """Passes the times of every step to a function, after the loader got them.

        Args:
            listener: called with the step and, by module, the seconds of its microbatches on this rank.
        """
        self._listeners.append(listener)

    def microbatch(self, index: int) -> None:
        """Sets the microbatch of the step that runs next, counted from 0 on this rank."""
        for spans in self._spans.values():
            spans.index = index

    def step(self, step: Any) -> None:
        """Ends a step after its last backward pass; all ranks of the group call it once per step.

        Args:
            step: the `dflop.Step` whose microbatches have run.
        """
        self._launches.forget()
        if self.limit is not None and not self._has_warned:
            self._has_warned = True
            warnings.warn(self.limit, stacklevel=2)
        self._waiting.append((step, {name: spans.passes for name, spans in self._spans.items()}))
        for spans in self._spans.values():
            spans.passes, spans.index = [], None
        if len(self._waiting) > self._delay:
            self._report()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stops timing meanwhile, for example during an evaluation."""
        self._launches.forget()
        for spans in self._spans.values():
            spans.is_paused = True
        try:
            yield
        finally:
            for spans in self._spans.values():
                spans.is_paused = False

    def close(self) -> None:
        """Reports the delayed steps and removes the hooks; all ranks call it."""
        while self._waiting:
            self._report()
        for spans in self._spans.values():
            spans.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            # Other ranks may not get here, and an exchange of times would wait for them.
            self._waiting.clear()
        self.close()

    def _report(self) -> None:
        step, passes = self._waiting.popleft()
        count = len(step.microbatches)
        own = [self._seconds(of_module, count) for of_module in passes.values()]
        ranks = self._exchange.all_ranks(own)
        seconds_of_ranks = dict(zip(passes, ranks, strict=True))
        self._loader.report_stage_seconds(step, seconds_of_ranks, interval=self._interval)
        seconds = dict(zip(passes, own, strict=True))
        for name, times in seconds.items():
            self._module_seconds[name] += sum(time for time in times if not isnan(time))
        for listener in self._listeners:
            listener(step, seconds)

    def _seconds(self, passes: list[Pass], microbatches: int) -> list[float]:
        """Returns the seconds of a module by microbatch."""
        is_marked = any(one.index is not None for one in passes)
        if not is_marked and len(passes) != microbatches:
            return [NAN] * microbatches
        seconds: list[float] = [NAN] * microbatches
        for at, one in enumerate(passes):
            index = one.index if is_marked else at
            if index is None or not 0 <= index < microbatches:
                continue
            before = 0.0 if seconds[index] != seconds[index] else seconds[index]
            seconds[index] = before + self._pass_seconds(one)
        incomplete = {one.index if is_marked else at for at, one in enumerate(passes) if not one.is_complete}
        return [NAN if index in incomplete else time for index, time in enumerate(seconds)]

    def _pass_seconds(self, one: Pass) -> float:
        microseconds = 0.0
        for start, end in one.spans:
            self._clock.wait(end)
            microseconds += self._clock.microseconds(start, end)
        return microseconds * SECONDS_PER_MICROSECOND


class _Exchange:
    """Gathers the times of data-parallel ranks through the hosts, so that no GPU waits for it."""

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        self._group, self._rank, self._size = None, 0, 1
        if not (dist.is_available() and dist.is_initialized()):
            if group is not None:
                raise ValueError("group: torch.distributed is not initialized")
            return
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._group = group
        if "gloo" not in dist.get_backend(group):
            ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
            self._group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)

    def all_ranks(self, own: list[list[float]]) -> list[list[list[float]]]:
        """Returns the rows of all ranks, by module.

        Raises `ValueError` on every rank if their numbers of microbatches differ.
        """
        if self._size == 1:
            return [[row] for row in own]
        import torch.distributed as dist

        count = len(own[0])
        counts = torch.zeros(self._size, dtype=torch.int64)
        counts[self._rank] = count
        dist.all_reduce(counts, group=self._group)
        if len(set(counts.tolist())) > 1:
            raise ValueError(f"expected equal numbers of microbatches on all ranks, found {counts.tolist()}")
        times = torch.zeros(len(own), self._size, count, dtype=torch.float64)
        times[:, self._rank] = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(times, group=self._group)
        rows: list[list[list[float]]] = times.tolist()
        return rows
