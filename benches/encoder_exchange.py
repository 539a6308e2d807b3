"""Simulates what an exchange of media between FSDP ranks adds to balancing encoder and LLM apart.

    python3 benches/encoder_exchange.py [--dflop PROGRAM] [--gpus 64] [--microbatches 2] [--steps 4] [--out FILE]

Each case is a data set of headers without pixels, and a run of `dflop simulate --gpus`, whose times are FLOPs over the
stated rate of an H100. The table has steps over the lower bound for ranks without exchange, the mean of all ranks or
the longest sample. Figures of the data, drawn from a fixed seed, follow published data sets: photos as in COCO 2017
(pixels 274,000, coefficient of variation 0.17), scans as in SROIE receipts (pixels 0.43 to 35 million, median 1.4, 0.6
in the logarithm, one in ten at 35), texts as in the Alpaca demonstration data (words from 12 to 444, median 96).
"""

import argparse
import io
import json
import math
import pathlib
import random
import struct
import subprocess
import tarfile
import tempfile
import zlib

MODELS = ("qwen2.5-vl-7b", "qwen3-vl-30b-a3b")
SAMPLES = (1, 2, 4, 8)
ROWS = ("data-blind", "tokens", "lpt", "dflop")
PIXELS_MAX = 35_000_000


def png(width: int, height: int) -> bytes:
    """Returns a PNG of the size, whose pixels are missing: planning reads headers only."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = (header, b"IDAT" + zlib.compress(b""), b"IEND")
    parts = (struct.pack(">I", len(one) - 4) + one + struct.pack(">I", zlib.crc32(one)) for one in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def photo(rng: random.Random) -> list[tuple[int, int]]:
    side = math.sqrt(274_000 * max(0.5, rng.gauss(1, 0.17)))
    aspect = rng.choice((0.75, 4 / 3))
    return [(round(side * math.sqrt(aspect)), round(side / math.sqrt(aspect)))]


def scans(rng: random.Random) -> list[tuple[int, int]]:
    """One to four pages."""
    sizes = []
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        drawn = PIXELS_MAX if rng.random() < 0.1 else 1_400_000 * math.exp(0.6 * rng.gauss(0, 1))
        width = math.sqrt(min(max(drawn, 430_000), PIXELS_MAX) / 1.8)
        sizes.append((round(width), round(1.8 * width)))
    return sizes


DATA = {"short": photo, "long": scans}


def write(directory: pathlib.Path, draw, samples: int) -> None:
    rng = random.Random(1)
    directory.mkdir(parents=True)
    with tarfile.open(directory / "000.tar", "w") as tar:
        for number in range(samples):
            sizes = draw(rng) if rng.random() < 0.8 else []
            words = round(min(max(96 * math.exp(0.9 * rng.gauss(0, 1)), 12), 444))
            human = "<image>\n" * len(sizes) + "what is in it"
            turns = [{"from": "human", "value": human}, {"from": "gpt", "value": " ".join(["word"] * words)}]
            fields = {f"{place}.png": png(*size) for place, size in enumerate(sizes)}
            for name, content in {**fields, "json": json.dumps({"conversations": turns}).encode()}.items():
                member = tarfile.TarInfo(f"{number:06}.{name}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def simulate(options: argparse.Namespace, data: pathlib.Path, model: str, samples: int, is_frozen: bool) -> dict:
    batch = options.gpus * options.microbatches * samples
    command = [*options.dflop.split(), "simulate", data, "--model", model, "--gpus", options.gpus]
    command += ["--microbatches", options.microbatches, "--global-batch-size", batch, "--steps", options.steps]
    command += ["--json", *(["--set", "cost.freeze=vision"] if is_frozen else [])]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}: {done.stderr}")
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dflop", default="dflop", help="command, with arguments")
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--out", type=argparse.FileType("w"), default="-")
    options = parser.parse_args()
    print(
        f"# {options.gpus} GPUs, {options.microbatches} microbatches per GPU, {options.steps} steps, FSDP, H100 at "
        "a stated rate; step over the lower bound without exchange",
        f"# {'model':<17} {'media':<6} {'encoder':<8} {'samples':>7} {'':>2}"
        + "".join(f"{row:>11}" for row in (*ROWS, "exchanged", "gain")),
        sep="\n", file=options.out, flush=True,
    )
    with tempfile.TemporaryDirectory() as directory:
        for media, draw in DATA.items():
            data = pathlib.Path(directory) / media
            write(data, draw, options.gpus * options.microbatches * max(SAMPLES) * options.steps)
            for model in options.models:
                for is_frozen in (False, True):
                    for samples in SAMPLES:
                        found = simulate(options, data, model, samples, is_frozen)
                        bound = found["lower_bound_seconds"]
                        steps = {one["name"]: one["step_seconds"] for one in found["strategies"]}
                        exchanged = found["exchanged_step_seconds"]
                        values = [*(steps[row] / bound for row in ROWS), exchanged / bound]
                        print(
                            f"{model:<19} {media:<6} {'frozen' if is_frozen else 'trained':<8} {samples:>7} {'':>2}"
                            + "".join(f"{value:>11.3f}" for value in values)
                            + f"{100 * (steps['dflop'] / exchanged - 1):>9.1f} %",
                            file=options.out, flush=True,
                        )


if __name__ == "__main__":
    main()
