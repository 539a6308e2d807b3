"""Tests how rows of MDS and litdata become samples, with the libraries and with stand-ins for them."""

import importlib.util
import json
import sys
import unittest
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import dflop
import numpy
from stored import (
    JPEG,
    ROWS,
    joined,
    litdata_modules,
    little,
    mds_modules,
    numbered,
    values,
    write_litdata,
    write_mds,
)
from support import InFolder

Samples = list[tuple[str, dict[str, bytes]]]


class Stored(InFolder):
    """Test case that converts `self.source` to samples; `modules` stand in for a library."""

    modules: dict[str, Any] = {}  # noqa: RUF012
    convert: Any

    def setUp(self) -> None:
        super().setUp()
        self.source = self.directory / "source"
        self.source.mkdir()
        # Without stand-ins, modules that a test imports are kept: some cannot be imported twice.
        if self.modules:
            patch = mock.patch.dict(sys.modules, self.modules)
            patch.start()
            self.addCleanup(patch.stop)

    def samples(self, **settings: Any) -> Samples:
        before = sorted(self.source.rglob("*"))
        out = self.directory / f"out-{len(list(self.directory.iterdir()))}"
        dataset = type(self).convert(self.source, out, **settings)
        self.assertEqual(sorted(self.source.rglob("*")), before, "the source is left as it is")
        loader = dflop.Loader(dataset, read=dflop.Read(decode="raw"), array_type="numpy")
        return [
            (sample.key, {name: numpy.asarray(sample[name]).tobytes() for name in sample})
            for batch in loader
            for sample in batch.samples
        ]

    def failure(self) -> str:
        indexes = list(self.directory.glob("out-*/.dflop"))
        with self.assertRaises(dflop.Error) as caught:
            self.samples()
        self.assertEqual(list(self.directory.glob("out-*/.dflop")), indexes, "no index")
        self.assertLess(len(str(caught.exception)), 500)
        return str(caught.exception)

    def skipped(self, **settings: Any) -> tuple[Samples, str]:
        with self.assertWarns(UserWarning) as caught:
            samples = self.samples(**settings)
        return samples, str(caught.warning)

    def expected(self, name: Callable[[int], str]) -> Samples:
        samples = []
        for file, rows in numbered():
            for place, row in enumerate(rows):
                document = (
                    f'{{"text":"{"x" * row}","count":{row},"image":"jpg",'
                    f'"__source__":{{"file":"{name(file)}","row":{place}}}}}'
                )
                samples.append((f"{row:09}", {"jpg": values(row)[2], "json": document.encode()}))
        return samples

    def change_index(self, old: str, new: str) -> None:
        index = (self.source / "index.json").read_text()
        self.assertIn(old, index)
        (self.source / "index.json").write_text(index.replace(old, new))


def mds_name(file: int) -> str:
    return f"shard.{file:05}.mds"


class Mds(Stored):
    modules = mds_modules()
    convert = dflop.from_mds

    def test_rows_are_samples_compressed_or_not(self) -> None:
        for compression in (None, "gz"):
            with self.subTest(compression=compression):
                for file in self.source.iterdir():
                    file.unlink()
                write_mds(self.source, compression)
                self.assertEqual(self.samples(), self.expected(mds_name))

    def test_columns_become_what_they_are_mapped_to(self) -> None:
        write_mds(self.source)
        samples = self.samples(columns={"text": "txt", "count": "__key__"}, shard_samples=2)
        self.assertEqual([key for key, _ in samples], ["0", "1", "2", "3", "4", "5"])
        self.assertEqual(samples[2][1]["txt"], b"xx")
        self.assertEqual(json.loads(samples[2][1]["json"])["image"], "jpg")

    def test_ids_are_keys_and_labels_and_files_are_fields(self) -> None:
        columns = {"id": "str", "label": "int", "mask": "png", "image": "jpeg", "small": "float32"}
        stored = [b"a/b.c", (7).to_bytes(8, "little"), b"\x89PNG mask", JPEG, b"\xcd\xcc\xcc\x3d"]
        lengths = little(len(stored[0]), len(stored[2]), len(stored[3]))
        changes = {
            "column_names": list(columns),
            "column_encodings": list(columns.values()),
            "column_sizes": [None, 8, None, None, 4],
        }
        write_mds(self.source, **changes)
        for file, rows in enumerate(ROWS):
            (self.source / mds_name(file)).write_bytes(joined([lengths + b"".join(stored)] * rows))
        samples = self.samples()
        self.assertEqual([key for key, _ in samples], ["a/b_c", *(f"a/b_c_{n}" for n in range(1, 6))])
        document = (
            b'{"id":"a/b.c","label":7,"mask":"mask.png","image":"jpg","small":0.1,'
            b'"__source__":{"file":"shard.00001.mds","row":0}}'
        )
        expected = {"mask.png": stored[2], "jpg": JPEG, "cls": b"7", "json": document}
        self.assertEqual(samples[3][1], expected)

    def test_pickled_columns_are_left_out(self) -> None:
        write_mds(self.source, column_encodings=["pkl", "int", "jpeg"])
        document = json.loads(self.samples()[0][1]["json"])
        self.assertEqual(list(document), ["count", "image", "__source__"])

    def test_rows_that_cannot_be_read_are_skipped_with_the_reason(self) -> None:
        write_mds(self.source)
        text, count, image = values(1)
        damaged = [little(1, len(image)) + b"\xff" + count + image, little(90, 1) + text, b"\x00" * 4]
        (self.source / mds_name(0)).write_bytes(joined(damaged))
        samples, warning = self.skipped()
        self.assertEqual([key for key, _ in samples], ["000000003", "000000004", "000000005"])
        reason = "shard.00000.mds:0: column `text`: its text is not UTF-8"
        self.assertIn(f"3 files or rows were not packed, the first: {reason}", warning)
        write_mds(self.source, column_encodings=["str", "knot", "jpeg"])
        self.assertIn("shard.00000.mds:0`: column `count`: its encoding `knot` is not known", self.failure())

    def test_damage_and_names_that_lead_outside_are_errors_that_name_the_file(self) -> None:
        def linked(source: Path) -> None:
            (source / mds_name(0)).unlink()
            (source / mds_name(0)).symlink_to("/etc/passwd")

        def written(number: int, content: bytes) -> Callable[[Path], object]:
            return lambda source: (source / mds_name(number)).write_bytes(content)

        def outside(source: Path) -> None:
            self.change_index(mds_name(0), f"../{mds_name(0)}")

        whole = joined([b"ab", b"cde", b"f"])
        changes: list[tuple[Callable[[Path], object], str]] = [
            (written(1, b"\x01\0\0\0"), "shard.00001.mds`: the file ends early"),
            (written(1, b""), "shard.00001.mds`: the file ends early"),
            (written(0, whole[:-1]), "shard.00000.mds`: the file ends early"),
            (written(0, little(3, 30, 20, 10, 5)), "shard.00000.mds`: the file is damaged: its offsets go"),
            (written(0, little(3, 8, 9, 10, 11)), "shard.00000.mds`: the file is damaged: its items overlap"),
            (written(0, little(2**32 - 1, 12)), "shard.00000.mds`: the file ends early"),
            (written(1, whole), "shard.00001.mds`: it has 3 rows, and `index.json` counts 1"),
            (lambda source: (source / mds_name(2)).unlink(), "could not access `.*shard.00002.mds"),
            (outside, "outside of its directory"),
            (linked, "outside of its directory"),
            (lambda source: (source / "index.json").write_text("{"), "index.json`: expected JSON"),
            (lambda source: (source / "index.json").write_text("{}"), "the index of MDS shards"),
            (lambda source: (source / "index.json").unlink(), "could not access `.*index.json"),
            (lambda _: self.change_index('["text", ', "["), "not one encoding and size per column"),
        ]
        for change, reason in changes:
            with self.subTest(reason=reason):
                for file in self.source.iterdir():
                    file.unlink()
                write_mds(self.source)
                change(self.source)
                self.assertRegex(self.failure(), reason)

    def test_shards_inside_the_source_and_splits_are_refused(self) -> None:
        write_mds(self.source)
        with self.assertRaisesRegex(dflop.DataError, "lies inside the source"):
            dflop.from_mds(self.source, self.source / "out")
        with self.assertRaisesRegex(dflop.ConfigError, "a source of the format mds has no splits"):
            dflop.from_mds(self.source, self.directory / "out", split="train")


@unittest.skipUnless(importlib.util.find_spec("streaming"), "mosaicml-streaming is not installed")
class MdsOfItsLibrary(Mds):
    modules: dict[str, Any] = {}  # noqa: RUF012


class Litdata(Stored):
    modules = litdata_modules()
    convert = dflop.from_litdata

    def test_items_are_samples(self) -> None:
        write_litdata(self.source)
        self.assertEqual(self.samples(), self.expected(lambda file: f"chunk-0-{file}.bin"))

    def test_values_of_a_list_are_numbered_and_pickled_ones_are_null(self) -> None:
        leaf = {"type": None, "context": None, "children_spec": []}
        spec = json.dumps([1, {"type": "builtins.list", "context": "null", "children_spec": [leaf] * 3}])
        write_litdata(self.source, data_spec=spec, data_format=["str", "pickle", "jpeg"])
        fields = self.samples()[1][1]
        self.assertEqual(fields["jpg"], values(1)[2])
        self.assertTrue(fields["json"].startswith(b'{"0":"x","1":null,"2":"jpg",'), fields["json"])

    def test_items_that_cannot_be_read_are_skipped_with_the_reason(self) -> None:
        write_litdata(self.source)
        items = [little(1, 8, 5) + b"\xff" + bytes(8) + JPEG + b"a", little(400, 8, 5), b"\0" * 8]
        (self.source / "chunk-0-0.bin").write_bytes(joined(items))
        self.change_index('"chunk_bytes": 98', f'"chunk_bytes": {len(joined(items))}')
        samples, warning = self.skipped()
        self.assertEqual([key for key, _ in samples], ["000000003", "000000004", "000000005"])
        self.assertIn("chunk-0-0.bin:0: column `text`: its text is not UTF-8", warning)
        report = dflop.data_in.pack_stored(
            "litdata", dflop.data_in.litdata_rows, self.source, str(self.directory / "report")
        )
        reasons = [entry["reason"] for entry in report["skipped"][1:]]
        self.assertEqual(reasons[0], "it ends early: expected 400 bytes, found 0")
        self.assertEqual(reasons[1], "it ends early: expected 12 bytes, found 8")

    def test_layouts_that_are_not_read_are_named(self) -> None:
        for old, new, reason in (
            ('"encryption": null', '"encryption": {}', "encrypted"),
            ("PyTreeLoader", "TokensLoader", "expected `PyTreeLoader`"),
            ("builtins.dict", "my.Class", "not a tree"),
            ('["str", "int", "jpeg"]', '["str"]', "3 leaves, its `data_format` 1"),
            ('"compression": null', '"compression_level": "row"', "expected chunk, batch or sample"),
            ('"chunks": ', '"lumps": ', "the index of litdata chunks"),
            ("chunk-0-0.bin", "../chunk-0-0.bin", "outside of its directory"),
            ('"chunk_size": 3', '"chunk_size": 4', "it has 3 items, and `index.json` counts 4"),
        ):
            with self.subTest(reason=reason):
                write_litdata(self.source)
                self.change_index(old, new)
                error = self.failure()
                self.assertIn("could not pack", error)
                self.assertIn(reason, error)


@unittest.skipUnless(importlib.util.find_spec("litdata"), "litdata is not installed")
class LitdataOfItsLibrary(Litdata):
    modules: dict[str, Any] = {}  # noqa: RUF012


class Refusals(InFolder):
    def test_a_library_that_is_not_installed_is_named(self) -> None:
        for function, write, module, package in (
            (dflop.from_mds, write_mds, "streaming", "mosaicml-streaming"),
            (dflop.from_litdata, write_litdata, "litdata", "litdata"),
        ):
            write(self.directory)
            loaded = [name for name in sys.modules if name.startswith(f"{module}.")]
            absent = mock.patch.dict(sys.modules, dict.fromkeys([module, *loaded]))
            with absent, self.assertRaisesRegex(ImportError, f"pip install {package}"):
                function(self.directory, self.directory.with_name("out"))

    def test_packing_names_the_function_that_converts(self) -> None:
        for write, format, function in (
            (write_mds, "mds", "from_mds"),
            (write_litdata, "litdata", "from_litdata"),
        ):
            write(self.directory)
            out = self.directory.with_name(f"{self.directory.name}-packed")
            with self.assertRaisesRegex(dflop.DataError, rf"`dflop\.{function}\(source, out\)`"):
                dflop.pack(self.directory, out)
            with self.assertRaisesRegex(dflop.ConfigError, rf"`dflop\.{function}\(source, out\)`"):
                dflop.pack(self.directory, out, format=format)


if __name__ == "__main__":
    warnings.simplefilter("error", UserWarning)
    unittest.main()
