"""Tests `dflop.Dataset`: indexes, splits, Arrow."""

import json
import os
import pickle
import unittest
import unittest.mock

import dflop
import pyarrow
from dflop import example
from support import InFolder, WithExample


class Datasets(WithExample):
    def test_its_index_says_what_is_in_it(self) -> None:
        ds = dflop.Dataset(self.shards)
        self.assertEqual((len(ds), len(ds.shards), ds.skipped, ds.warnings), (96, 3, [], []))
        self.assertRegex(ds.fingerprint, "^[0-9a-f]{32}$")
        self.assertTrue(ds.index_path.is_file())
        self.assertEqual(
            dflop.Dataset([str(self.shards / f"{n:03}.tar") for n in range(3)]).fingerprint, ds.fingerprint
        )
        self.assertIn("2 more shards", repr(ds))

    def test_its_rows_are_an_arrow_table(self) -> None:
        table = pyarrow.table(dflop.Dataset(self.shards))
        self.assertEqual(table.num_rows, 96)
        self.assertEqual(table.column("key")[0].as_py(), "000000")
        kinds = {field["extension"] for row in table.column("fields").to_pylist() for field in row}
        self.assertLessEqual({"json", "cls", "0.png"}, kinds)
        costs = pyarrow.table(dflop.CostModel(self.model).annotate(dflop.Dataset(self.shards)))
        self.assertEqual(costs.column("key").to_pylist(), table.column("key").to_pylist())
        self.assertEqual(costs.schema.field("llm_ns").type, pyarrow.uint64())

    def test_it_goes_to_other_processes(self) -> None:
        ds = dflop.Dataset(self.shards, index=self.directory / "elsewhere").count_tokens(self.model).repeat(2)
        copy = pickle.loads(pickle.dumps(ds))
        self.assertEqual(repr(copy), repr(ds))
        self.assertTrue(repr(copy).endswith(".repeat(2)"), repr(copy))
        self.assertEqual(
            (copy.shards, copy.fingerprint, copy.index_path), (ds.shards, ds.fingerprint, ds.index_path)
        )

    def test_texts_are_counted_by_a_tokenizer(self) -> None:
        estimated = dflop.Dataset(self.shards, index=self.directory / "estimated")
        exact = dflop.Dataset(self.shards, index=self.directory / "exact").count_tokens(model=self.model)
        model = dflop.CostModel(self.model)
        counts = [pyarrow.table(model.annotate(ds)).column("tokens").to_pylist() for ds in (estimated, exact)]
        self.assertNotEqual(counts[0], counts[1])
        loader = dflop.BalancedLoader(
            exact,
            model=self.model,
            global_batch_size=32,
            order=dflop.Order(shuffle="none", tail="short"),
            epochs=1,
        )
        for step in loader:
            for mb in step.microbatches:
                self.assertEqual(mb.planned_tokens, mb.tokens)
        with self.assertRaisesRegex(dflop.ConfigError, "a tokenizer or a model"):
            estimated.count_tokens(chat_template="{{ messages }}")

    def test_an_index_is_built_anew_on_request(self) -> None:
        dataset = dflop.Dataset(self.shards, index=self.directory / "anew")
        path = dataset.index_path
        built = path.stat().st_mtime_ns
        self.assertEqual(dflop.Dataset(self.shards, index=self.directory / "anew").index_path, path)
        self.assertEqual(path.stat().st_mtime_ns, built)
        self.assertEqual(dataset.reindex(verify=True).skipped, [])
        self.assertGreater(path.stat().st_mtime_ns, built)

    def test_an_epoch_limit_ends_a_run(self) -> None:
        ds = dflop.Dataset(self.shards / "000.tar")
        settings = {"model": "tiny", "tokenizer": False, "global_batch_size": 8}
        one, two = (dflop.BalancedLoader(ds.repeat(epochs), **settings) for epochs in (1, 2))
        self.assertGreater(len(two), len(one))

    def test_what_shard_names_may_reach_is_named(self) -> None:
        with self.assertRaisesRegex(dflop.ConfigError, "expected pipe or outside, found `all`"):
            dflop.Dataset(self.shards, allow="all")

    def test_the_environment_sets_what_belongs_to_a_machine(self) -> None:
        with unittest.mock.patch.dict(os.environ, {"DFLOP_READ": "pread", "DFLOP_CACHE_BYTES": "1"}):
            self.assertEqual(len(dflop.Dataset(self.shards)), 96)
        with (
            unittest.mock.patch.dict(os.environ, {"DFLOP_READ": "mapped"}),
            self.assertRaisesRegex(dflop.ConfigError, "`DFLOP_READ`: expected auto, mmap or pread"),
        ):
            dflop.Dataset(self.shards)

    def test_splits_are_read_through_the_index(self) -> None:
        splits = self.directory / "splits.json"
        splits.write_text(
            json.dumps({"splits": {"train": {"fraction": [0, 0.75]}, "val": {"fraction": [0.75, 1]}}})
        )
        parts = [dflop.Dataset(self.shards, split=(name, splits)) for name in ("train", "val")]
        self.assertEqual(sum(map(len, parts)), 96)
        loader = dflop.BalancedLoader(
            parts[1],
            model="tiny",
            tokenizer=False,
            global_batch_size=4,
            order=dflop.Order(shuffle="none", tail="short"),
            epochs=1,
        )
        delivered = sum(len(mb.samples) for step in loader for mb in step.microbatches)
        self.assertEqual(delivered, len(parts[1]))
        plain = [key for batch in dflop.Loader(parts[0]) for key in batch.sample_keys]
        self.assertEqual(len(plain), len(parts[0]))
        with self.assertRaises(dflop.ConfigError):
            len(dflop.Dataset(self.shards, split=("none", splits)))
        with self.assertRaisesRegex(TypeError, "a pair of a name and the file"):
            dflop.Dataset(self.shards, split=3)


class BadData(InFolder):
    def test_bad_samples_are_listed(self) -> None:
        ds = dflop.Dataset(self.shard({"a.png": b"not an image", "b.txt": b"text"}))
        self.assertEqual(len(ds), 1)
        self.assertEqual([(bad["key"], bad["field"]) for bad in ds.skipped], [("a", "png")])

    def test_nothing_good_is_an_error(self) -> None:
        with self.assertRaises(dflop.DataError) as caught:
            len(dflop.Dataset(self.shard({"a.png": b"not an image"})))
        self.assertEqual(caught.exception.kind, "no_samples")

    def test_names_of_other_kinds_are_refused(self) -> None:
        for shards in (3, [3], None):
            with self.subTest(shards), self.assertRaises(TypeError):
                dflop.Dataset(shards)


class Indexing(InFolder):
    def test_tasks_make_the_same_index(self) -> None:
        example.write_shards(self.directory / "shards", samples=40, shards=4)
        here = dflop.index(self.directory / "shards", index=self.directory / "here")
        ds = dflop.Dataset(self.directory / "shards", index=self.directory / "tasks")
        seen = []

        def backwards(function, tasks):
            seen.extend(tasks)
            return [pickle.loads(pickle.dumps(function))(task) for task in reversed(tasks)]

        there = dflop.index(ds, map=backwards, shards_per_task=3)
        self.assertEqual([len(task) for task in seen], [3, 1])
        self.assertEqual(here["path"].read_bytes(), there["path"].read_bytes())
        self.assertEqual((there["samples"], there["shards"], there["skipped"]), (40, 4, []))
        self.assertEqual(here["fingerprint"], there["fingerprint"])

    def test_a_missing_part_is_named(self) -> None:
        example.write_shards(self.directory / "shards", samples=8, shards=2)
        with self.assertRaisesRegex(dflop.Error, "001.tar"):
            dflop.index(self.directory / "shards", map=lambda function, tasks: [function(tasks[0])])


class Packing(InFolder):
    def source(self) -> None:
        (self.directory / "source").mkdir()
        for number in range(30):
            (self.directory / "source" / f"{number:03}.txt").write_text(f"text {number}")
            (self.directory / "source" / f"{number:03}.png").write_bytes(example._png(9, 9, number % 8))

    def test_tasks_pack_the_same_samples(self) -> None:
        self.source()
        here = dflop.pack(self.directory / "source", self.directory / "here", shard_samples=8)
        there = dflop.pack(
            self.directory / "source", self.directory / "there", shard_samples=8, map=map, tasks=3
        )
        self.assertEqual((here["samples"], len(here["shards"])), (30, 4))
        self.assertEqual(there["samples"], 30)

        def keys(directory: str) -> list[str]:
            return [key for batch in dflop.Loader(self.directory / directory) for key in batch.sample_keys]

        self.assertEqual(keys("here"), keys("there"))
        self.assertEqual(len(dflop.Dataset(self.directory / "there")), 30)

    def test_shards_in_the_way_are_an_error(self) -> None:
        self.source()
        dflop.pack(self.directory / "source", self.directory / "out")
        with self.assertRaises(dflop.DataError):
            dflop.pack(self.directory / "source", self.directory / "out")


if __name__ == "__main__":
    unittest.main()
