"""Iterates a balanced loader by microbatches, for trainers that accumulate gradients themselves."""

from __future__ import annotations

import itertools
import warnings
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

    @property
    def dp_rank(self) -> int:
        """Data-parallel rank."""

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks."""

    @property
    def global_batch_size(self) -> int:
        """Number of samples of a step, over all ranks."""

    def __iter__(self) -> Iterator[Step]: ...

    def state_dict(self) -> dict[str, Any]:
        """Returns the state after the last delivered step."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from a state; later iterations start there."""


class Microbatches(torch.utils.data.IterableDataset[Microbatch]):
    """Iterates the microbatches of a balanced loader, an epoch at a time, and resumes after any of them.

    For Lightning and Hugging Face ``Trainer`` (`BalancedTrainer` does it), which treat microbatches as
    batches. An iterator ends with its epoch, and the next one starts the next epoch, or resumes an epoch that
    was left in the middle. ``len`` is the number of microbatches of an epoch. The state is small, and equal
    on all ranks at the same microbatch.

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
        >>> microbatches, state = [next(iterator) for _ in range(8)], dataset.state_dict()
        >>> state["loader"]["step"], state["microbatch"]
        (1, 0)
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

    @property
    def loader(self) -> StepLoader:
        """The balanced loader."""
        return self._loader

    @property
    def microbatches(self) -> int:
        """Number of microbatches per rank and step."""
        return self._microbatches

    def state_dict(self) -> dict[str, Any]:
        """Returns the state after the last delivered microbatch.

        Its ``microbatch`` is the number of delivered microbatches of a step that has not ended, 0 at step
        ends.
        """
        before = self._loader.state_dict() if self._before is None else self._before
        return {"loader": before, "microbatch": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the state; a running iterator is not affected.

        Warns if the state is in the middle of a step: it is whole only beside the gradients of the step's
        earlier microbatches, which most trainers do not save.
        """
        if state["microbatch"] > 0:
            warnings.warn(
                f"resumes after microbatch {state['microbatch']} of {self._microbatches} of a step: the "
                "gradients of those before must be restored too, or the step learns from the others alone; "
                "save at step ends, in Lightning with `dflop.torch.StepCheckpoint`",
                UserWarning,
                stacklevel=2,
            )
        self._loader.load_state_dict(state["loader"])
        self._given = state["microbatch"]
        self._before = state["loader"] if self._given else None
