"""Reads the rows of MosaicML Streaming, format MDS, with its library ``streaming``.

``index.json`` lists shards with their columns and encodings. A row starts with the lengths of those columns
whose values have no fixed length, then come the values. Pickled columns are left out: reading one can run any
code.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflop import _stored_values as values
from dflop._stored_rows import (
    Columns,
    Items,
    Row,
    damaged,
    excerpt,
    inaccessible,
    inside,
    library,
    named_value,
    read_file,
    read_index,
)
from dflop._stored_values import Cut, UnreadableError

_PACKAGE = "mosaicml-streaming"
# Array types by their number in a value.
_ARRAY_TYPES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}


def mds_rows(source: Path) -> Iterator[Row]:
    """Yields all rows of a directory, in the order of the shards.

    Raises:
        ImportError: ``mosaicml-streaming`` is not installed.
        DataError: the index or a shard is damaged.
        ReadError: a file cannot be accessed.
    """
    for shard in _shards(source):
        yield from _shard_rows(source, shard)


def _shards(source: Path) -> list[Any]:
    """Returns the shards that the index lists, each as the library describes it."""
    path = source / "index.json"
    index = read_index(source)
    read = library("streaming.base.format", _PACKAGE).reader_from_json
    try:
        shards = [read(str(source), None, shard) for shard in index["shards"]]
        columns = [(shard.column_names, shard.column_encodings, shard.column_sizes) for shard in shards]
    except Exception as error:
        reason = f"expected the index of MDS shards: {type(error).__name__}: {error}"
        raise damaged(path, reason) from error
    for shard, (names, encodings, sizes) in zip(shards, columns, strict=True):
        if not len(names) == len(encodings) == len(sizes):
            name = shard.raw_data.basename
            raise damaged(path, f"shard `{name}` has not one encoding and size per column")
    return shards


def _shard_rows(source: Path, shard: Any) -> Iterator[Row]:
    name = shard.raw_data.basename
    path = stored = inside(source, name)
    with tempfile.TemporaryDirectory() as aside:
        if shard.zip_data is not None and not path.exists():
            path = inside(source, shard.zip_data.basename)
            stored = Path(aside) / name
            _decompress(path, shard.compression, stored)
            shard.dirname = aside
        Items(stored, path, shard.samples, "rows")
        for row in range(shard.samples):
            try:
                data = shard.get_sample_data(row)
            except OSError as error:
                raise inaccessible(path, error) from error
            yield name, row, _columns(shard, data)


def _decompress(packed: Path, compression: str | None, unpacked: Path) -> None:
    decompress = library("streaming.base.compression", _PACKAGE).decompress
    content = read_file(packed)
    try:
        content = decompress(compression, content)
    except Exception as error:
        raise damaged(packed, f"the file is damaged: {error}") from error
    unpacked.parent.mkdir(parents=True, exist_ok=True)
    unpacked.write_bytes(content)


def _columns(shard: Any, data: bytes) -> Columns:
    cut = Cut(data)
    try:
        # A size of 0 is unknown, too.
        lengths = [size or cut.number() for size in shard.column_sizes]
        columns = []
        for name, encoding, length in zip(shard.column_names, shard.column_encodings, lengths, strict=True):
            value = cut.take(length)
            if encoding != "pkl":
                columns.append((name, named_value(name, lambda e=encoding, v=value: _decode(e, v))))
    except UnreadableError as error:
        return str(error)
    return columns


def _decode(encoding: str, value: bytes) -> Any:
    """Decodes a value by the name of its encoding."""
    match encoding:
        case "bytes" | "jpeg" | "png":
            return value
        case "str" | "str_decimal":
            return values.text(value)
        case "str_int" | "str_float":
            return values.number_text(value)
        case "json":
            return values.json_value(value)
        case "int":
            return values.scalar("int64", value)
        case "pil":
            return values.png(value)
        case "jpeg_array" | "jpegarray":
            return values.files(value)
        case "list[jpeg]" | "list[png]" | "list[pil]":
            cut = Cut(value)
            # An unused number comes first.
            cut.number()
            found = values.files(cut.rest)
            return list(map(values.png, found)) if encoding == "list[pil]" else found
    kind, _, described = encoding.partition(":")
    if kind == "ndarray":
        return _array(described, value)
    if kind in ("jpeg", "png"):
        return value
    if encoding in values.ELEMENT_TYPES:
        return values.scalar(encoding, value)
    raise UnreadableError(f"its encoding `{excerpt(encoding, 40)}` is not known")


def _array(described: str, value: bytes) -> bytes:
    """Decodes an array.

    Args:
        described: type and shape, such as ``uint8:3,4``, as far as they are the same in all rows.
    """
    cut = Cut(value)
    name, _, fixed = described.partition(":")
    if not name:
        (number,) = cut.take(1)
        if number not in _ARRAY_TYPES:
            raise UnreadableError(f"an array of the unknown type {number}")
        name = _ARRAY_TYPES[number]
    if name not in values.ELEMENT_TYPES:
        raise UnreadableError(f"an array of the type `{excerpt(name, 40)}`")
    if not fixed:
        (byte,) = cut.take(1)
        axes, width = byte >> 2, 1 << (byte % 4)
        sizes = Cut(cut.take(axes * width))
        shape = [int.from_bytes(sizes.take(width), "little") for _ in range(axes)]
    elif all(size.isdecimal() for size in fixed.split(",")):
        shape = list(map(int, fixed.split(",")))
    else:
        raise UnreadableError(f"an array of the shape `{excerpt(fixed, 40)}`")
    return values.npy(name, shape, cut.rest)
