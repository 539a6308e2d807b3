"""Reads shards through ``fsspec`` where dflop has no store for the scheme of a URL.

The native module calls this from threads of its own, one call per request. A file system is found by the root
of a URL, ``SCHEME://FIRST``, and takes its settings from the configuration of ``fsspec``.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping
from datetime import datetime
from typing import Any

Version = tuple[int, float, str]
"""Length in bytes, seconds of the last change since 1970 or 0, and a tag that changes with the file."""
MODIFIED = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")
"""Names of the last change in descriptions of files."""


class Files:
    """Files below the root of a URL.

    - `root`: scheme and first name, such as ``memory://train``

    Raises:
        ImportError: ``fsspec`` or the package of the scheme is not installed.
        ValueError: ``fsspec`` does not know the scheme, or refuses its settings.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        scheme = root.partition("://")[0]
        try:
            self._fsspec = importlib.import_module("fsspec.core")
        except ImportError:
            raise ImportError(
                f"`{scheme}://` is not supported without fsspec: install `fsspec` and its package for "
                f"{scheme}, or use s3, gs, az, abfs, abfss, hf, http or https"
            ) from None
        # File systems that run on an event loop are for all threads, others are kept by fsspec for each.
        try:
            found = self._found()
        except ImportError as error:
            raise ImportError(f"`{scheme}://` needs another package: {error}") from None
        except ValueError as error:
            raise ValueError(f"`{scheme}://` is not supported, not by fsspec either: {error}") from None
        self._shared = found if getattr(found, "async_impl", False) else None
        self._versions: dict[str, Version] = {}

    def version(self, key: str) -> Version:
        """Requests the version of a file.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file system does not know its length.
        """
        found: Mapping[str, Any] = self._files().info(self._path(key))
        if found.get("type") == "directory":
            raise FileNotFoundError(f"`{self._root}/{key}` is a directory")
        size = found.get("size")
        if size is None:
            raise ValueError(f"the file system reports no length of `{self._root}/{key}`")
        self._versions[key] = made = (int(size), _modified(found), _tag(found))
        return made

    def read(self, key: str, start: int, end: int) -> tuple[bytes, Version]:
        """Returns bytes of a file, and its version when it was opened."""
        version = self._versions.get(key) or self.version(key)
        content = bytes(self._files().cat_file(self._path(key), start=start, end=end)) if end > start else b""
        return content, version

    def listed(self, directory: str) -> list[tuple[str, int]]:
        """Returns the names and sizes of the files directly in a directory; none if there is no directory."""
        files, path = self._files(), self._path(directory)
        # Listings may be kept since the last call.
        files.invalidate_cache(path)
        try:
            found = [one for one in files.ls(path, detail=True) if one.get("type") != "directory"]
        except FileNotFoundError:
            return []
        return [(str(one["name"]).rpartition("/")[2], one.get("size") or 0) for one in found]

    def _files(self) -> Any:
        return self._shared or self._found()

    def _found(self) -> Any:
        return self._fsspec.url_to_fs(self._root)[0]

    def _path(self, key: str) -> str:
        return str(self._files()._strip_protocol(f"{self._root}/{key}" if key else self._root))


def _modified(found: Mapping[str, Any]) -> float:
    for name in MODIFIED:
        value = found.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return 0.0


def _tag(found: Mapping[str, Any]) -> str:
    """Returns a hash of the description, as ``fsspec`` itself computes it."""
    return hashlib.sha256(repr(sorted(found.items(), key=lambda one: str(one[0]))).encode()).hexdigest()[:32]
