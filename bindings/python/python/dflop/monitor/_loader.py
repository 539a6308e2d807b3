"""The part of loaders that monitoring reads."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Monitored(Protocol):
    """A `dflop.Loader` or `dflop.BalancedLoader`."""

    def metrics(self) -> dict[str, Any]:
        """Returns the metrics of every stage."""


def metrics_of(loader: object) -> dict[str, Any]:
    """Returns the metrics of a loader.

    Raises:
        TypeError: the object has none.
        Error: the loader is closed.
    """
    if not isinstance(loader, Monitored):
        found = type(loader).__name__
        raise TypeError(
            f"expected a dflop.Loader or dflop.BalancedLoader, found {found}; of a SharedLoader, "
            "the loader that rank 0 shares has the metrics"
        )
    return loader.metrics()


def delivered(metrics: dict[str, Any]) -> dict[str, Any]:
    """Returns the metrics of the last stage, which counts delivered samples."""
    stage: dict[str, Any] = next(stage for stage in metrics["stages"] if stage["stage"] == "deliver")
    return stage


def tokens_of(metrics: dict[str, Any]) -> int:
    """Returns the delivered LLM positions; 0 for the plain loader, which counts none."""
    return sum(source["tokens"] for source in metrics.get("sources", ()))


def wait_share(seconds: float, wait_seconds: float) -> float:
    """Returns the share of the time that the consumer waited for data, 0 to 1."""
    return min(wait_seconds / seconds, 1.0) if seconds > 0 else 0.0
