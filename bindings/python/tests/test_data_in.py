"""Tests the functions that convert datasets of other libraries, on tables that pyarrow writes."""

import base64
import json
import unittest
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dflop
import numpy
import pyarrow
from pyarrow import parquet
from support import InFolder

GIF = base64.b64decode("R0lGODlhAQABAIAAAP8AAAAAACwAAAAAAQABAAACAkQBADs=")


def table(rows: int) -> pyarrow.Table:
    """Returns rows of an image, a label and a caption."""
    return pyarrow.Table.from_pylist(
        [
            {
                "id": f"row-{row}",
                "image": {"bytes": GIF + bytes([row]), "path": f"{row}.gif"},
                "label": row % 3,
                "caption": f"caption {row}",
            }
            for row in range(rows)
        ]
    )


class FakeDataset:
    """A dataset of Hugging Face, as far as the conversion uses one."""

    features = None
    split = "train"

    def __init__(self, rows: pyarrow.Table, fails_after: int | None = None) -> None:
        self.rows, self.fails_after = rows, fails_after

    def with_format(self, name: str) -> "FakeDataset":
        assert name == "arrow"
        return self

    def iter(self, batch_size: int) -> Iterator[pyarrow.Table]:
        for start in range(0, len(self.rows), batch_size):
            if self.fails_after is not None and start >= self.fails_after:
                raise OSError("the disk is gone")
            yield self.rows.slice(start, batch_size)


class Conversions(InFolder):
    def samples(self, dataset: dflop.Dataset) -> dict[str, dict[str, Any]]:
        loader = dflop.Loader(dataset, batch_size=1000, read=dflop.Read(decode="raw"), array_type="numpy")
        samples = [sample for batch in loader for sample in batch.samples]
        return {
            sample.key: {name: numpy.asarray(sample[name]).tobytes() for name in sample} for sample in samples
        }

    def check(self, dataset: dflop.Dataset, rows: int) -> None:
        samples = self.samples(dataset)
        self.assertEqual(list(samples), [f"row-{row}" for row in range(rows)])
        for row, fields in enumerate(samples.values()):
            document = json.loads(fields.pop("json"))
            self.assertEqual(fields, {"gif": GIF + bytes([row]), "cls": b"%d" % (row % 3)})
            self.assertEqual(document["image"], {"file": "gif", "path": f"{row}.gif"})
            self.assertEqual((document["caption"], document["__source__"]["row"]), (f"caption {row}", row))

    def test_parquet_and_objects_of_hugging_face_give_the_same_samples(self) -> None:
        rows = table(150)
        parquet.write_table(rows, self.directory / "a.parquet", row_group_size=40)
        self.check(dflop.from_parquet(self.directory / "a.parquet", self.directory / "a"), 150)
        self.check(dflop.from_huggingface(FakeDataset(rows), self.directory / "b"), 150)

    def test_a_dataset_that_fails_leaves_no_index(self) -> None:
        failing = FakeDataset(table(150), fails_after=128)
        with self.assertRaisesRegex(OSError, "the disk is gone"):
            dflop.from_huggingface(failing, self.directory / "out", shard_samples=50)
        self.assertFalse((self.directory / "out" / ".dflop").exists())

    def test_columns_become_what_they_are_mapped_to(self) -> None:
        parquet.write_table(table(2), self.directory / "a.parquet")
        columns = {"caption": "txt", "label": "__key__", "id": "text"}
        dataset = dflop.from_parquet(self.directory / "a.parquet", self.directory / "out", columns=columns)
        samples = self.samples(dataset)
        self.assertEqual([fields["txt"] for fields in samples.values()], [b"caption 0", b"caption 1"])
        self.assertEqual(list(samples), ["0", "1"])
        with self.assertRaisesRegex(dflop.ConfigError, "lower case"):
            dflop.from_parquet(self.directory / "a.parquet", self.directory / "x", columns={"caption": "TXT"})

    def test_lines_hold_base64_and_what_is_left_out_is_a_warning(self) -> None:
        image = base64.b64encode(GIF * 3).decode()
        lines = [{"id": "good", "image": image, "text": "x"}, {"id": "bad", "image": "%" * 300_000}]
        source = self.directory / "a.jsonl"
        source.write_text("\n".join(map(json.dumps, lines)))
        with self.assertWarnsRegex(
            UserWarning, "1 files or rows were not packed, the first: .*a.jsonl:2: "
        ) as caught:
            dataset = dflop.from_jsonl(source, self.directory / "out")
        self.assertLess(len(str(caught.warning)), 600)
        self.assertEqual(self.samples(dataset)["good"]["gif"], GIF * 3)

    def test_directories_of_classes_give_labels(self) -> None:
        for name in ("dog/1.gif", "cat/1.gif", "cat/2.gif", "README.md"):
            path = self.directory / "images" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(GIF)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dataset = dflop.from_image_folder(self.directory / "images", self.directory / "out")
        labels = {key: fields["cls"] for key, fields in self.samples(dataset).items()}
        self.assertEqual(labels, {"cat/1": b"0", "cat/2": b"0", "dog/1": b"1"})
        classes = json.loads((self.directory / "out" / "classes.json").read_text())
        self.assertEqual(classes, ["cat", "dog"])

    def test_the_report_accounts_for_fields_columns_and_what_was_left_out(self) -> None:
        parquet.write_table(table(3), self.directory / "a.parquet")
        report = dflop.pack([self.directory / "a.parquet"], self.directory / "out")
        self.assertEqual(report["fields"], {"gif": 3, "cls": 3, "json": 3})
        self.assertEqual(report["columns"]["image"], ["gif"])
        self.assertEqual((report["samples"], report["skipped"]), (3, []))

    def test_tasks_pack_tables_in_parts(self) -> None:
        parquet.write_table(table(50), self.directory / "a.parquet", row_group_size=7)
        dflop.pack(self.directory / "a.parquet", self.directory / "out", map=map, tasks=3)
        self.check(dflop.Dataset(self.directory / "out"), 50)
        with self.assertRaisesRegex(TypeError, "one source"):
            dflop.pack([Path("a"), Path("b")], self.directory / "x", map=map)

    def test_other_objects_are_refused(self) -> None:
        with self.assertRaisesRegex(TypeError, "one split of it: train, test"):
            dflop.from_huggingface({"train": 1, "test": 2}, self.directory / "out")
        with self.assertRaisesRegex(TypeError, "no `split`"):
            dflop.from_huggingface(FakeDataset(table(1)), self.directory / "out", split="train")
        with self.assertRaisesRegex(dflop.ConfigError, "label_from"):
            dflop.pack(self.directory, self.directory / "out", label_from="file")  # type: ignore[arg-type]


if __name__ == "__main__":
    unittest.main()
