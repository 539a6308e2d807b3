"""Iterates a balanced loader by microbatches, for trainers that accumulate gradients themselves."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Protocol

import torch.utils.data

from dflop.batches import Microbatch, Step
from dflop.torch.dataset import _refuse_workers


class StepLoader(Protocol):
    """A `dflop.BalancedLoader`."""

    @property
    def step(self) -> int:
        """The next step."""

    @property
    def microbatches(self) -> int:
        """Number of microbatches per rank."""

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps that start in one epoch."""

    def __iter__(self) -> Iterator[Step]: ...

    def state_dict(self) -> dict[str, Any]:
        """Returns the state after the last delivered step."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from a state; later iterations start there."""


class Microbatches(torch.utils.data.IterableDataset[Microbatch]):
    """Iterates the microbatches of a balanced loader, an epoch at a time, and resumes after any of them.

    For Lightning and Hugging Face ``Trainer``, which treat microbatches as batches. An iterator ends with its
    epoch, and the next one starts the next epoch, or resumes an epoch that was left in the middle. ``len`` is
    the number of microbatches of an epoch. The state is small, and equal on all ranks at the same microbatch.

    Args:
        loader: a `dflop.BalancedLoader`.
        microbatches: number of microbatches per rank and step. Default: the loader's.

    Raises:
        RuntimeError: iterated in a worker process (``num_workers > 0``).

    Examples:
        >>> import torch
        >>> def make():
        ...     return dflop.BalancedLoader("shards/", model="model/", global_batch_size=64, microbatches=8)
        >>> dataset = dflop.torch.Microbatches(make())
        >>> loader = torch.utils.data.DataLoader(dataset, batch_size=None, collate_fn=dflop.torch.keep)
        >>> len(loader)  # for ``lightning.Trainer(accumulate_grad_batches=8).fit(module, loader)``
        32
        >>> iterator = iter(loader)
        >>> microbatch, state = next(iterator), dataset.state_dict()
        >>> state["microbatch"]
        1
        >>> resumed = dflop.torch.Microbatches(make())
        >>> resumed.load_state_dict(state)
        >>> next(iter(resumed)).sample_keys == next(iterator).sample_keys
        True
    """

    def __init__(self, loader: StepLoader, microbatches: int | None = None) -> None:
        super().__init__()
        self._loader = loader
        self._microbatches: int = loader.microbatches if microbatches is None else microbatches
        # In the middle of a step: the state before it, and the number of its delivered microbatches.
        self._before: dict[str, Any] | None = None
        self._given = 0

    def __len__(self) -> int:
        """Returns the number of microbatches of an epoch."""
        return self._loader.steps_per_epoch * self._microbatches

    def __iter__(self) -> Iterator[Microbatch]:
        _refuse_workers()
        return self._items()

    def _items(self) -> Iterator[Microbatch]:
        if self._before is not None:
            self._loader.load_state_dict(self._before)
        steps, per_epoch = iter(self._loader), self._loader.steps_per_epoch
        for _ in range(per_epoch - self._loader.step % per_epoch):
            before, given = self._loader.state_dict(), self._given
            step = next(steps, None)
            if step is None:
                return
            microbatches = itertools.islice(step.microbatches, given, None)
            for place, microbatch in enumerate(microbatches, given + 1):
                is_last = place == len(step.microbatches)
                self._before, self._given = (None, 0) if is_last else (before, place)
                yield microbatch

    def state_dict(self) -> dict[str, Any]:
        """Returns the state after the last delivered microbatch."""
        before = self._loader.state_dict() if self._before is None else self._before
        return {"loader": before, "microbatch": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the state; a running iterator is not affected."""
        self._loader.load_state_dict(state["loader"])
        self._given = state["microbatch"]
        self._before = state["loader"] if self._given else None
