"""Simulates what an exchange of media between FSDP ranks adds to balancing encoder and LLM apart.

    python3 benches/encoder_exchange.py [--ranks 64] [--microbatches 2] [--steps 4] [--out FILE]

The package plans datasets of headers without pixels; times are FLOPs over the stated rate of an H100. A microbatch takes
the slowest rank's encoder and the slowest rank's LLM, a step the sum of both over microbatches; the table has it over the
mean of all ranks. With an exchange, computed here independently of the package, encoders take the largest share by LPT of
all media in the microbatch, if media do not stay where they are; messages take no time. Columns:

- `blind`: samples round robin; `sum`: ranks balanced by the sum of encoder and LLM; `apart`: each for itself
- `+exchange`: as `apart`, with an exchange; `llm`: LLMs balanced alone, with an exchange
- `gain`: `apart` over the better of both

Figures of the data, drawn from a fixed seed, follow published datasets: photos as in COCO 2017
(pixels 274,000, coefficient of variation 0.17), scans as in SROIE receipts (pixels 0.43 to 35 million, median 1.4, 0.6
in the logarithm, one in ten at 35), texts as in the Alpaca demonstration data (words from 12 to 444, median 96).
"""

import argparse
import functools
import heapq
import io
import itertools
import json
import math
import pathlib
import random
import struct
import tarfile
import tempfile
import zlib

import dflop

MODELS = ("qwen2.5-vl-7b", "qwen3-vl-30b-a3b")
SAMPLES = (1, 2, 4, 8)
ROWS = ("blind", "sum", "apart", "+exchange", "llm")
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
    """Writes samples whose images are headers."""
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

def lpt(times: list[float], ranks: int) -> float:
    """Returns the largest sum of times of a rank."""
    loads = [0.0] * ranks
    for time in sorted(times, reverse=True):
        heapq.heapreplace(loads, loads[0] + time)
    return max(loads)


def step_times(options: argparse.Namespace, data: pathlib.Path, model: str, frozen: str | None, samples: int) -> dict:
    """Returns the sum of steps by row, over the mean of all ranks."""
    costs = dflop.CostModel(model, freeze=frozen)
    seconds: dict[int, tuple[list[float], float]] = {}  # of each medium, and of the LLM, by sample

    @functools.cache
    def encoder_seconds(size: tuple[int, int]) -> float:
        return costs.cost(images=[size])["seconds"]["vision"]

    def predicted(batch: list[dict]) -> list[dict]:
        for sample in batch:
            media = [encoder_seconds(tuple(size)) for size in sample["images"]]
            seconds[sample["sample"]] = (media, sample["seconds"]["llm"])
        return [sample["seconds"] for sample in batch]

    def of_llm(batch: list[dict]) -> list[dict]:
        return [{"vision": 0.0, "llm": times["llm"]} for times in predicted(batch)]

    plans = {
        "blind": dflop.Plan(strategy="data-blind", schedule="microbatch", cost=predicted),
        "sum": dflop.Plan(schedule="step", cost=predicted),
        "apart": dflop.Plan(schedule="microbatch", cost=predicted),
        "llm": dflop.Plan(schedule="microbatch", cost=of_llm),
    }
    totals, mean = dict.fromkeys(ROWS, 0.0), 0.0
    settings = {"microbatches": options.microbatches, "dp_size": options.ranks, "steps": options.steps}
    settings["global_batch_size"] = options.ranks * options.microbatches * samples
    for name, plan in plans.items():
        loader = dflop.BalancedLoader(
            data, model=costs, tokenizer=False, plan=plan, read=dflop.Read(fields=["json"]), **settings
        )
        for step in loader:
            drawn = [seconds[number] for _, number in step.plan.samples]
            for slot in range(options.microbatches):
                ranks = [[drawn[place] for place in rank[slot]] for rank in step.plan.ranks]
                media = [[time for times, _ in rank for time in times] for rank in ranks]
                llms = [sum(llm for _, llm in rank) for rank in ranks]
                alone = max(map(sum, media))  # media stay where that is no slower
                shared = min(alone, lpt([time for own in media for time in own], options.ranks))
                exchanged = shared + max(llms)
                totals[name] += exchanged if name == "llm" else alone + max(llms)
                if name == "apart":
                    totals["+exchange"] += exchanged
                    mean += (sum(map(sum, media)) + sum(llms)) / options.ranks
        loader.close()
    return {name: total / mean for name, total in totals.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--out", type=argparse.FileType("w"), default="-")
    options = parser.parse_args()
    print(
        f"# {options.ranks} FSDP ranks, {options.microbatches} microbatches per rank, {options.steps} steps, H100 at a "
        "stated rate; step over the mean of all ranks",
        f"# {'model':<17} {'media':<6} {'encoder':<8}{'samples':>8}" + "".join(f"{row:>11}" for row in (*ROWS, "gain")),
        sep="\n",
        file=options.out,
        flush=True,
    )
    with tempfile.TemporaryDirectory() as directory:
        for media, draw in DATA.items():
            data = pathlib.Path(directory) / media
            write(data, draw, options.ranks * options.microbatches * max(SAMPLES) * options.steps)
            for model, frozen, samples in itertools.product(options.models, (None, "vision"), SAMPLES):
                found = step_times(options, data, model, frozen, samples)
                gain = found["apart"] / min(found["+exchange"], found["llm"]) - 1
                print(
                    f"{model:<19} {media:<6} {'frozen' if frozen else 'trained':<8}{samples:>8}"
                    + "".join(f"{found[row]:>11.3f}" for row in ROWS)
                    + f"{100 * gain:>9.1f} %",
                    file=options.out,
                    flush=True,
                )


if __name__ == "__main__":
    main()
