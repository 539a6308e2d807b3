"""Tests the Lightning example: gradients by token, exact resumption within and across epochs."""

from __future__ import annotations

import logging
import tempfile
import unittest
import warnings

import dflop
from example_runs import load

try:
    import lightning  # noqa: F401
    import torch
    import transformers
except ImportError as missing:
    raise unittest.SkipTest(f"{missing.name} is not installed") from missing


class Fit(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        torch.set_num_threads(1)
        transformers.logging.set_verbosity_error()
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
        cls.example = load("lightning_loop")

    def by_hand(self, steps: int) -> tuple[list[float], list[list[str]]]:
        """Compares losses and samples with a loop without Lightning."""
        directory = self.example.DIRECTORY
        ds = dflop.Dataset(directory / "shards", tokenizer=directory / "model", model=directory / "model")
        torch.manual_seed(0)
        module = self.example.Module()
        optimizer = module.configure_optimizers()
        loader = dflop.BalancedLoader(
            ds, model=directory / "model", global_batch_size=32, microbatches=2, steps=steps
        )
        losses, keys = [], []
        for step in loader:
            for mb in step.microbatches:
                loss = module.model(**mb).loss * mb.loss_scale
                loss.backward()
                losses.append(loss.item())
                keys.append(mb.sample_keys)
            optimizer.step()
            optimizer.zero_grad()
        return losses, keys

    def test_it_trains_as_a_token_true_loop_does_and_resumes_exactly(self) -> None:
        losses, keys = self.by_hand(5)
        with tempfile.TemporaryDirectory() as directory:
            whole = self.example.train(directory, steps=5)
            self.assertEqual(whole.keys, keys)
            for loss, other in zip(whole.losses, losses, strict=True):
                self.assertAlmostEqual(loss, other, delta=1e-4)
            # Three steps are an epoch: one checkpoint is inside the first, the other inside the second.
            for saved in (2, 4):
                resumed = self.example.train(directory, steps=5, resume=f"{directory}/step={saved}.ckpt")
                self.assertEqual(resumed.keys, whole.keys[2 * saved :])
                self.assertEqual(resumed.losses, whole.losses[2 * saved :])


if __name__ == "__main__":
    unittest.main()
