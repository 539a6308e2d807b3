"""Tests the writer: what is written is read back, and the index is ready."""

import io
import tarfile
import unittest

import dflop
import numpy
from support import InFolder

JPEG = b"\xff\xd8\xff\xe0 not decoded"


class Pixels:
    """An image of Pillow, as far as the writer uses one."""

    def save(self, file: io.BytesIO, format: str, **options: object) -> None:
        file.write(f"{format} {sorted(options)}".encode())


class Writing(InFolder):
    def entries(self, shard: str) -> dict[str, bytes]:
        with tarfile.open(shard) as tar:
            files = {member.name: tar.extractfile(member) for member in tar}
            return {name: file.read() for name, file in files.items() if file is not None}

    def test_values_are_encoded_by_the_extensions_of_their_fields(self) -> None:
        with dflop.Writer(self.directory / "out") as writer:
            writer.write(
                {
                    "__key__": "a/kite",
                    "__url__": "passed over",
                    "jpg": JPEG,
                    "png": Pixels(),
                    "meta.json": {"é": [1, None]},
                    "txt": "wörds",
                    "cls": numpy.int64(3),
                    "none.txt": None,
                    "flag": True,
                }
            )
            self.assertEqual((writer.samples, writer.shards), (1, []))
        expected = {
            "a/kite.jpg": JPEG,
            "a/kite.png": b"PNG []",
            "a/kite.meta.json": '{"é": [1, null]}'.encode(),
            "a/kite.txt": "wörds".encode(),
            "a/kite.cls": b"3",
            "a/kite.flag": b"1",
        }
        self.assertEqual(self.entries(writer.shards[0]), expected)

    def test_arrays_come_back(self) -> None:
        array = numpy.arange(6, dtype=numpy.float32).reshape(2, 3)
        with dflop.Writer(self.directory / "out") as writer:
            writer.write({"npy": array})
        (batch,) = dflop.Loader(writer.dataset(), batch_size=4)
        self.assertEqual(batch.samples[0].key, "000000000")
        numpy.testing.assert_array_equal(batch.samples[0]["npy"], array)

    def test_shards_roll_and_the_index_is_ready_when_the_writer_is_closed(self) -> None:
        with dflop.Writer(self.directory / "out", shard_samples=4) as writer:
            for number in range(10):
                writer.write({"__key__": f"{number:03}", "txt": f"text {number}"})
        self.assertEqual(len(writer.shards), 3)
        index = self.directory / "out" / ".dflop"
        written = {path: path.stat().st_mtime_ns for path in index.iterdir()}
        self.assertEqual(len(writer.dataset()), 10)
        self.assertEqual({path: path.stat().st_mtime_ns for path in index.iterdir()}, written)

    def test_a_block_that_fails_leaves_whole_shards_without_an_index(self) -> None:
        with (
            self.assertRaisesRegex(KeyError, "mine"),
            dflop.Writer(self.directory / "out", shard_samples=2) as writer,
        ):
            for number in range(3):
                writer.write({"__key__": f"{number}", "txt": "x"})
            raise KeyError("mine")
        names = sorted(path.name for path in (self.directory / "out").iterdir())
        self.assertEqual(names, ["shard-000000.tar"])
        with self.assertRaisesRegex(ValueError, "closed"):
            writer.write({"txt": "x"})

    def test_appending_continues_after_the_shards(self) -> None:
        for append in (False, True):
            with dflop.Writer(self.directory / "out", append=append) as writer:
                writer.write({"__key__": f"run-{append}", "txt": "x"})
        self.assertEqual(len(writer.dataset()), 2)
        with self.assertRaisesRegex(dflop.DataError, "in the way"):
            dflop.Writer(self.directory / "out")

    def test_bad_values_are_refused_by_field_and_leave_the_writer_usable(self) -> None:
        with dflop.Writer(self.directory / "out") as writer:
            for value, field, reason in (
                (object(), "txt", "field `txt`: expected bytes, text or a number, found `object`"),
                ([1], "cls", "field `cls`: expected bytes, text or a number, found `list`"),
                (
                    "x",
                    "jpg",
                    "field `jpg`: expected bytes, a Pillow image or an array of pixels, found `str`",
                ),
                (numpy.zeros(3), "png", "expected pixels of `uint8`"),
                (numpy.array([object()]), "npy", "field `npy`: the array cannot be written"),
            ):
                with self.subTest(field=field), self.assertRaisesRegex(TypeError, reason):
                    writer.write({"__key__": "a", field: value})
            with self.assertRaisesRegex(dflop.DataError, "dot"):
                writer.write({"__key__": "a.b", "txt": "x"})
            with self.assertRaisesRegex(dflop.DataError, "TXT"):
                writer.write({"__key__": "a", "TXT": "x"})
            writer.write({"__key__": "a", "txt": "x"})
        self.assertEqual(len(writer.dataset()), 1)

    def test_settings_without_sense_are_refused(self) -> None:
        with self.assertRaises(dflop.ConfigError):
            dflop.Writer(self.directory / "out", shard_samples=0)


if __name__ == "__main__":
    unittest.main()
