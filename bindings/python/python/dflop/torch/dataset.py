"""The loader as a dataset of PyTorch, for `DataLoader` and torchdata's `StatefulDataLoader`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch.utils.data

WORKERS_ADVICE = (
    "a dflop loader reads and decodes in threads of its own, and each worker process would start them, and "
    "read every sample, "
    "once more; use DataLoader(dataset, batch_size=None, num_workers=0)"
)


class ResumableLoader(Protocol):
    """A `dflop.Loader` or `dflop.BalancedLoader`."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]:
        """Returns the position behind what was handed out last."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a position; iteration begun afterwards starts there."""


class IterableDataset(torch.utils.data.IterableDataset[Any]):
    """Iterates a loader, and resumes it where it was left.

    - `loader`: a `dflop.Loader` (items are batches) or a `dflop.BalancedLoader` (items are steps)

    ```python
    dataset = dflop.torch.IterableDataset(dflop.BalancedLoader(...))
    loader = torchdata.stateful_dataloader.StatefulDataLoader(dataset, batch_size=None, num_workers=0)
    ```

    Items are whole batches already, hence `batch_size=None`; with `collate_fn=dflop.torch.keep` batches of a
    `dflop.Loader` keep their type, of which PyTorch's own function leaves a `dict`. `state_dict` and
    `load_state_dict` are those of the loader, and torchdata calls them: a `StatefulDataLoader` resumes behind
    the item that it handed out last, in the middle of an epoch, without reading what came before. Where the
    loader ends, so does the iterator, and the next one begins where the loader does. One iterator runs at a
    time, since there is one loader.

    Raises `RuntimeError` in a worker process (`num_workers > 0`).
    """

    def __init__(self, loader: ResumableLoader) -> None:
        super().__init__()
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        _refuse_workers()
        return self._items()

    def _items(self) -> Iterator[Any]:
        # Begun with the first item: torchdata makes iterators that it only asks for their state.
        yield from self._loader

    def __getstate__(self) -> dict[str, Any]:
        # Workers that are spawned get the dataset pickled, before any of them could refuse.
        raise RuntimeError(WORKERS_ADVICE)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the loader."""
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the position of the loader; an iterator that runs already is not moved."""
        self._loader.load_state_dict(state)


def keep(item: Any) -> Any:
    """Returns what it is given: a `collate_fn` that leaves batches as the loader made them."""
    return item


def _refuse_workers() -> None:
    worker = torch.utils.data.get_worker_info()
    if worker is not None:
        raise RuntimeError(f"num_workers={worker.num_workers}: {WORKERS_ADVICE}")
