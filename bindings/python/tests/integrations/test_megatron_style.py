"""Tests the Megatron-LM example: keys, types and shapes, `None`, state, one `next` per microbatch."""

from __future__ import annotations

import io
import unittest

import dflop
import dflop.torch
import torch
from example_runs import load


class Replays:
    """Takes the next microbatch with `next` on the iterator itself, as Megatron does."""

    def __init__(self, iterable) -> None:
        self.iterable = iterable

    def __next__(self):
        return next(self.iterable)


class Protocol(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.example = load("megatron_style")

    def test_a_microbatch_has_what_tensor_parallel_ranks_are_sent(self) -> None:
        batch = next(Replays(self.example.data_iterators()[0]))
        length = (1, self.example.SEQ_LENGTH)
        for name, dtype in (
            ("tokens", torch.int64),
            ("labels", torch.int64),
            ("loss_mask", torch.float32),
            ("position_ids", torch.int64),
        ):
            self.assertEqual((tuple(batch[name].shape), batch[name].dtype), (length, dtype), name)
        starts = batch["cu_seqlens"]
        self.assertEqual(
            (starts.dtype, starts.shape[0], starts[0, 0].item(), starts[0, -1].item()),
            (torch.int32, 1, 0, length[1]),
        )
        self.assertEqual((batch["max_seqlen"].dtype, tuple(batch["max_seqlen"].shape)), (torch.int32, (1,)))
        self.assertEqual(batch["max_seqlen"].item(), starts[0].diff().max().item())
        # Positions start from 0 with every sample, so that they determine the attention mask too.
        self.assertEqual(
            (batch["position_ids"][0] == 0).nonzero().flatten().tolist(), starts[0, :-1].tolist()
        )
        learned = batch["loss_mask"][0].nonzero().flatten()
        self.assertTrue(torch.equal(batch["labels"][0, learned], batch["tokens"][0, learned + 1]))
        self.assertNotIn(True, (batch["labels"] < 0).tolist()[0])

    def test_ranks_that_read_nothing_get_none(self) -> None:
        self.assertEqual(self.example.data_iterators(stage=1, stages=4), [None] * 3)
        self.assertEqual(self.example.data_iterators(tp_rank=1), [None] * 3)
        self.assertNotIn(None, self.example.data_iterators(stage=3, stages=4))

    def test_all_ranks_together_learn_the_same_tokens(self) -> None:
        def tokens(dp_size: int) -> float:
            ranks = [self.example.data_iterators(dp_rank=rank, dp_size=dp_size)[0] for rank in range(dp_size)]
            return sum(
                next(rank)["loss_mask"].sum().item()
                for rank in ranks
                for _ in range(2 * self.example.MICROBATCHES)
            )

        self.assertEqual(tokens(1), tokens(2))

    def test_first_and_last_stage_see_the_same_microbatches(self) -> None:
        first, last = (self.example.data_iterators(stage=stage, stages=2)[0] for stage in (0, 1))
        for _ in range(4):
            self.assertTrue(torch.equal(next(first)["tokens"], next(last)["tokens"]))

    def test_a_saved_state_resumes_even_inside_a_step(self) -> None:
        for taken in (2, 3):
            former = self.example.data_iterators()[0]
            for _ in range(taken):
                next(former)
            file = io.BytesIO()
            torch.save({"dataloader_state_dict": former.save_state()}, file)
            file.seek(0)
            later = self.example.data_iterators()[0]
            later.restore_state(torch.load(file)["dataloader_state_dict"])
            for _ in range(3):
                self.assertTrue(torch.equal(next(former)["tokens"], next(later)["tokens"]))

    def test_a_provider_of_megatron_bridge_builds_the_splits(self) -> None:
        try:
            from megatron.bridge.training.config import DatasetProvider
        except ImportError:
            with self.assertRaisesRegex(ImportError, "pip install megatron-bridge"):
                dflop.torch.megatron_bridge_provider(lambda _: None)
            self.skipTest("megatron-bridge is not installed")
        provider = dflop.torch.megatron_bridge_provider(lambda _: None)
        self.assertIsInstance(provider, DatasetProvider)
        self.assertEqual(provider.build_datasets(None), (None, None, None))

    def test_a_validation_reads_its_split_once_and_begins_again(self) -> None:
        ds = dflop.Dataset(self.example.DIRECTORY / "shards", split="valid")
        valid = self.example.data_iterators()[1]
        count = sum(1 for _ in valid._microbatches)
        keys = [key for mb in valid._microbatches for key in mb.sample_keys]
        self.assertEqual((len(keys), len(set(keys))), (len(ds), len(ds)))
        passes = [[next(valid)["tokens"] for _ in range(count)] for _ in range(2)]
        self.assertTrue(all(map(torch.equal, *passes)))


if __name__ == "__main__":
    unittest.main()
