"""Data iterators for Megatron-LM, and a dataset provider for Megatron-Bridge.

Both take data from outside with `dataloader_type = "external"`: an iterator gives `forward_step` one
microbatch after the other, for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch.nn.functional import pad

from dflop.batches import Microbatch
from dflop.torch.microbatches import Microbatches, StepLoader

# Inputs of the text, which have other names in Megatron.
_RENAMED = ("input_ids", "labels", "shift_labels", "position_ids")


def megatron_batch(microbatch: Microbatch, ignore_index: int = -100) -> dict[str, Any]:
    """Returns a packed microbatch under the names of Megatron.

    Args:
        microbatch: a microbatch of a loader with ``array_type="torch"`` and the layout ``packed``.
        ignore_index: label of tokens without a target in the microbatch.

    Returns:
        dict[str, Tensor]: ``tokens``, ``labels`` (of the next tokens) and ``loss_mask`` ``[1, tokens]``,
        ``position_ids``, ``cu_seqlens`` ``[1, samples + 1]``, ``max_seqlen`` ``[1]``, and the inputs of
        encoders under their own names.

    Examples:
        >>> import torch
        >>> loader = dflop.BalancedLoader("shards/", model="model/", global_batch_size=8, microbatches=2)
        >>> batch = dflop.torch.megatron_batch(next(iter(loader)).microbatches[0])
        >>> batch["tokens"].shape == batch["labels"].shape == batch["loss_mask"].shape
        True
        >>> batch["cu_seqlens"].tolist(), batch["max_seqlen"].tolist()
        ([[0, 79, 162, 196, 257, 354]], [97])
    """
    labels = microbatch.get("shift_labels")
    if labels is None:
        labels = pad(microbatch["labels"][:, 1:], (0, 1), value=ignore_index)
    batch = {name: value for name, value in microbatch.items() if name not in _RENAMED}
    positions = microbatch["position_ids"]
    return batch | {
        "tokens": microbatch["input_ids"],
        "labels": labels.clamp(min=0),
        "loss_mask": (labels != ignore_index).float(),
        "position_ids": positions[0] if positions.ndim == 3 else positions,
        "cu_seqlens": microbatch.cu_seqlens[None],
        "max_seqlen": torch.tensor([microbatch.max_seqlen], dtype=torch.int32),
    }


class MegatronIterator(Iterator[dict[str, Any]]):
    """Iterates the microbatches of a balanced loader as batches of Megatron, epoch after epoch.

    Use ``--micro-batch-size 1 --calculate-per-token-loss``: a microbatch is one packed row, and losses are
    sums over targets. ``save_state`` and ``restore_state`` are those that Megatron's checkpoints call.

    Args:
        loader: a `dflop.BalancedLoader`.
        microbatches: number of microbatches per rank and step. Default: the loader's.
        to_batch: makes a batch of a microbatch. Default: `megatron_batch`.

    Examples:
        >>> import torch
        >>> def make():
        ...     return dflop.BalancedLoader("shards/", model="model/", global_batch_size=8, microbatches=2)
        >>> train = dflop.torch.MegatronIterator(make())  # for ``forward_step(train, model)``
        >>> step, state = [next(train), next(train)], train.save_state()
        >>> resumed = dflop.torch.MegatronIterator(make())
        >>> resumed.restore_state(state)
        >>> torch.equal(next(resumed)["tokens"], next(train)["tokens"])
        True
    """

    def __init__(
        self,
        loader: StepLoader,
        microbatches: int | None = None,
        *,
        to_batch: Callable[[Microbatch], dict[str, Any]] = megatron_batch,
    ) -> None:
        self._microbatches = Microbatches(loader, microbatches)
        self._to_batch = to_batch
        self._epoch: Iterator[Microbatch] = iter(())

    def __next__(self) -> dict[str, Any]:
        microbatch = next(self._epoch, None)
        if microbatch is None:
            self._epoch = iter(self._microbatches)
            microbatch = next(self._epoch)  # a loader without further steps ends the iteration
        return self._to_batch(microbatch)

    def save_state(self) -> dict[str, Any]:
        """Returns the state after the last delivered microbatch."""
        return self._microbatches.state_dict()

    def restore_state(self, state: dict[str, Any]) -> None:
        """Resumes from a state."""
        self._microbatches.load_state_dict(state)
        self._epoch = iter(())


def megatron_bridge_provider(make_loader: Callable[[str], StepLoader | None], **settings: Any) -> Any:
    """Returns a dataset provider of Megatron-Bridge, for ``ConfigContainer.dataset``.

    Args:
        make_loader: makes the `dflop.BalancedLoader` of a split, ``train``, ``valid`` or ``test``, on the
            ranks that read data; ``None`` for a split that there is not.
        settings: other fields of the provider.

    Returns:
        DatasetProvider: a provider whose iterators are `MegatronIterator`.

    Raises:
        ImportError: Megatron-Bridge is not installed.

    Examples:
        >>> def make_loader(split):
        ...     if split != "train":
        ...         return None
        ...     return dflop.BalancedLoader("shards/", model="model/", global_batch_size=8, microbatches=2)
        >>> import megatron.bridge
        >>> provider = dflop.torch.megatron_bridge_provider(make_loader)
        >>> train, valid, test = provider.build_datasets(None)
        >>> batch = next(train)  # Megatron-Bridge does both with ``config.dataset = provider``
    """
    try:
        # Looked up by name, because checkers of types do not find it.
        provider: Any = import_module("megatron.bridge.training.config").DatasetProvider
    except ImportError as error:
        message = "megatron_bridge_provider needs Megatron-Bridge: pip install megatron-bridge"
        raise ImportError(message) from error

    def build_datasets(self: Any, context: Any) -> tuple[Any, Any, Any]:
        """Builds the iterators of all splits."""
        del self, context
        loaders = [make_loader(split) for split in ("train", "valid", "test")]
        # Not by truth, which asks a loader for its length: a run without an end has none.
        made = [None if loader is None else MegatronIterator(loader) for loader in loaders]
        return made[0], made[1], made[2]

    # Not a statement, whose class stubtest would look for in the module.
    of_loader = type("Provider", (provider,), {"build_datasets": build_datasets})
    return of_loader(dataloader_type="external", **settings)
