"""Describes checkpoints that no family of dflop reads where they are named as a model, and keeps them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from dflop import _native
from dflop.errors import ConfigError

# Files that a description depends on, in a checkpoint directory.
_FILES = (
    "config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "tokenizer_config.json",
    "chat_template.json",
    "chat_template.jinja",
)
_PACKAGES = ("torch", "transformers")
_log = logging.getLogger("dflop")


def names(given: Sequence[str]) -> list[str]:
    """Replaces checkpoint directories of unknown types by their descriptions.

    A name stays as it is if a family reads the checkpoint, if the directory has a ``model.json``, or without
    ``torch`` and ``transformers``.

    Raises:
        ModelError: the checkpoint cannot be described; the message tells what to do.
    """
    return [_name(name) for name in given]


def model(value: Any) -> Any:
    """Replaces directories in the model argument of a command; other values stay."""
    if isinstance(value, str | os.PathLike):
        return _name(os.fspath(value))
    if isinstance(value, Sequence):
        return [model(one) for one in value]
    return value


def _name(name: str) -> str:
    directory = Path(name)
    try:
        config = directory / "config.json"
        if not config.is_file() or (directory / "model.json").is_file():
            return name
        document = json.loads(config.read_bytes())
    except (OSError, ValueError):
        return name  # The reader of the model tells what is wrong.
    if not isinstance(document, dict) or not isinstance(document.get("model_type"), str):
        return name
    versions = _versions()
    if versions is None or _is_by_hand(document):
        return name
    return str(_described(directory, versions))


def _is_by_hand(config: dict[str, Any]) -> bool:
    """Whether a family reads the type, and that of the language model in it if transformers has it."""
    if config["model_type"] not in _known_types():
        return False
    text = config.get("text_config")
    model_type = text.get("model_type") if isinstance(text, dict) else None
    if model_type is None or model_type in _known_types():
        return True
    from transformers import CONFIG_MAPPING

    return model_type not in CONFIG_MAPPING


@lru_cache(maxsize=1)
def _known_types() -> frozenset[str]:
    families = json.loads(_native.command(["models", "--json"]))["families"]
    return frozenset(model_type for family in families for model_type in family["model_types"])


def _versions() -> list[str] | None:
    """Returns the versions that a description depends on; nothing if a package is missing."""
    try:
        return [_native.__version__, *(importlib.metadata.version(name) for name in _PACKAGES)]
    except importlib.metadata.PackageNotFoundError:
        return None


def _described(directory: Path, versions: Iterable[str]) -> Path:
    target = _cache() / f"{_key(directory, versions)}.json"
    if not target.is_file():
        from dflop import hugging_face

        _log.info("describing %s, which no family of dflop reads, into %s", directory, target)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            hugging_face.describe(directory, path=target)
        except OSError as error:
            raise ConfigError(f"could not write {target}: {error}; set XDG_CACHE_HOME") from error
    return target


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return Path(home or Path.home() / ".cache", "dflop", "models")


def _key(directory: Path, versions: Iterable[str]) -> str:
    digest = hashlib.sha256()
    # A description has the name of its directory.
    for text in (directory.resolve().name, *versions):
        digest.update(text.encode() + b"\0")
    for name in _FILES:
        file = directory / name
        digest.update(file.read_bytes() if file.is_file() else b"")
        digest.update(b"\0")
    return digest.hexdigest()[:32]
