"""Tests how single values of MDS and litdata are decoded."""

import io
import json
import struct
import unittest
from typing import Any

import dflop
import numpy
from dflop import _litdata, _mds
from dflop import _stored_values as values
from dflop._stored_values import UnreadableError
from stored import little
from support import InFolder


class Values(InFolder):
    def refused(self, reason: str) -> Any:
        return self.assertRaisesRegex(UnreadableError, reason)

    def test_an_array_becomes_a_file_of_numpy(self) -> None:
        for shape in ((2, 3), (6,), (1, 6, 1)):
            array = numpy.arange(6, dtype="<i2").reshape(shape)
            file = io.BytesIO()
            numpy.save(file, array)
            found = values.npy("int16", shape, array.tobytes())
            numpy.testing.assert_array_equal(numpy.load(io.BytesIO(found)), array)
            self.assertEqual((len(found) - 12) % 64, 0)
        self.assertEqual(numpy.load(io.BytesIO(values.npy("float64", (), bytes(8)))).shape, ())
        with self.refused(r"12 bytes does not have the shape \[2, 4\]"):
            values.npy("int16", (2, 4), bytes(12))

    def test_raw_pixels_become_a_png_of_the_same_pixels(self) -> None:
        dice = numpy.random.default_rng(1)
        with dflop.Writer(self.directory / "shards") as writer:
            expected = {}
            for mode, channels in (("L", 1), ("LA", 2), ("RGB", 3), ("RGBA", 4)):
                pixels = dice.integers(0, 256, (5, 7, channels), dtype=numpy.uint8)
                # Colors of images without opacity are kept by the decoder as well.
                pixels[:, :, 3 if mode == "RGBA" else channels :] = 255
                pixels[:, :, 1 if mode == "LA" else channels :] = 255
                item = little(7, 5, len(mode)) + mode.encode() + pixels.tobytes()
                writer.write({"__key__": mode, "png": values.png(item)})
                color = pixels[:, :, : 3 if channels > 2 else 1]
                expected[mode] = numpy.broadcast_to(color, (5, 7, 3))
        for sample in writer.dataset()[:]:
            numpy.testing.assert_array_equal(numpy.asarray(sample["png"]), expected[sample.key])
        with self.refused("an image of 8 bytes is not 3 x 1 pixels"):
            values.png(little(3, 1, 3) + b"RGB" + bytes(8))
        with self.refused("an image of Pillow's mode `CMYK`; expected L, LA, RGB or RGBA"):
            values.png(little(1, 1, 4) + b"CMYK" + bytes(4))
        with self.refused("it ends early"):
            values.png(little(1, 1))

    def test_lists_end_where_their_bytes_end(self) -> None:
        item = little(2, 1, 2) + b"abc"
        self.assertEqual(values.files(item), [b"a", b"bc"])
        for damaged in (item[:14], b"\xff" * 4):
            with self.refused("it ends early"):
                values.files(damaged)

    def test_numbers_keep_their_width(self) -> None:
        for name, code, number in (
            ("int8", "b", -3),
            ("uint16", "H", 65535),
            ("int64", "q", -(2**63)),
            ("uint64", "Q", 2**64 - 1),
            ("float32", "f", 0.1),
            ("float32", "f", 3.4028235e38),
            ("float32", "f", 16777216.0),
            ("float64", "d", 0.1),
            ("bool", "?", True),
        ):
            found = values.scalar(name, struct.pack(f"<{code}", number))
            self.assertEqual((found, type(found)), (number, type(number)), name)
        self.assertEqual(values.scalar("float16", struct.pack("<e", 0.1)), 0.099975586)
        with self.refused("expected 8 bytes, found 4"):
            values.scalar("float64", bytes(4))
        with self.refused("expected a number, found the type `complex64`"):
            values.scalar("complex64", bytes(8))

    def test_numbers_as_text_are_numbers_if_64_bits_hold_them(self) -> None:
        for written, number in (
            ("7", 7),
            ("-7", -7),
            (str(2**64 - 1), 2**64 - 1),
            (str(10**30), str(10**30)),
            ("1.5", 1.5),
            ("1e5", 1e5),
            ("1_0", "1_0"),
            (" 7", " 7"),
            ("none", "none"),
        ):
            found = values.number_text(written.encode())
            self.assertEqual((found, type(found)), (number, type(number)), written)

    def test_json_is_what_a_document_can_hold(self) -> None:
        text = '{"z": 1, "a": [null, true, -2, 1.5, "x"], "big": 18446744073709551615, "z": 3}'
        self.assertEqual(values.json_value(text.encode()), json.loads(text))
        self.assertEqual(values.json_value(b"[100000000000000000000]"), [1e20])
        deep = b"[" * 127 + b"]" * 127
        self.assertEqual(values.json_value(deep), json.loads(deep))
        for damaged in (
            b"{",
            b"NaN",
            b"[1e999]",
            b'"\\ud800"',
            b"\xff",
            b"[" * 128 + b"]" * 128,
            b"[" * 99_999,
        ):
            with self.refused("expected JSON: "):
                values.json_value(damaged)

    def test_arrays_of_mds_state_what_their_encoding_leaves_open(self) -> None:
        data = bytes([1, 0, 2, 0])
        fixed = _mds._decode("ndarray:int16:2,1", data)
        self.assertEqual(fixed, _mds._decode("ndarray:int16", bytes([2 << 2, 2, 1]) + data))
        self.assertEqual(fixed, _mds._decode("ndarray", bytes([17, (2 << 2) | 1, 2, 0, 1, 0]) + data))
        for described in ("int16:3", "int16:x", "object", "int16", ""):
            with self.refused("."):
                _mds._decode(f"ndarray:{described}", data)

    def test_lists_of_mds_start_with_an_unused_number(self) -> None:
        pixels = little(1, 1, 1) + b"L" + b"\x07"
        item = little(0, 2, len(pixels), len(pixels)) + pixels * 2
        self.assertEqual(_mds._decode("list[png]", item), [pixels, pixels])
        self.assertEqual(_mds._decode("list[pil]", item), [values.png(pixels)] * 2)
        self.assertEqual(_mds._decode("jpeg_array", item[4:]), [pixels, pixels])
        self.assertEqual(_mds._decode("jpeg:90", b"any"), b"any")

    def test_arrays_of_litdata_have_their_type_in_the_value_or_in_the_format(self) -> None:
        array = numpy.arange(6, dtype="<i2")
        for format, value, shape in (
            ("numpy", little(1, 2, 2, 3) + array.tobytes(), (2, 3)),
            ("tensor", struct.pack(">4I", 14, 2, 3, 2) + array.tobytes(), (3, 2)),
            ("no_header_numpy:1", array.tobytes(), (6,)),
            ("no_header_tensor:13", array.tobytes(), (6,)),
        ):
            found = numpy.load(io.BytesIO(_litdata._decode(format, value)))
            numpy.testing.assert_array_equal(found, array.reshape(shape), format)
        for format, value, reason in (
            ("tensor", struct.pack(">3I", 10, 1, 2) + bytes(4), r"an array of the type bfloat16 \(10\)"),
            ("no_header_numpy:99", b"", "an array of the type unknown"),
            ("numpy", little(1, 2**32 - 1), "it ends early"),
            ("json", b"\x01[", "its format `json` is not known"),
            ("knot:1", b"", "its format `knot:1` is not known"),
        ):
            with self.refused(reason):
                _litdata._decode(format, value)


if __name__ == "__main__":
    unittest.main()
