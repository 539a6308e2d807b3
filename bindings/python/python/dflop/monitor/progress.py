"""A line on a terminal that shows how a run goes on."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from dflop.monitor._loader import T, Wrapper, delivered, metrics_of, tokens_of, wait_share

# Below this share of the time spent waiting for data, computing is the bottleneck, as in `metrics`.
WAIT_SHARE_NOTICED = 0.05
# Rates and the time left are those of the last so many updates.
UPDATES_KEPT = 60


class Progress(Wrapper[T]):
    """Iterates a loader and shows its progress: steps, rates, time left, and what limits the run.

    On a terminal it is one line on standard error, drawn again at most every ``interval_seconds`` while steps
    are delivered; no thread runs. ``wait`` is the share of the time that training waited for data, and the
    bottleneck is ``data`` from 5 % on, else ``compute``. Rates are those of the last 60 updates. Samples and
    tokens are those of this rank.

    ::

        step 120 of 5000   98.2 samples/s   41.3 k tokens/s   2:41:07 left   wait 0.4 %   compute

    Args:
        loader: a `dflop.BalancedLoader` or `dflop.Loader`, or a `Record` of one, whose items are delivered
            unchanged. All else that it has is an attribute of the progress: ``progress.state_dict()``.
        always: shows lines also where standard error is no terminal, each on its own.
        tqdm: ``tqdm.tqdm``, or a class with its interface, which draws instead; rates and bottleneck are its
            postfix.
        interval_seconds: shortest time between two lines.
        file: where the line is written. Default: standard error.

    Raises:
        TypeError: the object has no metrics.
        ValueError: the interval is not a number of at least 0.

    Examples:
        >>> import sys
        >>> loader = dflop.Loader("shards/", batch_size=64)
        >>> progress = dflop.monitor.Progress(loader, always=True, interval_seconds=0, file=sys.stdout)
        >>> for batch in progress:
        ...     images = len(batch)
        batch 1 of 4   ... samples/s   ... left   wait ...
        batch 2 of 4   ...
        batch 3 of 4   ...
        batch 4 of 4   ...
        >>> len(progress)
        4
    """

    def __init__(
        self,
        loader: Any,
        *,
        always: bool = False,
        tqdm: Callable[..., Any] | None = None,
        interval_seconds: float = 1.0,
        file: TextIO | None = None,
    ) -> None:
        super().__init__(loader)
        if not interval_seconds >= 0.0:
            raise ValueError(f"interval_seconds: must be at least 0, found {interval_seconds}")
        self._always, self._tqdm, self._interval, self._file = always, tqdm, interval_seconds, file

    def __iter__(self) -> Iterator[T]:
        # Not with the first item: `iter` of a restored loader sets its step.
        return self._shown(iter(self.loader))

    def _shown(self, items: Iterator[T]) -> Iterator[T]:
        file = sys.stderr if self._file is None else self._file
        display: _Bar | _Line
        if self._tqdm is not None:
            # Drawing is left to the bar: it has its own interval.
            display = _Bar(self._tqdm, self.loader)
        elif self._always or file.isatty():
            display = _Line(self.loader, file, self._interval)
        else:
            yield from items
            return
        try:
            for item in items:
                # When it is asked for the next item, the consumer is done with this one.
                yield item
                display.advance()
        finally:
            display.close()


class _Pace:
    """Counts items, and takes the rates of the last updates."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._is_balanced = hasattr(loader, "steps_per_epoch")
        self.unit = "step" if self._is_balanced else "batch"
        self.done: int = loader.step if self._is_balanced else 0
        try:
            self.total: int | None = len(loader)
        except TypeError:
            self.total = None
        self._marks: deque[tuple[float, int, dict[str, Any]]] = deque(maxlen=UPDATES_KEPT)
        self.mark()

    def advance(self) -> None:
        self.done += 1

    def mark(self) -> None:
        self._marks.append((time.monotonic(), self.done, metrics_of(self._loader)))

    def rates(self) -> tuple[str, str, list[str]]:
        """Returns the time left, the bottleneck and the rates, after a mark."""
        (began, first, before), (now, last, after) = self._marks[0], self._marks[-1]
        seconds = max(now - began, 1e-9)
        samples = delivered(after)["items"] - delivered(before)["items"]
        tokens = tokens_of(after) - tokens_of(before)
        waited = after["consumer_wait_seconds"] - before["consumer_wait_seconds"]
        share = wait_share(seconds, max(waited, 0.0))
        rates = [f"{_short(samples / seconds)} samples/s"]
        if after.get("sources"):
            rates.append(f"{_short(tokens / seconds)} tokens/s")
        rates.append(f"wait {100 * share:.1f} %")
        left = "? left"
        if self.total is not None and last > first:
            left = f"{_clock((self.total - last) * seconds / (last - first))} left"
        return left, "data" if share >= WAIT_SHARE_NOTICED else "compute", rates


class _Line:
    """A line on a terminal, or lines in a file."""

    def __init__(self, loader: Any, file: TextIO, interval_seconds: float) -> None:
        self._pace, self._file, self._interval = _Pace(loader), file, interval_seconds
        self._is_terminal = file.isatty()
        self._drawn_at, self._width, self._shown = time.monotonic(), 0, self._pace.done

    def advance(self) -> None:
        self._pace.advance()
        if time.monotonic() - self._drawn_at >= self._interval:
            self._draw()

    def _draw(self) -> None:
        self._pace.mark()
        left, bottleneck, (*rates, wait) = self._pace.rates()
        of = "" if self._pace.total is None else f" of {self._pace.total}"
        line = "   ".join([f"{self._pace.unit} {self._pace.done}{of}", *rates, left, wait, bottleneck])
        start, end = ("\r", "") if self._is_terminal else ("", "\n")
        self._file.write(start + line.ljust(self._width if self._is_terminal else 0) + end)
        self._file.flush()
        self._width, self._drawn_at, self._shown = len(line), time.monotonic(), self._pace.done

    def close(self) -> None:
        # Also after an error of the loop: the last line stands above its traceback.
        if self._shown != self._pace.done:
            self._draw_if_open()
        if self._is_terminal and self._width:
            self._file.write("\n")
            self._file.flush()

    def _draw_if_open(self) -> None:
        from dflop.errors import Error

        try:
            self._draw()
        except Error:
            # A loader that was closed has no metrics.
            return


class _Bar:
    """A bar of tqdm."""

    def __init__(self, tqdm: Callable[..., Any], loader: Any) -> None:
        self._pace = _Pace(loader)
        self._bar = tqdm(total=self._pace.total, initial=self._pace.done, unit=self._pace.unit)
        self._marked_at = time.monotonic()

    def advance(self) -> None:
        self._pace.advance()
        # As often as tqdm draws, by default.
        if time.monotonic() - self._marked_at >= getattr(self._bar, "mininterval", 0.1):
            self._pace.mark()
            _, bottleneck, rates = self._pace.rates()
            self._bar.set_postfix_str(", ".join([*rates, bottleneck]), refresh=False)
            self._marked_at = time.monotonic()
        self._bar.update(1)

    def close(self) -> None:
        self._bar.close()


def _short(value: float) -> str:
    """Returns a number with three digits, and ``k`` or ``M``."""
    for unit, factor in (("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.3g}"


def _clock(seconds: float) -> str:
    """Returns hours, minutes and seconds."""
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}"
