"""What can go wrong, by what the caller does next.

Every error has the fields of the Rust error as attributes, such as ``shard``, ``offset`` and ``key``, and its ``kind``,
the name of the case in snake case.
"""

from __future__ import annotations

from typing import Any


class Error(Exception):
    """Base of all errors of this package.

    Attributes:
        kind: name of the case, such as ``"error_budget"``.
        fields: everything that the error knows, by name; also available as attributes.
    """

    kind: str = "error"

    def __init__(self, message: str, kind: str = "error", fields: dict[str, Any] | None = None) -> None:
        # All arguments go to the base, so that an error can be sent to another process.
        super().__init__(message, kind, fields or {})
        self.kind = kind
        self.fields = fields or {}

    def __str__(self) -> str:
        return str(self.args[0])

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(
            f"`{type(self).__name__}` has no `{name}`; it has {', '.join(fields) or 'no fields'}"
        )


class ConfigError(Error, ValueError):
    """A setting makes no sense; raised when something is built, never while it streams."""


class DataError(Error):
    """The data cannot be used: a damaged shard, no samples, a source that cannot be packed."""


class ErrorBudgetError(DataError):
    """More samples are bad than the error budget tolerates; ``first`` is the first of them."""


class ReadError(Error):
    """A file or a store cannot be read or written."""


class StateError(Error, ValueError):
    """A saved state belongs to another dataset or another order."""


class PlanError(Error):
    """A global batch, a partition or a parallelism cannot be planned."""


class ModelError(Error, ValueError):
    """A model, a device or a profile makes no sense, or cannot answer."""


class UserCodeError(Error):
    """A function of the user cannot be gone on with: a cost function, or a call of a transform as a whole."""


class StalledError(Error, TimeoutError):
    """Nothing has happened for longer than was allowed; a state taken now goes on exactly."""


class StageError(Error, RuntimeError):
    """A part of the loader ended without a word: a defect."""


class ForkError(Error, RuntimeError):
    """This process was forked after threads of this package had started, which do not live on in a fork."""
