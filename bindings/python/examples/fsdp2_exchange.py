"""Trains with FSDP2 and ranks that exchange images: `python fsdp2_exchange.py`, or `torchrun ...`.

As `fsdp2.py`, but no rank waits for the rank with the most pixels: each encodes an equal share of all images
of a microbatch, and sends the features to the ranks whose samples have the images. The model is unchanged.
"""

import dflop

if __name__ == "__main__":
    dflop.example.on_ranks(2)  # as `torchrun --nproc-per-node 2` does

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration


def model_of(directory: Path) -> Qwen2VLForConditionalGeneration:
    torch.manual_seed(0)
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig.from_pretrained(directory / "model"))
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (*model.model.visual.blocks, *model.model.language_model.layers):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def backward(
    model: Qwen2VLForConditionalGeneration, step: dflop.Step, encoder: dflop.torch.BalancedEncoder
) -> None:
    """Leaves the gradients of the global batch in the ranks' parts of the parameters."""
    for place, microbatch in enumerate(encoder.microbatches(step), 1):
        # Gradients are averaged over the ranks once per step, with the last microbatch.
        model.set_requires_gradient_sync(place == len(step.microbatches))
        dflop.torch.loss(model, microbatch, step).backward()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    directory = dflop.example.directory()  # the same on every rank; yours must be readable by all ranks
    model, ranks = model_of(directory), {"dp_rank": dist.get_rank(), "dp_size": dist.get_world_size()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    plan = dflop.Plan(schedule="microbatch")  # ranks wait for each other in every microbatch
    settings = {"global_batch_size": 16, "microbatches": 3, "steps": 6, "plan": plan, **ranks}
    loader = dflop.BalancedLoader(directory / "shards", model=directory / "model", **settings)
    encoder = dflop.torch.BalancedEncoder(model.model.visual, loader)
    for step in loader:
        backward(model, step, encoder)
        norm = torch.nn.utils.get_total_norm([one.grad for one in model.parameters()]).full_tensor()
        print(f"rank {dist.get_rank()}, step {step.step}: gradient norm {norm:.4f}", flush=True)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
