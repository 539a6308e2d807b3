"""Writes small datasets of MosaicML Streaming and litdata, and stands in for their libraries."""

import gzip
import json
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Number of rows in each file.
ROWS = (3, 1, 2)
JPEG = b"\xff\xd8\xff\xe0"


def little(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


def joined(items: Sequence[bytes], between: bytes = b"") -> bytes:
    """Joins items as both formats do: count, offsets, what lies between, items."""
    ends = [4 * (len(items) + 2) + len(between)]
    for item in items:
        ends.append(ends[-1] + len(item))
    return little(len(items), *ends) + between + b"".join(items)


def values(row: int) -> list[bytes]:
    """Returns the values of a row: text of varying length, number, image."""
    return [b"x" * row, row.to_bytes(8, "little"), JPEG + bytes([row])]


def numbered() -> Iterable[tuple[int, range]]:
    """Yields the number of each file, and those of its rows."""
    first = 0
    for number, rows in enumerate(ROWS):
        yield number, range(first, first + rows)
        first += rows


def write_mds(directory: Path, compression: str | None = None, **changes: Any) -> None:
    """Writes three shards; `changes` replace what the index says about each."""
    shards = []
    for number, rows in numbered():
        items = []
        for row in rows:
            text, count, image = values(row)
            items.append(little(len(text), len(image)) + text + count + image)
        raw, zipped, content = f"shard.{number:05}.mds", None, joined(items, b'{"columns": 3}')
        if compression:
            zipped = {"basename": f"{raw}.{compression}", "bytes": 1, "hashes": {}}
            (directory / zipped["basename"]).write_bytes(gzip.compress(content))
        else:
            (directory / raw).write_bytes(content)
        shard = {
            "format": "mds",
            "version": 2,
            "samples": len(rows),
            "compression": compression,
            "hashes": [],
            "size_limit": None,
            "column_names": ["text", "count", "image"],
            "column_encodings": ["str", "int", "jpeg"],
            "column_sizes": [None, 8, None],
            "raw_data": {"basename": raw, "bytes": len(content), "hashes": {}},
            "zip_data": zipped,
        }
        shards.append(shard | changes)
    (directory / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))


def write_litdata(directory: Path, **changes: Any) -> None:
    """Writes three chunks; `changes` replace what the index says about all."""
    chunks = []
    for number, rows in numbered():
        leaves = [values(row) for row in rows]
        items = [little(*map(len, row)) + b"".join(row) for row in leaves]
        name, content = f"chunk-0-{number}.bin", joined(items)
        (directory / name).write_bytes(content)
        chunks.append({"filename": name, "chunk_size": len(rows), "chunk_bytes": len(content), "dim": None})
    leaf = {"type": None, "context": None, "children_spec": []}
    context = '["text", "count", "image"]'
    spec = [1, {"type": "builtins.dict", "context": context, "children_spec": [leaf] * 3}]
    config = {
        "chunk_bytes": 1 << 20,
        "chunk_size": None,
        "compression": None,
        "data_format": ["str", "int", "jpeg"],
        "data_spec": json.dumps(spec),
        "encryption": None,
        "item_loader": "PyTreeLoader",
    }
    (directory / "index.json").write_text(json.dumps({"chunks": chunks, "config": config | changes}))


class MdsShard:
    """A shard as `streaming` describes it."""

    def __init__(self, directory: str, described: dict[str, Any]) -> None:
        self.__dict__ |= described
        self.dirname = directory
        self.raw_data, zipped = SimpleNamespace(**described["raw_data"]), described["zip_data"]
        self.zip_data = SimpleNamespace(**zipped) if zipped else None

    def get_sample_data(self, row: int) -> bytes:
        return stored_item((Path(self.dirname) / self.raw_data.basename).read_bytes(), row)


def stored_item(content: bytes, row: int) -> bytes:
    start, end = struct.unpack_from("<2I", content, 4 * (row + 1))
    return content[start:end]


def mds_modules() -> dict[str, Any]:
    """Returns modules with what is used of `streaming`."""
    return {
        "streaming.base.format": SimpleNamespace(
            reader_from_json=lambda directory, _, described: MdsShard(directory, described)
        ),
        "streaming.base.compression": SimpleNamespace(
            decompress=lambda compression, content: gzip.decompress(content) if compression else content
        ),
    }


class LitdataItems:
    """Items as `litdata` reads them, of a dictionary of leaves."""

    def __init__(self, source: str, cache_dir: str, serializers: dict[str, Any], shuffle: bool) -> None:
        index = json.loads((Path(source) / "index.json").read_text())
        self.source, self.chunks, self.serializers = Path(source), index["chunks"], serializers
        self.formats = index["config"]["data_format"]
        _, tree = json.loads(index["config"]["data_spec"])
        self.names = json.loads(tree["context"]) if tree["context"] else None
        assert cache_dir and not shuffle

    def __getitem__(self, place: int) -> Any:
        for chunk in self.chunks:
            if place < chunk["chunk_size"]:
                content = (self.source / chunk["filename"]).read_bytes()
                return self.item(stored_item(content, place))
            place -= chunk["chunk_size"]
        raise IndexError(place)

    def item(self, content: bytes) -> Any:
        leaves, start = [], 4 * len(self.formats)
        for format, length in zip(
            self.formats, struct.unpack_from(f"<{len(self.formats)}I", content), strict=True
        ):
            leaves.append(self.serializers[format].deserialize(content[start : start + length]))
            start += length
        return dict(zip(self.names, leaves, strict=True)) if self.names else leaves


def litdata_modules() -> dict[str, Any]:
    """Returns modules with what is used of `litdata`."""
    return {
        "litdata": SimpleNamespace(StreamingDataset=LitdataItems),
        "litdata.streaming.serializers": SimpleNamespace(Serializer=object),
    }
