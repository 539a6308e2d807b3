"""Writes samples from Python to shards, with their index."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from dflop import _native

# Formats that Pillow writes, by the extension of a field.
_IMAGE_FORMATS = {
    "jpg": "JPEG",
    "jpeg": "JPEG",
    "png": "PNG",
    "webp": "WEBP",
    "gif": "GIF",
    "bmp": "BMP",
    "tif": "TIFF",
    "tiff": "TIFF",
}
# Quality of JPEG and lossy WebP images that are encoded here.
_QUALITY = 95


class Writer:
    """Writes samples to numbered shards in one directory; the index is ready when it is closed.

    A shard appears under its name when it is complete, so that a killed program leaves whole shards only. A
    ``with`` block that ends by an exception removes the shard under construction and writes no index.

    Args:
        path: directory or URL of the shards; must not contain shards yet, unless ``append`` is set.
        shard_bytes: size in bytes at which the next shard starts, before compression. Default: 256 MiB.
        shard_samples: number of samples at which the next shard starts. Default: no limit.
        zstd: compresses shards; ranges of them cannot be read then.
        index: writes the index, whose rows are collected while samples are written.
        append: adds shards to those in the directory, and removes what a killed writer left.

    Raises:
        ConfigError: a setting is invalid.
        DataError: ``path`` contains shards.
        ReadError: it cannot be created.

    Examples:
        >>> with dflop.Writer("captions/", shard_samples=2) as writer:
        ...     for number, caption in enumerate(["a red kite", "a lake", "two dogs"]):
        ...         writer.write({"txt": caption, "json": {"source": "me"}, "cls": number})
        >>> writer.samples, writer.shards
        (3, ['captions/shard-000000.tar', 'captions/shard-000001.tar'])
        >>> [sample["txt"] for sample in writer.dataset()[:]]
        ['a red kite', 'a lake', 'two dogs']

        Later, more shards are added:

        >>> with dflop.Writer("captions/", append=True) as writer:
        ...     writer.write({"__key__": "hill", "txt": "a hill"})
        >>> len(dflop.Dataset("captions/"))
        4
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        shard_bytes: int | None = None,
        shard_samples: int | None = None,
        zstd: bool = False,
        index: bool = True,
        append: bool = False,
    ) -> None:
        self._path = os.fspath(path)
        self._samples = 0
        self._report: dict[str, Any] | None = None
        self._writer = _native.ShardWriter(
            self._path,
            shard_bytes=shard_bytes,
            shard_samples=shard_samples,
            zstd=zstd,
            index=index,
            append=append,
        )

    def write(self, sample: Mapping[str, Any]) -> None:
        """Appends one sample.

        Args:
            sample: values by the extensions of their fields, in order. ``__key__`` is the key, by default the
                number of the sample in nine digits; other names that start with ``__`` are passed over, as is
                ``None``. Bytes are written as they are. Other values are encoded by the last part of the
                extension: ``json`` takes what the module ``json`` takes; ``jpg``, ``png``, ``webp``, … a
                Pillow image or an array of pixels; ``npy`` an array; every other extension text or a number.

        Raises:
            TypeError: a value cannot be encoded.
            DataError: the sample would not be read back as it is, for example because a key has a dot in its
                base name; nothing of it is written.
            ReadError: the shard cannot be written.
            ValueError: the writer is closed.

        Examples:
            >>> import numpy
            >>> image = dflop.Dataset("shards/")[1]["0.png"]
            >>> with dflop.Writer("crops/") as writer:
            ...     writer.write({"__key__": "a/0", "npy": image[:8, :8], "json": {"caption": "stripes"}})
            >>> sample = writer.dataset()[0]
            >>> sample["npy"].shape, sample["json"]
            ((8, 8, 3), {'caption': 'stripes'})
        """
        key = sample.get("__key__")
        if key is None:
            key = f"{self._samples:09}"
        fields = [
            (name, _encoded(name, value))
            for name, value in sample.items()
            if not name.startswith("__") and value is not None
        ]
        self._writer.write(str(key), fields)
        self._samples += 1

    @property
    def samples(self) -> int:
        """Number of samples written so far."""
        return self._samples

    @property
    def shards(self) -> list[str]:
        """Paths of the shards, after closing."""
        return [] if self._report is None else list(self._report["shards"])

    def close(self) -> None:
        """Completes the last shard and the index; closing twice does nothing.

        Raises:
            ReadError: the shard or the index cannot be written.

        Examples:
            >>> writer = dflop.Writer("captions/")
            >>> writer.write({"txt": "a kite"})
            >>> writer.close()
            >>> writer.shards
            ['captions/shard-000000.tar']
        """
        if self._report is None:
            self._report = self._writer.finish()

    def dataset(self, **settings: Any) -> _native.Dataset:
        """Closes the writer and opens the dataset that was written, with settings of `Dataset`.

        Raises:
            ConfigError: no sample was written.

        Examples:
            >>> writer = dflop.Writer("captions/")
            >>> writer.write({"txt": "a kite"})
            >>> writer.dataset().reindex(verify=True).skipped
            []
        """
        self.close()
        return _native.Dataset(self._path, **settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._writer.abort()

    def __repr__(self) -> str:
        return f"Writer({self._path!r}, samples={self._samples})"


def _encoded(name: str, value: Any) -> bytes:
    """Returns the payload of a field."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    extension = name.rsplit(".", 1)[-1].lower()
    if extension == "json":
        return json.dumps(value, ensure_ascii=False).encode()
    if extension in _IMAGE_FORMATS:
        return _image(name, _IMAGE_FORMATS[extension], value)
    if extension == "npy":
        return _array(name, value)
    if isinstance(value, str):
        return value.encode()
    if _is_number(value):
        value = value.item()
    if isinstance(value, bool | int | float):
        return str(int(value) if isinstance(value, bool) else value).encode()
    raise _refusal(name, value, "bytes, text or a number")


def _image(name: str, format: str, value: Any) -> bytes:
    """Returns an image of Pillow, or an array of its pixels, in a format."""
    if not hasattr(value, "save"):
        if not hasattr(value, "__array__"):
            raise _refusal(name, value, "bytes, a Pillow image or an array of pixels")
        import numpy

        pixels = numpy.asarray(value)
        if pixels.dtype != numpy.uint8:
            found = f"an array of `{pixels.dtype}`"
            raise TypeError(
                f"field `{name}`: expected pixels of `uint8`, height by width by 3, found {found}"
            )
        try:
            from PIL import Image
        except ImportError as error:
            message = f"field `{name}`: pixels are written as {format} by Pillow: pip install pillow"
            raise ImportError(message) from error
        value = Image.fromarray(pixels)
    file = io.BytesIO()
    options = {"quality": _QUALITY} if format in ("JPEG", "WEBP") else {}
    try:
        value.save(file, format=format, **options)
    except (OSError, ValueError) as error:
        raise TypeError(f"field `{name}`: the image cannot be written as {format}: {error}") from error
    return file.getvalue()


def _array(name: str, value: Any) -> bytes:
    """Returns an array as an ``.npy`` file."""
    if not hasattr(value, "__array__") and not hasattr(value, "__dlpack__"):
        raise _refusal(name, value, "bytes or an array")
    import numpy

    file = io.BytesIO()
    try:
        numpy.save(file, numpy.asarray(value), allow_pickle=False)
    except ValueError as error:
        raise TypeError(f"field `{name}`: the array cannot be written: {error}") from error
    return file.getvalue()


def _is_number(value: Any) -> bool:
    """Returns whether a value is a scalar of NumPy or PyTorch."""
    return getattr(value, "shape", None) == () and hasattr(value, "item")


def _refusal(name: str, value: Any, expected: str) -> TypeError:
    return TypeError(f"field `{name}`: expected {expected}, found `{type(value).__name__}`")
