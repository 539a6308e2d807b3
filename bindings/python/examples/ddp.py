"""Trains on all ranks of a job with `DistributedDataParallel`: `python ddp.py`, or `torchrun ... ddp.py`.

Every rank reads its share of each global batch. Shares have about the same cost, so that ranks hardly wait
for each other when gradients are summed. The weights equal those of training in one process.
"""

import dflop

if __name__ == "__main__":
    dflop.example.on_ranks(2)  # as `torchrun --nproc-per-node 2` does

from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration


def loader_of(directory: Path, **settings: object) -> dflop.BalancedLoader:
    defaults = {"global_batch_size": 16, "microbatches": 3, "steps": 6}
    ranks = {"dp_rank": dist.get_rank(), "dp_size": dist.get_world_size()}
    return dflop.BalancedLoader(
        directory / "shards", model=directory / "model", **ranks, **defaults | settings
    )


def model_of(directory: Path) -> DistributedDataParallel:
    torch.manual_seed(0)
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig.from_pretrained(directory / "model"))
    # Every microbatch reaches all parameters: one without images has a blank one.
    return DistributedDataParallel(model)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    directory = dflop.example.directory()  # the same on every rank; yours must be readable by all ranks
    model = model_of(directory)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in loader_of(directory):
        loss = dflop.torch.backward(model, step)  # averages gradients once, with the last microbatch
        print(f"rank {dist.get_rank()}, step {step.step}: loss {loss:.3f}, plan {step.digest}", flush=True)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
