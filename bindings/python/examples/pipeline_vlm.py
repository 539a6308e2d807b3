"""Trains a model of transformers: its vision encoder on one rank, its LLM in two stages on two others.

``pipeline_vlm.py CHECKPOINT SHARDS`` reads both directories; without them, a small model has random weights.
"""

import sys

import dflop

if __name__ == "__main__":
    dflop.example.on_ranks(3)  # as `torchrun --nproc-per-node 3` does

import torch
import transformers


def made_up():
    data = dflop.example.directory()
    return data / "model", data / "shards", transformers.AutoConfig.from_pretrained(data / "model")


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")  # on GPUs: "nccl", and torch.cuda.set_device
    rank = torch.distributed.get_rank()
    checkpoint, shards, model = (*sys.argv[1:3], sys.argv[1]) if len(sys.argv) > 1 else made_up()
    build = dflop.torch.split(model)  # creates and reads the weights of this rank only

    def loader(role):
        return dflop.BalancedLoader(shards, model=checkpoint, global_batch_size=16, steps=8, role=role)

    schedule = dflop.Schedule({"vision": {}, "llm": {"stages": 2}}, microbatches=4)
    pipeline = dflop.torch.Pipeline(build, schedule, loader, layers=build.layers)
    optimizer = torch.optim.AdamW(pipeline.module.parameters(), lr=3e-3)
    for step in pipeline:
        print(f"rank {rank}, step {step.step}: loss {pipeline.step(step):.3f}", flush=True)
        pipeline.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    pipeline.close()
    torch.distributed.destroy_process_group()
