"""A dataloader for torchtitan: packed rows with their next tokens, and a state for its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from dflop.torch.microbatches import Microbatches, StepLoader

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful as _Base
else:
    try:
        from torchtitan.components.dataloader import BaseDataLoader as _Base
    except ImportError:
        from torch.distributed.checkpoint.stateful import Stateful as _Base


class TitanDataLoader(_Base):
    """Iterates a balanced loader as torchtitan's trainer expects it, epoch after epoch.

    An item is a dictionary, with the ids as ``input`` ``[1, tokens]``, ``positions``, which start anew with
    each sample, and the inputs of encoders; and the labels ``[1, tokens]``, each of the next token. Sums of
    losses are divided by all targets of the step, as torchtitan does. The state is the same on all ranks.
    Where torchtitan is installed this is one of its ``BaseDataLoader``.

    Args:
        loader: a `dflop.BalancedLoader`.
        microbatches: number of microbatches per rank and step, ``gradient_accumulation_steps`` of the
            trainer. Default: the loader's.
        ignore_index: label of tokens without a target.

    Examples:
        >>> import torch
        >>> def make():
        ...     return dflop.BalancedLoader("shards/", model="model/", global_batch_size=8, microbatches=2)
        >>> loader = dflop.torch.TitanDataLoader(make())  # for ``trainer.dataloader``
        >>> batches = iter(loader)
        >>> for inputs, labels in (next(batches), next(batches)):  # a step
        ...     print(inputs["input"].shape == labels.shape)
        True
        True
        >>> state = loader.state_dict()
        >>> list(state)
        ['dflop']
        >>> resumed = dflop.torch.TitanDataLoader(make())
        >>> resumed.load_state_dict(state)
    """

    def __init__(
        self, loader: StepLoader, microbatches: int | None = None, *, ignore_index: int = -100
    ) -> None:
        self._microbatches = Microbatches(loader, microbatches)
        self._ignore_index = ignore_index

    def __iter__(self) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        while True:
            is_empty = True
            for microbatch in self._microbatches:  # ends with the epoch
                is_empty = False
                inputs: dict[str, Any] = dict(microbatch)
                labels = pad(inputs.pop("labels")[:, 1:], (0, 1), value=self._ignore_index)
                inputs["input"] = inputs.pop("input_ids")
                inputs["positions"] = inputs.pop("position_ids")
                yield inputs, labels
            if is_empty:  # the loader has no further steps
                return

    def state_dict(self) -> dict[str, Any]:
        """Returns the state after the last delivered item, as text, which checkpoints keep as it is."""
        return {"dflop": json.dumps(self._microbatches.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Sets the state; a running iterator is not affected."""
        self._microbatches.load_state_dict(json.loads(state_dict["dflop"]))
