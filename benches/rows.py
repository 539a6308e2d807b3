#!/usr/bin/env python3
"""Measures how full rows of a fixed length are and what they cost, beside whole samples and beside TRL.

Every round runs, one after the other in one process: dflop with whole samples in rows of a fixed length
(`length_buckets="fixed:N"`, which has no row for a document that is longer), with documents that are split, and with documents that are fitted; TRL's
`pack_dataset` over `datasets` with the strategies `wrapped`, `bfd_split` and `bfd`. Ratios are taken within a round.

    pip install ./bindings/python datasets trl                                   # into VENV
    VENV/bin/python benches/rows.py --out out.txt
    VENV/bin/python benches/rows.py --tokens 4096 --words 200000 --rounds 3

Documents are made from a fixed seed, words of a text tokenizer that is trained on them. A *first pass* counts or tokenizes, packs and
delivers all rows; a *next pass* delivers them again: dflop tokenizes again, `datasets` has stored the tokens. Every
program has one thread. *Fill* is the fraction of tokens that are not padding; *kept* the fraction of all tokens that rows hold.
CPU figures are user + system time of the process, all threads.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rounds import printer, spread

# Median and sigma of the logarithm of document lengths, in words.
CORPORA = {"chats": (110, 0.8), "web pages": (300, 1.1), "papers": (2400, 0.7)}
LAYOUTS = ("packed", "split", "fit")
STRATEGIES = ("wrapped", "bfd_split", "bfd")
RANK_ROWS = 8
WORDS = 20_000


def main() -> None:
    """Runs the rounds and prints fill, speed and ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per row")
    parser.add_argument("--words", type=int, default=1_000_000, help="words per corpus")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="file for the same text")
    args = parser.parse_args()
    # Before the libraries start their threads.
    os.environ |= {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    tell = printer(args.out)
    tell(f"{machine()}\n{args.words:,} words per corpus, rows of {args.tokens} tokens")
    with tempfile.TemporaryDirectory() as directory:
        for name, (median, sigma) in CORPORA.items():
            folder = Path(directory) / name.replace(" ", "-")
            write_corpus(folder, args.words, median, sigma)
            rounds = [one_round(folder, args.tokens) for _ in range(args.rounds)]
            tell("\n".join(report(name, rounds)))


def machine() -> str:
    """Names the processor and the load."""
    models = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")
    ]
    processor = models[0].split(":")[1].strip() if models else "unknown processor"
    return f"{processor}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}"


def write_corpus(folder: Path, total: int, median: int, sigma: float) -> None:
    """Writes shards, a table for `datasets`, and a model with a tokenizer that is trained on the words."""
    import dflop
    import pyarrow
    import pyarrow.parquet
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    rng = random.Random(7)
    letters = "etaoinshrdlucmfwygpbvk"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(WORDS)]
    # Words have about the frequencies of natural text.
    weights = [1 / (place + 3) for place in range(WORDS)]
    lengths: list[int] = []
    while sum(lengths) < total:
        lengths.append(max(3, round(median * math.exp(rng.gauss(0, sigma)))))
    texts = [" ".join(rng.choices(words, weights, k=length)) for length in lengths]
    folder.mkdir()
    with dflop.Writer(folder / "shards", shard_samples=max(len(texts) // 4, 1)) as writer:
        for number, text in enumerate(texts):
            writer.write({"__key__": f"{number:06}", "txt": text})
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "texts.parquet")
    dflop.example.write_model(folder / "model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = json.loads((folder / "model" / "tokenizer_config.json").read_text())
    added = json.loads((folder / "model" / "tokenizer.json").read_text())["added_tokens"]
    trainer = trainers.BpeTrainer(
        vocab_size=8192,
        special_tokens=[token["content"] for token in added],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts[:300], trainer)
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    (folder / "model" / "end").write_text(special["eos_token"])


def one_round(folder: Path, tokens: int) -> dict[str, dict[str, float]]:
    """Measures every way once."""
    return {way: measure(folder, way, tokens) for way in (*LAYOUTS, *STRATEGIES)}


def measure(folder: Path, way: str, tokens: int) -> dict[str, float]:
    """Measures a first and a next pass."""
    deliver = dflop_passes(folder, way, tokens) if way in LAYOUTS else trl_passes(folder, way, tokens)
    figures: dict[str, float] = {}
    for name in ("first", "next"):
        wall, cpu = time.perf_counter(), time.process_time()
        delivered, rows = deliver()
        figures |= {f"{name} s": time.perf_counter() - wall, f"{name} CPU s": time.process_time() - cpu}
    return figures | {"tokens": delivered, "rows": rows, "fill": delivered / (rows * tokens)}


def dflop_passes(folder: Path, layout: str, tokens: int) -> Any:
    """Returns a pass of dflop's loader, whose first call counts the tokens."""
    import dflop

    global_batch, processor = RANK_ROWS, dflop.Processor(layout=f"{layout}:{tokens}")
    if layout == "packed":
        processor = dflop.Processor(length_buckets=f"fixed:{tokens}")
        global_batch = whole_samples(folder, tokens)

    def deliver() -> tuple[int, int]:
        with dflop.BalancedLoader(
            folder / "shards",
            model=folder / "model",
            global_batch_size=global_batch,
            microbatches=RANK_ROWS,
            epochs=1,
            processor=processor,
            read=dflop.Read(workers=1),
            array_type="numpy",
            filter=(lambda samples: fits(samples, tokens)) if layout == "packed" else None,
        ) as loader:
            delivered, rows = 0, 0
            for step in loader:
                for microbatch in step.microbatches:
                    if len(microbatch.samples):
                        assert microbatch["input_ids"].shape == (1, tokens)
                        delivered, rows = delivered + microbatch.tokens, rows + 1
        return delivered, rows

    # Tokens are counted again.
    for index in (folder / "shards").glob(".dflop/*"):
        index.unlink()
    return deliver


def fits(samples: list[dict[str, Any]], tokens: int) -> list[bool]:
    """Returns which samples a row holds as a whole."""
    return [sample["tokens"] <= tokens for sample in samples]


def whole_samples(folder: Path, tokens: int) -> int:
    """Returns the largest global batch, in steps of 4 %, that fits rows of this length in every step."""
    found = folder / f"whole-{tokens}"
    if found.exists():
        return int(found.read_text())
    import dflop
    import pyarrow.parquet
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
    texts = pyarrow.parquet.read_table(folder / "texts.parquet")["text"].to_pylist()
    lengths = [len(found.ids) + 1 for found in tokenizer.encode_batch(texts)]
    fitting = [length for length in lengths if length <= tokens]
    samples = min(RANK_ROWS * tokens / statistics.mean(fitting), len(fitting))
    processor = dflop.Processor(length_buckets=f"fixed:{tokens}")
    while samples > RANK_ROWS:
        settings: dict[str, Any] = {"global_batch_size": int(samples), "microbatches": RANK_ROWS, "epochs": 1}
        try:
            with dflop.BalancedLoader(
                folder / "shards",
                model=folder / "model",
                processor=processor,
                filter=lambda found: fits(found, tokens),
                **settings,
            ) as loader:
                for _ in loader:
                    pass
            break
        except dflop.PlanError:
            samples *= 0.96
    found.write_text(str(max(int(samples), RANK_ROWS)))
    return int(found.read_text())


def trl_passes(folder: Path, strategy: str, tokens: int) -> Any:
    """Returns a pass of `datasets`, whose first call tokenizes and packs."""
    import datasets
    import numpy
    from tokenizers import Tokenizer
    from trl.data_utils import pack_dataset

    datasets.disable_progress_bars()
    tokenizer = Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
    end = tokenizer.token_to_id((folder / "model" / "end").read_text())
    packed: list[datasets.Dataset] = []

    def encode(texts: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"input_ids": [encoding.ids + [end] for encoding in tokenizer.encode_batch(texts["text"])]}

    def deliver() -> tuple[int, int]:
        if not packed:
            with tempfile.TemporaryDirectory() as cache:
                texts = datasets.load_dataset(
                    "parquet", data_files=str(folder / "texts.parquet"), split="train", cache_dir=cache
                )
                encoded = texts.shuffle(seed=7).map(
                    encode, batched=True, remove_columns=["text"], keep_in_memory=True
                )
                # One window for all documents, as large as dflop's.
                window = {"batch_size": 16_384, "keep_in_memory": True}
                packed.append(pack_dataset(encoded, tokens, strategy, window))
        delivered, rows = 0, 0
        for batch in packed[0].with_format("arrow").iter(batch_size=RANK_ROWS):
            column = batch["input_ids"].combine_chunks()
            ends, values = column.offsets.to_numpy(), column.values.to_numpy()
            ids = numpy.zeros((len(column), tokens), dtype=numpy.int64)
            for row, start, end in zip(ids, ends, ends[1:], strict=False):
                row[: end - start] = values[start:end]
            delivered, rows = delivered + int(ends[-1] - ends[0]), rows + len(ids)
        return delivered, rows

    return deliver


def report(name: str, rounds: list[dict[str, dict[str, float]]]) -> list[str]:
    """Returns a table of medians, and the ratios to TRL within the rounds."""

    def median(way: str, figure: Any) -> float:
        return statistics.median(figure(one[way]) for one in rounds)

    everything = rounds[0]["split"]["tokens"]
    lines = ["", f"{name}: {everything:,.0f} tokens, {len(rounds)} rounds, medians", ""]
    heads = ("fill %", "kept %", "rows", "first k/s", "first k/CPU s", "next k/s", "next k/CPU s")
    lines.append(f"{'':18}" + "".join(f"{head:>14}" for head in heads))
    for way in (*LAYOUTS, *STRATEGIES):
        label = f"dflop {way}" if way in LAYOUTS else f"TRL {way}"
        row = [100 * median(way, lambda run: run["fill"])]
        row += [
            100 * median(way, lambda run: run["tokens"]) / everything,
            median(way, lambda run: run["rows"]),
        ]
        for figure in ("first s", "first CPU s", "next s", "next CPU s"):
            row.append(median(way, lambda run, figure=figure: run["tokens"] / run[figure] / 1e3))
        lines.append(f"{label:18}" + "".join(f"{figure:14,.2f}" for figure in row))
    lines += ["", f"{'tokens per CPU second, ratio':42} {'median':>8} {'least':>8} {'largest':>8}"]
    for own, other in (("split", "wrapped"), ("fit", "bfd_split"), ("split", "packed"), ("fit", "packed")):
        for passing in ("first", "next"):

            def speed(run: dict[str, float], passing: str = passing) -> float:
                return run["tokens"] / run[f"{passing} CPU s"]

            least, middle, largest = spread(speed(one[own]) / speed(one[other]) for one in rounds)
            label = f"{passing} pass, {own} / {other}"
            lines.append(f"{label:42} {middle:8.3f} {least:8.3f} {largest:8.3f}")
    return lines


if __name__ == "__main__":
    main()
