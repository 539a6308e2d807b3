#!/usr/bin/env python3
"""Measures inputs by a processor of transformers in dflop's loader, beside dflop's own processor and a torch `DataLoader`.

Every round runs, one after the other, for each type: decoded samples without a processor; dflop's own processor;
`dflop.hugging_face.Inputs` on one thread, on two threads and in two processes; a `DataLoader` with two workers whose
`collate_fn` is the same `Inputs`, on photos from Pillow. Ratios are taken within a round.

    pip install ./bindings/python torch torchvision transformers pillow        # into VENV
    OMP_NUM_THREADS=1 VENV/bin/python benches/inputs.py --out out.txt           # all types
    OMP_NUM_THREADS=1 VENV/bin/python benches/inputs.py qwen2_vl llava --variants own DataLoader --rounds 3

Checkpoints have the class defaults of their type, and the small tokenizer of the tests: weights are not needed. Photos are made
from a fixed seed. CPU figures are user + system time of all processes of a loader, without imports and a first call, in
milliseconds per photo. `--dflop` names a command that runs dflop's own processor in place of the package.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from rounds import cpu_seconds, photo, printer, run_alone, spread, versions

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "python"))

TYPES = (
    "qwen2_vl",
    "qwen3_vl",
    "internvl",
    "llava_onevision",
    "gemma3",
    "glm4v",
    "idefics3",
    "smolvlm",
    "llava",
    "llava_next",
    "mistral3",
)
VARIANTS = ("decoded", "own", "1 thread", "2 threads", "2 processes", "DataLoader")
WORKERS, MICROBATCH, MICROBATCHES = 2, 8, 4


def main() -> None:
    """Runs the rounds and prints the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("types", nargs="*", help=f"model types, of {', '.join(TYPES)}; all by default")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--photos", type=int, default=192)
    parser.add_argument(
        "--dflop", help="command whose `batches` runs dflop's own processor, if it is not the package"
    )
    parser.add_argument("--out", type=Path, help="file for a copy of the output")
    parser.add_argument("--run", nargs=3, metavar=("VARIANT", "CHECKPOINT", "SHARDS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        print(json.dumps(measured(args.run[0], Path(args.run[1]), Path(args.run[2]))))
        return
    tell = printer(args.out)
    tell(versions("dflop", "transformers", "torch", "torchvision", "PIL"))
    with tempfile.TemporaryDirectory() as scratch:
        shards = Path(scratch, "shards")
        write_photos(shards, args.photos)
        tell(f"{args.photos} photos, {sum(file.stat().st_size for file in shards.iterdir()) / 1e6:.1f} MB")
        for model_type in args.types or TYPES:
            checkpoint = Path(scratch, model_type)
            make_checkpoint(model_type, checkpoint)
            rounds = [one_round(checkpoint, shards, args, tell) for _ in range(args.rounds)]
            report(model_type, rounds, tell)


def write_photos(directory: Path, count: int) -> None:
    """Writes shards of photos with a conversation each, and their index."""
    import dflop
    import numpy as np

    directory.mkdir()
    random = np.random.default_rng(11)
    with tarfile.open(directory / "0.tar", "w") as tar:
        for number in range(count):
            turns = [
                {"from": "human", "value": "<image>\nWhat is this?"},
                {"from": "gpt", "value": "A red kite over the sea. " * 8},
            ]
            document = json.dumps({"conversations": turns}).encode()
            for extension, content in (("jpg", photo(random)), ("json", document)):
                member = tarfile.TarInfo(f"{number:05}.{extension}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    len(dflop.Dataset(directory))


def make_checkpoint(model_type: str, directory: Path) -> None:
    """Writes the files of a checkpoint without weights: configuration, processor, tokenizer, chat template."""
    from describe_models import make_checkpoint as of_class
    from train_types import template
    from transformers import AutoProcessor

    directory.mkdir()
    opened = of_class(model_type, directory)
    settings = (directory / "preprocessor_config.json").read_bytes()
    opened.processor.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_bytes(settings)
    # Names of placeholders may be lost with the tokenizer: the template needs those that are read back.
    processor = AutoProcessor.from_pretrained(directory, local_files_only=True)
    (directory / "chat_template.jinja").write_text(template(processor, "image"))


def one_round(checkpoint: Path, shards: Path, args: Any, tell: Any) -> dict[str, dict[str, float]]:
    """Measures the variants once, each in a process of its own."""
    model_type, found = checkpoint.name, {}
    for variant in args.variants:
        environment = {} if args.dflop is None else {"DFLOP_COMMAND": args.dflop}
        done = run_alone(__file__, "--run", variant, checkpoint, shards, **environment)
        if done.returncode:
            tell(f"{model_type:16} {variant:12} failed: {done.stderr.strip().splitlines()[-1]}")
            continue
        found[variant] = json.loads(done.stdout.splitlines()[-1])
        tell(
            f"{model_type:16} {variant:12} {found[variant]['photos_per_second']:8.1f} photos/s "
            f"{found[variant]['cpu_ms']:8.2f} ms CPU  load {os.getloadavg()[0]:.1f}"
        )
    return found


def report(model_type: str, rounds: list[dict[str, dict[str, float]]], tell: Any) -> None:
    """Prints the ratios within rounds: least, median, largest."""
    for name, unit in (("cpu_ms", "CPU"), ("photos_per_second", "photos per second")):
        for variant, base in [(one, "own") for one in VARIANTS] + [
            (one, "DataLoader") for one in VARIANTS[1:5]
        ]:
            ratios = [
                one[variant][name] / one[base][name] for one in rounds if variant in one and base in one
            ]
            if ratios and variant != base:
                low, middle, high = spread(ratios)
                tell(f"{model_type:16} {unit}: {variant} / {base} {low:.3f} {middle:.3f} {high:.3f}")


def measured(variant: str, checkpoint: Path, shards: Path) -> dict[str, float]:
    """Runs a variant over all photos and returns its speed and CPU time."""
    import dflop
    import torch
    from transformers import AutoProcessor

    torch.set_num_threads(1)
    inputs = dflop.hugging_face.Inputs(AutoProcessor.from_pretrained(checkpoint, local_files_only=True))
    photos = Photos(shards)
    inputs([photos[0]])
    if variant == "DataLoader":
        loader = torch.utils.data.DataLoader(
            photos, batch_size=MICROBATCH, num_workers=WORKERS, collate_fn=inputs, prefetch_factor=2
        )
        return timed(lambda: sum(len(batch["input_ids"]) for batch in loader), len(photos))
    if variant == "2 processes":
        # Processes are forked before dflop starts threads.
        with ProcessPoolExecutor(WORKERS, multiprocessing.get_context("fork")) as pool:
            list(pool.map(abs, range(WORKERS)))
            made = lambda samples: pool.submit(inputs, plain(samples)).result()
            run = lambda: delivered(checkpoint, shards, dflop.CustomProcessor(batch=made), WORKERS)

            def and_ends() -> int:
                count = run()
                pool.shutdown()
                return count

            return timed(and_ends, len(photos))
    processor = None
    threads = 1
    if variant == "own" and "DFLOP_COMMAND" in os.environ:
        return prepared(os.environ["DFLOP_COMMAND"], checkpoint, shards, len(photos))
    if variant == "own":
        processor = dflop.Processor(layout="padded")
    elif variant != "decoded":
        threads = int(variant.split()[0])
        processor = dflop.CustomProcessor(batch=inputs)
    return timed(lambda: delivered(checkpoint, shards, processor, threads), len(photos))


def prepared(command: str, checkpoint: Path, shards: Path, photos: int) -> dict[str, float]:
    """Measures the command that prepares samples: a long run less a short one, which both start the same way."""
    batch = MICROBATCH * MICROBATCHES
    arguments = ["batches", shards, "--model", checkpoint, "--tokenizer", checkpoint]
    arguments += ["--dp-size", 1, "--rank", 0]
    arguments += ["--global-batch-size", batch, "--microbatches", MICROBATCHES, "--epochs", 8, "--json"]
    arguments += ["--set", f"read.workers={WORKERS}", "--set", "processor.layout=padded"]
    used = []
    for epochs in (1, 4):
        before, began = cpu_seconds(), time.perf_counter()
        steps = ["--steps", str(epochs * photos // batch)]
        subprocess.run([command, *map(str, arguments), *steps], check=True, capture_output=True)
        used.append((time.perf_counter() - began, cpu_seconds() - before))
    (short, short_cpu), (long, long_cpu) = used
    more = (4 * photos // batch - photos // batch) * batch
    return {"photos_per_second": more / (long - short), "cpu_ms": 1e3 * (long_cpu - short_cpu) / more}


def delivered(checkpoint: Path, shards: Path, processor: Any, threads: int) -> int:
    """Returns the number of samples that a balanced loader delivers in an epoch."""
    import dflop

    own = isinstance(processor, dflop.Processor)
    loader = dflop.BalancedLoader(
        shards,
        model=str(checkpoint),
        global_batch_size=MICROBATCH * MICROBATCHES,
        microbatches=MICROBATCHES,
        epochs=1,
        tokenizer=str(checkpoint) if own else False,
        processor=processor,
        read=dflop.Read(workers=WORKERS, python_threads=threads, error_budget=0.0),
    )
    return sum(len(microbatch.samples) for step in loader for microbatch in step.microbatches)


def plain(samples: list[Any]) -> list[dict[str, Any]]:
    """Returns samples that another process can be sent."""
    import numpy as np

    return [
        {name: np.asarray(value) if hasattr(value, "ndim") else value for name, value in sample.items()}
        for sample in samples
    ]


def timed(run: Any, photos: int) -> dict[str, float]:
    """Runs a loader to its end; the CPU time of child processes counts when they have ended."""
    before, began = cpu_seconds(), time.perf_counter()
    count = run()
    seconds = time.perf_counter() - began
    if count != photos:
        raise SystemExit(f"{count} of {photos} photos were delivered")
    return {"photos_per_second": photos / seconds, "cpu_ms": 1e3 * (cpu_seconds() - before) / photos}


class Photos:
    """Samples of shards for a `DataLoader`, decoded by Pillow."""

    def __init__(self, directory: Path) -> None:
        self._shard = next(directory.glob("*.tar"))
        with tarfile.open(self._shard) as tar:
            members = [(one.name.split("."), one.offset_data, one.size) for one in tar]
        self._entries: dict[str, dict[str, tuple[int, int]]] = {}
        for (key, extension), offset, size in members:
            self._entries.setdefault(key, {})[extension] = (offset, size)
        self._keys = sorted(self._entries)

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, at: int) -> dict[str, Any]:
        import numpy as np
        from PIL import Image

        sample: dict[str, Any] = {}
        with self._shard.open("rb") as file:
            for extension, (offset, size) in self._entries[self._keys[at]].items():
                file.seek(offset)
                content = file.read(size)
                is_photo = extension == "jpg"
                sample[extension] = (
                    np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
                    if is_photo
                    else json.loads(content)
                )
        return sample


if __name__ == "__main__":
    main()
