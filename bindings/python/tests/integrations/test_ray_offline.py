"""Tests indexing and packing by tasks on threads, processes and Ray against one process."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import pickle
import shutil
import tarfile
import tempfile
import unittest
from pathlib import Path

import dflop
from example_runs import load, run

try:
    import ray
except ImportError:
    ray = None


def same_process(function, items):
    """Pickles arguments and results, as for another machine."""
    return [pickle.loads(pickle.dumps(function))(pickle.loads(pickle.dumps(item))) for item in items]


class Tasks(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        directory = tempfile.TemporaryDirectory()
        cls.addClassCleanup(directory.cleanup)
        cls.directory = Path(directory.name)
        cls.shards, cls.source = cls.directory / "shards", cls.directory / "source"
        dflop.example.write_shards(cls.shards, samples=48, shards=4)
        for shard in sorted(cls.shards.glob("*.tar")):
            with tarfile.open(shard) as tar:
                tar.extractall(cls.source, filter="data")
        threads = concurrent.futures.ThreadPoolExecutor(2)
        cls.addClassCleanup(threads.shutdown)
        processes = multiprocessing.get_context("spawn").Pool(2)
        cls.addClassCleanup(processes.join)
        cls.addClassCleanup(processes.terminate)
        cls.maps = {"pickled": same_process, "threads": threads.map, "processes": processes.map}
        if ray is not None:
            os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
            ray.init(num_cpus=2, include_dashboard=False, configure_logging=False, log_to_driver=False)
            cls.addClassCleanup(ray.shutdown)
            cls.maps["ray"] = load("ray_offline").on_ray

    def index(self, name: str, **settings) -> bytes:
        ds = dflop.Dataset(self.shards, index=self.directory / f"index-{name}")
        made = dflop.index(ds, **settings)
        self.assertEqual((made["samples"], made["shards"], made["skipped"]), (48, 4, []))
        return Path(made["path"]).read_bytes()

    def contents(self, shards: list[str]) -> dict[str, bytes]:
        found = {}
        for shard in shards:
            with tarfile.open(shard) as tar:
                found |= {member.name: tar.extractfile(member).read() for member in tar.getmembers()}
        return found

    def test_an_index_has_the_bytes_of_that_of_one_process(self) -> None:
        alone = self.index("alone")
        for name, spread in self.maps.items():
            with self.subTest(name):
                self.assertEqual(self.index(name, map=spread), alone)
        self.assertEqual(self.index("pairs", map=self.maps["threads"], shards_per_task=3), alone)

    def test_packed_shards_hold_the_samples_of_the_source(self) -> None:
        expected = {path.name: path.read_bytes() for path in self.source.iterdir()}
        for name, spread in {"alone": None, **self.maps}.items():
            with self.subTest(name):
                packed = dflop.pack(
                    self.source, self.directory / f"packed-{name}", map=spread, tasks=3, shard_samples=10
                )
                self.assertEqual((packed["samples"], packed["skipped"]), (48, []))
                self.assertEqual(self.contents(packed["shards"]), expected)
                self.assertEqual(len(dflop.Dataset(self.directory / f"packed-{name}")), 48)

    def test_a_task_that_fails_gives_its_error(self) -> None:
        for name, spread in self.maps.items():
            shards = self.directory / f"lost-{name}"
            shutil.copytree(self.shards, shards, ignore=shutil.ignore_patterns(".dflop"))
            ds = dflop.Dataset(shards)
            (shards / "002.tar").unlink()
            with self.subTest(name), self.assertRaisesRegex(Exception, "002.tar") as raised:
                dflop.index(ds, map=spread)
            self.assertIsInstance(raised.exception, dflop.Error)

    def test_workers_may_see_the_shards_elsewhere(self) -> None:
        elsewhere = self.directory / "mounts"
        elsewhere.mkdir()
        shutil.copytree(self.shards, elsewhere / "shards")
        here, there = str(self.shards).encode(), str(elsewhere / "shards").encode()

        def elsewhere_map(function, items):
            make = function.args[0]
            moved = [[url.replace(here.decode(), there.decode()) for url in item] for item in items]
            return [function.func(make, item) for item in moved]

        self.assertEqual(self.index("elsewhere", map=elsewhere_map), self.index("here"))

    @unittest.skipIf(ray is None, "ray is not installed")
    def test_the_example_runs_and_leaves_nothing_behind(self) -> None:
        out = run(load("ray_offline").__file__)
        self.assertIn("packed 256 samples into 8 shards", out)
        self.assertIn("one process makes the same index: True", out)


if __name__ == "__main__":
    unittest.main()
