"""Reads the items of litdata with its library.

``index.json`` lists chunks, the formats of the leaves of an item, and the tree that the leaves form. The
library returns the stored bytes of each leaf, and decompresses chunks, batches and items. Chunks of texts and
numbers may hold their items as an Arrow table instead, whose values are kept. Pickled leaves become null:
reading one can run any code.
"""

from __future__ import annotations

import datetime
import decimal
import importlib.util
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dflop import _stored_values as values
from dflop._stored_rows import (
    Columns,
    Items,
    Row,
    damaged,
    excerpt,
    inside,
    library,
    named_value,
    open_file,
    read_index,
)
from dflop._stored_values import Cut, UnreadableError

# Column of an item that is a single value.
_VALUE = "value"
# Start of a chunk whose items are compressed together, in frames.
_FRAMED = b"LDFZ01\0\0"
# Compression of each item by itself.
_SAMPLE_LEVEL = "sample"
# Deepest tree of an item.
_DEPTH_MAX = 32
_FILES = {"bytes", "jpeg", "image", "video", "audio", "file", "tiff", "tifffile", "pdf", "nifti", "mesh"}
# Types of NumPy arrays by their number in a value.
_NUMPY_TYPES = [
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bool"),
]
# Types of PyTorch tensors by their number in a value; NumPy lacks `bfloat16`.
_TORCH_TYPES = [
    *("float32", "float32", "float64", "float64", "complex64", "complex64", "complex128", "complex128"),
    *(
        "float16",
        "float16",
        "bfloat16",
        "uint8",
        "int8",
        "int16",
        "int16",
        "int32",
        "int32",
        "int64",
        "int64",
    ),
    *("bool", "uint16"),
]


class Leaf:
    """Stored bytes of a leaf."""

    def __init__(self, stored: bytes) -> None:
        self.stored = stored


def litdata_rows(source: Path) -> Iterator[Row]:
    """Yields all items of a directory, in the order of the chunks.

    Raises:
        ImportError: ``litdata`` is not installed.
        DataError: the index or a chunk is damaged, or of a layout that is not read.
        ReadError: a file cannot be accessed.
    """
    path = source / "index.json"
    index = read_index(source)
    try:
        chunks = [(str(chunk["filename"]), int(chunk["chunk_size"])) for chunk in index["chunks"]]
        config = dict(index["config"])
        formats = list(map(str, config.get("data_format") or []))
    except (KeyError, TypeError, ValueError) as error:
        reason = f"expected the index of litdata chunks: {type(error).__name__}: {error}"
        raise damaged(path, reason) from error
    try:
        _check_layout(config, formats)
    except UnreadableError as error:
        raise damaged(path, str(error)) from error
    paths = [inside(source, name) for name, _ in chunks]
    opened = library("litdata", "litdata").StreamingDataset
    serializers = _serializers(formats)
    with tempfile.TemporaryDirectory() as aside, tempfile.TemporaryDirectory() as cache:
        # The library replaces compressed chunks where it finds them.
        view = _linked(Path(aside), path, dict(zip((name for name, _ in chunks), paths, strict=True)))
        try:
            items = opened(str(view), cache_dir=cache, serializers=serializers, shuffle=False)
        except Exception as error:
            raise damaged(path, f"litdata cannot open it: {type(error).__name__}: {error}") from error
        first = 0
        for (name, size), chunk in zip(chunks, paths, strict=True):
            for row, columns in _chunk_rows(chunk, size, items, first, config, formats):
                yield name, row, columns
            first += size
            for unpacked in (file for file in (view / name).parent.glob("*.bin") if not file.is_symlink()):
                unpacked.unlink()


def _linked(view: Path, index: Path, chunks: Mapping[str, Path]) -> Path:
    """Returns a directory with the index and links to the chunks."""
    (view / index.name).write_bytes(index.read_bytes())
    for name, chunk in chunks.items():
        link = view / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(chunk.resolve())
    return view


def _check_layout(config: Mapping[str, Any], formats: list[str]) -> None:
    """Checks that items can be read.

    Raises:
        UnreadableError: the reason, if they cannot.
    """
    if config.get("encryption") is not None:
        raise UnreadableError("its chunks are encrypted")
    level = config.get("compression_level")
    if level not in (None, "chunk", "batch", _SAMPLE_LEVEL):
        shown = excerpt(str(level), 40)
        raise UnreadableError(f"its chunks are compressed by `{shown}`; expected chunk, batch or sample")
    loader = config.get("item_loader")
    if loader not in (None, "PyTreeLoader"):
        shown = excerpt(str(loader), 40)
        raise UnreadableError(f"its items are those of `{shown}`; expected `PyTreeLoader`")
    try:
        spec = json.loads(config.get("data_spec") or "")
    except (ValueError, TypeError) as error:
        raise UnreadableError(f"its `data_spec` is no JSON: {error}") from error
    try:
        leaves = _leaves(spec[1], 0)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        reason = "its `data_spec` is not a tree of dictionaries, lists and tuples"
        raise UnreadableError(reason) from error
    if leaves != len(formats):
        raise UnreadableError(f"its `data_spec` has {leaves} leaves, its `data_format` {len(formats)}")


def _leaves(node: Mapping[str, Any], depth: int) -> int:
    """Returns the number of leaves of a tree as ``treespec_dumps`` of PyTorch writes it."""
    children, kind = node["children_spec"], node.get("type")
    if depth > _DEPTH_MAX:
        raise ValueError("too deep")
    if kind is None and not children:
        return 1
    if kind in ("builtins.dict", "collections.OrderedDict"):
        # The context is a JSON text in JSON.
        context = node["context"]
        names = json.loads(context) if isinstance(context, str) else context
        if len(names) != len(children):
            raise ValueError("names are missing")
    elif kind not in ("builtins.list", "builtins.tuple"):
        raise ValueError(f"the type {kind}")
    return sum(_leaves(child, depth + 1) for child in children)


def _serializers(formats: list[str]) -> dict[str, Any]:
    """Returns a serializer for each format that hands on the stored bytes."""
    base = library("litdata.streaming.serializers", "litdata").Serializer

    class Stored(base):  # type: ignore[misc, valid-type]
        def serialize(self, data: Any) -> tuple[bytes, str | None]:
            raise NotImplementedError

        def deserialize(self, data: bytes) -> Leaf:
            return Leaf(bytes(data))

        def can_serialize(self, data: Any) -> bool:
            return False

    return {part: Stored() for format in formats for part in (format, *format.split(":"))}


def _chunk_rows(
    path: Path, size: int, items: Any, first: int, config: Mapping[str, Any], formats: list[str]
) -> Iterator[tuple[int, Columns]]:
    """Yields number and columns of the items of a chunk, of which `first` precede it in the dataset."""
    checked = _checked(path, size, config)
    if checked is not None and checked.is_blank() and importlib.util.find_spec("pyarrow") is None:
        raise ImportError(f"`{path}` holds an Arrow table, which needs `pyarrow`: pip install pyarrow")
    has_lengths = checked is not None and not checked.is_blank()
    is_plain = has_lengths and config.get("compression_level") != _SAMPLE_LEVEL
    for row in range(size):
        try:
            if is_plain:
                checked.check_lengths(row, len(formats))
        except UnreadableError as error:
            yield row, str(error)
            continue
        try:
            item = items[first + row]
        except Exception as error:
            raise damaged(path, f"the file is damaged: {type(error).__name__}: {error}") from error
        yield row, _columns(item, formats)


def _checked(path: Path, size: int, config: Mapping[str, Any]) -> Items | None:
    """Returns the items of a chunk whose offsets are not compressed."""
    with open_file(path) as file:
        start = file.read(len(_FRAMED))
    # Chunks that the whole-file compression left alone keep the name of an uncompressed one.
    if start == _FRAMED or (config.get("compression") and ".zstd" in path.name):
        return None
    return Items(path, path, size, "items")


def _columns(item: Any, formats: list[str]) -> Columns:
    if isinstance(item, Mapping):
        named = [(_name(name), value) for name, value in item.items()]
    elif isinstance(item, list | tuple):
        named = [(str(number), value) for number, value in enumerate(item)]
    else:
        named = [(_VALUE, item)]
    left = iter(formats)
    try:
        return [(name, _filled(value, name, left)) for name, value in named]
    except UnreadableError as error:
        return str(error)


def _name(name: Any) -> str:
    return name if isinstance(name, str) else json.dumps(name)


def _filled(value: Any, path: str, formats: Iterator[str]) -> Any:
    """Returns a value whose leaves are decoded, in the order of their formats."""
    if isinstance(value, Leaf):
        format, stored = next(formats), value.stored
        return named_value(path, lambda: _decode(format, stored))
    if isinstance(value, Mapping):
        named = ((_name(name), inner) for name, inner in value.items())
        return {name: _filled(inner, f"{path}.{name}", formats) for name, inner in named}
    if isinstance(value, list | tuple):
        return [_filled(inner, f"{path}.{number}", formats) for number, inner in enumerate(value)]
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, datetime.timedelta):
        return value // datetime.timedelta(microseconds=1)
    if isinstance(value, datetime.date | datetime.time):
        return _time(value)
    return value


def _time(value: datetime.date | datetime.time) -> str:
    """Returns a date or a time of a table as text; a time with a zone is in UTC."""
    zone = ""
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        value, zone = value.astimezone(datetime.UTC).replace(tzinfo=None), "Z"
    shown = value.isoformat()
    return shown.removesuffix("000") + zone if "." in shown else shown + zone


def _decode(format: str, value: bytes) -> Any:
    """Decodes a leaf by its format."""
    kind, _, detail = format.partition(":")
    if kind in _FILES:
        return value
    match kind:
        case "pickle" | "graph":
            return None
        case "str" | "text":
            return values.text(value)
        case "bool":
            return values.scalar("bool", value)
        case "int":
            return values.scalar("int64", value)
        case "float":
            return values.scalar("float64", value)
        case "pil":
            return values.png(value)
        case "jpeg_array":
            return values.files(value)
        # Values of a first byte below a space are in a layout of litdata's own.
        case "json" if value[:1] > b" ":
            return values.json_value(value)
        case "numpy":
            return _array(value, _NUMPY_TYPES, "<")
        case "tensor":
            return _array(value, _TORCH_TYPES, ">")
        case "no_header_numpy":
            return _flat_array(value, _NUMPY_TYPES, detail)
        case "no_header_tensor":
            return _flat_array(value, _TORCH_TYPES, detail)
    raise UnreadableError(f"its format `{excerpt(format, 40)}` is not known")


def _array(value: bytes, types: list[str], order: str) -> bytes:
    """Decodes an array that starts with type, number of axes, and sizes."""
    cut = Cut(value)
    kind, axes = cut.number(order), cut.number(order)
    shape = [cut.number(order) for _ in range(axes)]
    name = types[kind] if kind < len(types) else "unknown"
    if name not in values.ELEMENT_TYPES:
        raise UnreadableError(f"an array of the type {name} ({kind})")
    return values.npy(name, shape, cut.rest)


def _flat_array(value: bytes, types: list[str], kind: str) -> bytes:
    """Decodes an array of one axis whose type is part of its format."""
    name = types[int(kind)] if kind.isdecimal() and int(kind) < len(types) else "unknown"
    if name not in values.ELEMENT_TYPES:
        raise UnreadableError(f"an array of the type {name}")
    _, size = values.ELEMENT_TYPES[name]
    return values.npy(name, [len(value) // size], value)
