"""Compares losses and gradients of microbatches, balanced and data-blind, with those of whole global batches.

    python tests/python/trainer_losses.py                      # the whole matrix
    python tests/python/trainer_losses.py plain qwen2-audio-7b # one loop, one family

Every family runs in a plain loop and in `BalancedTrainer`; one family of each kind of loss (`forward` takes
`num_items_in_batch`, `accepts_loss_kwargs = False`, a `CrossEntropyLoss` of its own) runs in all loops, on two
ranks. Needs the package dflop, torch, transformers, accelerate, lightning, safetensors and Pillow.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import wave
from pathlib import Path

import dflop
import model_runs
import model_runs_omni
import numpy as np
import torch
import training_loops
from PIL import Image
from training_loops import LOOPS, differences

KINDS = {
    "qwen2-vl-7b": "takes num_items_in_batch",
    "qwen2.5-vl-7b": "accepts_loss_kwargs=False",
    "qwen2-audio-7b": "own loss",
}
OMNI = model_runs_omni.FAMILY
FAMILIES = model_runs.FAMILIES | {OMNI: model_runs_omni.thinker}
ALONE, RANKS, LARGEST_DIFFERENCE = ("plain", "trainer"), 2, 1e-5
WORDS = "a red green kite crow boat over the sea sky".split()
STRATEGIES = {"balanced": "search", "data-blind": "data-blind"}


def write_sample(folder, sample):
    """Writes a sample with images and one with clips, of one conversation with answers of any length."""
    random = np.random.default_rng(sample)
    media = (1, 1, 2, 0)[sample % 4]
    turns = [{"from": "human", "value": "<%s>\n" * media + "What is this?"}]
    for answer in random.integers(1, 40, 1 + sample % 3):
        turns += [
            {"from": "gpt", "value": " ".join(random.choice(WORDS, answer))},
            {"from": "human", "value": "And then?"},
        ]
    for number in range(media):
        # Few tiles for the models that cut images into tiles by their aspect ratio.
        side = int(random.integers(2, 9)) * 28
        pixels = random.integers(0, 255, (side, side * (1 + number), 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"image-{sample}.{number}.png")
        with wave.open(str(folder / f"clip-{sample}.{number}.wav"), "wb") as file:
            file.setparams((1, 2, 16000, 0, "NONE", ""))
            file.writeframes(
                (random.normal(0, 3000, int(16000 * random.uniform(0.4, 3)))).astype("<i2").tobytes()
            )
    for kind in ("image", "clip"):
        marks = [kind.replace("clip", "audio")] * media
        text = json.dumps({"conversations": turns[:-1]})
        (folder / f"{kind}-{sample}.json").write_text(text % tuple(marks) if media else text)


def write_data(scratch):
    """Writes shards of 8 samples with images, with clips and, for omni models, of both."""
    (scratch / "samples").mkdir()
    for sample in range(8):
        write_sample(scratch / "samples", sample)
    for name, taken in {"image": "image-*", "clip": "clip-*", "omni": "*-[0-3].*"}.items():
        with tarfile.open(scratch / f"{name}.tar", "w") as shard:
            for path in sorted((scratch / "samples").glob(taken)):
                shard.add(path, path.name)


def tokenizer_of(family, scratch):
    """Returns the directory of a family's tokenizer."""
    if family != OMNI:
        return model_runs.tokenizer_of(family, scratch)
    folder = scratch / "tokenizer-omni"
    if not folder.exists():
        shutil.copytree(model_runs.TOKENIZERS / "chatml", folder)
        text = (folder / "tokenizer.json").read_text()
        for old, new in model_runs_omni.RENAMED.items():
            text = text.replace(f"<|{old}|>", f"<|{new}|>")
        (folder / "tokenizer.json").write_text(text)
    return folder


def model_of(family):
    torch.manual_seed(0)
    return FAMILIES[family]().train()


def loader_of(family, scratch, strategy, microbatches, rank=0, ranks=1):
    """Returns a loader of two epochs of 8 samples, each of which is a step."""
    shards = "omni" if family == OMNI else "clip" if "audio" in family else "image"
    return dflop.BalancedLoader(
        scratch / f"{shards}.tar",
        model=model_runs.model_of(family, scratch),
        tokenizer=str(tokenizer_of(family, scratch)),
        global_batch_size=8,
        microbatches=microbatches,
        dp_rank=rank,
        dp_size=ranks,
        epochs=2,
        seed=3,
        array_type="torch",
        plan=dflop.Plan(strategy=strategy),
    )


def run_loop(loop, family, scratch, ranks=1, rank=0):
    """Returns what a loop found, by strategy."""
    microbatches = 3 if ranks == 1 else 2
    loaders = {
        name: loader_of(family, scratch, one, microbatches, rank, ranks) for name, one in STRATEGIES.items()
    }
    return {name: LOOPS[loop](model_of(family), loader) for name, loader in loaders.items()}


def run_ranks(loop, family, scratch):
    """The same on two ranks, which are processes of their own."""
    out = scratch / f"{loop}-{family}.pt"
    job = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={RANKS}",
        __file__,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
    subprocess.run(
        [*job, "--rank", loop, family, scratch, out], check=True, env=environment, stdout=subprocess.DEVNULL
    )
    return torch.load(out)


def rank_of_job(loop, family, scratch, out):
    torch.set_num_threads(1)
    if loop in ("plain", "ddp", "fsdp2"):
        torch.distributed.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    found = run_loop(loop, family, Path(scratch), RANKS, rank)
    if rank == 0:
        torch.save(found, out)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def jobs(loops, families):
    """Yields loop, family and number of ranks."""
    for family in families:
        for loop in loops:
            if loop in ALONE:
                yield loop, family, 1
            if family in KINDS and loop != "plain":
                yield loop, family, RANKS


def main():
    loops = [name for name in LOOPS if name in sys.argv[1:]] or list(LOOPS)
    families = [name for name in FAMILIES if name in sys.argv[1:]] or list(FAMILIES)
    torch.set_num_threads(1)
    faults, wanted = [], {}
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        write_data(scratch)
        for loop, family, ranks in jobs(loops, families):
            began = time.monotonic()
            if family not in wanted:
                wanted = {
                    family: training_loops.reference(
                        model_of(family), loader_of(family, scratch, "search", 1)
                    )
                }
            found = run_loop(loop, family, scratch) if ranks == 1 else run_ranks(loop, family, scratch)
            for name, one in found.items():
                of_loss, of_gradient = differences(one, wanted[family])
                is_good = max(of_loss, of_gradient) < LARGEST_DIFFERENCE
                faults += [] if is_good else [(loop, family, ranks, name)]
                print(
                    f"{family:24} {loop:10} {ranks} rank{'s' * (ranks > 1):1} {name:10} "
                    f"loss {of_loss:.1e} gradient {of_gradient:.1e}"
                    f"{'' if is_good else '  TOO LARGE'}  ({time.monotonic() - began:.0f} s)",
                    flush=True,
                )
    assert not faults, faults


if __name__ == "__main__":
    rank_of_job(*sys.argv[2:]) if sys.argv[1:2] == ["--rank"] else main()
