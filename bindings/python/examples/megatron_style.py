"""Builds data iterators for Megatron-LM: `next(data_iterator)` gives `forward_step` one packed microbatch.

Use `--dataloader-type external --micro-batch-size 1 --calculate-per-token-loss` and a provider that returns
`data_iterators(...)`: `None` for intermediate stages and for all tensor-parallel ranks but the first.
"""

import json

import dflop.torch
import torch
from torch.nn.functional import cross_entropy

DIRECTORY, SEQ_LENGTH, MICROBATCHES = dflop.example.directory(), 2048, 2
SPLITS = {"train": {"fraction": [0, 0.8]}, "valid": {"fraction": [0.8, 0.9]}, "test": {"fraction": [0.9, 1]}}
(DIRECTORY / "shards" / "splits.json").write_text(json.dumps({"splits": SPLITS}))


def data_iterator(split, **rank):
    model = DIRECTORY / "model"
    ds = dflop.Dataset(DIRECTORY / "shards", split=split)
    rank |= {"microbatches": MICROBATCHES, "global_batch_size": 8}
    if split != "train":
        rank |= {"order": dflop.Order(shuffle="none", tail="short"), "epochs": 1}
    rank["processor"] = dflop.Processor(length_buckets=f"fixed:{SEQ_LENGTH}")
    return dflop.torch.MegatronIterator(dflop.BalancedLoader(ds, model=model, **rank))


def data_iterators(*, stage=0, stages=1, tp_rank=0, **rank):
    reads = tp_rank == 0 and stage in (0, stages - 1)
    return [data_iterator(split, **rank) if reads else None for split in SPLITS]


def forward_step(data_iterator, model):
    batch = next(data_iterator)
    losses = cross_entropy(model(batch["tokens"])[0], batch["labels"][0], reduction="none")
    return losses @ batch["loss_mask"][0], batch["loss_mask"].sum()


if __name__ == "__main__":
    model = torch.nn.Sequential(torch.nn.Embedding(640, 64), torch.nn.Linear(64, 640))
    optimizer, train = torch.optim.AdamW(model.parameters(), lr=1e-2), data_iterators()[0]
    for _ in range(8):
        losses, tokens = zip(*(forward_step(train, model) for _ in range(MICROBATCHES)), strict=True)
        (loss := sum(losses) / sum(tokens)).backward(), optimizer.step(), optimizer.zero_grad()
        print(f"loss {loss.item():.4f} of {int(sum(tokens))} tokens")
