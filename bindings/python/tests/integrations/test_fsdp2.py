"""Tests FSDP2 on two real ranks: gradients of any partition equal those of one process."""

from __future__ import annotations

import os
import sys
import unittest
from pathlib import Path

import dflop
import dflop.torch
import torch
import torch.distributed as dist
from trainers import EXAMPLES, WithData, difference, example, gradients_of, has_images, run, torchrun

# Microbatches of few samples, so that some have no image, on one rank or on both.
SETTINGS = {"global_batch_size": 9, "microbatches": 2, "steps": 5, "seed": 1}
STRATEGIES = ("search", "data-blind")
RANKS = 2


def rank_of_job(directory: Path) -> None:
    """Runs a rank; saves whole gradients of steps by strategy, and its microbatches with images."""
    fsdp2 = example("fsdp2")
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), {}
    model = fsdp2.model_of(directory)
    parts = {name: tuple(one.to_local().shape) for name, one in model.named_parameters()}
    for strategy in STRATEGIES:
        settings = SETTINGS | {
            "dp_rank": rank,
            "dp_size": RANKS,
            "plan": dflop.Plan(strategy=strategy, schedule="microbatch"),
        }
        for step in dflop.BalancedLoader(directory / "shards", model=directory / "model", **settings):
            step = step.hold()
            fsdp2.backward(model, step)
            gradients = {name: one.grad.full_tensor() for name, one in model.named_parameters()}
            found[strategy, step.step] = (gradients, list(map(has_images, step.microbatches)))
            model.zero_grad()
    # The same steps, with images that ranks exchange.
    exchange = example("fsdp2_exchange")
    loader = dflop.BalancedLoader(directory / "shards", model=directory / "model", **settings)
    encoder = dflop.torch.BalancedEncoder(model.model.visual, loader)
    for step in loader:
        exchange.backward(model, step, encoder)
        gradients = {name: one.grad.full_tensor() for name, one in model.named_parameters()}
        media = [loader.media_exchange(step, number) for number in range(len(step.microbatches))]
        moved = [one.rank != one.encoder_rank for of_microbatch in media for one in of_microbatch]
        found["exchanged", step.step] = (gradients, moved)
        model.zero_grad()
    torch.save((parts, found), directory / f"found-{rank}")
    dist.destroy_process_group()


class Ranks(WithData):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        torchrun(__file__, cls.directory, ranks=RANKS)
        cls.parts, cls.found = zip(
            *(torch.load(cls.directory / f"found-{rank}") for rank in range(RANKS)), strict=True
        )
        pytorch = example("pytorch")
        cls.model, cls.wanted = pytorch.model_of(cls.directory), []
        for step in pytorch.loader_of(cls.directory, **SETTINGS | {"microbatches": 1}):
            pytorch.backward(cls.model, step)
            cls.wanted.append(gradients_of(cls.model))
            cls.model.zero_grad()

    def test_gradients_of_all_partitions_are_those_of_one_process(self) -> None:
        for rank, found in enumerate(self.found):
            for strategy in STRATEGIES:
                for step, wanted in enumerate(self.wanted):
                    with self.subTest(rank=rank, strategy=strategy, step=step):
                        gradients, _ = found[strategy, step]
                        self.assertLess(difference(gradients, wanted), 1e-4)

    def test_ranks_that_exchange_images_have_the_gradients_of_one_process(self) -> None:
        for rank, found in enumerate(self.found):
            for step, wanted in enumerate(self.wanted):
                with self.subTest(rank=rank, step=step):
                    self.assertLess(difference(found["exchanged", step][0], wanted), 1e-4)
        self.assertTrue(any(any(self.found[0]["exchanged", step][1]) for step in range(len(self.wanted))))

    def test_microbatches_without_images_ran_with_some_that_have_them(self) -> None:
        """Checks the premise of the test above: microbatches with and without images ran at the same time."""
        beside = [
            set(places)
            for place in self.found[0]
            if place[0] in STRATEGIES
            for places in zip(*(found[place][1] for found in self.found), strict=True)
        ]
        self.assertIn({True, False}, beside)

    def test_every_rank_has_a_part_of_every_parameter(self) -> None:
        for name, one in self.model.named_parameters():
            rows = [parts[name][0] for parts in self.parts]
            self.assertEqual((sum(rows), len(rows)), (one.shape[0], RANKS))
            self.assertLess(max(rows), one.shape[0])

    def test_the_examples_start_their_ranks_themselves(self) -> None:
        found = {}
        for name in ("fsdp2", "fsdp2_exchange"):
            printed = run(EXAMPLES / f"{name}.py")
            found[name] = [float(part.split("norm ")[1].split()[0]) for part in printed.split("rank ")[1:]]
            self.assertEqual((len(found[name]), len(set(found[name]))), (12, 6), printed)
        for norms in zip(*map(sorted, found.values()), strict=True):
            self.assertAlmostEqual(*norms, delta=1e-2)


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank_of_job(Path(sys.argv[1]))
    else:
        unittest.main()
