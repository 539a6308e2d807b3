"""Hugging Face ``Trainer`` on balanced microbatches, and a mixin for trainers that extend it, as TRL's do."""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.trainer_utils import get_last_checkpoint

from dflop.batches import Microbatch
from dflop.torch.dataset import keep
from dflop.torch.microbatches import Microbatches
from dflop.torch.token_loss import loss, unwrapped
from dflop.torch.trainer_settings import check_ranks, settle

POSITION = "loader.json"
"""File of the loader's state in a checkpoint."""


class _Hooks:
    """What the trainer asks for, by the loader."""

    # The loss is divided by the targets of the step, and not once more by the number of its microbatches.
    loss_is_scaled_for_ga = True

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        given = inspect.signature(super().__init__).bind(*arguments, **keywords)
        dataset = _microbatches(given.arguments.get("train_dataset"))
        args = given.arguments.get("args")
        if args is None:
            raise TypeError("args: expected transformers.TrainingArguments, found none")
        settle(args, given.arguments, dataset)
        given.arguments["train_dataset"] = _stand_in(type(self), dataset)
        super().__init__(*given.args, **given.kwargs)
        self.train_dataset = dataset
        # The step that was begun last, by the number of steps before it, and the state before it.
        self._begun: tuple[int, dict[str, Any]] = (-1, {})
        self.add_callback(_Epochs(dataset))
        if not hasattr(transformers.Trainer, "loss_is_scaled_for_ga"):
            # Earlier versions decide by this whether to divide once more.
            self.model_accepts_loss_kwargs = True
        check_ranks(self, dataset.loader)

    def get_train_dataloader(self) -> torch.utils.data.DataLoader[Microbatch]:
        """Returns a ``DataLoader`` that neither batches nor shards again."""
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=None, collate_fn=keep)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, *arguments: Any
    ) -> tuple[Any, int | None]:
        """Returns a step's microbatches, which are read one by one, and the targets of the global batch."""
        self._begun = self.state.global_step, self.train_dataset.state_dict()
        first = next(epoch_iterator, None)
        if first is None:
            return [], None
        targets = _targets(first, self.train_dataset.loader)
        # Nothing but the chain holds the first microbatch, until it is trained on.
        return _OneByOne(itertools.chain([first], epoch_iterator), num_batches), targets

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        *arguments: Any,
        **keywords: Any,
    ) -> Any:
        """Returns `dflop.torch.loss` of a microbatch; of other inputs, as in evaluation, the usual loss."""
        if not isinstance(inputs, Microbatch):
            return super().compute_loss(model, inputs, return_outputs, *arguments, **keywords)
        # TRL asks for the loss of routers by an argument, which wrappers of language models need.
        router = {"output_router_logits": True} if getattr(self, "aux_loss_enabled", False) else {}
        found = loss(model, inputs, **router)
        return (found, {}) if return_outputs else found

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **keywords: Any
    ) -> Any:
        """Trains; from a checkpoint, the loader goes on after the last step of it."""
        checkpoint = resume_from_checkpoint
        if checkpoint is True:
            checkpoint = get_last_checkpoint(self.args.output_dir)
        if checkpoint:
            self.train_dataset.load_state_dict(_position_in(Path(checkpoint)))
        return super().train(resume_from_checkpoint, *arguments, **keywords)

    def num_examples(self, dataloader: Any) -> int:
        """Returns the number of samples of an epoch."""
        if dataloader.dataset is not self.train_dataset:
            return super().num_examples(dataloader)
        loader = self.train_dataset.loader
        return loader.steps_per_epoch * loader.global_batch_size

    def get_total_train_batch_size(self, *arguments: Any) -> int:
        """Returns the number of samples of a step."""
        return self.train_dataset.loader.global_batch_size

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._unloaded: set[str] = set()
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self._unloaded:
            _load_renamed(unwrapped(self.model if model is None else model), resume_from_checkpoint)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        # `save_pretrained` renames some weights, which the trainer does not find by name, and only warns of.
        self._unloaded = {*load_result.missing_keys, *load_result.unexpected_keys}

    def _prepare_inputs(self, inputs: Any) -> Any:
        # The trainer's own way rebuilds the mapping, without its attributes.
        return (
            inputs.to(self.args.device) if isinstance(inputs, Microbatch) else super()._prepare_inputs(inputs)
        )

    def _save_checkpoint(self, model: Any, trial: Any, *arguments: Any, **keywords: Any) -> None:
        steps, before = self._begun
        # Nothing was learned from a step that has not ended, as at a signal: it is done again as a whole.
        state = before if steps == self.state.global_step else self.train_dataset.state_dict()
        if self.args.should_save:
            folder = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
            folder.mkdir(parents=True, exist_ok=True)
            position = folder.joinpath(POSITION)
            # A new file: not the target of a link that somebody put there.
            position.unlink(missing_ok=True)
            with position.open("x") as file:
                file.write(json.dumps(state))
        super()._save_checkpoint(model, trial, *arguments, **keywords)


class BalancedTrainerMixin(_Hooks):
    """Makes a trainer that extends ``transformers.Trainer`` train on balanced microbatches: see
    `BalancedTrainer`.

    Place it before the trainer: ``class Balanced(dflop.torch.BalancedTrainerMixin, trl.SFTTrainer)``. A TRL
    trainer prepares no data then: chat template, packing and labels are those of the loader.

    Examples:
        >>> import transformers
        >>> class Quiet(dflop.torch.BalancedTrainerMixin, transformers.Trainer):
        ...     def log(self, logs, *arguments):
        ...         pass
        >>> loader = dflop.BalancedLoader("shards/", model="model/", global_batch_size=8, microbatches=2)
        >>> config = transformers.AutoConfig.from_pretrained("model/")
        >>> model = transformers.AutoModelForImageTextToText.from_config(config)
        >>> args = transformers.TrainingArguments("out", max_steps=2, use_cpu=True, report_to="none")
        >>> Quiet(model, args, train_dataset=loader).train().global_step
        2
    """


class BalancedTrainer(BalancedTrainerMixin, transformers.Trainer):
    """Hugging Face ``Trainer`` on the microbatches of a balanced loader, with the loss of `dflop.torch.loss`.

    Microbatches are its steps of gradient accumulation, read one by one. Losses and gradients are those of
    the global batch for every model: neither ``accepts_loss_kwargs`` nor ``average_tokens_across_devices``
    has a part in them. Checkpoints hold the loader's state in ``loader.json``, from which
    ``train(resume_from_checkpoint=…)`` resumes exactly, on any number of processes.

    Sets ``gradient_accumulation_steps`` to the microbatches of the loader, ``ignore_data_skip``, and no
    ``logging_nan_inf_filter``. Refuses by name what would change steps or the loss: workers, other
    accumulation, sampling by length, ``split_batches``, ``dispatch_batches``, label smoothing,
    ``compute_loss_func``, several devices in a process, ranks that are not the loader's, and sequences that
    ranks share. ``per_device_train_batch_size`` has no effect: the loader has a ``global_batch_size``.
    Evaluation is the trainer's own.

    Args:
        model: model of ``transformers``, or one that `dflop.torch.loss` takes.
        args: ``TrainingArguments``, which are changed as above.
        train_dataset: a `dflop.BalancedLoader`, or a `dflop.torch.Microbatches` of one. Under ``torchrun``
            with ``dp_rank=args.process_index, dp_size=args.world_size``.
        *arguments: further arguments of ``transformers.Trainer``, by position or by name.

    Raises:
        TypeError: ``train_dataset`` is no balanced loader, or there are no ``args``.
        ValueError: a setting conflicts with the loader.

    Examples:
        >>> import transformers
        >>> loader = dflop.BalancedLoader("shards/", model="model/", global_batch_size=8, microbatches=2)
        >>> config = transformers.AutoConfig.from_pretrained("model/")
        >>> model = transformers.AutoModelForImageTextToText.from_config(config)
        >>> args = transformers.TrainingArguments("out", max_steps=2, use_cpu=True, report_to="none")
        >>> trainer = dflop.torch.BalancedTrainer(model, args, train_dataset=loader)
        >>> trainer.args.gradient_accumulation_steps
        2
        >>> trained = trainer.train()  # doctest: +SKIP
    """


class _Epochs(transformers.TrainerCallback):
    """Counts epochs by the loader: the trainer starts an epoch anew where it resumes in the middle of one."""

    def __init__(self, dataset: Microbatches) -> None:
        self._loader = dataset.loader

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        state.epoch = self._loader.step / self._loader.steps_per_epoch


class _OneByOne:
    """Microbatches of a step, which are read as they are iterated: the trainer goes over them once."""

    def __init__(self, microbatches: Iterator[Microbatch], count: int) -> None:
        self._microbatches, self._count = microbatches, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Microbatch]:
        yield from itertools.islice(self._microbatches, self._count)


def _microbatches(dataset: Any) -> Microbatches:
    if isinstance(dataset, Microbatches):
        return dataset
    if hasattr(dataset, "steps_per_epoch") and hasattr(dataset, "state_dict"):
        return Microbatches(dataset)
    raise TypeError(
        "train_dataset: expected a dflop.BalancedLoader or dflop.torch.Microbatches, "
        f"found {type(dataset).__name__}"
    )


def _stand_in(trainer: type, dataset: Microbatches) -> Any:
    """Returns what the constructor of a trainer gets: TRL looks at samples and prepares them."""
    if not any(one.__module__.partition(".")[0] == "trl" for one in trainer.__mro__):
        return dataset
    import datasets

    return datasets.Dataset.from_list([{"input_ids": [0, 0], "labels": [0, 0]}])


def _load_renamed(model: Any, checkpoint: str) -> None:
    """Loads weights as ``from_pretrained`` does, which undoes the names of ``save_pretrained``.

    Raises:
        ValueError: the checkpoint lacks weights of the model.
    """
    loaded, found = type(model).from_pretrained(
        checkpoint, config=model.config, dtype=model.dtype, output_loading_info=True
    )
    if missing := found["missing_keys"]:
        raise ValueError(
            f"{checkpoint}: the checkpoint lacks weights of {type(model).__name__}: {sorted(missing)[:5]}"
        )
    model.load_state_dict(loaded.state_dict())


def _targets(microbatch: Microbatch, loader: Any) -> int:
    """Returns the target tokens of the global batch, as planned."""
    scale = microbatch.loss_scale_sum
    return round(loader.dp_size / scale) if scale > 0 else 0


def _position_in(checkpoint: Path) -> Any:
    path = checkpoint / POSITION
    if not path.is_file():
        raise FileNotFoundError(f"{path}: without the state of the loader, a run would start its data again")
    return json.loads(path.read_text())
