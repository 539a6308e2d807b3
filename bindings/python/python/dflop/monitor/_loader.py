"""The part of loaders that monitoring reads, and the base of the classes that wrap a loader."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Wrapper(Generic[T]):
    """A loader with something added: it has the length and all attributes of the loader.

    Wrappers therefore stand wherever a loader does, also in each other.
    """

    loader: Any

    def __init__(self, loader: Any) -> None:
        metrics_of(loader)
        self.loader = loader

    def __len__(self) -> int:
        """Returns the length of the loader."""
        return len(self.loader)

    def __bool__(self) -> bool:
        # A loader of a run without end has no length, and is no false value.
        return True

    def __getattr__(self, name: str) -> Any:
        # Copies and pickles ask for these before there is a loader.
        if name == "loader" or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.loader, name)


def metrics_of(loader: object) -> dict[str, Any]:
    """Returns the metrics of a loader, also of a wrapped one.

    Raises:
        TypeError: the object has none.
        Error: the loader is closed.
    """
    metrics = getattr(loader, "metrics", None)
    if not callable(metrics):
        found = type(loader).__name__
        raise TypeError(
            f"expected a dflop.Loader or dflop.BalancedLoader, found {found}; of a SharedLoader, "
            "the loader that rank 0 shares has the metrics"
        )
    measured: dict[str, Any] = metrics()
    return measured


def recorded(loader: object) -> dict[str, float]:
    """Returns the numbers of the last step of the `Record` among the wrappers; none without one."""
    latest: dict[str, float] = getattr(loader, "latest", {})
    return latest


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
