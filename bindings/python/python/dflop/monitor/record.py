"""A file of a run's steps, which ``dflop top`` shows."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, BinaryIO, Self

from dflop.monitor._loader import T, Wrapper, delivered, metrics_of, tokens_of

LOGGER = logging.getLogger("dflop")
# What `log` must not replace: the fields that the record measures itself.
MEASURED = (
    "step",
    "time",
    "seconds",
    "samples",
    "tokens",
    "tokens_per_second",
    "data_wait_seconds",
    "dropped_samples",
)


class Record(Wrapper[T]):
    """Iterates a loader and records every step in a file, which ``dflop top FILE`` shows while the run goes on.

    A line is one JSON object: ``step``, ``time`` (its end, in seconds since 1970), ``seconds``, ``samples``,
    ``tokens`` (LLM positions) and ``tokens_per_second`` unless it is a plain loader, ``data_wait_seconds``,
    ``dropped_samples``, and what `log` adds. ``dflop report FILE`` makes a page of them. Samples and tokens
    are those of this rank, so one rank records, usually rank 0. A loader that starts with a later step than
    the first appends to the file; otherwise the file is replaced.

    A line that cannot be written, as on a full disk, ends the record with a warning, and not the run. As a
    context manager it also records why the loop ended: with an exception it is a failed run. Samples that were
    skipped are warnings of the logger ``dflop``.

    Args:
        loader: a `dflop.BalancedLoader` or `dflop.Loader`, or a `Progress` of one, whose items are delivered
            unchanged. All else that it has is an attribute of the record: ``record.state_dict()``.
        path: file, by convention ``steps.jsonl`` in the directory of the run, which is created.
        title: what runs, such as the name of the model.
        about: facts that are shown beside the title, such as ``["8 ranks", "bf16"]``.

    Raises:
        TypeError: the object has no metrics.
        OSError: the file cannot be opened, when iteration starts.

    Examples:
        >>> directory = dflop.example.directory(samples=8, shards=1)
        >>> loader = dflop.BalancedLoader(
        ...     directory / "shards", model=directory / "model", global_batch_size=4, epochs=1
        ... )
        >>> with dflop.monitor.Record(loader, directory / "run/steps.jsonl", title="example") as record:
        ...     for step in record:
        ...         record.log(loss=2.5)
        >>> dflop.monitor.steps(record.path)[-1]["loss"]
        2.5
    """

    def __init__(
        self,
        loader: Any,
        path: str | os.PathLike[str],
        *,
        title: str = "",
        about: Sequence[str] = (),
    ) -> None:
        super().__init__(loader)
        if isinstance(about, str):
            raise TypeError("about: expected a list of texts, found a text")
        self.path = os.fspath(path)
        self._title, self._about = title, [str(fact) for fact in about]
        self._logged: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._lines: _Lines | None = None
        self._is_entered = False

    @property
    def latest(self) -> dict[str, float]:
        """Numbers of the last recorded step, with those that were logged since: ``loss``, ``seconds``."""
        return self._last | self._logged

    def __enter__(self) -> Self:
        self._is_entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._is_entered = False
        if error is None:
            self._finish("stopped", "the loop ended")
        else:
            self._finish("failed", f"{type(error).__name__}: {error}")

    def log(self, **values: float) -> None:
        """Adds numbers to the line of the present step, such as ``loss``, ``mfu`` or ``learning_rate``.

        ``dflop top`` shows ``loss`` and ``mfu``; others are kept in the file.

        Raises:
            ValueError: the record measures the value itself, such as ``seconds``.
            TypeError: a value is no number.
        """
        for name, value in values.items():
            if name in MEASURED:
                raise ValueError(f"{name}: is measured by the record; choose another name")
            self._logged[name] = float(value)

    def __iter__(self) -> Iterator[T]:
        # Not with the first item: `iter` of a restored loader sets its step.
        items = iter(self.loader)
        is_balanced = hasattr(self.loader, "steps_per_epoch")
        return self._recorded(items, self.loader.step if is_balanced else 0, is_balanced)

    def _recorded(self, items: Iterator[T], step: int, is_balanced: bool) -> Iterator[T]:
        self._finish("stopped", "another loop began")
        self._logged, self._last = {}, {}
        lines = self._lines = _Lines(self.path, step)
        lines.write(
            {
                "format": "dflop-steps",
                "version": 1,
                "title": self._title,
                "first_step": step,
                "end_step": self._end(step, is_balanced),
                "about": self._about,
                "time": time.time(),
            }
        )
        LOGGER.info("records steps from %d on in %s", step, self.path)
        try:
            # Counters start with `iter`; the first step may have been counted while it was prefetched.
            before: dict[str, float] = {"dropped_samples": self.loader.skipped_samples}
            began = time.perf_counter()
            for item in items:
                yield item
                # When it is asked for the next item, the consumer is done with this one.
                after, now = self._totals(), time.perf_counter()
                grown = {name: total - before.get(name, 0) for name, total in after.items()}
                seconds = max(now - began, 1e-9)
                if "tokens" in grown:
                    grown["tokens_per_second"] = grown["tokens"] / seconds
                line = {"step": step, "time": time.time(), "seconds": seconds}
                self._last = line | grown | self._logged
                lines.write(_finite(self._last))
                if grown["dropped_samples"] > 0:
                    self._warn_of_skipped(step, grown["dropped_samples"])
                before, began, self._logged = after, now, {}
                step += 1
        except GeneratorExit:
            # A loop that fails drops its iterator first; the context manager knows why.
            if not self._is_entered:
                self._finish("stopped", "the loop ended")
            raise
        except BaseException as error:
            self._finish("failed", f"{type(error).__name__}: {error}")
            raise
        self._finish("completed", "")

    def _finish(self, outcome: str, reason: str) -> None:
        """Writes how the running record ended; nothing if none is running."""
        lines, self._lines = self._lines, None
        if lines is not None:
            lines.write({"end": outcome, "reason": reason, "time": time.time()})
            lines.close()
            LOGGER.info("record %s %s%s", self.path, outcome, f": {reason}" if reason else "")

    def _warn_of_skipped(self, step: int, samples: int) -> None:
        last = self.loader.skipped[-1:]
        shown = "; the last: {key} in {shard}: {reason}".format_map(last[0]) if last else ""
        LOGGER.warning("step %d: skipped samples: %d%s", step, samples, shown)

    def _end(self, step: int, is_balanced: bool) -> int | None:
        try:
            length = len(self.loader)
        except TypeError:
            return None
        return length if is_balanced else step + length

    def _totals(self) -> dict[str, float]:
        metrics = metrics_of(self.loader)
        totals = {
            "samples": delivered(metrics)["items"],
            "data_wait_seconds": metrics["consumer_wait_seconds"],
            "dropped_samples": self.loader.skipped_samples,
        }
        if metrics.get("sources"):
            totals["tokens"] = tokens_of(metrics)
        return totals


class _Lines:
    """The file of a record."""

    def __init__(self, path: str, first_step: int) -> None:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        kept = 0 if first_step == 0 else _kept_bytes(path, first_step)
        self._file: BinaryIO | None = open(path, "r+b" if kept else "wb", buffering=0)
        if kept:
            self._file.truncate(kept)
            self._file.seek(kept)

    def write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            # In one piece, so that a killed process cuts at most the last line.
            self._file.write(json.dumps(line).encode() + b"\n")
        except OSError as error:
            import warnings

            warnings.warn(f"the record of steps ends here: {error}", RuntimeWarning, stacklevel=3)
            self.close()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _kept_bytes(path: str, first_step: int) -> int:
    """Returns the length of the lines before the first one of this step or a later one."""
    kept = 0
    if os.path.exists(path):
        with open(path, "rb") as file:
            for line in file:
                if not line.endswith(b"\n") or _parsed(line).get("step", -1) >= first_step:
                    break
                kept += len(line)
    return kept


def _parsed(line: bytes) -> dict[str, Any]:
    """Returns the object of a line; an empty one for other lines."""
    try:
        parsed = json.loads(line)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _finite(values: dict[str, float]) -> dict[str, float | None]:
    """JSON has no infinity and no NaN."""
    return {name: value if abs(value) < float("inf") else None for name, value in values.items()}


def steps(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the steps of a record, that of a `Record` or of ``dflop train``, as dictionaries.

    A line that a killed process cut is left out.

    Args:
        path: the file, such as ``run/steps.jsonl``.

    Raises:
        OSError: the file cannot be read.

    Examples:
        >>> path = dflop.example.directory(samples=1, shards=1) / "steps.jsonl"
        >>> _ = path.write_text('{"step": 0, "seconds": 1.5, "loss": 2.5}\\n')
        >>> [step["loss"] for step in dflop.monitor.steps(path)]
        [2.5]
    """
    with open(path, "rb") as file:
        return [line for line in map(_parsed, file) if "step" in line]
