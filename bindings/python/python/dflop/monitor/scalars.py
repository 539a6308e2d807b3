"""Metrics of a loader as numbers by name, for TensorBoard and Weights & Biases."""

from __future__ import annotations

from typing import Any

from dflop.monitor._loader import delivered, metrics_of, recorded, tokens_of, wait_share
from dflop.monitor.record import MEASURED


def scalars(loader: object, *, prefix: str = "dflop") -> dict[str, float]:
    """Returns the metrics of a loader since the last ``iter``, as numbers by name.

    ``samples``, ``tokens``, ``samples_per_second`` and ``tokens_per_second`` are of delivered samples,
    ``data_wait_share`` is the share of the time that training waited for data, ``stage/NAME/busy_share`` the
    share of the time that the threads of a stage were busy. Datasets of a mixture have
    ``source/NAME/samples``, ``tokens`` and ``skipped_samples``. The plain loader counts no tokens. A `Record`
    adds what was logged for the step, such as ``loss``, and the ``step_seconds`` of the last recorded step.

    Args:
        loader: a `dflop.BalancedLoader` or `dflop.Loader`, or a `Record` or `Progress` of one.
        prefix: first part of the names, before a slash; none if it is empty.

    Raises:
        TypeError: the object has no metrics.
        Error: the loader is closed.

    Examples:
        >>> loader = dflop.Loader("shards/", batch_size=64)
        >>> batches = list(loader)
        >>> values = dflop.monitor.scalars(loader)
        >>> values["dflop/samples"], 0 <= values["dflop/data_wait_share"] <= 1
        (256, True)
    """
    metrics = metrics_of(loader)
    seconds = metrics["seconds"]
    samples, tokens = delivered(metrics)["items"], tokens_of(metrics)
    values: dict[str, float] = {
        "samples": samples,
        "samples_per_second": samples / seconds if seconds else 0.0,
        "data_wait_share": wait_share(seconds, metrics["consumer_wait_seconds"]),
        "skipped_samples": loader.skipped_samples,  # type: ignore[attr-defined]
        "undecoded_bytes": metrics["undecoded_bytes"],
        "decoded_bytes": metrics["decoded_bytes"],
        "request_retries": metrics["retries"],
        "stalls": metrics["stalls"],
    }
    if metrics.get("sources"):
        values |= {"tokens": tokens, "tokens_per_second": tokens / seconds if seconds else 0.0}
    for stage in metrics["stages"]:
        available = seconds * stage["workers"]
        share = min(stage["busy_seconds"] / available, 1.0) if available else 0.0
        values |= {
            f"stage/{stage['stage']}/busy_share": share,
            f"stage/{stage['stage']}/depth": stage["depth"],
        }
    for source in metrics.get("sources", ()):
        for field in ("samples", "tokens", "skipped_samples"):
            values[f"source/{source['source']}/{field}"] = source[field]
    latest = dict(recorded(loader))
    if "seconds" in latest:
        values["step_seconds"] = latest["seconds"]
    values |= {name: value for name, value in latest.items() if name not in MEASURED}
    start = f"{prefix}/" if prefix else ""
    return {start + name: value for name, value in values.items()}


def log(loader: object, writer: Any, step: int | None = None, *, prefix: str = "dflop") -> None:
    """Writes the `scalars` of a loader to TensorBoard or to Weights & Biases.

    Args:
        loader: a `dflop.BalancedLoader` or `dflop.Loader`, or a `Record` of one, which adds loss and learning
            rate.
        writer: a ``SummaryWriter`` of TensorBoard, or any object with its ``add_scalar(name, value, step)``;
            or a run of Weights & Biases, its module, or any object with ``log(values, step=step)``.
        step: number of the step. Default: the last delivered step of a `dflop.BalancedLoader`; else left to
            the writer.
        prefix: first part of the names.

    Raises:
        TypeError: the object has no metrics, or the writer has neither method.
        Error: the loader is closed.

    Examples:
        >>> class Board:  # a ``SummaryWriter`` in its place
        ...     def add_scalar(self, name, value, step):
        ...         if name == "dflop/samples":
        ...             print(f"step {step}: {value} samples")
        >>> loader = dflop.BalancedLoader("shards/", model="model/", global_batch_size=16, steps=4)
        >>> writer = Board()
        >>> for step in loader:
        ...     microbatches = list(step.microbatches)
        ...     if step.step % 2 == 1:
        ...         dflop.monitor.log(loader, writer, step.step)
        step 1: 32 samples
        step 3: 64 samples
    """
    if step is None and hasattr(loader, "steps_per_epoch"):
        step = max(loader.step - 1, 0)  # type: ignore[attr-defined]
    if hasattr(writer, "add_scalar"):
        for name, value in scalars(loader, prefix=prefix).items():
            writer.add_scalar(name, value, step)
    elif hasattr(writer, "log"):
        writer.log(scalars(loader, prefix=prefix), step=step)
    else:
        found = type(writer).__name__
        raise TypeError(f"writer: expected a method `add_scalar` or `log`, found {found} without them")
