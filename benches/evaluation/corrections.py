"""Replays runs in which some input shapes are slower than predicted, with corrections from measured times.

The times are not measured: a sample takes its predicted time, samples in a length band a stated factor more,
and each microbatch has 2 % noise. Needs the Python package `dflop` and `pyarrow`.
"""

import io
import random
import statistics
import tarfile
import time
from pathlib import Path
from typing import Any

MODEL = "omni-7b"
SAMPLES, SEED = 4_000, 3
RANKS, MICROBATCHES, GLOBAL_BATCH = 8, 4, 128
INTERVAL = 8
NOISE = 0.02
# Share of samples that are anomalous, and the additional time of an anomalous sample.
SHARES = [0.01, 0.03, 0.05]
ADDED = [0.25, 0.5, 1.0]
# Words of an anomalous text; other texts are log-normal around the median and outside the band.
BAND, MEDIAN_WORDS, SIGMA = (1_900, 2_100), 330, 1.0
WORDS = (12, 6_000)


def run(directory: Path, steps: int) -> dict[str, Any]:
    """Runs all pairs of share and additional time; without anomalies a single run."""
    cases = [(0.0, 0.0), *((share, added) for share in SHARES for added in ADDED)]
    return {
        "model": MODEL,
        "ranks": RANKS,
        "microbatches": MICROBATCHES,
        "global_batch": GLOBAL_BATCH,
        "interval_steps": INTERVAL,
        "noise": NOISE,
        "steps": steps,
        "rows": [
            _replay(directory / f"texts-{share}-{added}", share, added, steps) for share, added in cases
        ],
    }


def _dataset(shards: Path, share: float) -> set[str]:
    """Writes a shard with texts, `share` of them in the band; returns the keys of these."""
    shards.mkdir(parents=True, exist_ok=True)
    source = random.Random(SEED)
    slow = set()
    with tarfile.open(shards / "000.tar", "w") as archive:
        for number in range(SAMPLES):
            is_slow = source.random() < share
            words = source.randint(*BAND) if is_slow else _usual_words(source)
            payload = " ".join(["ab"] * words).encode()
            entry = tarfile.TarInfo(f"{number:05}.txt")
            entry.size = len(payload)
            archive.addfile(entry, io.BytesIO(payload))
            if is_slow:
                slow.add(f"{number:05}")
    return slow


def _usual_words(source: random.Random) -> int:
    while True:
        words = round(source.lognormvariate(0, SIGMA) * MEDIAN_WORDS)
        if WORDS[0] <= words <= WORDS[1] and not BAND[0] <= words <= BAND[1]:
            return words


def _true_seconds(shards: Path, slow: set[str], added: float) -> list[float]:
    """Returns the LLM time of every sample, by its number in the dataset."""
    import dflop
    import pyarrow

    table = pyarrow.table(dflop.CostModel(MODEL).annotate(dflop.Dataset(shards)))
    rows = zip(table["key"].to_pylist(), table["llm_ns"].to_pylist(), strict=True)
    return [ns / 1e9 * (1 + added * (key in slow)) for key, ns in rows]


def _replay(shards: Path, share: float, added: float, steps: int) -> dict[str, Any]:
    """Runs the steps with and without corrections; imbalances are means over the last third."""
    import dflop

    slow = _dataset(shards, share)
    seconds = _true_seconds(shards, slow, added)
    settings = {
        "model": MODEL,
        "tokenizer": False,
        "global_batch_size": GLOBAL_BATCH,
        "microbatches": MICROBATCHES,
        "dp_rank": 0,
        "dp_size": RANKS,
        "seed": SEED,
        "steps": steps,
    }
    plain = dflop.BalancedLoader(shards, **settings)
    corrected = dflop.BalancedLoader(shards, **settings)
    noise = random.Random(SEED + 1)
    without, with_corrections, reporting, modes = [], [], [], []
    for before, after in zip(plain, corrected, strict=True):
        without.append(_imbalance(_rank_seconds(before.plan, seconds)))
        truth = _rank_seconds(after.plan, seconds)
        with_corrections.append(_imbalance(truth))
        measured = [[one * (1 + NOISE * noise.gauss(0, 1)) for one in rank] for rank in truth]
        start = time.perf_counter()
        report = corrected.report_stage_seconds(after, {"llm": measured}, interval=INTERVAL)
        reporting.append(time.perf_counter() - start)
        if report is not None:
            modes.append(report["next_mode"])
    last = slice(2 * steps // 3, None)
    return {
        "share": share,
        "added": added,
        "anomalous_samples": len(slow),
        "without": statistics.mean(without[last]),
        "with": statistics.mean(with_corrections[last]),
        "report_seconds": statistics.median(reporting),
        "modes": modes,
    }


def _imbalance(ranks: list[list[float]]) -> float:
    """Returns the time of the slowest rank over the mean."""
    sums = [sum(rank) for rank in ranks]
    return max(sums) / statistics.mean(sums)


def _rank_seconds(plan: Any, seconds: list[float]) -> list[list[float]]:
    """Returns the time of every microbatch, by rank."""
    return [
        [sum(seconds[plan.samples[item][1]] for item in microbatch) for microbatch in rank]
        for rank in plan.ranks
    ]
