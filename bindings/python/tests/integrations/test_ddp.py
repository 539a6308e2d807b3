"""Tests DDP on real ranks: gradients of any partition equal those of one process, with and without images."""

from __future__ import annotations

import os
import sys
import unittest
from pathlib import Path

import dflop.torch
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode
from trainers import (
    EXAMPLES,
    WithData,
    difference,
    example,
    gradients_of,
    has_images,
    keys_of,
    run,
    torchrun,
)

# Microbatches of few samples, so that some have no image, on one rank or on all.
SETTINGS = {"global_batch_size": 9, "microbatches": 2, "steps": 5, "seed": 1}
STRATEGIES = ("search", "data-blind")


def rank_of_job(directory: Path) -> None:
    """Runs a rank; saves gradients and losses of steps by strategy, and its microbatches with images."""
    ddp = example("ddp")
    dist.init_process_group("gloo")
    found = {}
    for strategy in STRATEGIES:
        model = ddp.model_of(directory)
        for step in ddp.loader_of(directory, **SETTINGS, plan=dflop.Plan(strategy=strategy)):
            # Microbatches without images come last, because gradients are averaged with the last one.
            step = step.hold()
            step.microbatches.sort(key=has_images, reverse=True)
            loss = dflop.torch.backward(model, step).item()
            images = [None] * dist.get_world_size()
            dist.all_gather_object(images, list(map(has_images, step.microbatches)))
            found[strategy, step.step] = {
                "loss": loss,
                "gradients": gradients_of(model),
                "images": images,
                "digest": step.digest,
            }
            model.zero_grad()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in ddp.loader_of(directory, **SETTINGS, plan=dflop.Plan(strategy=strategy)):
            dflop.torch.backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        found[strategy, "weights"] = {name: one.detach() for name, one in model.module.named_parameters()}
    torch.save(found, directory / f"found-{dist.get_world_size()}-{dist.get_rank()}")
    dist.destroy_process_group()


def cuts(directory: Path, strategy: str, dp_size: int, **settings: object) -> list[list[dflop.Step]]:
    """Returns steps with the shares of all ranks."""
    loaders = [
        dflop.BalancedLoader(
            directory / "shards",
            model=directory / "model",
            dp_rank=dp_rank,
            dp_size=dp_size,
            plan=dflop.Plan(strategy=strategy),
            array_type="torch",
            **SETTINGS | settings,
        )
        for dp_rank in range(dp_size)
    ]
    return [[share.hold() for share in shares] for shares in zip(*loaders, strict=True)]


class Ranks(WithData):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.found = {}
        for ranks in (2, 3):
            torchrun(__file__, cls.directory, ranks=ranks)
            for rank in range(ranks):
                cls.found[ranks, rank] = torch.load(cls.directory / f"found-{ranks}-{rank}")
        # One process, each global batch in one pass, without DDP.
        pytorch = example("pytorch")
        model = pytorch.model_of(cls.directory)
        loader = pytorch.loader_of(cls.directory, **SETTINGS | {"microbatches": 1})
        steps = [step.hold() for step in loader]
        cls.wanted = []
        for step in steps:
            cls.wanted.append((pytorch.backward(model, step), gradients_of(model)))
            model.zero_grad()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in steps:
            pytorch.backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        cls.weights = {name: one.detach() for name, one in model.named_parameters()}

    def test_gradients_of_all_partitions_are_those_of_one_process(self) -> None:
        for (ranks, rank), found in self.found.items():
            for strategy in STRATEGIES:
                for step, (loss, wanted) in enumerate(self.wanted):
                    with self.subTest(ranks=ranks, rank=rank, strategy=strategy, step=step):
                        self.assertAlmostEqual(found[strategy, step]["loss"], loss, places=5)
                        self.assertLess(difference(found[strategy, step]["gradients"], wanted), 1e-4)

    def test_balanced_and_data_blind_runs_end_with_the_weights_of_one_process(self) -> None:
        for place, found in self.found.items():
            for strategy in STRATEGIES:
                with self.subTest(place, strategy=strategy):
                    self.assertLess(difference(found[strategy, "weights"], self.weights), 1e-4)

    def test_partitions_differ_and_ranks_agree_on_them(self) -> None:
        for ranks in (2, 3):
            for step in range(SETTINGS["steps"]):
                balanced, blind = (self.found[ranks, 0][strategy, step]["digest"] for strategy in STRATEGIES)
                self.assertNotEqual(balanced, blind)
                for rank in range(ranks):
                    self.assertEqual(self.found[ranks, rank]["search", step]["digest"], balanced)

    def test_microbatches_without_images_were_among_them(self) -> None:
        """Checks the premise of the tests above: some of the last microbatches have no images."""
        steps = [found for place, found in _of_all(self.found) if place[1] != "weights"]
        self.assertIn({True, False}, [{images[-1] for images in found["images"]} for found in steps])

    def test_a_rank_waits_less_for_the_work_of_another(self) -> None:
        """Compares FLOPs, as PyTorch counts them, of the slowest rank."""
        model = example("pytorch").model_of(self.directory)
        most, predicted = {}, {}
        for strategy in STRATEGIES:
            steps = cuts(self.directory, strategy, 2)
            counted = [[_operations(model, share) for share in shares] for shares in steps]
            most[strategy] = sum(map(max, counted))
            predicted[strategy] = sum(shares[0].makespan_seconds for shares in steps)
        self.assertLess(most["search"], 0.95 * most["data-blind"])
        self.assertLess(predicted["search"], 0.95 * predicted["data-blind"])

    def test_all_partitions_are_of_the_same_samples(self) -> None:
        wanted = keys_of(cuts(self.directory, "search", 1)[step][0] for step in range(SETTINGS["steps"]))
        for strategy in STRATEGIES:
            for dp_size in (2, 3):
                for shares, keys in zip(cuts(self.directory, strategy, dp_size), wanted, strict=True):
                    self.assertEqual(set().union(*keys_of(shares)), keys)

    def test_the_example_starts_its_ranks_itself(self) -> None:
        lines = run(EXAMPLES / "ddp.py").split("rank ")[1:]
        losses = {}
        for line in lines:
            place, loss = line.split(": loss ")
            rank, step = place.split(", step ")
            losses.setdefault(int(step), {})[int(rank)] = loss.split(",")[0]
        self.assertEqual(sorted(losses), list(range(6)))
        for of_ranks in losses.values():
            self.assertEqual((sorted(of_ranks), len(set(of_ranks.values()))), ([0, 1], 1))
        self.assertLess(float(losses[5][0]), float(losses[0][0]) - 0.3)


def _of_all(found: dict) -> list[tuple]:
    return [item for of_rank in found.values() for item in of_rank.items()]


def _operations(model: torch.nn.Module, share: dflop.Step) -> int:
    with FlopCounterMode(display=False) as counter:
        for microbatch in share.microbatches:
            model(**microbatch, num_items_in_batch=1).loss.backward()
    return counter.get_total_flops()


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank_of_job(Path(sys.argv[1]))
    else:
        unittest.main()
