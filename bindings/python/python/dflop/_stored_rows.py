"""Packs the rows of datasets that other libraries read: MosaicML Streaming (MDS) and litdata.

A damaged file ends packing with an error that names it. A row that cannot be read is skipped with the reason.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from dflop import _native
from dflop._stored_values import UnreadableError
from dflop.errors import ConfigError, DataError, ReadError
from dflop.offline import pack_settings

# Columns of a row by name, in order, or the reason for skipping the row.
Columns: TypeAlias = list[tuple[str, Any]] | str
# File, number of the row in it, columns.
Row: TypeAlias = tuple[str, int, Columns]

# Most characters of a foreign text in a message.
_SHOWN_MAX = 80
_REASON_MAX = 300


def pack_stored(
    format: str, rows: Callable[[Path], Iterator[Row]], source: Path, out: str, **settings: Any
) -> dict[str, Any]:
    """Packs the rows of a directory; returns the report of `pack`.

    Raises:
        ConfigError: a split is chosen.
        DataError: no row is a sample, a file is damaged, or ``out`` contains shards.
        ReadError: a file cannot be read or written.
        ImportError: the library of the format is not installed.
    """
    if settings.get("split") is not None:
        reason = f"a source of the format {format} has no splits; leave it out"
        raise ConfigError(f"invalid `split`: {reason}", "config", {"setting": "split", "reason": reason})
    prepared = pack_settings(**settings)
    return _native.pack_rows(rows(source), source, out, prepared)


def library(module: str, package: str) -> Any:
    """Returns a module of a library.

    Raises:
        ImportError: the library is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        message = f"reading this format needs `{package}`: pip install {package} ({error})"
        raise ImportError(message) from error


def damaged(path: Path, reason: str) -> DataError:
    """Returns the error for a file that cannot be used."""
    shown, reason = os.fspath(path), reason[:_REASON_MAX]
    fields = {"path": shown, "reason": reason}
    return DataError(f"could not pack `{shown}`: {reason}", "pack", fields)


def inaccessible(path: Path, error: OSError) -> ReadError:
    """Returns the error for a file that cannot be accessed."""
    cause = f"{error.strerror} (os error {error.errno})" if error.strerror else str(error)
    message = f"could not access `{path}`\n  because: {cause}"
    return ReadError(message, "file", {"path": os.fspath(path)})


def excerpt(shown: str, characters: int = _SHOWN_MAX) -> str:
    """Returns the start of a foreign text."""
    return shown if len(shown) <= characters else f"{shown[: characters - 1]}…"


def open_file(path: Path, named: Path | None = None) -> BinaryIO:
    """Opens a regular file; errors name it, or `named` in its place.

    Raises:
        ReadError: it cannot be opened; a pipe would be waited for.
    """
    try:
        if path.exists() and not path.is_file():
            raise OSError("not a regular file")
        return path.open("rb")
    except OSError as error:
        raise inaccessible(named or path, error) from error


def read_file(path: Path) -> bytes:
    """Returns the content of a regular file."""
    with open_file(path) as file:
        try:
            return file.read()
        except OSError as error:
            raise inaccessible(path, error) from error


def read_index(directory: Path) -> Any:
    """Returns the `index.json` of a directory."""
    path = directory / "index.json"
    try:
        return json.loads(read_file(path))
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"expected JSON: {error}") from error


def inside(directory: Path, name: str) -> Path:
    """Returns the path of a file that an index names, which must lie in the directory."""
    path = directory / name
    is_plain = ".." not in name.replace("\\", "/").split("/") and not Path(name).is_absolute()
    if is_plain and path.resolve().is_relative_to(directory.resolve()):
        return path
    raise damaged(directory / "index.json", f"it names `{excerpt(name)}`, outside of its directory")


class Items:
    """Items of a file without compression: a count, offsets, then the items, with numbers of 32 bits.

    Libraries read what the offsets say, so they are checked before.

    Args:
        path: file that is read.
        named: file that errors name.
        items: number of items that the index counts.
        noun: what an item is, for errors.
    """

    def __init__(self, path: Path, named: Path, items: int, noun: str) -> None:
        with open_file(path, named) as file:
            size = os.fstat(file.fileno()).st_size
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        if len(self._map) < 4:
            raise damaged(named, "the file ends early")
        (count,) = struct.unpack_from("<I", self._map)
        if len(self._map) < 4 * (count + 2):
            raise damaged(named, "the file ends early")
        self.offsets = struct.unpack_from(f"<{count + 1}I", self._map, 4)
        if any(end < start for start, end in zip(self.offsets, self.offsets[1:], strict=False)):
            raise damaged(named, "the file is damaged: its offsets go backwards")
        if self.offsets[0] < 4 * (count + 2):
            raise damaged(named, "the file is damaged: its items overlap its offsets")
        if count != items:
            raise damaged(named, f"it has {count} {noun}, and `index.json` counts {items}")
        if self.offsets[-1] > len(self._map):
            raise damaged(named, "the file ends early")

    def is_blank(self) -> bool:
        """Returns whether there are items, all of them without bytes."""
        return len(self.offsets) > 1 and self.offsets[0] == self.offsets[-1]

    def check_lengths(self, item: int, values: int) -> None:
        """Checks that the values of an item, whose lengths come first, end within it.

        Raises:
            UnreadableError: they do not.
        """
        start, end = self.offsets[item : item + 2]
        left = end - start - 4 * values
        if left < 0:
            raise UnreadableError(f"it ends early: expected {4 * values} bytes, found {end - start}")
        for length in struct.unpack_from(f"<{values}I", self._map, start):
            if length > left:
                raise UnreadableError(f"it ends early: expected {length} bytes, found {left}")
            left -= length


def named_value(column: str, decode: Callable[[], Any]) -> Any:
    """Decodes a value; a failure names the column."""
    try:
        return decode()
    except UnreadableError as error:
        raise UnreadableError(f"column `{column}`: {error}") from error
