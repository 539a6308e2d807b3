"""Shards and tables are read through fsspec where dflop has no store for the scheme of a URL."""

from __future__ import annotations

import random
import threading
import unittest
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import dflop
import fsspec
import numpy
import pyarrow
from dflop import _other_stores
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow import parquet
from support import InFolder, WithExample

SETTINGS: dict[str, Any] = {"tokenizer": False, "model": "tiny", "global_batch_size": 8, "seed": 3}


class Watched(MemoryFileSystem):
    """Files in memory, which notes the ranges that are read."""

    protocol = "watched"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    reads: ClassVar[list[tuple[str, int, int]]] = []
    failures: ClassVar[list[Exception]] = []
    lock = threading.Lock()

    def cat_file(self, path: str, start: Any = None, end: Any = None, **settings: Any) -> bytes:
        with self.lock:
            self.reads.append((path, start, end))
            failure = self.failures.pop() if self.failures else None
        if failure is not None:
            raise failure
        return super().cat_file(path, start, end, **settings)


def put(directory: Path, root: str) -> None:
    """Copies the files of a directory to a file system."""
    for path in directory.iterdir():
        if path.is_file():
            with fsspec.open(f"{root}/{path.name}", "wb") as file:
                file.write(path.read_bytes())


def contents(source: Any) -> list[tuple[str, dict[str, bytes]]]:
    loader = dflop.Loader(source, batch_size=8, read=dflop.Read(decode="raw"), array_type="numpy")
    samples = [sample for batch in loader for sample in batch.samples]
    return [(one.key, {name: numpy.asarray(one[name]).tobytes() for name in one}) for one in samples]


class Shards(WithExample):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        fsspec.register_implementation("watched", Watched, clobber=True)
        put(cls.shards, "watched://train/shards")
        put(cls.shards, "memory://train/shards")

    def setUp(self) -> None:
        Watched.reads.clear()
        Watched.failures.clear()

    def dataset(self, source: Any = "watched://train/shards/") -> dflop.Dataset:
        return dflop.Dataset(source, index=self.directory / "index")

    def test_shards_give_what_local_files_give(self) -> None:
        self.assertEqual(contents("memory://train/shards/"), contents(self.shards))
        self.assertEqual(contents("watched://train/shards/{000..002}.tar"), contents(self.shards))

    def test_an_index_is_built_and_samples_are_read_by_range(self) -> None:
        dataset = self.dataset()
        self.assertEqual(dataset.shards, [f"watched://train/shards/{number:03}.tar" for number in range(3)])
        self.assertEqual((len(dataset), dataset.skipped), (96, []))
        local = dflop.Dataset(self.shards, index=self.directory / "local")
        self.assertEqual(dataset.fingerprint, local.fingerprint)
        Watched.reads.clear()
        self.assertEqual(dataset[40].key, local[40].key)
        self.assertTrue(Watched.reads)
        largest = max(path.stat().st_size for path in self.shards.iterdir() if path.suffix == ".tar")
        self.assertLess(sum(end - start for _, start, end in Watched.reads), largest)
        self.assertNotIn("fingerprint", repr(self.dataset()))

    def test_a_run_resumes(self) -> None:
        def keys(loader: Any) -> list[list[str]]:
            return [[key for mb in step.microbatches for key in mb.sample_keys] for step in loader]

        whole = keys(dflop.BalancedLoader(self.dataset(), steps=6, **SETTINGS))
        with dflop.BalancedLoader(self.dataset(), steps=6, **SETTINGS) as first:
            steps = iter(first)
            taken = [next(steps) for _ in range(2)]
            state = first.state_dict()
        self.assertEqual(len(taken), 2)
        resumed = dflop.BalancedLoader(self.dataset(), steps=6, **SETTINGS)
        resumed.load_state_dict(state)
        self.assertEqual(keys(resumed), whole[2:])
        local = dflop.BalancedLoader(dflop.Dataset(self.shards), steps=6, **SETTINGS)
        self.assertEqual(keys(local), whole)

    def test_failed_reads_are_tried_again(self) -> None:
        Watched.failures += [ConnectionResetError("reset"), TimeoutError("late")]
        self.assertEqual(len(contents("watched://train/shards/000.tar")), 32)
        self.assertEqual(Watched.failures, [])

    def test_other_exceptions_end_the_read(self) -> None:
        Watched.failures.append(KeyError("no token"))
        with self.assertRaisesRegex(
            dflop.ReadError, r"(?s)watched://train/shards/000.tar.*KeyError: .*no token"
        ):
            contents("watched://train/shards/000.tar")

    def test_what_is_missing_is_named(self) -> None:
        with self.assertRaisesRegex(dflop.Error, r"watched://train/shards/009.tar"):
            contents("watched://train/shards/009.tar")
        with self.assertRaisesRegex(dflop.Error, r"watched://train/none/"):
            dflop.Dataset("watched://train/none/")
        with self.assertRaisesRegex(dflop.Error, "expected a bucket after `watched://`"):
            dflop.Dataset("watched:///a.tar")
        with self.assertRaisesRegex(dflop.Error, "`shed://` is not supported, not by fsspec either: .*shed"):
            dflop.Dataset("shed://one/a.tar")

    def test_without_fsspec_the_packages_to_install_are_named(self) -> None:
        missing = ImportError("No module named 'fsspec'")
        with (
            mock.patch.object(_other_stores.importlib, "import_module", side_effect=missing),
            self.assertRaisesRegex(dflop.Error, r"`memory://` is not supported without fsspec: install"),
        ):
            dflop.Dataset("memory://elsewhere/a.tar")
        with (
            mock.patch("fsspec.core.url_to_fs", side_effect=ImportError("Please install shedfs")),
            self.assertRaisesRegex(dflop.Error, "`shed://` needs another package: Please install shedfs"),
        ):
            dflop.Dataset("shed://one/a.tar")

    def test_shards_are_not_written(self) -> None:
        with self.assertRaisesRegex(dflop.Error, "read through fsspec, not written: write to a directory"):
            dflop.pack(self.shards, "watched://train/packed/")


class Tables(InFolder):
    def test_parquet_is_read_in_place(self) -> None:
        fsspec.register_implementation("watched", Watched, clobber=True)
        rows = pyarrow.table(
            {
                "id": [f"{n:04}" for n in range(64)],
                "text": [random.Random(n).randbytes(10_000).hex() for n in range(64)],
            }
        )
        path = self.directory / "a.parquet"
        parquet.write_table(rows, path, row_group_size=8)
        put(self.directory, "watched://tables/text")
        dataset = dflop.Dataset("watched://tables/text/a.parquet", index=self.directory / "index")
        self.assertEqual(len(dataset), 64)
        Watched.reads.clear()
        self.assertEqual(dataset[50].key, "0050")
        self.assertLess(sum(end - start for _, start, end in Watched.reads), path.stat().st_size // 2)
        self.assertEqual(len(contents("watched://tables/text/")), 64)


if __name__ == "__main__":
    unittest.main()
