"""Measures your own modules, writes the profile that loader and planner read, and checks it."""

import tempfile

import dflop.torch
import torch
from torch import nn

WIDTH = 96


class Layer(nn.Module):
    """A transformer layer whose attention does not cross packed samples."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, rows: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        samples = self.qkv(self.norm(rows)).view(-1, 3, 4, WIDTH // 4).split(lengths)
        attend = nn.functional.scaled_dot_product_attention
        mixed = [attend(*sample.permute(1, 2, 0, 3), is_causal=True).transpose(0, 1) for sample in samples]
        rows = rows + self.out(torch.cat(mixed).flatten(1))
        return rows + self.mlp(rows)


class Layers(nn.ModuleList):
    def forward(self, rows: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        for layer in self:
            rows = layer(rows, lengths)
        return rows


def inputs(lengths: list[int]) -> dict[str, object]:
    return {"rows": torch.randn(sum(lengths), WIDTH), "lengths": lengths}


torch.set_num_threads(1)  # times are CPU time then, independent of other load
profile = dflop.torch.profile(
    llm=Layers(Layer() for _ in range(4)),
    encoder=Layers(Layer() for _ in range(2)),
    model="own",
    make_inputs={"llm": inputs, "vision": inputs},
    item_tokens={"vision": 64},  # per image, inside the encoder
    tokens_max=1024,
    seconds_max=10,
    progress=print,
)
with tempfile.TemporaryDirectory() as directory:
    print("written:", *[path.name for path in profile.write(directory)])
print(f"300, 40 and 90 tokens: {profile.predict_microseconds('llm', [300, 40, 90]):.0f} us predicted")
for found in profile.check(microbatches=8, repeats=5).values():
    print(found)
