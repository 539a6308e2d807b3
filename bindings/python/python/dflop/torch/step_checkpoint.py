"""Lightning checkpoints at step ends, where no gradients are accumulated."""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch.callbacks import ModelCheckpoint
except ImportError:
    from pytorch_lightning.callbacks import ModelCheckpoint

from dflop.errors import StateError
from dflop.torch.microbatches import Microbatches


class _Hooks(ModelCheckpoint):
    """What Lightning calls, at step ends only."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Checks that the state of the data is saved, and that steps end where the optimizer steps."""
        super().on_train_start(trainer, pl_module)
        for data in _loaders(trainer):
            dataset = getattr(data, "dataset", None)
            if isinstance(dataset, Microbatches) and not hasattr(data, "state_dict"):
                raise ValueError(
                    "train_dataloaders: Lightning saves no state of a DataLoader; pass the "
                    "dflop.torch.Microbatches itself"
                )
            found = data if isinstance(data, Microbatches) else dataset
            steps = getattr(found, "microbatches", None)
            if isinstance(found, Microbatches) and trainer.accumulate_grad_batches != steps:
                raise ValueError(
                    f"accumulate_grad_batches={trainer.accumulate_grad_batches}: a step of the loader has "
                    f"{steps} microbatches; set it to that"
                )

    def on_train_batch_end(self, trainer: Any, *arguments: Any, **keywords: Any) -> None:
        """Saves if the batch was the last one of a step."""
        if _microbatch(trainer) == 0:
            super().on_train_batch_end(trainer, *arguments, **keywords)

    def on_validation_end(self, trainer: Any, *arguments: Any, **keywords: Any) -> None:
        """Saves unless validation ran in the middle of a step."""
        if _microbatch(trainer) == 0:
            super().on_validation_end(trainer, *arguments, **keywords)

    def on_exception(self, trainer: Any, *arguments: Any, **keywords: Any) -> None:
        """Saves, if asked for, unless the exception came in the middle of a step."""
        if _microbatch(trainer) == 0:
            super().on_exception(trainer, *arguments, **keywords)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Refuses a checkpoint in the middle of a step, whoever saves it."""
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        given = _microbatch(trainer)
        if given > 0:
            raise StateError(
                f"the checkpoint is taken in the middle of a step, after microbatch {given} of "
                f"{trainer.accumulate_grad_batches}, whose gradients it does not hold: save at step ends, "
                "where `trainer.global_step` has changed",
                "state",
            )


class StepCheckpoint(_Hooks):
    """Lightning's ``ModelCheckpoint``, which saves at step ends only.

    In the middle of a step, gradients of some microbatches are accumulated, and Lightning does not save them:
    a run that resumes there learns that step from the rest of its microbatches alone. Lightning's own
    callback saves there, after the first microbatch of a run that resumed, over the good checkpoint of the
    same step. Saves that fall into a step wait for its end; every other save in the middle of a step, such as
    by ``trainer.save_checkpoint`` or another callback, is a `dflop.StateError`.

    The training data are a `dflop.torch.Microbatches`, whose state Lightning saves, and
    ``accumulate_grad_batches`` of the trainer is its number of microbatches.

    Args:
        *arguments: arguments of ``ModelCheckpoint``, by position or by name.

    Raises:
        StateError: a checkpoint is saved in the middle of a step.
        ValueError: at the start of training, the data are in a ``DataLoader``, whose state Lightning does not
            save, or ``accumulate_grad_batches`` is another number.

    Examples:
        >>> import lightning
        >>> loader = dflop.BalancedLoader("shards/", model="model/", global_batch_size=8, microbatches=2)
        >>> saves = dflop.torch.StepCheckpoint("out/", "{step}", every_n_train_steps=100, save_top_k=-1)
        >>> trainer = lightning.Trainer(accumulate_grad_batches=2, callbacks=[saves], logger=False)
        >>> data = dflop.torch.Microbatches(loader)  # for ``trainer.fit(module, data)``
    """


def _loaders(trainer: Any) -> list[Any]:
    data = trainer.train_dataloader
    if isinstance(data, dict):
        return list(data.values())
    return list(data) if isinstance(data, list | tuple) else [data]


def _microbatch(trainer: Any) -> int:
    """Returns the number of delivered microbatches of a step that has not ended."""
    progress, given = trainer.fit_loop.epoch_loop.batch_progress.current, 0
    for data in _loaders(trainer):
        dataset = data if isinstance(data, Microbatches) else getattr(data, "dataset", None)
        if isinstance(dataset, Microbatches):
            # The last microbatch of a step ends it with the step of the optimizer, not when it is delivered.
            at_work = dataset.microbatches if progress.ready > progress.processed else 0
            given = max(given, dataset.state_dict()["microbatch"] or at_work)
    return given
