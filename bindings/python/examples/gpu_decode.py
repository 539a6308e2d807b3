"""Decodes images on the device: the loader delivers encoded bytes, balanced by the pixels that they hold.

`Read(decode="raw")` delivers fields as stored. `torchcodec` decodes the images of a microbatch in one call,
with nvJPEG on a GPU, and on the CPU without one; its `VideoDecoder` decodes clips in the same place. The
index knows the sizes of all images, so the time to decode them is a part of the costs, and every rank decodes
about as many pixels.
"""

import io
import tempfile
from pathlib import Path

import dflop
import numpy as np
import torch
from PIL import Image
from torchcodec.decoders import decode_jpeg
from torchvision.transforms.v2.functional import resize

DEVICE, SIDE, PATCH = "cuda" if torch.cuda.is_available() else "cpu", 64, 16
# Decoding this many pixels takes about as long as encoding a patch; measure yours.
PIXELS_PER_PATCH = 1280


def write_shards(directory: Path) -> None:
    values = np.random.default_rng(0)
    with dflop.Writer(directory, shard_samples=32) as writer:
        for number in range(96):
            label, (height, width) = number % 4, values.integers(40, 400, 2)
            pixels = values.normal(40 + 50 * label, 20, (height, width, 3)).clip(0, 255).astype("uint8")
            Image.fromarray(pixels).save(encoded := io.BytesIO(), "JPEG")
            writer.write({"__key__": f"{number:04}", "jpg": encoded.getvalue(), "cls": label})


def tokens(samples: list[dict]) -> list[dict[str, int]]:
    """Counts patches, and decoding as patches, from the sizes in the index; nothing is decoded for it."""
    pixels = [sum(width * height for width, height in sample["images"]) for sample in samples]
    patches = [(SIDE // PATCH) ** 2 + own // PIXELS_PER_PATCH for own in pixels]
    return [{"vision": own, "llm": 1, "targets": 1} for own in patches]


def batch(samples: list[dflop.Sample]) -> dict[str, object]:
    """Collects the encoded images of a microbatch, on a thread of the loader."""
    encoded = [torch.from_numpy(np.array(sample["jpg"])) for sample in samples]
    return {"encoded": encoded, "labels": torch.tensor([int(bytes(sample["cls"])) for sample in samples])}


def loader_of(shards: Path, **settings: object) -> dflop.BalancedLoader:
    defaults = {
        "global_batch_size": 24,
        "microbatches": 2,
        "steps": 12,
        "array_type": "torch",
        "tokenizer": False,
    }
    return dflop.BalancedLoader(
        shards,
        model=dflop.Custom(modules={"vision": 1e6, "llm": 1e6}, tokens=tokens),
        processor=dflop.CustomProcessor(batch=batch),
        read=dflop.Read(decode="raw", fields=["jpg", "cls"]),
        **defaults | settings,
    )


def images_of(microbatch: dflop.Microbatch) -> torch.Tensor:
    """Decodes and scales the images on the device."""
    decoded = decode_jpeg(microbatch["encoded"], device=DEVICE)
    return torch.stack([resize(image, [SIDE, SIDE]) for image in decoded]).float() / 64 - 2


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(3, 16, PATCH, PATCH), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LazyLinear(4)
    model = torch.nn.Sequential(*layers).to(DEVICE)
    model(torch.zeros(1, 3, SIDE, SIDE, device=DEVICE))  # sizes the last layer
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with tempfile.TemporaryDirectory() as directory:
        write_shards(Path(directory))
        for step in loader_of(Path(directory)):
            total = 0.0
            for mb in step.microbatches:
                labels = mb["labels"].to(DEVICE)
                losses = torch.nn.functional.cross_entropy(model(images_of(mb)), labels, reduction="sum")
                (loss := losses * mb.loss_scale_sum).backward()
                total += loss.item()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step.step}: loss {total:.3f}, decoded on {DEVICE}")
