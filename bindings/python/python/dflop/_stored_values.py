"""Decodes values that MosaicML Streaming and litdata store in the same way, or in almost the same.

Media keep the bytes that were stored, where the libraries would decode them. Arrays become `.npy` files, and
pixels without compression PNG files. What cannot be read is an `UnreadableError`, the reason for skipping a
row.
"""

from __future__ import annotations

import ctypes
import json
import math
import re
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy

# Array types by name: the NumPy code and the number of bytes of an element.
ELEMENT_TYPES = {
    "bool": ("|b1", 1),
    "int8": ("|i1", 1),
    "uint8": ("|u1", 1),
    "int16": ("<i2", 2),
    "uint16": ("<u2", 2),
    "float16": ("<f2", 2),
    "int32": ("<i4", 4),
    "uint32": ("<u4", 4),
    "float32": ("<f4", 4),
    "int64": ("<i8", 8),
    "uint64": ("<u8", 8),
    "float64": ("<f8", 8),
    "complex64": ("<c8", 8),
    "complex128": ("<c16", 16),
}
# Modes of Pillow by name: the color type of PNG and the number of bytes of a pixel.
_PNG_MODES = {b"L": (0, 1), b"LA": (4, 2), b"RGB": (2, 3), b"RGBA": (6, 4)}
# Integers that a document can hold.
_INTEGERS = range(-(2**63), 2**64)
# Deepest nesting of JSON that is read.
_DEPTH_MAX = 127


class UnreadableError(ValueError):
    """A value or a row cannot be read; the message is the reason for skipping the row."""


class Cut:
    """Takes numbers and bytes from the front of an item."""

    def __init__(self, item: bytes) -> None:
        self.rest = item

    def take(self, length: int) -> bytes:
        if length > len(self.rest):
            raise UnreadableError(f"it ends early: expected {length} bytes, found {len(self.rest)}")
        taken, self.rest = self.rest[:length], self.rest[length:]
        return taken

    def number(self, order: str = "<") -> int:
        """Takes an unsigned number of 32 bits."""
        return struct.unpack(f"{order}I", self.take(4))[0]


def scalar(name: str, value: bytes) -> Any:
    """Returns a number of a NumPy type."""
    if name not in ELEMENT_TYPES or name.startswith("complex"):
        raise UnreadableError(f"expected a number, found the type `{name}`")
    code, size = ELEMENT_TYPES[name]
    if len(value) != size:
        raise UnreadableError(f"expected {size} bytes, found {len(value)}")
    number = numpy.frombuffer(value, code)[0].item()
    return _shortest(number) if name in ("float16", "float32") else number


def _shortest(number: float) -> float:
    """Returns the number with the fewest digits that has the same 32 bits."""
    if not math.isfinite(number):
        return number
    shorter = (float(f"{number:.{digits}g}") for digits in range(1, 10))
    return next((short for short in shorter if ctypes.c_float(short).value == number), number)


def text(value: bytes) -> str:
    """Returns UTF-8 text."""
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise UnreadableError(f"its text is not UTF-8: {error}") from error


def number_text(value: bytes) -> Any:
    """Returns a number that is stored as text; it stays text if 64 bits do not hold it."""
    written = text(value)
    if re.fullmatch(r"[+-]?[0-9]{1,20}", written) and int(written) in _INTEGERS:
        return int(written)
    if re.search(r"[.en]", written) and not re.search(r"[_\s]", written):
        try:
            return float(written)
        except ValueError:
            pass
    return written


def json_value(value: bytes) -> Any:
    """Returns a JSON value; integers over 64 bits become numbers with a fraction."""

    def number(written: str) -> Any:
        is_integer = re.fullmatch(r"-?[0-9]{1,20}", written) and int(written) in _INTEGERS
        found = int(written) if is_integer else float(written)
        if math.isinf(found):
            raise ValueError(f"the number {written[:40]} is out of range")
        return found

    def refuse(constant: str) -> Any:
        raise ValueError(f"`{constant}` is not JSON")

    try:
        found = json.loads(value.decode(), parse_int=number, parse_float=number, parse_constant=refuse)
        # Half a surrogate pair is no text.
        if b"\\u" in value:
            json.dumps(found, ensure_ascii=False).encode()
        if value.count(b"[") + value.count(b"{") > _DEPTH_MAX and _depth(found) > _DEPTH_MAX:
            raise ValueError(f"it is nested more than {_DEPTH_MAX} levels deep")
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"expected JSON: {error}") from error
    return found


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)


def npy(name: str, shape: Sequence[int], data: bytes) -> bytes:
    """Returns an array as the bytes of an `.npy` file."""
    code, size = ELEMENT_TYPES[name]
    if math.prod(shape) * size != len(data):
        raise UnreadableError(f"an array of {len(data)} bytes does not have the shape {list(shape)}")
    header = f"{{'descr': '{code}', 'fortran_order': False, 'shape': {tuple(shape)}, }}"
    # Magic, version, length and header are a multiple of 64 bytes; a line feed ends them.
    header += " " * (-(len(header) + 11) % 64) + "\n"
    if len(header) >= 1 << 16:
        raise UnreadableError("an array of too many dimensions")
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + data


def png(item: bytes) -> bytes:
    """Returns an image that Pillow stored without compression as a PNG with the same pixels.

    Args:
        item: width, height and length of the mode, each of 32 bits, then mode and pixels.
    """
    cut = Cut(item)
    width, height, length = cut.number(), cut.number(), cut.number()
    mode = cut.take(length)
    if mode not in _PNG_MODES:
        shown = mode[:16].decode(errors="replace")
        raise UnreadableError(f"an image of Pillow's mode `{shown}`; expected L, LA, RGB or RGBA")
    color, size = _PNG_MODES[mode]
    if width * height * size != len(cut.rest):
        raise UnreadableError(f"an image of {len(cut.rest)} bytes is not {width} x {height} pixels")
    if not cut.rest:
        raise UnreadableError("an image cannot be written as PNG: it has no pixels")
    rows = numpy.frombuffer(cut.rest, numpy.uint8).reshape(height, width * size)
    # Each row is stored as its difference from the row above, which the first byte says.
    lines = numpy.full((height, 1 + width * size), 2, numpy.uint8)
    lines[:, 1:] = numpy.diff(rows, axis=0, prepend=numpy.uint8(0))
    header = struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )


def files(item: bytes) -> list[bytes]:
    """Returns a list of files: their number, their lengths, then their bytes."""
    cut = Cut(item)
    lengths = Cut(cut.take(4 * cut.number()))
    return [cut.take(lengths.number()) for _ in range(len(lengths.rest) // 4)]
