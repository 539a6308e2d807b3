"""Classifies images from PyTorch's `DataLoader`, and resumes exactly in the middle of an epoch.

Items are whole batches, hence `batch_size=None`; the loader has its own threads, hence `num_workers=0`.
torchdata's `StatefulDataLoader` restores the position without reading earlier items again.
"""

from collections.abc import Iterable
from pathlib import Path

import dflop
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader


def dataset_of(directory: Path) -> dflop.torch.IterableDataset:
    settings = {
        "batch_size": 16,
        "image": dflop.Image(size=32),
        "read": dflop.Read(fields=["images", "cls"]),
        "array_type": "torch",
    }
    return dflop.torch.IterableDataset(dflop.Loader(directory / "shards", shuffle_buffer=64, **settings))


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 8, stride=8), nn.ReLU(), nn.Flatten(), nn.Linear(256, 8))


def labels_of(batch: dflop.Batch) -> torch.Tensor:
    """Returns the class of each image; a sample may have none or several images."""
    images = [end - start for start, end in batch.image_rows]
    return torch.tensor(batch["cls"]).repeat_interleave(torch.tensor(images))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[dflop.Batch]) -> list[float]:
    losses = []
    for batch in batches:
        loss = nn.functional.cross_entropy(model(batch["image"]), labels_of(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    directory, model = dflop.example.directory(), model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    settings = {"batch_size": None, "num_workers": 0, "collate_fn": dflop.torch.keep}
    losses = train(model, optimizer, DataLoader(dataset_of(directory), **settings))
    print(f"an epoch of DataLoader: {len(losses)} batches, loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    stopped, resumed = (StatefulDataLoader(dataset_of(directory), **settings) for _ in range(2))
    head = [batch for _, batch in zip(range(5), stopped, strict=False)]
    resumed.load_state_dict(stopped.state_dict())
    print(f"{len(head)} batches before a stop, {len(list(resumed))} after it")
