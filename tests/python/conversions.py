"""Checks conversions on files that the original libraries write, byte for byte.

Hugging Face `datasets`, pyarrow, MosaicML Streaming and litdata write the same samples in their formats;
the functions `dflop.from_…` convert them, and every field of every sample is compared.
"""

import io
import json
import tarfile
import tempfile
import unittest
import warnings
from pathlib import Path
from typing import Any, ClassVar

import dflop
import numpy
import pyarrow
from PIL import Image
from pyarrow import feather, parquet

SAMPLES = 37


def pixels(number: int) -> numpy.ndarray:
    """Returns an image of its own size and content."""
    dice = numpy.random.default_rng(number)
    return dice.integers(0, 256, (8 + number % 5, 9 + number % 7, 3), dtype=numpy.uint8)


def encoded(number: int, format: str) -> bytes:
    """Returns the image as a file of a format."""
    file = io.BytesIO()
    Image.fromarray(pixels(number)).save(file, format)
    return file.getvalue()


def wav(number: int) -> bytes:
    """Returns a recording of silence."""
    data = bytes(2 * (100 + number))
    header = b"RIFF" + (36 + len(data)).to_bytes(4, "little") + b"WAVEfmt " + (16).to_bytes(4, "little")
    rate = 16_000
    header += (1).to_bytes(2, "little") + (1).to_bytes(2, "little") + rate.to_bytes(4, "little")
    header += (2 * rate).to_bytes(4, "little") + (2).to_bytes(2, "little") + (16).to_bytes(2, "little")
    return header + b"data" + len(data).to_bytes(4, "little") + data


def turns(number: int) -> list[dict[str, str]]:
    """Returns a conversation."""
    return [
        {"role": "user", "content": f"What is {number}?"},
        {"role": "assistant", "content": f"Ünit {number}"},
    ]


def read(directory: Path) -> dict[str, dict[str, bytes]]:
    """Returns the fields of all samples, as they are in the shards."""
    samples: dict[str, dict[str, bytes]] = {}
    for shard in sorted(directory.glob("*.tar")):
        with tarfile.open(shard) as tar:
            for member in tar:
                key, extension = member.name.split(".", 1)
                file = tar.extractfile(member)
                assert file is not None
                samples.setdefault(key, {})[extension] = file.read()
    return samples


class Conversion(unittest.TestCase):
    def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)

    def out(self, name: str) -> Path:
        return self.directory / f"out-{name}"

    def document(self, fields: dict[str, bytes], file: str, row: int) -> dict[str, Any]:
        """Returns the document of a sample, whose source is checked."""
        document = json.loads(fields.pop("json"))
        self.assertEqual(document.pop("__source__"), {"file": file, "row": row})
        return document


class Arrow(Conversion):
    def table(self) -> pyarrow.Table:
        return pyarrow.Table.from_pylist(
            [
                {
                    "id": f"s{number:02}",
                    "images": [
                        {"bytes": encoded(number, "PNG"), "path": None},
                        {"bytes": encoded(number + 1, "JPEG"), "path": "b.jpg"},
                    ],
                    "messages": turns(number),
                    "score": number / 7,
                }
                for number in range(SAMPLES)
            ]
        )

    def check(self, out: Path, file: str) -> None:
        samples = read(out)
        self.assertEqual(list(samples), [f"s{number:02}" for number in range(SAMPLES)])
        for number, fields in enumerate(samples.values()):
            document = self.document(fields, file, number)
            self.assertEqual(fields, {"0.png": encoded(number, "PNG"), "1.jpg": encoded(number + 1, "JPEG")})
            images = ["0.png", {"file": "1.jpg", "path": "b.jpg"}]
            expected = {
                "id": f"s{number:02}",
                "images": images,
                "messages": turns(number),
                "score": number / 7,
            }
            self.assertEqual(document, expected)

    def test_parquet_of_every_compression(self) -> None:
        for compression in ("none", "snappy", "gzip", "brotli", "zstd", "lz4"):
            with self.subTest(compression=compression):
                path = self.directory / f"{compression}.parquet"
                parquet.write_table(self.table(), path, compression=compression, row_group_size=10)
                self.assertEqual(len(dflop.from_parquet(path, self.out(compression))), SAMPLES)
                self.check(self.out(compression), path.name)

    def test_parquet_of_other_versions_and_encodings(self) -> None:
        for name, settings in {
            "v1": {"version": "1.0", "data_page_version": "1.0", "use_dictionary": False},
            "v2": {"version": "2.6", "data_page_version": "2.0", "write_page_index": True},
            "plain": {"store_schema": False},
        }.items():
            with self.subTest(name=name):
                path = self.directory / f"{name}.parquet"
                parquet.write_table(self.table(), path, **settings)
                dflop.from_parquet(path, self.out(name))
                self.check(self.out(name), path.name)

    def test_arrow_files_and_streams(self) -> None:
        table = self.table()
        for compression in ("uncompressed", "lz4", "zstd"):
            with self.subTest(compression=compression):
                path = self.directory / f"{compression}.feather"
                feather.write_feather(table, path, compression=compression, chunksize=10)
                dflop.from_parquet(path, self.out(compression))
                self.check(self.out(compression), path.name)
        path = self.directory / "stream.arrow"
        with pyarrow.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table, max_chunksize=9)
        dflop.from_parquet(path, self.out("stream"))
        self.check(self.out("stream"), path.name)


class HuggingFace(Conversion):
    def dataset(self) -> Any:
        import datasets

        features = datasets.Features(
            {
                "image": datasets.Image(),
                "sound": {"bytes": datasets.Value("binary"), "path": datasets.Value("string")},
                "label": datasets.ClassLabel(names=["crow", "kite"]),
                "text": datasets.Value("string"),
            }
        )
        rows = {
            "image": [
                {"bytes": encoded(number, "JPEG"), "path": f"{number}.jpg"} for number in range(SAMPLES)
            ],
            "sound": [{"bytes": wav(number), "path": None} for number in range(SAMPLES)],
            "label": [number % 2 for number in range(SAMPLES)],
            "text": [f"text {number}" for number in range(SAMPLES)],
        }
        # Encoding a feature of audio would take torchcodec; the cast only declares what the rows hold.
        return datasets.Dataset.from_dict(rows, features=features).cast_column(
            "sound", datasets.Audio(decode=False)
        )

    def check(self, out: Path, order: list[int]) -> None:
        samples = read(out)
        self.assertEqual(list(samples), [f"{number:09}" for number in range(len(order))])
        for number, fields in zip(order, samples.values(), strict=True):
            document = json.loads(fields.pop("json"))
            self.assertEqual(document["image"], {"file": "jpg", "path": f"{number}.jpg"})
            self.assertEqual((document["sound"], document["text"]), ("wav", f"text {number}"))
            expected = {"jpg": encoded(number, "JPEG"), "wav": wav(number), "cls": b"%d" % (number % 2)}
            self.assertEqual(fields, {**expected, "txt": f"text {number}".encode()})
        self.assertEqual(json.loads((out / "classes.json").read_text()), ["crow", "kite"])

    def test_saved_datasets(self) -> None:
        import datasets

        rows = self.dataset()
        rows.save_to_disk(self.directory / "one", num_shards=3)
        dflop.from_huggingface(self.directory / "one", self.out("one"))
        self.check(self.out("one"), list(range(SAMPLES)))
        split = datasets.DatasetDict(train=rows, test=rows.select([3, 5]).flatten_indices())
        split.save_to_disk(self.directory / "split")
        with self.assertRaisesRegex(dflop.DataError, "it has the splits"):
            dflop.from_huggingface(self.directory / "split", self.out("none"))
        dflop.from_huggingface(self.directory / "split", self.out("test"), split="test")
        self.check(self.out("test"), [3, 5])

    def test_a_directory_of_the_hub(self) -> None:
        data = self.directory / "hub" / "data"
        data.mkdir(parents=True)
        (self.directory / "hub" / "README.md").write_text("---\nlicense: mit\n---\n# Kites\n")
        rows = self.dataset()
        rows.select(range(20)).to_parquet(data / "train-00000-of-00002.parquet")
        rows.select(range(20, SAMPLES)).to_parquet(data / "train-00001-of-00002.parquet")
        rows.select([0]).to_parquet(data / "test-00000-of-00001.parquet")
        dflop.from_huggingface(self.directory / "hub", self.out("hub"), split="train")
        self.check(self.out("hub"), list(range(SAMPLES)))

    def test_objects_in_their_order(self) -> None:
        rows = self.dataset()
        dflop.from_huggingface(rows, self.out("whole"))
        self.check(self.out("whole"), list(range(SAMPLES)))
        order = list(range(SAMPLES - 1, 0, -2))
        dflop.from_huggingface(rows.select(order), self.out("selected"))
        self.check(self.out("selected"), order)
        dflop.from_huggingface(rows.to_iterable_dataset().take(5), self.out("taken"))
        self.check(self.out("taken"), list(range(5)))


class Mosaic(Conversion):
    COLUMNS: ClassVar[dict[str, str]] = {
        "uid": "int",
        "jpeg": "jpeg",
        "png": "png",
        "raw": "pil",
        "pages": "list[jpeg]",
        "blob": "bytes",
        "text": "str",
        "small": "float32",
        "exact": "str_int",
        "meta": "json",
        "fixed": "ndarray:int16:2,3",
        "typed": "ndarray:float32",
        "loose": "ndarray",
        "code": "pkl",
    }

    def row(self, number: int) -> dict[str, Any]:
        jpegs = [Image.open(io.BytesIO(encoded(number + at, "JPEG"))) for at in range(2)]
        return {
            "uid": number,
            "jpeg": encoded(number, "JPEG"),
            "png": encoded(number, "PNG"),
            "raw": Image.fromarray(pixels(number)),
            "pages": jpegs,
            "blob": bytes([number, 0, 255]),
            "text": f"wörds {number}",
            "small": numpy.float32(number / 4),
            "exact": 10**30 + number,
            "meta": {"a": [1, None, "x"]},
            "fixed": numpy.arange(6, dtype=numpy.int16).reshape(2, 3) + number,
            "typed": numpy.arange(number + 1, dtype=numpy.float32),
            "loose": numpy.arange(300, dtype=numpy.uint64).reshape(1, 300),
            "code": {1, 2},
        }

    def check(self, out: Path) -> None:
        samples = read(out)
        self.assertEqual(len(samples), SAMPLES)
        for number, fields in enumerate(samples.values()):
            row = self.row(number)
            document = json.loads(fields.pop("json"))
            self.assertEqual(document["__source__"]["row"], number % 10)
            self.assertEqual(
                (document["uid"], document["text"], document["small"]), (number, row["text"], number / 4)
            )
            self.assertEqual((document["meta"], document["exact"]), (row["meta"], str(row["exact"])))
            self.assertNotIn("code", document)
            self.assertEqual(fields.pop("jpeg"), row["jpeg"])
            self.assertEqual(fields.pop("png"), row["png"])
            self.assertEqual(fields.pop("blob.bin"), row["blob"])
            raw = numpy.asarray(Image.open(io.BytesIO(fields.pop("raw.png"))))
            numpy.testing.assert_array_equal(raw, pixels(number))
            for at, page in enumerate(row["pages"]):
                file = io.BytesIO()
                page.save(file, format="JPEG")
                self.assertEqual(fields.pop(f"pages.{at}.jpg"), file.getvalue())
            for name in ("fixed", "typed", "loose"):
                array = numpy.load(io.BytesIO(fields.pop(f"{name}.npy")))
                numpy.testing.assert_array_equal(array, row[name])
                self.assertEqual(array.dtype, row[name].dtype)
            self.assertEqual(fields, {})

    def test_mds_of_every_compression_and_encoding(self) -> None:
        from streaming import MDSWriter

        for compression in (None, "zstd", "gz"):
            with self.subTest(compression=compression):
                source = self.directory / f"mds-{compression}"
                settings = {"compression": compression, "size_limit": None, "hashes": ["sha1"]}
                with MDSWriter(out=str(source), columns=self.COLUMNS, **settings) as writer:
                    for number in range(SAMPLES):
                        writer.write(self.row(number))
                        if number % 10 == 9:
                            writer.flush_shard()
                            writer._reset_cache()
                before = sorted(source.iterdir())
                dflop.from_mds(source, self.out(str(compression)))
                self.check(self.out(str(compression)))
                self.assertEqual(sorted(source.iterdir()), before)


class Lightning(Conversion):
    def write(self, name: str, rows: list[Any], **settings: Any) -> Path:
        from litdata.streaming.writer import BinaryWriter

        source = self.directory / name
        source.mkdir()
        writer = BinaryWriter(str(source), chunk_size=10, **settings)
        for number, row in enumerate(rows):
            writer.add_item(number, row)
        writer.done()
        writer.merge()
        return source

    def row(self, number: int) -> dict[str, Any]:
        import torch

        return {
            "index": number,
            "image": Image.open(io.BytesIO(encoded(number, "JPEG"))),
            "raw": Image.fromarray(pixels(number)),
            "text": f"wörds {number}",
            "weight": number / 3,
            "is_even": number % 2 == 0,
            "blob": bytes([number, 1]),
            "nested": {
                "tokens": torch.arange(number + 1),
                "grid": torch.ones(2, number + 1, dtype=torch.float16),
            },
            "flat": numpy.arange(3, dtype=numpy.uint8),
            "matrix": numpy.arange(6, dtype=numpy.float64).reshape(2, 3) * number,
        }

    def check(self, out: Path) -> None:
        samples = read(out)
        self.assertEqual(len(samples), SAMPLES)
        for number, fields in enumerate(samples.values()):
            row = self.row(number)
            document = json.loads(fields.pop("json"))
            self.assertEqual(document["__source__"]["row"], number % 10)
            self.assertEqual((document["index"], document["text"]), (number, row["text"]))
            self.assertEqual((document["weight"], document["is_even"]), (number / 3, number % 2 == 0))
            file = io.BytesIO()
            row["image"].save(file, format="JPEG")
            self.assertEqual(fields.pop("jpg"), file.getvalue())
            raw = numpy.asarray(Image.open(io.BytesIO(fields.pop("raw.png"))))
            numpy.testing.assert_array_equal(raw, pixels(number))
            self.assertEqual(fields.pop("blob.bin"), row["blob"])
            arrays = {"flat": row["flat"], "matrix": row["matrix"]}
            arrays |= {"nested.0": row["nested"]["tokens"].numpy(), "nested.1": row["nested"]["grid"].numpy()}
            for name, array in arrays.items():
                found = numpy.load(io.BytesIO(fields.pop(f"{name}.npy")))
                numpy.testing.assert_array_equal(found, array)
                self.assertEqual(found.dtype, array.dtype)
            self.assertEqual(fields, {})

    def test_chunks_of_every_kind_of_leaf(self) -> None:
        for name, settings in {
            "plain": {},
            "chunk": {"compression": "zstd", "compression_level": "chunk"},
            "batch": {"compression": "zstd", "compression_level": "batch", "compression_batch_size": 4},
            "sample": {"compression": "zstd", "compression_level": "sample"},
        }.items():
            with self.subTest(name=name):
                rows = [self.row(number) for number in range(SAMPLES)]
                source = self.write(f"litdata-{name}", rows, **settings)
                before = sorted(source.iterdir())
                dflop.from_litdata(source, self.out(name))
                self.check(self.out(name))
                self.assertEqual(sorted(source.iterdir()), before)

    def test_texts_that_lie_in_a_table_of_the_chunk(self) -> None:
        rows = [{"text": f"wörds {number}", "tags": ["a", str(number)]} for number in range(SAMPLES)]
        dflop.from_litdata(self.write("texts", rows), self.out("texts"))
        samples = read(self.out("texts"))
        for number, fields in enumerate(samples.values()):
            document = json.loads(fields["json"])
            source = document.pop("__source__")
            self.assertEqual((document, source["row"]), (rows[number], number % 10))
        self.assertEqual(len(samples), SAMPLES)


if __name__ == "__main__":
    warnings.simplefilter("error", UserWarning)
    unittest.main()
