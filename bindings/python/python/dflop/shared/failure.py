"""Exceptions of the reader, as text: their type by name, their message, and of this package their details."""

from __future__ import annotations

import builtins
from typing import Any

from dflop import errors
from dflop.errors import SharedError

_PLAIN = (str, int, float, bool, type(None))


def described(error: BaseException) -> dict[str, Any]:
    """Returns what ranks raise an exception of."""
    name = type(error).__name__
    made: dict[str, Any] = {"type": name, "message": str(error)}
    if isinstance(error, errors.Error) and type(error) is getattr(errors, name, None):
        made |= {"kind": error.kind, "fields": {key: _plain(one) for key, one in error.fields.items()}}
    elif type(error) is getattr(builtins, name, None) and all(type(one) in _PLAIN for one in error.args):
        made["args"] = list(error.args)
        # The arguments of one with a file have lost it.
        if isinstance(error, OSError) and error.filename is not None and len(error.args) == 2:
            made["args"].append(str(error.filename))
    return made


def raised(described: dict[str, Any]) -> Exception:
    """Returns the exception: of this package or of Python by its type, any other as a `SharedError`."""
    name, message = described["type"], described["message"]
    if "kind" in described:
        made = getattr(errors, name, None)
        if isinstance(made, type) and issubclass(made, errors.Error):
            return made(message, described["kind"], described["fields"])
    if "args" in described:
        made = getattr(builtins, name, None)
        # Not those that end an interpreter, nor one that would end a loop without a word.
        if isinstance(made, type) and issubclass(made, Exception) and not issubclass(made, StopIteration):
            return made(*described["args"])
    return SharedError(f"{name}: {message}", "shared_failure")


def _plain(value: Any) -> Any:
    """Returns a value of JSON: of any other type its text."""
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    return value if type(value) in _PLAIN else str(value)
