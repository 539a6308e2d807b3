"""Tests that messages are short, name what was found, and use the names of arguments."""

import base64
import json
import unittest

import dflop
from support import WithExample


class Messages(WithExample):
    def test_files_of_other_formats_are_named(self) -> None:
        cases = {"Parquet": b"PAR1", "an Arrow file": b"ARROW1\0\0"}
        for name, magic in cases.items():
            shard = self.directory / "other.tar"
            shard.write_bytes(magic + b"x" * 2000)
            loader = dflop.Loader(shard, read=dflop.Read(error_budget=1.0))
            list(loader)
            self.assertEqual([bad["reason"] for bad in loader.skipped], [f"this is {name}, not a tar"])
            with self.assertRaisesRegex(dflop.DataError, f"this is {name}, not a tar"):
                len(dflop.Dataset(shard))

    def test_a_dataset_of_hugging_face_is_not_packed_as_files(self) -> None:
        folder = self.directory / "saved"
        folder.mkdir()
        for name in ("state.json", "dataset_info.json", "data-00000-of-00001.arrow"):
            (folder / name).write_text("{}")
        with self.assertRaisesRegex(dflop.DataError, "saved by Hugging Face `datasets`"):
            dflop.pack(folder, self.directory / "out")

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


if __name__ == "__main__":
    unittest.main()
