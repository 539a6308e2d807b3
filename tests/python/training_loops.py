"""Trains a model in the loops of the documents by `dflop.torch.loss`; records losses and gradients of steps.

A loop gets a model and a loader of this rank. It returns for every step the loss of the global batch and the
gradients that the optimizer got, whole and averaged over the ranks.
"""

import contextlib
import logging
import tempfile
import warnings

import dflop
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

RATE = 0.05


class Recorder:
    """Keeps the gradients of every optimizer step."""

    def __init__(self, model, optimizer):
        self.gradients, self.parameters = [], dict(model.named_parameters())
        optimizer.register_step_post_hook(self.keep)

    def keep(self, *_):
        whole = lambda grad: grad.full_tensor() if hasattr(grad, "full_tensor") else grad  # noqa: E731
        grads = {name: one.grad for name, one in self.parameters.items() if one.grad is not None}
        self.gradients.append({name: whole(grad).detach().clone() for name, grad in grads.items()})


def recorded(model):
    """Returns an optimizer, and the record of its gradients."""
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    return optimizer, Recorder(model, optimizer)


def over_ranks(values):
    """Returns the mean over the ranks."""
    values = torch.tensor(values)
    if dist.is_initialized():
        dist.all_reduce(values)
        values /= dist.get_world_size()
    return values.tolist()


def reference(model, loader):
    """Runs each global batch in one pass, with a loss of its own."""
    optimizer, record = recorded(model)
    losses = []
    for step in loader:
        (whole,) = step.hold().microbatches
        inputs = {name: value for name, value in whole.items() if name != "labels"}
        targets = whole["labels"][:, 1:].flatten()
        logits = model(**inputs).logits[:, :-1].flatten(0, 1).float()
        summed = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
        loss = summed / (targets != -100).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, record.gradients


def plain(model, loader, wrap=lambda model: model, last=lambda model, is_last: contextlib.nullcontext()):
    optimizer, record = recorded(model)
    trained, losses = wrap(model), []
    for step in loader:
        total = 0.0
        for place, microbatch in enumerate(step.microbatches, 1):
            with last(trained, place == len(step.microbatches)):
                loss = dflop.torch.loss(trained, microbatch, step)
                loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return over_ranks(losses), record.gradients


def ddp(model, loader):
    return plain(
        model,
        loader,
        DistributedDataParallel,
        lambda model, is_last: contextlib.nullcontext() if is_last else model.no_sync(),
    )


def fsdp2(model, loader):
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    for layer in (layer for layers in lists for layer in layers if any(True for _ in layer.parameters())):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def last(model, is_last):
        model.set_requires_gradient_sync(is_last)
        return contextlib.nullcontext()

    return plain(model, loader, last=last)


def trainer(model, loader):
    import transformers

    transformers.logging.set_verbosity_error()
    optimizer, record = recorded(model)
    with tempfile.TemporaryDirectory() as out:
        args = transformers.TrainingArguments(
            out,
            max_steps=loader.steps_per_epoch * 2,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            logging_steps=1,
            save_strategy="no",
            lr_scheduler_type="constant",
            max_grad_norm=0,
            ddp_find_unused_parameters=False,
        )
        run = dflop.torch.BalancedTrainer(model, args, train_dataset=loader, optimizers=(optimizer, None))
        with contextlib.redirect_stdout(None):
            run.train()
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry], record.gradients


def accelerate(model, loader):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=loader.microbatches)
    optimizer, record = recorded(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for step in loader:
        total = 0.0
        for microbatch in step.microbatches:
            with accelerator.accumulate(model):
                loss = dflop.torch.loss(model, microbatch, step)
                accelerator.backward(loss * loader.microbatches)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.item()
        losses.append(total)
    return over_ranks(losses), record.gradients


def lightning(model, loader):
    import lightning

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.losses = model, []

        def training_step(self, microbatch, place):
            loss = dflop.torch.loss(self.model, microbatch)
            self.losses.append(loss.item())
            return loss * self.trainer.accumulate_grad_batches

        def configure_optimizers(self):
            optimizer, self.record = recorded(self.model)
            return optimizer

    module, ranks = Module(), loader.dp_size
    run = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        logger=False,
        accumulate_grad_batches=loader.microbatches,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    run.fit(module, dflop.torch.Microbatches(loader))
    parts = iter(module.losses)
    return over_ranks([sum(step) for step in zip(*[parts] * loader.microbatches)]), module.record.gradients


LOOPS = {
    "plain": plain,
    "ddp": ddp,
    "fsdp2": fsdp2,
    "trainer": trainer,
    "accelerate": accelerate,
    "lightning": lightning,
}


def differences(found, wanted):
    """Returns the largest difference of losses, and of gradients relative to the norm of a step's gradient."""
    (losses, gradients), (wanted_losses, wanted_gradients) = found, wanted
    assert len(losses) == len(wanted_losses) == len(gradients) == len(wanted_gradients), (
        losses,
        wanted_losses,
    )
    of_losses = max(abs(one - other) for one, other in zip(losses, wanted_losses))
    assert of_losses == of_losses, losses
    return of_losses, max(map(distance, gradients, wanted_gradients))


def distance(found, wanted):
    """Returns the norm of the difference of two gradients by parameter, relative to the second."""
    zero = torch.zeros(())
    both = [(found.get(name, zero), wanted.get(name, zero)) for name in found.keys() | wanted.keys()]
    squared = sum(float((one - other).double().norm()) ** 2 for one, other in both)
    return (squared / sum(float(other.double().norm()) ** 2 for _, other in both)) ** 0.5
