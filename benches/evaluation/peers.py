"""Balances the same steps by the published rules of other trainers, and by dflop.

`fsdp`: ranks that run the whole model and meet in every microbatch, encoder and LLM one after the other.
`pairs`: encoder ranks and LLM ranks apart, sample by sample in pairs, under 1F1B.

Samples are the images of `shapes`, as black files; every rule gets the same samples, and every answer the
predicted times of dflop's cost model. Communication is left out. Needs the Python package `dflop`
and `pyarrow`.
"""

import heapq
import io
import random
import statistics
import struct
import tarfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import shapes
from simulated import DEVICE, MODEL, SEED

# Parts with images, in proportion to their sizes.
PARTS = ["LLaVA-Wild", "AI2D", "InfographicVQA", "M4-Instruct"]
SAMPLES = 8_192
RANKS, MICROBATCHES = 64, 4
GLOBAL_BATCHES = [512, 2_048]
# Pairs of an encoder rank and an LLM rank, with their microbatches.
PAIRS, PAIR_MICROBATCHES = 32, 8
PATCHES_PER_TILE = 729

# Samples of every microbatch, by rank.
Cut = list[list[list[int]]]


class Sample(NamedTuple):
    """Predicted times in nanoseconds, LLM positions, and tiles of each medium."""

    encoder: int
    llm: int
    positions: int
    tiles: list[int]


def run(directory: Path, steps: int) -> dict[str, Any]:
    """Runs both layouts for every global batch, `steps` steps each."""
    shards = directory / "images"
    samples = _samples(shards)
    ratio = sum(one.llm for one in samples) / sum(one.encoder for one in samples)
    rows: dict[str, list[dict[str, Any]]] = {"fsdp": [], "pairs": []}
    for size in GLOBAL_BATCHES:
        rows["fsdp"].append({"global_batch": size, "over_bound": _fsdp(shards, samples, size, steps)})
        rows["pairs"].append(
            {"global_batch": size, "over_bound": _pairs(shards, samples, ratio, size, steps)}
        )
    return {
        "model": MODEL,
        "steps": steps,
        "samples": len(samples),
        "ranks": RANKS,
        "microbatches": MICROBATCHES,
        "pair_count": PAIRS,
        "pair_microbatches": PAIR_MICROBATCHES,
        **rows,
    }


def _samples(shards: Path) -> list[Sample]:
    """Writes the shard and returns the samples in the order of their numbers."""
    import dflop
    import pyarrow

    drawn = _drawn()
    shards.mkdir(parents=True, exist_ok=True)
    with tarfile.open(shards / "000.tar", "w") as archive:
        for number, media in enumerate(drawn):
            for at, (width, height) in enumerate(media.images):
                _add(archive, f"{number:05}.{at}.png", _image(width, height))
            _add(archive, f"{number:05}.txt", b"ab " * media.words)
    table = pyarrow.table(dflop.CostModel(MODEL, device=DEVICE).annotate(dflop.Dataset(shards)))
    columns = [table[name].to_pylist() for name in ("vision_ns", "llm_ns", "tokens", "encoder_items")]
    samples = []
    for media, (encoder, llm, positions, tiles) in zip(drawn, zip(*columns, strict=True), strict=True):
        expected = shapes.onevision(media)
        if tiles != expected.tiles:
            raise ValueError(f"dflop counts {tiles} tiles, not {expected.tiles}, in {media}")
        samples.append(Sample(encoder, llm, positions, [tiles // expected.media] * expected.media))
    return samples


def _drawn() -> list[shapes.Media]:
    total = sum(shapes.PARTS[name].thousands for name in PARTS)
    drawn = []
    for name in PARTS:
        source = random.Random(f"{shapes.SEED} {name}")
        count = round(SAMPLES * shapes.PARTS[name].thousands / total)
        drawn += [shapes.PARTS[name].draw(source) for _ in range(count)]
    return drawn


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def _image(width: int, height: int) -> bytes:
    """Returns a black PNG image with one bit per pixel."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    size = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    pixels = zlib.compress(bytes(height * (1 + (width + 7) // 8)), 1)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def _fsdp(shards: Path, samples: list[Sample], size: int, steps: int) -> dict[str, float]:
    """Returns the step time of every rule over that of equal work, mean over the steps."""
    seconds: dict[str, list[float]] = {}
    settings = {"schedule": "microbatch"}
    for plan, predicted in _plans(shards, size, steps, RANKS, MICROBATCHES, settings):
        step = [samples[number] for _, number in plan.samples]
        work = sum(one.encoder + one.llm for one in step) / RANKS
        dealt = _dealt(len(step), RANKS, MICROBATCHES)
        ours = [[list(microbatch) for microbatch in rank] for rank in plan.ranks]
        found = {
            "dealt": _lockstep(step, dealt),
            "verl": _lockstep(step, _verl(step)),
            "VeOmni": _lockstep(step, dealt, _squares),
            "OrchMLLM": _lockstep(step, dealt, _linear, moves_samples=True),
            "dflop": _lockstep(step, ours),
            "dflop, media apart": _lockstep(step, ours, _linear),
        }
        _check(found["dflop"], predicted)
        for name, nanoseconds in found.items():
            seconds.setdefault(name, []).append(nanoseconds / work)
    return {name: statistics.mean(values) for name, values in seconds.items()}


def _plans(
    shards: Path, size: int, steps: int, ranks: int, microbatches: int, settings: dict[str, Any]
) -> list[tuple[Any, float]]:
    """Returns dflop's plans for the steps, with the predicted step times in nanoseconds."""
    import dflop

    loader = dflop.BalancedLoader(
        shards,
        model=dflop.CostModel(MODEL, device=DEVICE),
        global_batch_size=size,
        microbatches=microbatches,
        dp_size=ranks,
        seed=SEED,
        steps=steps,
        tokenizer=False,
        plan=dflop.Plan(**settings),
    )
    return [(step.plan, 1e9 * step.makespan_seconds) for step in loader]


def _check(nanoseconds: float, predicted: float) -> None:
    """Checks that a simulation here agrees with dflop's.

    Raises:
        ValueError: they differ by more than 1 %.
    """
    if abs(nanoseconds / predicted - 1) > 0.01:
        raise ValueError(f"a step takes {nanoseconds:.0f} ns here, and {predicted:.0f} ns by dflop")


def _dealt(count: int, ranks: int, microbatches: int) -> Cut:
    """Deals samples round robin over ranks and microbatches."""
    stride = ranks * microbatches
    return [
        [list(range(rank + slot * ranks, count, stride)) for slot in range(microbatches)]
        for rank in range(ranks)
    ]


def _lockstep(
    step: list[Sample],
    cut: Cut,
    media_cost: Callable[[int], int] | None = None,
    *,
    moves_samples: bool = False,
) -> float:
    """Returns the time of a step in which all ranks meet after encoder and LLM of every microbatch.

    - `media_cost`: cost of a medium by tiles, by which media move between the ranks of a microbatch
    - `moves_samples`: whether samples move as well, by LLM positions, before the LLM
    """
    total = 0.0
    for slot in zip(*cut, strict=True):
        encoder = [sum(step[item].encoder for item in rank) for rank in slot]
        llm = [sum(step[item].llm for item in rank) for rank in slot]
        present = [item for rank in slot for item in rank]
        if media_cost is not None:
            media = [(step[item], tiles) for item in present for tiles in step[item].tiles]
            times = [sample.encoder * tiles / sum(sample.tiles) for sample, tiles in media]
            groups = _greedy([media_cost(tiles) for _, tiles in media], len(cut))
            encoder = [sum(times[one] for one in group) for group in groups]
        if moves_samples:
            groups = _greedy([step[item].positions for item in present], len(cut))
            llm = [sum(step[present[one]].llm for one in group) for group in groups]
        total += max(encoder) + max(llm)
    return total


def _linear(tiles: int) -> int:
    return tiles


def _squares(tiles: int) -> int:
    return (PATCHES_PER_TILE * tiles) ** 2


def _greedy(costs: Sequence[float], groups: int, most: int | None = None) -> list[list[int]]:
    """Puts the most expensive item first into the group with the least cost that has less than `most` items."""
    found: list[list[int]] = [[] for _ in range(groups)]
    heap = [(0.0, group) for group in range(groups)]
    for item in sorted(range(len(costs)), key=lambda one: (-costs[one], one)):
        load, group = heapq.heappop(heap)
        found[group].append(item)
        if most is None or len(found[group]) < most:
            heapq.heappush(heap, (load + costs[item], group))
    return found


def _verl(step: list[Sample]) -> Cut:
    """Balances tokens over ranks with equal counts, then over the microbatches of a rank; sorts these."""
    tokens = [one.positions for one in step]
    cut = []
    for rank in _differencing(tokens, RANKS, equal=True):
        groups = _differencing([tokens[item] for item in rank], MICROBATCHES, equal=False)
        own = [[rank[at] for at in group] for group in groups]
        cut.append(sorted(own, key=lambda group: -sum(tokens[item] for item in group)))
    return cut


def _differencing(weights: list[int], groups: int, *, equal: bool) -> list[list[int]]:
    """Partitions by the largest differencing method of Karmarkar and Karp.

    With `equal`, as many items at a time as there are groups form a first state, so that counts are equal.
    """
    order = sorted(range(len(weights)), key=lambda item: (weights[item], item))
    size = groups if equal else 1
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    serial = 0

    def push(state: list[tuple[int, list[int]]]) -> None:
        nonlocal serial
        state.sort(key=lambda one: -one[0])
        heapq.heappush(heap, (state[-1][0] - state[0][0], serial, state))
        serial += 1

    for start in range(0, len(order), size):
        items = order[start : start + size]
        push([(weights[item], [item]) for item in items] + [(0, [])] * (groups - len(items)))
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        pairs = zip(first, reversed(second), strict=True)
        push([(one[0] + other[0], one[1] + other[1]) for one, other in pairs])
    return [items for _, items in heap[0][2]]


def _pairs(shards: Path, samples: list[Sample], ratio: float, size: int, steps: int) -> dict[str, float]:
    """Returns the step time of every rule over that of equal work, mean over the steps.

    An encoder rank takes `ratio` times as long as a GPU, so that encoder and LLM have equal work.
    """
    scaled = [one._replace(encoder=round(one.encoder * ratio)) for one in samples]
    settings = {"stages": [1, 1], "cost": _Scaled(ratio)}
    times: dict[str, list[float]] = {}
    for plan, predicted in _plans(shards, size, steps, PAIRS, PAIR_MICROBATCHES, settings):
        step = [scaled[number] for _, number in plan.samples]
        work = sum(one.llm for one in step) / PAIRS
        dealt = _dealt(len(step), PAIRS, PAIR_MICROBATCHES)
        # The language weight that gives both modules equal costs.
        weight = sum(sum(one.tiles) for one in step) / sum(one.positions for one in step)
        cuts = {
            "dealt": dealt,
            "MegatronMIMO": _reordered(step, dealt, 0),
            "MegatronMIMO, both weights": _reordered(step, dealt, weight),
            "dflop": [[list(microbatch) for microbatch in rank] for rank in plan.ranks],
        }
        found = {
            name: max(one_f_one_b([_stages(step, items) for items in rank]) for rank in cut)
            for name, cut in cuts.items()
        }
        _check(found["dflop"], predicted)
        for name, makespan in found.items():
            times.setdefault(name, []).append(makespan / work)
    return {name: statistics.mean(values) for name, values in times.items()}


class _Scaled:
    """Costs of samples with a slower encoder."""

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio

    def __call__(self, samples: list[dict[str, Any]]) -> list[dict[str, float]]:
        return [
            {"vision": self.ratio * one["seconds"]["vision"], "llm": one["seconds"]["llm"]} for one in samples
        ]


def _reordered(step: list[Sample], dealt: Cut, language_weight: float) -> Cut:
    """Moves samples between the ranks of a microbatch: equal counts, balanced by tiles and LLM positions."""
    cut: Cut = [[] for _ in dealt]
    for slot in zip(*dealt, strict=True):
        present = [item for rank in slot for item in rank]
        costs = [sum(step[item].tiles) + language_weight * step[item].positions for item in present]
        groups = _greedy(costs, len(dealt), most=len(present) // len(dealt))
        for rank, group in zip(cut, groups, strict=True):
            rank.append([present[at] for at in group])
    return cut


def _stages(step: list[Sample], items: list[int]) -> list[float]:
    return [sum(step[item].encoder for item in items), sum(step[item].llm for item in items)]


def one_f_one_b(times: list[list[float]]) -> float:
    """Returns the makespan of 1F1B; a third of a stage's time in a microbatch is the forward pass.

    - `times`: `[microbatches][stages]`
    """
    stages, count = len(times[0]), len(times)
    forward = [[0.0] * count for _ in range(stages)]
    backward = [[0.0] * count for _ in range(stages)]
    orders = [_order(count, stages - stage) for stage in range(stages)]
    free, at = [0.0] * stages, [0] * stages
    while any(at[stage] < 2 * count for stage in range(stages)):
        for stage in range(stages):
            while at[stage] < 2 * count:
                is_forward, microbatch = orders[stage][at[stage]]
                if is_forward:
                    ready = forward[stage - 1][microbatch] if stage else 1e-9
                else:
                    last = stage == stages - 1
                    ready = forward[stage][microbatch] if last else backward[stage + 1][microbatch]
                if not ready:
                    break
                passes = forward if is_forward else backward
                free[stage] = (
                    max(free[stage], ready) + times[microbatch][stage] * (1 if is_forward else 2) / 3
                )
                passes[stage][microbatch] = free[stage]
                at[stage] += 1
    return max(free)


def _order(count: int, ahead: int) -> list[tuple[bool, int]]:
    """Returns forward (true) and backward passes of a stage that starts with `ahead` forward passes."""
    ahead = min(ahead, count)
    order = [(True, microbatch) for microbatch in range(ahead)]
    for microbatch in range(count):
        order.append((False, microbatch))
        if microbatch + ahead < count:
            order.append((True, microbatch + ahead))
    return order
