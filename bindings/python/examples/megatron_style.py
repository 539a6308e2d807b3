"""Builds data iterators for Megatron-LM: `next(data_iterator)` gives `forward_step` one packed microbatch.

Use `--dataloader-type external --micro-batch-size 1 --calculate-per-token-loss` and a provider that returns
`data_iterators(...)`: `None` for intermediate stages and for all tensor-parallel ranks but the first.
"""

import json

import dflop.torch
import torch
from torch.nn.functional import cross_entropy, pad

DIRECTORY, SEQ_LENGTH, MICROBATCHES = dflop.example.directory(), 2048, 2
SPLITS = {"train": {"fraction": [0, 0.8]}, "valid": {"fraction": [0.8, 0.9]}, "test": {"fraction": [0.9, 1]}}
(DIRECTORY / "shards" / "splits.json").write_text(json.dumps({"splits": SPLITS}))


def megatron_batch(mb):
    labels = pad(mb["labels"][:, 1:], (0, 1), value=-100)  # the next tokens
    batch = {"tokens": mb["input_ids"], "labels": labels.clamp(min=0), "loss_mask": (labels >= 0).float()}
    longest = torch.tensor([mb.max_seqlen], dtype=torch.int32)
    batch |= {"position_ids": mb["position_ids"][0], "cu_seqlens": mb.cu_seqlens[None], "max_seqlen": longest}
    return batch | {name: mb[name] for name in ("pixel_values", "image_grid_thw") if name in mb}


class DataIterator:
    def __init__(self, split, **rank):
        model = DIRECTORY / "model"
        ds = dflop.Dataset(DIRECTORY / "shards", split=split, tokenizer=model, model=model)
        order = dflop.Order(validation=split != "train")
        rank |= {"microbatches": MICROBATCHES, "global_batch_size": 8, "order": order}
        rank["processor"] = dflop.Processor(pad_to_tokens=SEQ_LENGTH)
        loader = dflop.BalancedLoader(ds, model=model, **rank)
        self.microbatches, self.epoch = dflop.torch.Microbatches(loader, MICROBATCHES), iter(())

    def __next__(self):
        while (microbatch := next(self.epoch, None)) is None:
            self.epoch = iter(self.microbatches)
        return megatron_batch(microbatch)

    def save_state(self):
        return self.microbatches.state_dict()


def data_iterators(*, stage=0, stages=1, tp_rank=0, **rank):
    reads = tp_rank == 0 and stage in (0, stages - 1)
    return [DataIterator(split, **rank) if reads else None for split in SPLITS]


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
