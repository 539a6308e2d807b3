"""Indexes and packs datasets, here or as tasks of another engine: Ray, Spark, Slurm, a process pool.

Tasks are independent: each reads shards, or packs a contiguous part of a source, and returns a small result.
Any mapping function runs them: ``map(function, iterable)`` of an executor,
``ray.util.multiprocessing.Pool().map``.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from dflop import _native

if TYPE_CHECKING:
    from dflop.commands import Names

Map = Callable[[Callable[[Any], Any], list[Any]], Iterable[Any]]


def index(
    dataset: _native.Dataset | Names,
    *,
    rebuild: bool = False,
    verify: bool = False,
    map: Map | None = None,
    shards_per_task: int = 1,
    **settings: Any,
) -> dict[str, Any]:
    """Builds the index of a dataset, the location and shape of every sample; an index that fits is kept.

    Args:
        dataset: a `Dataset`, or shards with the ``settings`` of one.
        rebuild: builds the index even if the present one fits the shards.
        verify: decodes every field meanwhile, so that every bad sample is known in advance; rebuilds the
            index.
        map: runs tasks: called with a function that can be pickled and a list of arguments, it returns the
            results in any order. Tasks must see the shards under the same URLs or base names. Default:
            threads of this process.
        shards_per_task: number of shards that a task reads.

    Returns:
        ``shards``, ``samples``, ``bytes``, ``seconds``, ``fingerprint``, ``path``, ``skipped`` (bad samples
        and shards), ``warnings``, ``samples_without_target``, ``unused`` (parts of samples that nothing uses).

    Raises:
        ReadError: a shard cannot be read, or has changed since a task read it.
        DataError: no sample is good.

    Examples:
        >>> report = dflop.index("shards/", index="indexes/")
        >>> report["shards"], report["samples"], report["skipped"]
        (4, 256, [])

        As tasks, here of a pool of threads, each of two shards:

        >>> from concurrent.futures import ThreadPoolExecutor
        >>> with ThreadPoolExecutor(2) as pool:
        ...     report = dflop.index("shards/", map=pool.map, shards_per_task=2, rebuild=True)
        >>> report["samples"]
        256
    """
    started = time.perf_counter()
    if not isinstance(dataset, _native.Dataset):
        dataset = _native.Dataset(dataset, **settings)
    elif settings:
        raise TypeError(
            f"expected no settings with a `Dataset`, which has its own, found {', '.join(settings)}"
        )
    if rebuild or verify:
        dataset = dataset.reindex(verify=verify)
    if map is not None:
        shards, at_once = dataset.shards, max(shards_per_task, 1)
        tasks = [shards[start : start + at_once] for start in range(0, len(shards), at_once)]
        # The first item of `__reduce__` builds a dataset of given shards with the same settings, so that a
        # task only lists its own shards.
        make = dataset.__reduce__()[0]
        _native.merge_index(dataset, list(map(functools.partial(_index_part, make), tasks)))
    return {
        "shards": len(dataset.shards),
        "samples": len(dataset),
        "bytes": dataset.payload_bytes,
        "fingerprint": dataset.fingerprint,
        "path": dataset.index_path,
        "skipped": dataset.skipped,
        "warnings": dataset.warnings,
        "samples_without_target": dataset.samples_without_target,
        "unused": dataset.unused,
        "seconds": time.perf_counter() - started,
    }


def dataset_again(
    make: Callable[[list[str]], _native.Dataset], calls: list[tuple[str, dict[str, Any]]], shards: list[str]
) -> _native.Dataset:
    """Creates a pickled dataset: constructs it, and calls the methods that changed it."""
    dataset = make(shards)
    for name, arguments in calls:
        dataset = getattr(dataset, name)(**arguments)
    return dataset


def _index_part(make: Callable[[list[str]], _native.Dataset], shards: list[str]) -> bytes:
    return _native.index_part(make(shards), shards)


def pack(
    source: Names,
    out: str | os.PathLike[str],
    *,
    shard_bytes: int | None = None,
    shard_samples: int | None = None,
    index: bool = True,
    zstd: bool = False,
    format: str | None = None,
    split: str | None = None,
    columns: Mapping[str, str] | None = None,
    label_from: Literal["directory"] | None = None,
    root: str | os.PathLike[str] | None = None,
    allow_outside: bool = False,
    map: Map | None = None,
    tasks: int | None = None,
) -> dict[str, Any]:
    """Writes shards from files, manifests, Parquet, Arrow or Hugging Face datasets.

    Args:
        source: directory, manifest (LLaVA-style JSON or JSONL, audio manifest, CSV), Parquet or Arrow file,
            or a list of these; see ``docs/data-in.md``.
        out: directory or URL of the shards; must not contain shards yet.
        shard_bytes: size in bytes at which the next shard starts, before compression. Default: 256 MiB.
        shard_samples: number of samples at which the next shard starts. Default: no limit.
        index: writes the index too.
        zstd: compresses shards; ranges of them cannot be read then.
        format: ``files``, ``jsonl``, ``json``, ``csv``, ``parquet``, ``arrow`` or ``huggingface``. Default:
            recognized by the content.
        split: split to pack of tables that have several.
        columns: what columns become: the extension of a field (``{"caption": "txt", "photo": "jpg"}``), a
            column that loaders know (``{"chat": "messages"}``), or the key (``{"uid": "__key__"}``). Others
            go where their names and contents put them.
        label_from: ``directory`` makes the field ``cls`` of the directory at the top of ``source`` that a
            file lies in; the names go to ``classes.json`` next to the shards.
        root: directory that the paths of a manifest or table are relative to. Default: its own directory.
        allow_outside: packs files outside of the source too: paths of a manifest that lead out of ``root``,
            and links that lead out of a directory.
        map: runs tasks, see `index`; all must see ``source``, one path, and ``out``.
        tasks: number of tasks. Default: one per core of this machine.

    Returns:
        ``shards`` (paths), ``samples``, ``bytes``, ``index`` (path), ``fields`` (number by extension),
        ``columns`` (fields that each column is in), ``classes`` (names in the order of their labels),
        ``skipped``: files and rows that cannot be packed, with ``path`` and ``reason``.

    Raises:
        DataError: the source has no sample, or ``out`` contains shards.
        ReadError: a file cannot be read or written.
        ConfigError: a setting is invalid.

    Examples:
        >>> import pathlib
        >>> pathlib.Path("files").mkdir()
        >>> for name in ("kite", "lake"):
        ...     size = pathlib.Path(f"files/{name}.txt").write_text(f"a {name}")
        >>> report = dflop.pack("files/", "packed/", shard_samples=1)
        >>> report["shards"], report["samples"], report["fields"]
        (['packed/shard-000000.tar', 'packed/shard-000001.tar'], 2, {'txt': 2})
    """
    settings = pack_settings(
        shard_bytes=shard_bytes,
        shard_samples=shard_samples,
        index=index,
        zstd=zstd,
        format=format,
        split=split,
        columns=columns,
        label_from=label_from,
        root=root,
        allow_outside=allow_outside,
    )
    one = isinstance(source, str | os.PathLike)
    sources = [source] if isinstance(source, str | os.PathLike) else list(source)
    if map is None:
        return _native.pack_all(sources, out, settings)
    if not one and len(sources) != 1:
        raise TypeError(
            "expected one source with `map`, because tasks share its entries; pack each by itself"
        )
    parts = _native.pack_list(sources[0], tasks or os.cpu_count() or 1, settings)
    task = functools.partial(_pack_part, os.fspath(sources[0]), os.fspath(out), settings)
    return _native.pack_finish(out, list(map(task, parts)), settings)


def pack_settings(
    *,
    shard_bytes: int | None = None,
    shard_samples: int | None = None,
    index: bool = True,
    zstd: bool = False,
    format: str | None = None,
    split: str | None = None,
    columns: Mapping[str, str] | None = None,
    label_from: str | None = None,
    root: str | os.PathLike[str] | None = None,
    allow_outside: bool = False,
) -> dict[str, Any]:
    """Returns the settings of packing, as the compiled functions take them."""
    return {
        "shard_bytes": shard_bytes,
        "shard_samples": shard_samples,
        "index": index,
        "zstd": zstd,
        "format": format,
        "split": split,
        "columns": dict(columns or {}),
        "label_from": label_from,
        "root": root,
        "allow_outside": allow_outside,
    }


def _pack_part(source: str, out: str, settings: dict[str, Any], part: bytes) -> bytes:
    return _native.pack_one(source, out, part, settings)
