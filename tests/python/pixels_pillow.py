"""Compares the pixels that dflop decodes with Pillow's: random pictures in every format and mode, whole and damaged.

Lossless formats must be equal. JPEG and lossy WebP may differ by rounding, and by how color is interpolated where it has
fewer samples than brightness. Gray of 16 bits is compared with its upper 8. Damaged files need not be refused by both, and of those that both decode, one
in a hundred may have another size: a header that was hit says what it says.
"""

import argparse
import io
import pathlib
import random
import sys
import tarfile
import tempfile
import warnings
from collections import Counter

import dflop
import numpy as np
from PIL import Image, ImageFile, ImageOps

ORIENTATION = 0x0112
# Largest mean difference of a lossy picture, in levels of 255.
MEAN_MAX = {"jpg": 2.0, "webp-lossy": 2.0}


def picture(source: random.Random, mode: str) -> Image.Image:
    """Makes a smooth picture with a little noise."""
    width, height = source.randint(1, 96), source.randint(1, 96)
    y, x = np.mgrid[0:height, 0:width]
    planes = [(x * source.uniform(0, 3) + y * source.uniform(0, 3) + source.randint(0, 255)) % 511 for _ in range(4)]
    values = np.abs(np.stack(planes, axis=-1) - 255).astype(np.uint8)
    values[..., 3] = values[..., 3] | 128
    image = Image.fromarray(values, "RGBA")
    if mode == "I;16":
        return Image.fromarray(values[..., 0].astype(np.uint16) * 257)
    return image.convert("RGB").convert(mode) if mode in ("P", "1", "L", "RGB", "CMYK", "YCbCr") else image.convert(mode)


def encoded(source: random.Random) -> tuple[str, str, bytes]:
    """Returns format, extension and bytes of a random picture."""
    kind = source.choice(["jpg", "jpg", "jpg", "png", "png", "bmp", "gif", "tiff", "webp-lossless", "webp-lossy"])
    modes = {
        "jpg": ["RGB", "L", "CMYK"],
        "png": ["RGB", "RGBA", "L", "LA", "P", "1", "I;16"],
        "bmp": ["RGB", "L", "P", "1"],
        "gif": ["P", "L", "RGB"],
        "tiff": ["RGB", "L", "RGBA"],
        "webp-lossless": ["RGB", "RGBA"],
        "webp-lossy": ["RGB"],
    }
    image = picture(source, source.choice(modes[kind]))
    options: dict = {}
    if kind == "jpg":
        options = {"quality": source.randint(30, 100), "progressive": source.random() < 0.4, "subsampling": source.randint(0, 2)}
        options["restart_marker_blocks"] = source.choice([0, 0, 3])
    elif kind.startswith("webp"):
        options = {"lossless": kind == "webp-lossless", "quality": source.randint(60, 100), "exact": True}
    elif kind == "tiff":
        options = {"compression": source.choice([None, "tiff_lzw", "tiff_deflate", "packbits"])}
    if kind in ("jpg", "png") and source.random() < 0.3:
        exif = Image.Exif()
        exif[ORIENTATION] = source.randint(1, 8)
        options["exif"] = exif
    out = io.BytesIO()
    extension = kind.split("-")[0]
    image.save(out, {"jpg": "JPEG"}.get(extension, extension.upper()), **options)
    return kind, extension, out.getvalue()


def damaged(source: random.Random, content: bytes) -> bytes:
    """Changes a few bytes, or cuts the end."""
    if source.random() < 0.3:
        return content[: source.randrange(len(content))]
    changed = bytearray(content)
    for _ in range(source.randint(1, 4)):
        changed[source.randrange(len(changed))] = source.randrange(256)
    return bytes(changed)


def by_pillow(content: bytes) -> np.ndarray | None:
    """Decodes as the processors of Hugging Face do; transparency is dropped."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(content))
            image.load()
            image = ImageOps.exif_transpose(image)
            if image.mode.startswith("I"):  # Pillow would clip 16 bits at 255
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            return np.asarray(image.convert("RGB"))
    except Exception:  # Pillow raises many kinds for damaged files
        return None


def by_dflop(files: list[tuple[str, bytes]]) -> dict[str, np.ndarray]:
    """Decodes files by their key, through a shard."""
    with tempfile.TemporaryDirectory() as place:
        shard = pathlib.Path(place) / "shard.tar"
        with tarfile.open(shard, "w") as archive:
            for number, (extension, content) in enumerate(files):
                entry = tarfile.TarInfo(f"{number:06}.{extension}")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
        found = {}
        loader = dflop.Loader(shard, batch_size=16, read=dflop.Read(workers=2, error_budget=1.0))
        for batch in loader:
            for at, sample in enumerate(batch.samples):
                names = [name for name in batch.keys() if batch[name][at] is not None]
                found[sample.key] = np.asarray(batch[names[0]][at])
        if len(found) + loader.skipped_samples != len(files):
            sys.exit(f"{len(files)} files, but {len(found)} delivered and {loader.skipped_samples} skipped")
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    source = random.Random(arguments.seed)
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    whole = [encoded(source) for _ in range(arguments.pictures)]
    broken = [(kind, extension, damaged(source, content)) for kind, extension, content in whole]
    faults, worst, counts = [], Counter(), Counter()

    ours = by_dflop([(extension, content) for _, extension, content in whole])
    for number, (kind, _, content) in enumerate(whole):
        mine, theirs = ours.get(f"{number:06}"), by_pillow(content)
        counts[kind] += 1
        if mine is None or theirs is None or mine.shape != theirs.shape:
            shapes = [None if array is None else array.shape for array in (mine, theirs)]
            faults.append(f"{number} ({kind}): shapes {shapes}")
            continue
        difference = np.abs(mine.astype(int) - theirs.astype(int))
        worst[kind] = max(worst[kind], float(difference.mean()))
        if difference.mean() > MEAN_MAX.get(kind, 0):
            faults.append(f"{number} ({kind}): pixels differ by {difference.mean():.3f} in the mean, {difference.max()} at most")

    ours = by_dflop([(extension, content) for _, extension, content in broken])
    accepted, sizes_differ = Counter(), 0
    for number, (kind, _, content) in enumerate(broken):
        mine, theirs = ours.get(f"{number:06}"), by_pillow(content)
        accepted[(mine is not None, theirs is not None)] += 1
        if mine is not None and theirs is not None and mine.shape != theirs.shape:
            sizes_differ += 1

    for kind in sorted(counts):
        print(f"{kind:14} {counts[kind]:6} pictures, largest mean difference {worst[kind]:.3f}")
    print(f"damaged: both decode {accepted[True, True]}, only dflop {accepted[True, False]}, only Pillow {accepted[False, True]}, none {accepted[False, False]}")
    print(f"damaged, decoded by both: {sizes_differ} have another size")
    if sizes_differ > accepted[True, True] / 100:
        faults.append(f"{sizes_differ} damaged pictures have another size")
    for fault in faults[:20]:
        print(f"fault: {fault}")
    sys.exit(f"{len(faults)} faults" if faults else 0)


if __name__ == "__main__":
    main()
