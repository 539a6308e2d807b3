"""Compares one family of each kind of loss, in a plain loop and in `BalancedTrainer`, with one pass over
global batches.

The whole matrix, every family in every trainer, is `tests/python/trainer_losses.py`.
"""

from __future__ import annotations

import sys
import tempfile
import unittest
from pathlib import Path

import torch

TOOLS = Path(__file__).resolve().parents[4] / "tests/python"
sys.path.append(str(TOOLS))
try:
    import trainer_losses
    import training_loops
except ImportError as missing:
    raise unittest.SkipTest(f"{missing.name} is not installed, or this is no checkout") from missing


class Kinds(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        torch.set_num_threads(1)
        directory = tempfile.TemporaryDirectory()
        cls.addClassCleanup(directory.cleanup)
        cls.scratch = Path(directory.name)
        trainer_losses.write_data(cls.scratch)

    def test_partitions_have_the_losses_and_gradients_of_one_pass(self) -> None:
        for family in trainer_losses.KINDS:
            whole = trainer_losses.loader_of(family, self.scratch, "search", 1)
            wanted = training_loops.reference(trainer_losses.model_of(family), whole)
            for loop in trainer_losses.ALONE:
                found = trainer_losses.run_loop(loop, family, self.scratch)
                for name, one in found.items():
                    with self.subTest(family, loop=loop, microbatches=name):
                        differences = training_loops.differences(one, wanted)
                        self.assertLess(max(differences), trainer_losses.LARGEST_DIFFERENCE)

    def test_a_mean_of_means_would_be_noticed(self) -> None:
        family = "qwen2.5-vl-7b"
        whole = trainer_losses.loader_of(family, self.scratch, "search", 1)
        losses, _ = training_loops.reference(trainer_losses.model_of(family), whole)
        step = next(iter(trainer_losses.loader_of(family, self.scratch, "search", 3))).hold()
        model = trainer_losses.model_of(family)
        with torch.no_grad():
            means = [model(**one, num_items_in_batch=None).loss.item() for one in step.microbatches]
        self.assertGreater(abs(sum(means) / 3 - losses[0]), 20 * trainer_losses.LARGEST_DIFFERENCE)

    def test_models_are_of_the_kinds_that_they_stand_for(self) -> None:
        whole, flags = {}, {}
        for family in trainer_losses.KINDS:
            model = trainer_losses.model_of(family)
            step = next(iter(trainer_losses.loader_of(family, self.scratch, "search", 1))).hold()
            (one,) = step.microbatches
            with torch.no_grad():
                losses = [model(**one, **more).loss.item() for more in ({}, {"num_items_in_batch": 1})]
            whole[family] = losses[1] > 2 * losses[0]
            flags[family] = getattr(model, "accepts_loss_kwargs", None)
        self.assertEqual(whole, {"qwen2-vl-7b": True, "qwen2.5-vl-7b": True, "qwen2-audio-7b": False})
        self.assertEqual(flags, {"qwen2-vl-7b": None, "qwen2.5-vl-7b": False, "qwen2-audio-7b": None})


if __name__ == "__main__":
    unittest.main()
