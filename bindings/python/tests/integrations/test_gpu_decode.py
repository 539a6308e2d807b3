"""Tests images that are decoded after the loader: bytes as stored, pixels, ranks that decode equal shares."""

from __future__ import annotations

import io
import tarfile
import tempfile
import unittest
from pathlib import Path

import dflop
import numpy as np
import torch
from PIL import Image
from trainers import example

try:
    gpu_decode = example("gpu_decode")
except ImportError:
    raise unittest.SkipTest("torchcodec is not installed") from None


class HandedOver(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        directory = tempfile.TemporaryDirectory()
        cls.addClassCleanup(directory.cleanup)
        cls.shards = Path(directory.name)
        gpu_decode.write_shards(cls.shards)

    def pixels(self, rank: int, strategy: str) -> list[int]:
        """Returns the numbers of pixels that a rank decodes, by step."""
        plan = dflop.Plan(strategy=strategy, schedule="step")
        loader = gpu_decode.loader_of(self.shards, dp_rank=rank, dp_size=2, plan=plan)
        area = lambda encoded: int(np.prod(Image.open(io.BytesIO(encoded.numpy().tobytes())).size))
        return [sum(area(one) for mb in step.microbatches for one in mb["encoded"]) for step in loader]

    def test_bytes_are_delivered_as_stored_with_their_labels(self) -> None:
        stored = {}
        for shard in self.shards.glob("*.tar"):
            with tarfile.open(shard) as tar:
                stored |= {member.name: tar.extractfile(member).read() for member in tar}
        step = next(iter(gpu_decode.loader_of(self.shards, steps=1)))
        for microbatch in step.microbatches:
            images = gpu_decode.images_of(microbatch)
            self.assertEqual(images.shape, (len(microbatch.sample_keys), 3, 64, 64))
            delivered = microbatch.sample_keys, microbatch["encoded"], microbatch["labels"]
            for key, encoded, label in zip(*delivered, strict=True):
                self.assertEqual(encoded.numpy().tobytes(), stored[f"{key}.jpg"])
                self.assertEqual(label, int(stored[f"{key}.cls"]))

    def test_ranks_decode_about_the_same_number_of_pixels(self) -> None:
        blind, balanced = (
            [self.pixels(rank, strategy) for rank in (0, 1)] for strategy in ("data-blind", "search")
        )
        self.assertEqual(np.sum(blind, axis=0).tolist(), np.sum(balanced, axis=0).tolist())
        spread = lambda pixels: np.abs(np.subtract(*pixels)).sum()
        self.assertLess(spread(balanced) * 4, spread(blind))

    def test_the_losses_of_two_ranks_sum_to_that_of_one(self) -> None:
        def loss(**settings: int) -> float:
            step = next(iter(gpu_decode.loader_of(self.shards, steps=1, **settings)))
            score = lambda mb: gpu_decode.images_of(mb).mean((2, 3)).sum(1) * (mb["labels"] + 1)
            return sum((score(mb).sum() * mb.loss_scale_sum).item() for mb in step.microbatches)

        ranks = [loss(dp_rank=rank, dp_size=2) for rank in (0, 1)]
        torch.testing.assert_close(sum(ranks) / 2, loss())


if __name__ == "__main__":
    unittest.main()
