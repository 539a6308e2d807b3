"""Trains a made-up model with a made-up processor, neither of which dflop knows, on balanced microbatches.

`KITE` describes the model as data: sizes of its modules, and the token rule of its images. `KiteProcessor`
makes the tensors of a whole microbatch in one call, on threads of the loader. The loader compares the tokens
that were planned with those that the processor made.
"""

import dflop
import torch
from torch import nn

PATCH, MERGE, WIDTH, WORDS = 14, 2, 64, 600
SIDE = PATCH * MERGE  # of a token, in pixels
IMAGE = WORDS - 1  # id of a token of an image

ENCODER = {"num_hidden_layers": 2, "hidden_size": WIDTH, "num_attention_heads": 4, "intermediate_size": 128}
RULE = {
    "rule": "native",
    "patch_size": PATCH,
    "merge_size": MERGE,
    "min_pixels": SIDE**2,
    "max_pixels": 1 << 20,
}
DECODER = ENCODER | {"num_key_value_heads": 4, "vocab_size": WORDS}
KITE = dflop.ModelDescription(name="kite", vision=ENCODER | {"tokens": RULE}, llm=DECODER)


class KiteProcessor:
    """Makes ids, labels and patches of the samples of a microbatch; words are `w` and a number."""

    def __call__(self, samples):
        rows = [self.row(sample) for sample in samples]
        longest = max(len(ids) for ids, _ in rows)
        pad = lambda row, value: torch.tensor(row + [value] * (longest - len(row)))
        patches = [patch for sample in samples for patch in map(self.patches, self.images(sample))]
        batch = {
            "input_ids": torch.stack([pad(ids, 0) for ids, _ in rows]),
            "labels": torch.stack([pad(labels, -100) for _, labels in rows]),
            "attention_mask": torch.stack([pad([1] * len(ids), 0) for ids, _ in rows]),
        }
        return batch | ({"patches": torch.cat(patches)} if patches else {})

    def images(self, sample):
        return [torch.as_tensor(sample[name]) for name in sorted(sample) if name.endswith("png")]

    def row(self, sample):
        places = sum(image.shape[0] // SIDE * (image.shape[1] // SIDE) for image in self.images(sample))
        ids, labels = [IMAGE] * places, [-100] * places
        for turn in sample["json"]["conversations"]:
            words = [int(word[1:]) for word in turn["value"].replace("<image>\n", "").split()]
            ids, labels = ids + words, labels + (words if turn["from"] == "gpt" else [-100] * len(words))
        return ids, labels

    def patches(self, image):
        rows, columns = image.shape[0] // SIDE, image.shape[1] // SIDE
        pixels = image[: rows * SIDE, : columns * SIDE].float() / 127.5 - 1
        grid = pixels.reshape(rows, SIDE, columns, SIDE, 3).transpose(1, 2)
        return grid.reshape(rows * columns, SIDE * SIDE * 3)


class Kite(nn.Module):
    """Embeds squares of an image as tokens among those of the text."""

    def __init__(self):
        super().__init__()
        layer = lambda: nn.TransformerEncoderLayer(WIDTH, 4, 128, 0.0, batch_first=True, norm_first=True)
        self.vision = nn.Sequential(nn.Linear(3 * SIDE**2, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(4096, WIDTH)
        self.layers, self.head = nn.ModuleList([layer(), layer()]), nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids, labels, attention_mask, patches=None):
        hidden = self.words(input_ids)
        if patches is not None:
            hidden = hidden.masked_scatter((input_ids == IMAGE)[..., None], self.vision(patches))
        length = input_ids.shape[1]
        hidden = hidden + self.places(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        logits = self.head(hidden[:, :-1]).flatten(0, 1)
        return nn.functional.cross_entropy(
            logits, labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
        )


def loader_of(shards, **settings):
    # Texts are counted by the tokenizer; without one, the index has estimates.
    dataset = dflop.Dataset(shards).count_tokens(shards.parent / "model" / "tokenizer.json")
    processor = dflop.CustomProcessor(batch=KiteProcessor())
    defaults = {"global_batch_size": 16, "microbatches": 4, "steps": 8, "array_type": "torch"}
    return dflop.BalancedLoader(dataset, model=KITE, processor=processor, **defaults | settings)


def train(model, loader):
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in loader:
        # Targets are counted when all inputs are made, over all ranks. Kite sums its losses; of a model with
        # logits, `dflop.torch.loss(model, microbatch, step)` is the same.
        step = dflop.torch.count_targets(step)
        parts = [model(**microbatch) * microbatch.loss_scale_sum for microbatch in step.microbatches]
        (loss := sum(parts)).backward()
        optimizer.step(), optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    torch.manual_seed(0)
    loader = loader_of(dflop.example.directory() / "shards")
    print("losses", *(f"{loss:.3f}" for loss in train(Kite(), loader)))
    report = loader.prepare_report()
    print("tokens", report["tokens"], "planned", report["planned_tokens"])
