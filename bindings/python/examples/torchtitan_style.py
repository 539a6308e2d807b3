"""Builds a dataloader for torchtitan: `(input_dict, labels)` per microbatch, in distributed checkpoints.

A step takes `gradient_accumulation_steps * num_pp_microbatches` items, the loader's microbatches, and divides
summed losses by all labels of the global batch. The state is equal on all ranks.
"""

import tempfile

import dflop.torch
import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch.nn.functional import cross_entropy

DIRECTORY, IGNORED, MICROBATCHES = dflop.example.directory(), -100, 2
MODEL = DIRECTORY / "model"


def dataloader(*, dp_rank=0, dp_world_size=1, global_batch_size=16):
    ds = dflop.Dataset(DIRECTORY / "shards")
    rank = {"dp_rank": dp_rank, "dp_size": dp_world_size, "microbatches": MICROBATCHES}
    loader = dflop.BalancedLoader(ds, model=MODEL, global_batch_size=global_batch_size, **rank)
    return dflop.torch.TitanDataLoader(loader)


def train_step(model, optimizer, data_iterator):
    batches = [next(data_iterator) for _ in range(MICROBATCHES)]
    valid_tokens = sum((labels != IGNORED).sum() for _, labels in batches)
    for inputs, labels in batches:
        inputs |= {"input_ids": inputs.pop("input"), "position_ids": inputs.pop("positions")}
        logits = model(**inputs).logits
        (loss := cross_entropy(logits[0], labels[0], reduction="sum") / valid_tokens).backward()
        yield loss.item()
    optimizer.step(), optimizer.zero_grad()


if __name__ == "__main__":
    model = transformers.Qwen2VLForConditionalGeneration(transformers.Qwen2VLConfig.from_pretrained(MODEL))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data_iterator = iter(titan := dataloader())
    print("losses", *(f"{sum(train_step(model, optimizer, data_iterator)):.4f}" for _ in range(6)))
    with tempfile.TemporaryDirectory() as checkpoint:
        dcp.save({"dataloader": titan}, checkpoint_id=checkpoint)
        dcp.load({"dataloader": (resumed := dataloader())}, checkpoint_id=checkpoint)
    print("next tokens", *(next(it)[0]["input"][0, :9].tolist() for it in (data_iterator, iter(resumed))))
