"""Tests the torchtitan example: items, steps over ranks, state in distributed checkpoints."""

from __future__ import annotations

import tempfile
import unittest
import warnings

import torch
import torch.distributed.checkpoint as dcp
from example_runs import load

try:
    import transformers
except ImportError as missing:
    raise unittest.SkipTest(f"{missing.name} is not installed") from missing


def steps(dataloader, count: int, microbatches: int = 2) -> list[list[tuple[dict, torch.Tensor]]]:
    iterator = iter(dataloader)
    return [[next(iterator) for _ in range(microbatches)] for _ in range(count)]


class Protocol(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        cls.example = load("torchtitan_style")

    def test_items_are_inputs_and_labels_of_the_next_tokens(self) -> None:
        dataloader = self.example.dataloader()
        self.assertIsInstance(dataloader, dcp.stateful.Stateful)
        ((inputs, labels), *_) = steps(dataloader, 1)[0]
        ids = inputs["input"]
        self.assertEqual((ids.shape, ids.dtype), (labels.shape, torch.int64))
        learned = (labels != -100).nonzero(as_tuple=True)
        self.assertGreater(len(learned[1]), 0)
        for row, place in zip(*learned, strict=True):
            self.assertEqual(labels[row, place], ids[row, place + 1])

    def test_it_is_a_dataloader_of_torchtitan(self) -> None:
        try:
            from torchtitan.components.dataloader import BaseDataLoader
        except ImportError as missing:
            self.skipTest(f"{missing.name} is not installed")
        self.assertIsInstance(self.example.dataloader(), BaseDataLoader)

    def test_the_labels_of_all_ranks_are_those_of_one_rank(self) -> None:
        def valid(dp_world_size: int) -> list[int]:
            ranks = [
                self.example.dataloader(dp_rank=rank, dp_world_size=dp_world_size)
                for rank in range(dp_world_size)
            ]
            counts = [
                [sum(int((labels != -100).sum()) for _, labels in step) for step in steps(one, 3)]
                for one in ranks
            ]
            return [sum(step) for step in zip(*counts, strict=True)]

        self.assertEqual(valid(1), valid(2))

    def test_losses_are_those_of_the_model_itself(self) -> None:
        torch.manual_seed(0)
        config = transformers.AutoConfig.from_pretrained(self.example.DIRECTORY / "model")
        model = transformers.AutoModelForImageTextToText.from_config(config)
        idle = torch.optim.SGD(model.parameters(), lr=0.0)
        loss = sum(self.example.train_step(model, idle, iter(self.example.dataloader())))
        step = next(iter(self.example.dataloader()._microbatches._loader))
        scaled = [model(**mb).loss.item() * mb.loss_scale for mb in step.microbatches]
        self.assertAlmostEqual(loss, sum(scaled), places=4)

    def test_a_distributed_checkpoint_resumes_exactly_on_another_number_of_ranks(self) -> None:
        former = self.example.dataloader()
        iterator = iter(former)
        for _ in range(4):
            next(iterator)
        with tempfile.TemporaryDirectory() as directory:
            dcp.save({"dataloader": former}, checkpoint_id=directory)
            expected = [next(iterator)[0]["input"] for _ in range(4)]
            resumed = self.example.dataloader()
            dcp.load({"dataloader": resumed}, checkpoint_id=directory)
            ranks = [self.example.dataloader(dp_rank=rank, dp_world_size=2) for rank in range(2)]
            for rank in ranks:
                dcp.load({"dataloader": rank}, checkpoint_id=directory)
        later = iter(resumed)
        self.assertTrue(all(torch.equal(next(later)[0]["input"], ids) for ids in expected))
        tokens = sum(
            inputs["input"].numel() for rank in ranks for step in steps(rank, 2) for inputs, _ in step
        )
        self.assertEqual(tokens, sum(ids.numel() for ids in expected))


if __name__ == "__main__":
    unittest.main()
