"""Wraps a loader as a PyTorch dataset, for `DataLoader` and torchdata's `StatefulDataLoader`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch.utils.data
from torch.utils.data._utils.collate import default_collate_fn_map

from dflop.batches import Batch, Microbatch, Step

WORKERS_ADVICE = (
    "a dflop loader reads and decodes in its own threads; every worker process would start them and read all "
    "samples again; use DataLoader(dataset, batch_size=None, num_workers=0)"
)
BATCHES_ADVICE = (
    "the items of a dflop loader are whole batches, which DataLoader must not join: use "
    "DataLoader(dataset, batch_size=None), and set the size of batches in the loader"
)


class ResumableLoader(Protocol):
    """A `dflop.Loader` or `dflop.BalancedLoader`."""

    def __iter__(self) -> Iterator[Any]: ...

    def __len__(self) -> int: ...

    def state_dict(self) -> dict[str, Any]:
        """Returns the state after the last delivered item."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from a state; later iterations start there."""


class IterableDataset(torch.utils.data.IterableDataset[Any]):
    """Iterates a loader, and resumes it from its state.

    Items are whole batches, hence ``batch_size=None``; with ``collate_fn=dflop.torch.keep`` batches of a
    `dflop.Loader` keep their type, which PyTorch's default function converts to ``dict``. ``state_dict`` and
    ``load_state_dict`` call the loader, and torchdata calls them: a ``StatefulDataLoader(dataset,
    batch_size=None, num_workers=0)`` resumes after the last delivered item, in the middle of an epoch,
    without reading the items before. An iterator ends with the loader's iterator; the next one starts where
    the loader does. Only one iterator runs at a time, because there is one loader. ``len`` is that of the
    loader, so that ``DataLoader`` and trainers know the length of a run that ends.

    Args:
        loader: a `dflop.Loader`, whose items are batches, or a `dflop.BalancedLoader`, whose items are steps;
            or a `dflop.monitor.Progress` or `dflop.monitor.Record` of one.

    Raises:
        RuntimeError: iterated in a worker process (``num_workers > 0``).
        TypeError: iterated by a ``DataLoader`` with a ``batch_size``, which would join whole batches.

    Examples:
        >>> import torch
        >>> dataset = dflop.torch.IterableDataset(dflop.Loader("shards/", batch_size=100))
        >>> loader = torch.utils.data.DataLoader(dataset, batch_size=None, collate_fn=dflop.torch.keep)
        >>> len(loader)
        3
        >>> first, state = next(iter(loader)), dataset.state_dict()
        >>> dataset.load_state_dict(state)
        >>> [len(batch.samples) for batch in loader]
        [100, 56]
    """

    def __init__(self, loader: ResumableLoader) -> None:
        super().__init__()
        self._loader = loader

    def __len__(self) -> int:
        """Returns the number of items of the loader.

        Raises:
            TypeError: the run has no end.
        """
        return len(self._loader)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        _refuse_workers()
        return self._items()

    def _items(self) -> Iterator[Any]:
        # Starts with the first item: torchdata creates iterators that it only asks for their state.
        yield from self._loader

    def __getstate__(self) -> dict[str, Any]:
        # Spawned workers unpickle the dataset before they could refuse to iterate it.
        raise RuntimeError(WORKERS_ADVICE)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the loader."""
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the state of the loader; a running iterator is not affected."""
        self._loader.load_state_dict(state)


def keep(item: Any) -> Any:
    """Returns its argument: a ``collate_fn`` that keeps batches as the loader delivers them.

    Args:
        item: a batch, or a microbatch.

    Raises:
        TypeError: the item is a list of batches, which a ``DataLoader`` with a ``batch_size`` makes.

    Examples:
        >>> import torch
        >>> dataset = dflop.torch.IterableDataset(dflop.Loader("shards/"))
        >>> loader = torch.utils.data.DataLoader(dataset, batch_size=None, collate_fn=dflop.torch.keep)
        >>> type(next(iter(loader))).__name__
        'Batch'
    """
    if isinstance(item, list) and item and isinstance(item[0], WHOLE):
        _refuse_to_join(item)
    return item


def _refuse_workers() -> None:
    worker = torch.utils.data.get_worker_info()
    if worker is not None:
        raise RuntimeError(f"num_workers={worker.num_workers}: {WORKERS_ADVICE}")


def _refuse_to_join(items: list[Any], *, collate_fn_map: Any = None) -> Any:
    """Refuses batches that ``torch.utils.data.default_collate`` would join into one."""
    raise TypeError(
        f"DataLoader(batch_size={len(items)}) over items {type(items[0]).__name__}: {BATCHES_ADVICE}"
    )


# What the loaders deliver is whole.
WHOLE = (Batch, Microbatch, Step)
default_collate_fn_map.update(dict.fromkeys(WHOLE, _refuse_to_join))
