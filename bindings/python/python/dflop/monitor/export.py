"""Copies a record of steps to TensorBoard or Weights & Biases, after the run or while it is written."""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# The record in a run directory, and the directory next to it for the files of TensorBoard.
RECORD, BOARD = "steps.jsonl", "tensorboard"
EVENTS = "events.out.tfevents.*"
# Time between two looks at a record that is still written.
INTERVAL_SECONDS = 1.0

Scalars = dict[str, float]
# Writes the scalars of a step, with its end in seconds since 1970, if the record has it.
Write = Callable[[Scalars, int, float | None], None]


def export(
    path: str | os.PathLike[str], writer: Any = None, *, follow: bool = False, prefix: str = "dflop"
) -> int:
    """Copies the steps of a record to TensorBoard or Weights & Biases, as scalars by step.

    Every number of a step becomes a scalar: ``dflop/loss``, ``dflop/tokens_per_second``, and those of an
    evaluation ``dflop/evaluation/loss``. ``python -m dflop.monitor RUN`` does the same, ``--follow`` while the
    run goes on, from any process that sees the file: the training process needs no writer.

    Args:
        path: record of ``dflop train`` or of a `Record`, or a directory with ``steps.jsonl``.
        writer: a ``SummaryWriter`` of TensorBoard, or any object with its ``add_scalar(name, value, step)``;
            or a run of Weights & Biases, or any object with ``log(values, step=step)``. Default: TensorBoard
            files in ``tensorboard`` next to the record, in place of those of an earlier export; without
            TensorBoard a new run of ``wandb``, if that is installed.
        follow: whether to go on until the run has ended. Steps that a resumed run takes again are written
            again.
        prefix: first part of the names, before a slash; none if it is empty.

    Returns:
        Number of steps that were written.

    Raises:
        ImportError: no writer is given, and neither TensorBoard nor wandb is installed.
        TypeError: the writer has neither method.
        OSError: the record cannot be read, or does not exist and is not followed.

    Examples:
        >>> class Board:  # a ``SummaryWriter`` in its place
        ...     def add_scalar(self, name, value, step):
        ...         print(step, name, value)
        >>> path = dflop.example.directory(samples=1, shards=1) / "steps.jsonl"
        >>> _ = path.write_text('{"step": 0, "loss": 2.5, "evaluation": {"loss": 3.0}}\\n')
        >>> dflop.monitor.export(path, Board())
        0 dflop/loss 2.5
        0 dflop/evaluation/loss 3.0
        1
    """
    record = Path(path)
    if record.is_dir():
        record /= RECORD
    if not follow and not record.exists():
        raise FileNotFoundError(
            f"{record}: there is no record of steps, as `dflop train` and `Record` write it"
        )
    write, close = _installed(record.parent) if writer is None else (_given(writer), lambda: None)
    start, steps = f"{prefix}/" if prefix else "", 0
    try:
        for line in _lines(record, follow):
            if not isinstance(line.get("step"), int):
                continue
            values = {start + name: value for name, value in _scalars(line).items()}
            write(values, line["step"], line.get("time"))
            steps += 1
    finally:
        close()
    return steps


def _scalars(line: dict[str, Any]) -> Scalars:
    """Returns the numbers of a step and of its evaluation."""
    values: Scalars = {}
    for name, value in line.items():
        if name == "evaluation" and isinstance(value, dict):
            values |= {f"{name}/{own}": number for own, number in _scalars(value).items()}
        elif isinstance(value, (bool, int, float)) and name not in ("step", "time"):
            values[name] = float(value)
    return values


def _lines(path: Path, follow: bool) -> Iterator[dict[str, Any]]:
    """Yields the complete lines; from the start again if a resumed run has cut or replaced the file."""
    read, last, inode = 0, b"", 0
    while True:
        has_ended = False
        if path.exists():
            with open(path, "rb") as file:
                about = os.fstat(file.fileno())
                file.seek(max(read - len(last), 0))
                if (inode and about.st_ino != inode) or file.read(len(last)) != last:
                    read, last = 0, b""
                inode = about.st_ino
                file.seek(read)
                for text in file:
                    if not text.endswith(b"\n"):
                        break
                    read, last = read + len(text), text
                    line = _parsed(text)
                    has_ended = "end" in line
                    yield line
        if not follow or has_ended:
            return
        time.sleep(INTERVAL_SECONDS)


def _parsed(text: bytes) -> dict[str, Any]:
    """Returns the object of a line; an empty one for other lines."""
    try:
        line = json.loads(text)
    except ValueError:
        return {}
    return line if isinstance(line, dict) else {}


def _given(writer: Any) -> Write:
    """Returns how a writer of the caller takes the scalars of a step."""
    if hasattr(writer, "add_scalar"):

        def write(values: Scalars, step: int, _: float | None) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        return write
    if hasattr(writer, "log"):
        return lambda values, step, _: writer.log(values, step=step)
    found = type(writer).__name__
    raise TypeError(f"writer: expected a method `add_scalar` or `log`, found {found} without them")


def _installed(directory: Path) -> tuple[Write, Callable[[], object]]:
    """Opens the writer that is installed; returns how it takes the scalars of a step, and how it is closed."""
    board = directory / BOARD
    for name, kind, time_name in [
        ("torch.utils.tensorboard", "SummaryWriter", "walltime"),
        ("tensorboard.summary", "Writer", "wall_time"),
    ]:
        module = _imported(name)
        if module is None:
            continue
        for earlier in board.glob(EVENTS):
            earlier.unlink()
        writer = getattr(module, kind)(str(board))

        def write(
            values: Scalars, step: int, ended: float | None, writer: Any = writer, at: str = time_name
        ) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step, **({} if ended is None else {at: ended}))

        return write, writer.close
    wandb = _imported("wandb")
    if wandb is None:
        raise ImportError(
            "expected TensorBoard or wandb, found neither: `pip install tensorboard`, or pass `writer=`"
        )
    run = wandb.init(project="dflop", name=directory.resolve().name)
    return (lambda values, step, _: run.log(values, step=step)), run.finish


def _imported(name: str) -> Any:
    """Returns a module; ``None`` if it, or what it needs, is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
