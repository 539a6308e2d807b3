"""Tests `DataLoader` and torchdata's `StatefulDataLoader` over a loader: every image once, exact resume."""

from __future__ import annotations

import itertools
import unittest

import dflop
import torch
from torch.utils.data import DataLoader
from trainers import EXAMPLES, WithData, example, run

try:
    from torchdata.stateful_dataloader import StatefulDataLoader
except ImportError:
    raise unittest.SkipTest("torchdata is not installed") from None

dataloader = example("dataloader")
SETTINGS = {"batch_size": None, "num_workers": 0, "collate_fn": dflop.torch.keep}


class Batches(WithData):
    def stateful(self) -> StatefulDataLoader:
        return StatefulDataLoader(dataloader.dataset_of(self.directory), **SETTINGS)

    def test_an_epoch_has_every_sample_once_and_a_label_for_every_image(self) -> None:
        keys = []
        for batch in DataLoader(dataloader.dataset_of(self.directory), **SETTINGS):
            self.assertIsInstance(batch["image"], torch.Tensor)
            images, labels = batch["image"], dataloader.labels_of(batch)
            self.assertEqual((images.shape[1:], len(images)), ((3, 32, 32), len(labels)))
            keys += batch.sample_keys
        self.assertEqual(sorted(keys), [f"{number:06}" for number in range(64)])
        self.assertNotEqual(keys, sorted(keys))

    def test_images_show_their_class(self) -> None:
        # The color of an image is its class, bit by bit: images and labels belong together.
        for batch in DataLoader(dataloader.dataset_of(self.directory), **SETTINGS):
            brightness = batch["image"].amax((2, 3)) > 0
            bits = torch.stack([dataloader.labels_of(batch) >> bit & 1 for bit in range(3)], 1)
            self.assertTrue(torch.equal(brightness.long(), bits))

    def test_a_stateful_loader_goes_on_in_the_middle_of_an_epoch(self) -> None:
        whole = list(self.stateful())
        for stop in range(len(whole) + 1):
            with self.subTest(stop=stop):
                former, later = self.stateful(), self.stateful()
                for _ in zip(range(stop), former, strict=False):
                    pass
                later.load_state_dict(former.state_dict())
                for found, wanted in zip(later, whole[stop:], strict=True):
                    self.assertEqual(found.sample_keys, wanted.sample_keys)
                    self.assertTrue(torch.equal(found["image"], wanted["image"]))

    def test_a_state_after_an_epoch_starts_the_next_in_another_order(self) -> None:
        former, later = self.stateful(), self.stateful()
        first = [batch.sample_keys for batch in former]
        later.load_state_dict(former.state_dict())
        second = [batch.sample_keys for batch in former]
        self.assertEqual([batch.sample_keys for batch in later], second)
        self.assertEqual(sorted(itertools.chain(*first)), sorted(itertools.chain(*second)))
        self.assertNotEqual(first, second)

    def test_a_restored_run_has_the_very_losses_of_one_that_never_stopped(self) -> None:
        def train(batches, state=None):
            model = dataloader.model_of()
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
            if state is not None:
                model.load_state_dict(state["model"])
                optimizer.load_state_dict(state["optimizer"])
                batches.load_state_dict(state["batches"])
            return model, optimizer, batches

        model, optimizer, batches = train(self.stateful())
        items = iter(batches)
        dataloader.train(model, optimizer, [next(items), next(items)])
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "batches": batches.state_dict(),
        }
        state = {name: _copied(one) for name, one in state.items()}
        wanted = dataloader.train(model, optimizer, items)
        found = dataloader.train(*train(self.stateful(), state))
        self.assertEqual((found, len(found)), (wanted, 2))

    def test_batches_are_not_joined_to_batches_of_batches(self) -> None:
        def balanced():
            return dflop.BalancedLoader(
                self.directory / "shards", model=self.directory / "model", global_batch_size=8, microbatches=2
            )

        wrappers = {
            "Batch": dataloader.dataset_of(self.directory),
            "Step": dflop.torch.IterableDataset(balanced()),
            "Microbatch": dflop.torch.Microbatches(balanced()),
        }
        for name, wrapper in wrappers.items():
            for settings in ({}, {"collate_fn": dflop.torch.keep}):
                wanted = rf"batch_size=4\) over items {name}: .*batch_size=None\)"
                with self.subTest(name, **settings), self.assertRaisesRegex(TypeError, wanted):
                    next(iter(DataLoader(wrapper, batch_size=4, **settings)))
            # A function of the user's own may join them.
            found = next(iter(DataLoader(wrapper, batch_size=2, collate_fn=len)))
            self.assertEqual(found, 2)

    def test_a_loader_without_the_wrapper_is_refused_with_advice(self) -> None:
        plain = dflop.Loader(self.directory / "shards")
        settings = {"model": self.directory / "model", "global_batch_size": 8}
        balanced = [
            dflop.BalancedLoader(self.directory / "shards", epochs=epochs, **settings) for epochs in (1, None)
        ]
        for loader in (plain, *balanced):
            for batch_size in (None, 8):
                with self.assertRaisesRegex(TypeError, r"wrap .*IterableDataset\(loader\), batch_size=None"):
                    next(iter(DataLoader(loader, batch_size=batch_size)))

    def test_the_example_learns_and_loses_nothing(self) -> None:
        printed = run(EXAMPLES / "dataloader.py")
        epoch, resumed = printed.splitlines()[-2:]
        first, last = map(float, epoch.split("loss ")[1].split(" -> "))
        self.assertLess(last, first / 4, printed)
        self.assertEqual(resumed, "5 batches before a stop, 11 after it")


def _copied(state: object) -> object:
    if isinstance(state, torch.Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {name: _copied(one) for name, one in state.items()}
    return state


if __name__ == "__main__":
    unittest.main()
