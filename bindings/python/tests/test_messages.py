"""Tests that messages are short, name what was found, and use the names of arguments."""

import base64
import json
import pickle
import unittest

import dflop
from dflop._hints import with_hint
from support import WithExample


class Messages(WithExample):
    def test_files_of_other_formats_are_named(self) -> None:
        cases = {
            "this Parquet file is damaged": b"PAR1",
            "this Arrow file is damaged": b"ARROW1\0\0",
            "this is a NumPy array, not a tar; `dflop pack` makes": b"\x93NUMPY",
        }
        for reason, magic in cases.items():
            shard = self.directory / "other.tar"
            shard.write_bytes(magic + b"x" * 2000)
            loader = dflop.Loader(shard, read=dflop.Read(error_budget=1.0))
            list(loader)
            (bad,) = loader.skipped
            self.assertRegex(bad["reason"], f"^{reason}")
            with self.assertRaisesRegex(dflop.DataError, reason):
                len(dflop.Dataset(shard))

    def test_tables_in_the_place_of_shards_are_named_with_what_converts_them(self) -> None:
        table = self.directory / "tables" / "train.jsonl"
        table.parent.mkdir()
        table.write_text("{}")
        for given in (table, table.parent):
            with self.assertRaisesRegex(dflop.ConfigError, "JSON Lines.*dflop pack .*dflop.from_jsonl"):
                dflop.Dataset(given)

    def test_values_in_messages_are_cut(self) -> None:
        manifest = self.directory / "inline.jsonl"
        image = base64.b64encode(bytes(200_000)).decode()
        manifest.write_text(json.dumps({"image": image, "text": "x"}) + "\n")
        with self.assertRaises(dflop.DataError) as caught:
            dflop.pack(manifest, self.directory / "out2")
        self.assertLess(len(str(caught.exception)), 1000)

    def test_unknown_models_are_explained(self) -> None:
        cases = {
            "org/name": "hf download org/name",
            "./nowhere": "no such directory",
            "/nowhere/at/all": "no such directory",
            "qwen": "or the directory of a checkpoint",
        }
        for name, hint in cases.items():
            with self.subTest(name), self.assertRaisesRegex(dflop.ModelError, hint):
                dflop.CostModel(name)

    def test_settings_have_the_names_of_arguments(self) -> None:
        def loader(**settings: object) -> dflop.BalancedLoader:
            return dflop.BalancedLoader(self.shards, model=self.model, **{"global_batch_size": 8, **settings})

        with self.assertRaisesRegex(dflop.ConfigError, "invalid `global_batch_size`") as caught:
            loader(global_batch_size=0)
        self.assertEqual(caught.exception.setting, "global_batch_size")
        with self.assertRaisesRegex(
            dflop.ConfigError, "expected .*`lpt`, .*`search` \\(also `balanced`\\).*, found `lptt`"
        ):
            loader(plan=dflop.Plan(strategy="lptt"))
        with self.assertRaisesRegex(dflop.ConfigError, "invalid `samples`"):
            dflop.Loader(self.shards, samples=0)

    def test_similar_names_are_proposed(self) -> None:
        def loader(**settings: object) -> dflop.BalancedLoader:
            return dflop.BalancedLoader(self.shards, model=self.model, global_batch_size=8, **settings)

        cases = {
            "unknown model `omni7b` (did you mean `omni-7b`?), known are": lambda: dflop.CostModel("omni7b"),
            "unknown device `h10` (did you mean `h100`?)": lambda: dflop.CostModel("omni-7b", device="h10"),
            "found `searc` (did you mean `search`?)": lambda: loader(plan=dflop.Plan(strategy="searc")),
            "found `roundrobin` (did you mean `round_robin`?)": lambda: dflop.balance(
                {"n": 2, "m": 1, "c": 1, "d": [[1], [2]], "tok": [5, 6]}, strategy="roundrobin"
            ),
            "found `globl` (did you mean `global`?)": lambda: loader(order=dflop.Order(shuffle="globl")),
            "did you mean `omni-7b`?": lambda: dflop.stats(self.shards, model="omni7b"),
            "did you mean `strategy`?": lambda: dflop.Plan(strateg="search"),
            "did you mean `batch_size`?": lambda: dflop.Loader(self.shards, batchsize=3),
            "did you mean `read=dflop.Read(buffered_bytes=…)`?": lambda: loader(buffer_bytes=3),
            "read=dflop.Read(workers=…)": lambda: dflop.Loader(self.shards, num_workers=3),
            "`filter=` selects samples": lambda: dflop.Loader(self.shards, sampler=[3]),
        }
        for expected, call in cases.items():
            with self.subTest(expected), self.assertRaises((dflop.Error, TypeError)) as caught:
                call()
            self.assertIn(expected, str(caught.exception))
            again = pickle.loads(pickle.dumps(caught.exception))
            self.assertEqual(str(again), str(caught.exception))

    def test_other_names_are_not_proposed(self) -> None:
        for call in (lambda: dflop.CostModel("gpt-5"), lambda: dflop.Plan(weight=1)):
            with self.assertRaises((dflop.Error, TypeError)) as caught:
                call()
            self.assertNotIn("did you mean", str(caught.exception))
        for message in ("expected 3 of 4, found `5`", "unknown model `a`, known are a", "no names"):
            self.assertEqual(with_hint(message), message)


if __name__ == "__main__":
    unittest.main()
