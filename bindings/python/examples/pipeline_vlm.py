"""Trains an encoder on one rank and an LLM in two stages on two others, all of them plain modules."""

import dflop

if __name__ == "__main__":
    dflop.example.on_ranks(3)  # as `torchrun --nproc-per-node 3` does

import torch
from torch.nn.functional import cross_entropy, layer_norm, scaled_dot_product_attention

WIDTH, WORDS, PATCHES = 64, 640, 4 * 1176  # an LLM row has four patches


class Vision(torch.nn.Linear):
    def forward(self, rows, microbatch):
        rows = super().forward(microbatch["pixel_values"].view(-1, PATCHES))
        return layer_norm(rows, [WIDTH])


class Language(torch.nn.Module):
    def __init__(self, layers, is_first, is_last, mesh):
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, WIDTH) if is_first else None
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 3 * WIDTH) for _ in layers)
        self.head = torch.nn.Linear(WIDTH, WORDS) if is_last else None

    def forward(self, rows, microbatch):
        if self.words is not None:
            words = self.words(microbatch["input_ids"][0])
            rows = words if rows is None else words.index_copy(0, microbatch.media_rows, rows)
        sample = torch.bucketize(torch.arange(len(rows)), microbatch.cu_seqlens, right=True)
        mask = (sample[:, None] == sample).tril()  # attention within each sample
        for block in self.blocks:
            parts = [part[None] for part in block(rows).chunk(3, -1)]
            rows = rows + scaled_dot_product_attention(*parts, attn_mask=mask)[0]
        labels = microbatch["labels"][0, 1:]
        return cross_entropy(self.head(rows)[:-1], labels, reduction="sum") if self.head else rows


def build(module, *place):
    return Vision(PATCHES, WIDTH) if module == "vision" else Language(*place)


def loader(role):
    paths = {"dataset": data / "shards", "model": data / "model"}
    return dflop.BalancedLoader(**paths, global_batch_size=16, steps=8, role=role)


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    rank, data = torch.distributed.get_rank(), dflop.example.directory()
    schedule = dflop.Schedule({"vision": {}, "llm": {"layers": [2, 2]}}, microbatches=4)
    pipeline = dflop.torch.Pipeline(build, schedule, loader)
    optimizer = torch.optim.AdamW(pipeline.module.parameters(), lr=1e-2)
    for step in pipeline:
        print(f"rank {rank}, step {step.step}: loss {pipeline.step(step):.3f}", flush=True)
        pipeline.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    torch.distributed.destroy_process_group()
