"""Tests trainers on two real ranks, where samples of one rank only cannot be decoded.

The rank has microbatches without a sample and without an image. Nothing hangs, all losses are numbers, and
gradients are those of one process on the same samples.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import unittest
from pathlib import Path

import dflop
import torch
import torch.distributed as dist
from trainers import WithData, difference, example, gradients_of, torchrun

SETTINGS = {"global_batch_size": 12, "microbatches": 3, "seed": 1, "read": dflop.Read(error_budget=1.0)}
STEPS, RANKS, MOST = 3, 2, 10
PNG = b"\x89PNG\r\n\x1a\n"


def damage(directory: Path, settings: dict) -> list[str]:
    """Overwrites the images of the last rank's first samples, behind their headers; returns their keys.

    The shapes in the headers stay, so that plans do.
    """
    loader = dflop.BalancedLoader(
        directory / "shards", model=directory / "model", dp_rank=RANKS - 1, dp_size=RANKS, steps=2, **settings
    )
    samples = [sample for step in loader for mb in step.microbatches for sample in mb.samples]
    with_images = [sample for sample in samples if "<image>" in json.dumps(sample["json"])]
    for sample in with_images[:MOST]:
        shard = Path(sample.shard.removeprefix("file://"))
        content = bytearray(shard.read_bytes())
        at = content.index(PNG, sample.offset)
        content[at + 41 : at + 57] = b"\xff" * 16
        times = shard.stat()
        shard.write_bytes(content)
        os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    return [sample.key for sample in with_images[:MOST]]


def gradients(directory: Path, name: str) -> dict:
    """Returns losses and whole gradients by step, and the numbers of skipped samples and empty microbatches."""
    trainer, found = example(name), {}
    model = trainer.model_of(directory)
    rank = {"dp_rank": dist.get_rank(), "dp_size": RANKS, "steps": STEPS}
    loader = dflop.BalancedLoader(directory / "shards", model=directory / "model", **rank, **SETTINGS)
    found["empty"] = 0
    for step in loader:
        step = step.hold()
        found["empty"] += sum(not mb.samples for mb in step.microbatches)
        loss = trainer.backward(model, step)
        if name == "fsdp2":
            named = {name: one.grad.full_tensor() for name, one in model.named_parameters()}
            found[step.step] = (loss, named)
        else:
            found[step.step] = (loss, gradients_of(model))
        model.zero_grad()
    found["skipped"] = loader.skipped_samples
    return found


def run_rank(name: str, directory: Path) -> None:
    """Runs a rank of a job and saves what it found."""
    if name in ("ddp", "fsdp2"):
        dist.init_process_group("gloo")
        found = gradients(directory, name)
    else:
        trainer = example(name)
        trainer.MICROBATCHES = SETTINGS["microbatches"] + 1
        rank = int(os.environ["RANK"])
        damaged = damage(trainer.DIRECTORY, {"global_batch_size": 16, "microbatches": trainer.MICROBATCHES})
        with tempfile.TemporaryDirectory() as out:
            if name == "hf_trainer":
                losses = trainer.train(out, max_steps=STEPS, save_strategy="no")
            else:
                losses = trainer.train(f"{directory}/checkpoint", steps=STEPS)
        found = {"losses": losses, "damaged": damaged}
        assert rank == 0 or damaged
    torch.save(found, directory / f"{name}-{os.environ['RANK']}")
    if dist.is_initialized():
        dist.destroy_process_group()


class Damaged(WithData):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.damaged = damage(cls.directory, SETTINGS)
        pytorch = example("pytorch")
        model, cls.wanted, cls.skipped = pytorch.model_of(cls.directory), [], []
        settings = SETTINGS | {"microbatches": 1, "steps": STEPS}
        for step in pytorch.loader_of(cls.directory, **settings):
            cls.wanted.append((pytorch.backward(model, step), gradients_of(model)))
            model.zero_grad()

    def job(self, name: str) -> list[dict]:
        torchrun(__file__, name, self.directory, ranks=RANKS)
        return [torch.load(self.directory / f"{name}-{rank}") for rank in range(RANKS)]

    def check_gradients(self, name: str) -> None:
        found = self.job(name)
        self.assertEqual((found[0]["skipped"], found[0]["empty"]), (0, 0))
        self.assertGreaterEqual(found[1]["skipped"], 5)
        self.assertGreater(found[1]["empty"], 0)
        for rank in range(RANKS):
            for step, (loss, wanted) in enumerate(self.wanted):
                with self.subTest(name, rank=rank, step=step):
                    self.assertTrue(math.isfinite(loss))
                    if found[rank][step][0] is not None:
                        self.assertAlmostEqual(found[rank][step][0], loss, places=5)
                    self.assertLess(difference(found[rank][step][1], wanted), 1e-4)

    def test_ddp_has_the_gradients_of_one_process(self) -> None:
        self.check_gradients("ddp")

    def test_fsdp2_has_the_gradients_of_one_process(self) -> None:
        self.check_gradients("fsdp2")

    def test_losses_of_trainer_and_accelerate_are_numbers(self) -> None:
        for name in ("hf_trainer", "hf_accelerate"):
            with self.subTest(name):
                found = self.job(name)
                self.assertEqual(found[0]["damaged"], found[1]["damaged"])
                self.assertGreater(len(found[0]["damaged"]), 5)
                for losses in (one["losses"] for one in found if one["losses"]):
                    self.assertEqual(len(losses), STEPS)
                    self.assertTrue(all(map(math.isfinite, losses)), losses)


if __name__ == "__main__":
    if "RANK" in os.environ:
        run_rank(sys.argv[1], Path(sys.argv[2]))
    else:
        unittest.main()
