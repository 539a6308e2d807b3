"""Converts datasets of other libraries to shards: Parquet, Hugging Face, JSON Lines, ImageFolder, MDS, litdata.

Each function packs a source into ``out``, as `dflop.pack` does, and returns the `Dataset` of the shards, with
its index. Rows and files that cannot be packed are left out with a warning that names the first of them.
"""

from __future__ import annotations

import importlib
import os
import pathlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dflop import _native
from dflop._litdata import litdata_rows
from dflop._mds import mds_rows
from dflop._stored_rows import pack_stored
from dflop.offline import pack, pack_settings

if TYPE_CHECKING:
    from dflop.commands import Names

Path = str | os.PathLike[str]

# Rows of a dataset in memory that are converted at a time.
_BATCH_ROWS = 64
# Most characters of a reason in a warning.
_REASON_MAX = 300


def from_parquet(
    source: Names,
    out: Path,
    *,
    columns: Mapping[str, str] | None = None,
    root: Path | None = None,
    split: str | None = None,
    **settings: Any,
) -> _native.Dataset:
    """Converts Parquet or Arrow files, or a directory of them, to shards.

    Args:
        source: file, directory, or a list of them. Media are columns of bytes, of ``{bytes, path}``, of
            base64 or of paths relative to ``root``; everything else goes to the document of the sample, with
            the file and the number of the row under ``__source__``.
        out: directory or URL of the shards; must not contain shards yet.
        columns: what columns become, where their names do not tell, such as ``{"caption": "txt"}``; see
            `pack`.
        root: directory that paths in the rows are relative to. Default: the directory of the source.
        split: split to convert of a directory that has several.
        settings: further settings of `pack`: ``shard_bytes``, ``shard_samples``, ``zstd``, ``allow_outside``.

    Raises:
        DataError: no row is a sample, a file is damaged, or ``out`` contains shards.

    Examples:
        >>> import pyarrow, pyarrow.parquet
        >>> table = pyarrow.table({"id": ["a", "b"], "caption": ["a red kite", "a lake"], "label": [3, 1]})
        >>> pyarrow.parquet.write_table(table, "train.parquet")
        >>> dataset = dflop.from_parquet("train.parquet", "captions/", columns={"caption": "txt"})
        >>> dataset[0].key, dataset[0]["txt"], dataset[0]["cls"]
        ('a', 'a red kite', 3)
    """
    return _packed(source, out, format="parquet", columns=columns, root=root, split=split, **settings)


def from_huggingface(
    source: Any,
    out: Path,
    *,
    columns: Mapping[str, str] | None = None,
    split: str | None = None,
    root: Path | None = None,
    **settings: Any,
) -> _native.Dataset:
    """Converts a dataset of Hugging Face ``datasets`` to shards, without decoding its media.

    Class labels become the field ``cls``; the names of the classes go to ``classes.json`` next to the shards.

    Args:
        source: directory that ``save_to_disk`` wrote or that was downloaded from the hub, with Parquet or
            Arrow files; or a ``datasets.Dataset`` or ``IterableDataset``, whose rows are converted in its
            order.
        out: directory or URL of the shards; must not contain shards yet.
        columns: what columns become, where their names do not tell; see `pack`.
        split: split to convert of a directory that has several.
        root: directory that paths in the rows are relative to. Default: the directory, or of an object the
            working directory.
        settings: further settings of `pack`: ``shard_bytes``, ``shard_samples``, ``zstd``, ``allow_outside``.

    Raises:
        DataError: no row is a sample, a file is damaged, or ``out`` contains shards.

    Examples:
        >>> import datasets
        >>> rows = datasets.Dataset.from_dict({"text": ["a red kite", "a lake"], "label": [3, 1]})
        >>> dataset = dflop.from_huggingface(rows, "captions/", columns={"text": "txt"})
        >>> len(dataset), dataset[1]["txt"], dataset[1]["cls"]
        (2, 'a lake', 1)

        A directory that ``save_to_disk`` wrote, or that was downloaded, needs no ``datasets``:

        >>> dataset = dflop.from_huggingface("saved/", "again/", split="train")  # doctest: +SKIP
    """
    if isinstance(source, str | os.PathLike) or _is_paths(source):
        return _packed(source, out, format="huggingface", columns=columns, split=split, root=root, **settings)
    if not hasattr(source, "with_format"):
        kind = type(source).__name__
        expected = "a directory, a `datasets.Dataset` or an `IterableDataset`"
        if isinstance(source, Mapping):
            expected += f", one split of it: {', '.join(map(str, source))}"
        raise TypeError(f"expected {expected}, found `{kind}`")
    if split is not None:
        raise TypeError("expected no `split` with a dataset object, which is one split")
    name = f"{type(source).__name__}({getattr(source, 'split', None) or 'rows'})"
    prepared = pack_settings(columns=columns, root=root, **settings)
    report = _native.pack_tables(_tables(source), name, os.fspath(out), prepared)
    return _dataset(report, out)


def from_jsonl(
    source: Names,
    out: Path,
    *,
    columns: Mapping[str, str] | None = None,
    root: Path | None = None,
    **settings: Any,
) -> _native.Dataset:
    """Converts JSON Lines to shards: an object per line, with media as paths, base64 or data URLs.

    Args:
        source: file, or a list of files.
        out: directory or URL of the shards; must not contain shards yet.
        columns: what columns become, where their names do not tell; see `pack`.
        root: directory that paths in the lines are relative to. Default: the directory of the file.
        settings: further settings of `pack`: ``shard_bytes``, ``shard_samples``, ``zstd``, ``allow_outside``.

    Raises:
        DataError: no line is a sample, or ``out`` contains shards.

    Examples:
        >>> import json
        >>> turns = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Good morning"}]
        >>> with open("talks.jsonl", "w") as file:
        ...     for number in range(3):
        ...         print(json.dumps({"id": f"talk-{number}", "conversations": turns}), file=file)
        >>> dataset = dflop.from_jsonl("talks.jsonl", "talks/")
        >>> len(dataset), dataset[0].key
        (3, 'talk-0')
    """
    return _packed(source, out, format="jsonl", columns=columns, root=root, **settings)


def from_image_folder(source: Path, out: Path, **settings: Any) -> _native.Dataset:
    """Converts a directory with one directory of images per class, as ``ImageFolder`` of torchvision reads it.

    The label, the field ``cls``, is the number of the directory in the order of names; the names go to
    ``classes.json`` next to the shards.

    Args:
        source: directory of the directories.
        out: directory or URL of the shards; must not contain shards yet.
        settings: further settings of `pack`: ``shard_bytes``, ``shard_samples``, ``zstd``, ``allow_outside``.

    Raises:
        DataError: there is no directory in it, or ``out`` contains shards.

    Examples:
        >>> import pathlib
        >>> raw = dflop.Loader("shards/", read=dflop.Read(fields="0.png", decode="raw"))
        >>> for name, sample in zip(["cat", "dog"], next(iter(raw)).samples[1:]):
        ...     directory = pathlib.Path("animals") / name
        ...     directory.mkdir(parents=True)
        ...     size = (directory / "1.png").write_bytes(bytes(sample["0.png"]))
        >>> dataset = dflop.from_image_folder("animals/", "labeled/")
        >>> [(sample.key, sample["cls"]) for sample in dataset[:]]
        [('cat/1', 0), ('dog/1', 1)]
        >>> pathlib.Path("labeled/classes.json").read_text()
        '["cat","dog"]'
    """
    return _packed(source, out, format="files", label_from="directory", **settings)


def from_mds(
    source: Path, out: Path, *, columns: Mapping[str, str] | None = None, **settings: Any
) -> _native.Dataset:
    """Converts a local directory of MosaicML Streaming, format MDS, to shards; pickled columns are left out.

    The library ``streaming`` of MosaicML reads the directory: ``pip install mosaicml-streaming``. Columns become
    fields as in a table, see `from_parquet`; media keep the bytes that are stored, arrays become ``npy``.

    Args:
        source: directory with ``index.json`` and the shards, compressed or not.
        out: directory or URL of the shards; must not contain shards yet.
        columns: what columns become, where their names do not tell; see `pack`.
        settings: further settings of `pack`: ``shard_bytes``, ``shard_samples``, ``zstd``.

    Raises:
        ImportError: ``mosaicml-streaming`` is not installed.
        DataError: no row is a sample, a file is damaged, or ``out`` contains shards.

    Examples:
        >>> import streaming
        >>> with streaming.MDSWriter(out="mds/", columns={"text": "str", "label": "int"}) as writer:
        ...     for label, text in enumerate(["a red kite", "a lake"]):
        ...         writer.write({"text": text, "label": label})
        >>> dataset = dflop.from_mds("mds/", "captions/", columns={"text": "txt"})
        >>> [(sample["txt"], sample["cls"]) for sample in dataset[:]]
        [('a red kite', 0), ('a lake', 1)]
    """
    report = pack_stored("mds", mds_rows, pathlib.Path(source), os.fspath(out), columns=columns, **settings)
    return _dataset(report, out)


def from_litdata(
    source: Path, out: Path, *, columns: Mapping[str, str] | None = None, **settings: Any
) -> _native.Dataset:
    """Converts a local directory of litdata to shards; pickled values are left out.

    The library reads the directory: ``pip install litdata``. The values of an item become fields as the columns
    of a table do, see `from_parquet`: those of a list are named ``0``, ``1``, …, a single value ``value``.

    Args:
        source: directory with ``index.json`` and the chunks.
        out: directory or URL of the shards; must not contain shards yet.
        columns: what columns become, where their names do not tell; see `pack`.
        settings: further settings of `pack`: ``shard_bytes``, ``shard_samples``, ``zstd``.

    Raises:
        ImportError: ``litdata`` is not installed.
        DataError: no item is a sample, a file is damaged, or ``out`` contains shards.

    Examples:
        >>> dataset = dflop.from_litdata("optimized/", "captions/", columns={"text": "txt"})  # doctest: +SKIP
    """
    report = pack_stored(
        "litdata", litdata_rows, pathlib.Path(source), os.fspath(out), columns=columns, **settings
    )
    return _dataset(report, out)


def _packed(source: Names, out: Path, **settings: Any) -> _native.Dataset:
    return _dataset(pack(source, out, **settings), out)


def _dataset(report: dict[str, Any], out: Path) -> _native.Dataset:
    skipped: Sequence[dict[str, str]] = report["skipped"]
    if skipped:
        first = f"{skipped[0]['path']}: {skipped[0]['reason']}"[:_REASON_MAX]
        message = (
            f"{len(skipped)} files or rows were not packed, the first: {first}; `dflop.pack` returns all"
        )
        warnings.warn(message, stacklevel=4)
    return _native.Dataset(os.fspath(out))


def _is_paths(source: object) -> bool:
    return isinstance(source, list | tuple) and all(isinstance(path, str | os.PathLike) for path in source)


def _tables(dataset: Any) -> Iterator[bytes]:
    """Yields the rows of a dataset of Hugging Face as Arrow IPC streams, with their features."""
    # Looked up by name, because it has no types.
    pyarrow = importlib.import_module("pyarrow")

    batches: Iterable[Any] = dataset.with_format("arrow").iter(batch_size=_BATCH_ROWS)
    features = getattr(dataset, "features", None)
    schema = features.arrow_schema if features is not None else None
    for table in batches:
        if schema is not None:
            table = table.replace_schema_metadata(schema.metadata)
        sink = pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        yield sink.getvalue().to_pybytes()
