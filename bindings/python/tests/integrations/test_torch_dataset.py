"""Tests PyTorch datasets: `DataLoader`, exact resume through torchdata, page-locked memory."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import unittest
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import dflop
import dflop.torch
import numpy
import torch
from dflop import example, monitor
from torch.utils.data import DataLoader

try:
    from torchdata.stateful_dataloader import StatefulDataLoader
except ImportError:
    StatefulDataLoader = None


class Batch(Mapping):
    """A mapping with attributes, as the loader's batches are."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.arrays = {"image": numpy.full((2, 3), number, dtype=numpy.float32)}

    def __getitem__(self, key):
        return self.arrays[key]

    def __iter__(self):
        return iter(self.arrays)

    def __len__(self):
        return len(self.arrays)


class Loader:
    """Loader of numbered batches; each iteration is the rest of an epoch after its state."""

    def __init__(self, batches: int = 5) -> None:
        self.batches, self.epoch, self.position, self.made = batches, 0, 0, []

    def __iter__(self):
        while self.position < self.batches:
            number = 100 * self.epoch + self.position
            self.position += 1
            self.made.append(number)
            yield Batch(number)
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.epoch, self.position = state["epoch"], state["position"]


def numbers(batches) -> list[int]:
    return [batch.number for batch in batches]


def stateful(loader: Loader):
    dataset = dflop.torch.IterableDataset(loader)
    return StatefulDataLoader(dataset, batch_size=None, num_workers=0, collate_fn=dflop.torch.keep)


class Imports(unittest.TestCase):
    def test_torch_is_imported_when_it_is_used(self) -> None:
        program = (
            "import dflop.torch as own, sys; print('torch' in sys.modules, 'numpy' in sys.modules, *dir(own))"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        self.assertEqual(done.stdout.split()[:2], ["False", "False"])
        self.assertIn("profile", done.stdout.split())

    def test_every_name_is_there(self) -> None:
        for name in dflop.torch.__all__:
            self.assertTrue(callable(getattr(dflop.torch, name)), name)
        with self.assertRaisesRegex(AttributeError, "has no attribute 'frofile'"):
            _ = dflop.torch.frofile


class DataSets(unittest.TestCase):
    def test_batches_come_as_the_loader_made_them(self) -> None:
        loader = DataLoader(
            dflop.torch.IterableDataset(Loader()), batch_size=None, collate_fn=dflop.torch.keep
        )
        self.assertEqual(numbers(loader), [0, 1, 2, 3, 4])
        self.assertEqual(numbers(loader), [100, 101, 102, 103, 104])

    def test_without_keep_pytorch_makes_tensors_in_a_dict(self) -> None:
        first = next(iter(DataLoader(dflop.torch.IterableDataset(Loader()), batch_size=None)))
        self.assertEqual((type(first), first["image"].tolist()), (dict, [[0.0] * 3] * 2))

    def test_worker_processes_are_refused_with_advice(self) -> None:
        for context in ("fork", "spawn"):
            loader = DataLoader(
                dflop.torch.IterableDataset(Loader()),
                batch_size=None,
                num_workers=1,
                multiprocessing_context=context,
            )
            with (
                self.subTest(context),
                self.assertRaisesRegex(RuntimeError, "batch_size=None, num_workers=0"),
            ):
                next(iter(loader))

    def test_the_length_is_that_of_the_loader_through_all_wrappers(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            example.write_shards(Path(directory, "shards"), samples=40, shards=2)
            example.write_model(Path(directory, "model"))
            plain = dflop.Loader(f"{directory}/shards", batch_size=8)
            settings = {"model": f"{directory}/model", "global_batch_size": 8}
            balanced = dflop.BalancedLoader(f"{directory}/shards", epochs=1, **settings)
            for loader in (plain, balanced):
                for wrapped in (loader, monitor.Progress(monitor.Record(loader, f"{directory}/run/s.jsonl"))):
                    data = DataLoader(
                        dflop.torch.IterableDataset(wrapped), batch_size=None, collate_fn=dflop.torch.keep
                    )
                    self.assertEqual(len(data), 5)
            self.assertEqual(sum(1 for _ in data), 5)
            self.assertEqual(
                [step["step"] for step in monitor.steps(f"{directory}/run/s.jsonl")], [*range(5)]
            )
            endless = dflop.torch.IterableDataset(
                dflop.BalancedLoader(f"{directory}/shards", epochs=None, **settings)
            )
            self.assertTrue(endless)
            with self.assertRaisesRegex(TypeError, "the run has no end"):
                len(DataLoader(endless, batch_size=None))

    def test_an_iterator_that_is_not_asked_reads_nothing(self) -> None:
        loader = Loader()
        iter(dflop.torch.IterableDataset(loader))
        self.assertEqual(loader.made, [])


@unittest.skipIf(StatefulDataLoader is None, "torchdata is not installed")
class Resume(unittest.TestCase):
    def test_a_loader_resumes_in_the_middle_of_an_epoch_and_reads_nothing_twice(self) -> None:
        for stop in range(6):
            with self.subTest(stop):
                former = stateful(Loader())
                batches = iter(former)
                seen = [next(batches).number for _ in range(stop)]
                state = former.state_dict()
                later = Loader()
                resumed = stateful(later)
                resumed.load_state_dict(state)
                self.assertEqual(seen + numbers(resumed), [0, 1, 2, 3, 4])
                self.assertEqual(later.made, [0, 1, 2, 3, 4][stop:])
                self.assertEqual(numbers(resumed), [100, 101, 102, 103, 104])

    def test_a_state_between_epochs_begins_the_next(self) -> None:
        former = stateful(Loader())
        self.assertEqual(len(numbers(former)), 5)
        resumed = stateful(Loader())
        resumed.load_state_dict(former.state_dict())
        self.assertEqual(numbers(resumed), [100, 101, 102, 103, 104])

    def test_a_state_before_the_first_batch_is_the_beginning(self) -> None:
        former = stateful(Loader())
        resumed = stateful(Loader())
        resumed.load_state_dict(former.state_dict())
        self.assertEqual(numbers(former), numbers(resumed))


class FakeRuntime:
    """Fake of the two CUDA runtime calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self.status = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls.append(("register", address, size))
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address, 0))
        return self.status


class PageLocked(unittest.TestCase):
    @unittest.skipIf(torch.cuda.is_available(), "CUDA is there")
    def test_without_cuda_a_batch_stays_as_it_is(self) -> None:
        batch = Batch(1)
        self.assertIs(dflop.torch.pin(batch), batch)
        with dflop.torch.HostRegistry() as registry:
            registry.register({"image": torch.zeros(3)})
            self.assertEqual(len(registry), 0)

    @unittest.skipUnless(torch.cuda.is_available(), "needs CUDA")
    def test_with_cuda_tensors_are_page_locked(self) -> None:
        pinned = dflop.torch.pin(Batch(1))
        self.assertTrue(pinned["image"].is_pinned())
        own = torch.zeros(1 << 20)
        with dflop.torch.HostRegistry() as registry:
            registry.register({"image": own})
            self.assertTrue(own.is_pinned())
        self.assertFalse(own.is_pinned())

    def test_a_buffer_is_registered_once_and_given_back(self) -> None:
        runtime = FakeRuntime()
        whole = torch.zeros(8)
        with (
            mock.patch("torch.cuda.is_available", lambda: True),
            mock.patch("torch.cuda.cudart", lambda: runtime),
            dflop.torch.HostRegistry() as registry,
        ):
            for _ in range(3):
                registry.register({"first": whole[:4], "second": [whole.view(2, 4), torch.zeros(0)]})
            self.assertEqual(runtime.calls, [("register", whole.data_ptr(), 32)])
            runtime.status = 712
            with self.assertRaisesRegex(RuntimeError, "register 16 bytes at .*: status 712"):
                registry.register((torch.zeros(4),))
            runtime.status = 0
        self.assertEqual(runtime.calls[-1], ("unregister", whole.data_ptr(), 0))


if __name__ == "__main__":
    unittest.main()
