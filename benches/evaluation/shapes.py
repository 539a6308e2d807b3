"""Draws the samples of the evaluation: encoder tiles, LLM positions and media, by stated distributions and a seed.

    python3 benches/evaluation/shapes.py OUT_DIRECTORY

The parts have the names and relative sizes of the datasets in the DFLOP paper (section 5.1). The datasets
themselves are not read: media sizes are drawn from the distributions in `PARTS`, and the token rules of the
models turn them into tiles and positions.
"""

import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

SEED = 20260325
# Number of samples in the whole mixture, divided by the part sizes.
SAMPLES = 12_000
# LLM positions per word of text.
TOKENS_PER_WORD = 1.3
FRAMES_MAX = 32


class Media(NamedTuple):
    """Media of a sample; images have a width and a height in pixels."""

    images: list[tuple[int, int]]
    frames: int
    words: int


class Shape(NamedTuple):
    """Encoder tiles, LLM positions, and the number of images, videos or clips of a sample."""

    tiles: int
    positions: int
    media: int


class Part(NamedTuple):
    """A dataset: thousands of samples in the paper, the distribution in words, and a draw."""

    thousands: int
    distribution: str
    draw: Callable[[random.Random], Media]


def _words(source: random.Random, median: float, sigma: float) -> int:
    return max(4, round(source.lognormvariate(math.log(median), sigma)))


def _image(
    source: random.Random, megapixels: float, sigma: float, aspect: float, spread: float
) -> tuple[int, int]:
    """Draws an image; `aspect` is the median height over width."""
    pixels = 1e6 * source.lognormvariate(math.log(megapixels), sigma)
    ratio = source.lognormvariate(math.log(aspect), spread)
    return max(28, round(math.sqrt(pixels / ratio))), max(28, round(math.sqrt(pixels * ratio)))


def _photo(source: random.Random) -> Media:
    return Media([_image(source, 0.27, 0.3, 0.8, 0.3)], 0, _words(source, 96, 0.9))


def _diagram(source: random.Random) -> Media:
    return Media([_image(source, 0.25, 0.6, 0.8, 0.25)], 0, _words(source, 30, 0.4))


def _infographic(source: random.Random) -> Media:
    return Media([_image(source, 2.2, 0.7, 2.2, 0.6)], 0, _words(source, 25, 0.4))


def _several(source: random.Random) -> Media:
    count = 2
    while count < 12 and source.random() < 0.6:
        count += 1
    return Media([_image(source, 0.27, 0.3, 0.8, 0.3) for _ in range(count)], 0, _words(source, 60, 0.8))


def _video(source: random.Random) -> Media:
    seconds = source.lognormvariate(math.log(30), 0.8)
    return Media([], min(FRAMES_MAX, max(4, round(seconds))), _words(source, 60, 0.8))


PARTS = {
    "LLaVA-Wild": Part(28, "an image, median 0.27 megapixels (sigma 0.3); median 96 words (0.9)", _photo),
    "AI2D": Part(18, "a diagram, median 0.25 megapixels (0.6); median 30 words (0.4)", _diagram),
    "InfographicVQA": Part(
        19, "an image, median 2.2 megapixels (0.7), 2.2 times as high as wide (0.6)", _infographic
    ),
    "M4-Instruct": Part(60, "2 to 12 images, mean 3.5; median 60 words (0.8)", _several),
    "LLaVA-Video": Part(
        60, "a frame a second for median 30 s (0.8), 4 to 32 frames; median 60 words", _video
    ),
}


def any_resolution(width: int, height: int) -> tuple[int, int]:
    """Returns tiles and LLM positions of an image by LLaVA-OneVision's rule, at most 9 tiles' positions."""
    side, patches, tiles_max = 384, 27, 9
    best = (-1, 0, 1, 1)
    for columns in range(1, 7):
        for rows in range(1, 7):
            scale = min(side * columns / width, side * rows / height)
            used = min(int(width * scale) * int(height * scale), width * height)
            found = (used, used - side * side * columns * rows, columns, rows)
            best = max(best, found, key=lambda one: one[:2])
    _, _, columns, rows = best
    wide, high = patches * columns, patches * rows
    if width / height > columns / rows:
        high -= 2 * ((high - int(height * wide / width)) // 2)
    else:
        wide -= 2 * ((wide - int(width * high / height)) // 2)
    shrink = math.sqrt(high * wide / (tiles_max * patches**2))
    if shrink > 1.1:
        high, wide = int(high // shrink), int(wide // shrink)
    return 1 + columns * rows, high * (wide + 1) + patches**2


def dynamic_tiles(width: int, height: int) -> tuple[int, int]:
    """Returns tiles and LLM positions of an image by InternVL's rule: 1 to 12 tiles and a thumbnail."""
    side, tokens = 448, 256
    shapes = sorted(
        ((c, r) for c in range(1, 13) for r in range(1, 13) if c * r <= 12),
        key=lambda one: (one[0] * one[1], one[0]),
    )
    best, least = (1, 1), math.inf
    for columns, rows in shapes:
        difference = abs(width / height - columns / rows)
        is_large = width * height > 0.5 * side * side * columns * rows
        if difference < least or (difference == least and is_large):
            best, least = (columns, rows), difference
    tiles = best[0] * best[1]
    tiles += tiles > 1
    return tiles, tiles * tokens + 2


def onevision(media: Media) -> Shape:
    """Returns the shape of a sample: several images take a tile each, a video 14 x 15 positions a frame."""
    text = round(TOKENS_PER_WORD * media.words)
    if media.frames:
        return Shape(media.frames, media.frames * 14 * 15 + text, 1)
    images = len(media.images)
    if images > 1:
        return Shape(images, images * (27 * 27 + 1) + text, images)
    tiles, tokens = any_resolution(*media.images[0])
    return Shape(tiles, tokens + text, 1)


def internvl(media: Media) -> Shape:
    """Returns the shape of a sample: several images and frames take a tile each."""
    text = round(TOKENS_PER_WORD * media.words)
    if len(media.images) == 1:
        tiles, tokens = dynamic_tiles(*media.images[0])
        return Shape(tiles, tokens + text, 1)
    tiles = len(media.images) + media.frames
    return Shape(tiles, tiles * (256 + 2) + text, max(1, len(media.images)))


AUDIO = "1 to 6 clips, mean 1.7, of median 9 s (0.8), at most 30 s; median 40 words (0.8)"


def audio(source: random.Random) -> Shape:
    """Returns the shape of a sample: a 30-second window a clip, 25 positions a second."""
    clips = 1
    while clips < 6 and source.random() < 0.4:
        clips += 1
    text = round(TOKENS_PER_WORD * _words(source, 40, 0.8))
    seconds = [min(30.0, source.lognormvariate(math.log(9), 0.8)) for _ in range(clips)]
    return Shape(clips, text + sum(2 + max(1, int(25 * one)) for one in seconds), clips)


def _drawn(parts: list[str], rule: Callable[[Media], Shape], samples: int) -> list[Shape]:
    """Draws samples from the parts in proportion to the part sizes."""
    total = sum(PARTS[name].thousands for name in parts)
    rows = []
    for name in parts:
        # Each part has a seed, so that its samples are the same in every mixture.
        source = random.Random(f"{SEED} {name}")
        count = round(samples * PARTS[name].thousands / total)
        rows += [rule(PARTS[name].draw(source)) for _ in range(count)]
    random.Random(SEED).shuffle(rows)
    return rows


def tables() -> dict[str, list[Shape]]:
    """Returns all shape tables by name."""
    source = random.Random(f"{SEED} audio")
    return {
        "onevision": _drawn(list(PARTS), onevision, SAMPLES),
        "internvl": _drawn(list(PARTS), internvl, SAMPLES),
        "audio": [audio(source) for _ in range(SAMPLES)],
        "single-image": _drawn(["LLaVA-Wild", "AI2D"], onevision, SAMPLES),
        "documents": _drawn(["InfographicVQA"], onevision, SAMPLES),
        "several-images": _drawn(["M4-Instruct"], onevision, SAMPLES),
        "video": _drawn(["LLaVA-Video"], onevision, SAMPLES),
        "images-and-video": _drawn(["LLaVA-Wild", "LLaVA-Video"], onevision, SAMPLES),
    }


def write(directory: Path) -> dict[str, list[Shape]]:
    """Writes the tables as `NAME.csv`, in the format that `--shapes` reads; returns them."""
    directory.mkdir(parents=True, exist_ok=True)
    drawn = tables()
    for name, rows in drawn.items():
        lines = "".join(f"{row.tiles},{row.positions},{row.media}\n" for row in rows)
        (directory / f"{name}.csv").write_text("tiles,seq_len,media\n" + lines, encoding="utf-8")
    return drawn


def described(rows: list[Shape]) -> dict[str, list[int]]:
    """Returns median, 95th percentile and maximum of every column."""

    def quantiles(column: str) -> list[int]:
        ordered = sorted(getattr(row, column) for row in rows)
        return [ordered[len(ordered) // 2], ordered[len(ordered) * 95 // 100], ordered[-1]]

    return {column: quantiles(column) for column in Shape._fields}


if __name__ == "__main__":
    for table, samples in write(Path(sys.argv[1])).items():
        print(table, len(samples), described(samples))
