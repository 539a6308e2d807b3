"""Builds a dataloader for torchtitan: `(input_dict, labels)` per microbatch, in distributed checkpoints.

A step takes `gradient_accumulation_steps * num_pp_microbatches` items, the loader's microbatches, and divides
summed losses by all labels of the global batch. The state is equal on all ranks.
"""

import json
import tempfile

import dflop.torch
import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch.nn.functional import cross_entropy, pad

DIRECTORY, IGNORED, MICROBATCHES = dflop.example.directory(), -100, 2
MODEL = DIRECTORY / "model"


class BalancedDataLoader(dcp.stateful.Stateful):
    def __init__(self, *, dp_rank=0, dp_world_size=1, global_batch_size=16):
        ds = dflop.Dataset(DIRECTORY / "shards", tokenizer=MODEL, model=MODEL)
        rank = {"dp_rank": dp_rank, "dp_size": dp_world_size, "microbatches": MICROBATCHES}
        loader = dflop.BalancedLoader(ds, model=MODEL, global_batch_size=global_batch_size, **rank)
        self.microbatches = dflop.torch.Microbatches(loader, MICROBATCHES)

    def __iter__(self):
        while True:
            for microbatch in self.microbatches:  # ends with the epoch
                labels = pad(microbatch.pop("labels")[:, 1:], (0, 1), value=IGNORED)
                inputs = {"input": microbatch.pop("input_ids"), "positions": microbatch.pop("position_ids")}
                yield inputs | microbatch, labels

    def state_dict(self):  # one string for any state
        return {"microbatches": json.dumps(self.microbatches.state_dict())}

    def load_state_dict(self, state):
        self.microbatches.load_state_dict(json.loads(state["microbatches"]))


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
    data_iterator = iter(dataloader := BalancedDataLoader())
    print("losses", *(f"{sum(train_step(model, optimizer, data_iterator)):.4f}" for _ in range(6)))
    with tempfile.TemporaryDirectory() as checkpoint:
        dcp.save({"dataloader": dataloader}, checkpoint_id=checkpoint)
        dcp.load({"dataloader": (resumed := BalancedDataLoader())}, checkpoint_id=checkpoint)
    print("next tokens", *(next(it)[0]["input"][0, :9].tolist() for it in (data_iterator, iter(resumed))))
