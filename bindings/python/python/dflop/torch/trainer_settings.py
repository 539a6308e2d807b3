"""Settings of Hugging Face ``Trainer`` that a balanced loader needs, and those that change its steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dflop.torch.microbatches import Microbatches


def settle(args: Any, given: Mapping[str, Any], microbatches: Microbatches) -> None:
    """Sets what must be, and refuses by name what conflicts.

    - `args`: `TrainingArguments`, which are changed
    - `given`: other arguments of the trainer by name

    Raises:
        ValueError: a setting conflicts with the loader.
    """
    steps = microbatches.microbatches
    if args.gradient_accumulation_steps == 1:
        args.gradient_accumulation_steps = steps
    faults = [f"{name}: {reason}" for name, reason in _faults(args, given, steps)]
    if faults:
        raise ValueError("; ".join(faults))
    # The position is restored from the checkpoint, without reading what was trained on.
    args.ignore_data_skip = True
    # A loss that is no number must be seen; one without targets is 0.
    args.logging_nan_inf_filter = False


def check_ranks(trainer: Any, loader: Any) -> None:
    """Refuses a loader of other data-parallel ranks than the trainer has, and sequences that are split.

    Raises:
        ValueError: the ranks differ, or ranks share a sequence.
    """
    tp, cp, sp = (_size_of(trainer, f"get_{name}_size") for name in ("tp", "cp", "sp"))
    if cp > 1 or sp > 1:
        raise ValueError(
            "parallelism_config: ranks that share a sequence need batches that are split by tokens"
        )
    dp_size = trainer.args.world_size // tp
    if loader.dp_size != dp_size:
        raise ValueError(
            f"dp_size={loader.dp_size}: the trainer has {dp_size} data-parallel ranks; create the loader "
            "with dp_rank=args.process_index, dp_size=args.world_size"
        )
    if tp == 1 and loader.dp_rank != trainer.args.process_index:
        raise ValueError(
            f"dp_rank={loader.dp_rank}: this process has the index {trainer.args.process_index}; create the "
            "loader with dp_rank=args.process_index"
        )


def _faults(args: Any, given: Mapping[str, Any], steps: int) -> Iterator[tuple[str, str]]:
    if args.gradient_accumulation_steps != steps:
        found = args.gradient_accumulation_steps
        yield (
            f"gradient_accumulation_steps={found}",
            f"a step of the loader has {steps} microbatches; leave it out, or change the loader's",
        )
    if args.dataloader_num_workers > 0:
        yield (
            f"dataloader_num_workers={args.dataloader_num_workers}",
            "the loader has threads of its own; use 0",
        )
    if args.dataloader_drop_last:
        yield "dataloader_drop_last=True", 'the loader keeps steps whole; use dflop.Order(tail="drop")'
    if args.label_smoothing_factor:
        yield (
            f"label_smoothing_factor={args.label_smoothing_factor}",
            "the loss is the cross entropy alone; use 0",
        )
    if args.auto_find_batch_size:
        yield "auto_find_batch_size=True", "the loader has a `global_batch_size`; use more `microbatches`"
    if getattr(args, "n_gpu", 1) > 1:
        yield f"n_gpu={args.n_gpu}", "one process has one device: start the script with `torchrun`"
    if getattr(args, "group_by_length", False):
        yield "group_by_length=True", "the loader orders samples; see dflop.Order"
    strategy = getattr(args, "train_sampling_strategy", None)
    if strategy not in (None, "random"):
        yield f"train_sampling_strategy={strategy!r}", "the loader orders samples; see dflop.Order"
    accelerator = args.accelerator_config
    for name in ("split_batches", "dispatch_batches"):
        if getattr(accelerator, name, None) is True:
            yield f"accelerator_config {name}=True", "every process has a share of its own; leave it out"
    for name in ("packing", "padding_free", "assistant_only_loss"):
        if getattr(args, name, False):
            yield f"{name}=True", "the loader makes rows and labels; see dflop.Processor"
    if getattr(args, "loss_type", "nll") not in ("nll", None):
        yield f"loss_type={args.loss_type!r}", 'the loss is the cross entropy; use "nll"'
    if given.get("compute_loss_func") is not None:
        yield "compute_loss_func", "dflop.torch.loss divides by the targets of the global batch; leave it out"


def _size_of(trainer: Any, name: str) -> int:
    found = getattr(trainer, name, None)
    return 1 if found is None else int(found())
