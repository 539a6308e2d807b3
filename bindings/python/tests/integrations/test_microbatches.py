"""Tests `Microbatches`: epochs, exact resume after any microbatch, moving to a device."""

from __future__ import annotations

import itertools
import json
import pickle
import unittest
import warnings

import dflop.torch
import torch
from torch.utils.data import DataLoader


class OneByOne(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        directory = dflop.example.directory(samples=40)
        cls.model = directory / "model"
        cls.ds = dflop.Dataset(directory / "shards")

    def microbatches(self) -> dflop.torch.Microbatches:
        settings = {"global_batch_size": 16, "microbatches": 2, "array_type": "torch"}
        return dflop.torch.Microbatches(dflop.BalancedLoader(self.ds, model=self.model, **settings), 2)

    def keys(self, batches, count: int | None = None) -> list[list[str]]:
        return [mb.sample_keys for mb in itertools.islice(batches, count)]

    def test_an_iterator_is_an_epoch_and_the_next_goes_on(self) -> None:
        loader = dflop.BalancedLoader(
            self.ds, model=self.model, global_batch_size=16, microbatches=2, steps=6
        )
        expected = [mb.sample_keys for step in loader for mb in step.microbatches]
        one = self.microbatches()
        self.assertEqual(len(one), 6)
        batches = DataLoader(one, batch_size=None, collate_fn=dflop.torch.keep)
        self.assertEqual(self.keys(batches) + self.keys(batches), expected)

    def test_it_resumes_after_any_microbatch(self) -> None:
        whole = self.microbatches()
        expected = self.keys(whole) + self.keys(whole)
        for stop in range(8):
            with self.subTest(stop):
                former = self.microbatches()
                seen = self.keys(itertools.chain(former, former), stop)
                state = json.loads(json.dumps(former.state_dict()))
                later = self.microbatches()
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    later.load_state_dict(state)
                # In the middle of a step a state is not whole without gradients.
                self.assertEqual(len(caught), stop % 2)
                rest = self.keys(itertools.chain(later, later), 8 - stop)
                self.assertEqual(seen + rest, expected[:8])

    def test_an_iterator_that_is_left_is_taken_up_by_the_next(self) -> None:
        expected = self.keys(self.microbatches())
        left = self.microbatches()
        self.assertEqual(self.keys(left, 3) + self.keys(left), expected)

    def test_a_microbatch_that_moves_keeps_its_attributes(self) -> None:
        (mb, *_) = self.microbatches()
        moved = mb.to("meta")
        self.assertIs(moved.pop("use_cache"), False)
        self.assertEqual({tensor.device.type for tensor in [*moved.values(), moved.cu_seqlens]}, {"meta"})
        self.assertEqual({tensor.device.type for name, tensor in mb.items() if name != "use_cache"}, {"cpu"})
        self.assertEqual((moved.loss_scale, moved.sample_keys), (mb.loss_scale, mb.sample_keys))
        self.assertEqual(pickle.loads(pickle.dumps(mb)).sample_keys, mb.sample_keys)
        self.assertIn("tensors=", repr(type(mb)({"a": 1})))

    def test_arrays_that_are_not_pytorchs_have_no_device(self) -> None:
        loader = dflop.BalancedLoader(self.ds, model=self.model, global_batch_size=4, array_type="numpy")
        with self.assertRaisesRegex(TypeError, 'array_type="torch"'):
            next(iter(loader)).microbatches[0].to("cpu")

    def test_packed_samples_do_not_see_each_other(self) -> None:
        transformers = __import__("transformers")
        torch.manual_seed(0)
        config = transformers.AutoConfig.from_pretrained(self.model)
        net = transformers.AutoModelForImageTextToText.from_config(config).eval()
        losses = []
        for layout, size in (("packed", 1), ("padded", 1), ("packed", 2)):
            total = 0.0
            for rank in range(size):
                settings = {"global_batch_size": 12, "microbatches": 2, "dp_rank": rank, "dp_size": size}
                loader = dflop.BalancedLoader(
                    self.ds, model=self.model, processor=dflop.Processor(layout=layout), **settings
                )
                with torch.no_grad():
                    for mb in next(iter(loader)).microbatches:
                        total += net(**mb).loss.item() * mb.loss_scale / size
            losses.append(total)
        self.assertLess(max(losses) - min(losses), 2e-5)


if __name__ == "__main__":
    unittest.main()
