"""Exceptions of the package, divided by what the caller can do about them.

Every error has the fields of the Rust error as attributes, such as ``shard``, ``offset`` and ``key``, and its
``kind``, the name of the case in snake case.
"""

from __future__ import annotations

from typing import Any


class Error(Exception):
    """Base of all errors of this package.

    Attributes:
        kind: name of the case, such as ``"error_budget"``.
        fields: details by name, also available as attributes.
    """

    kind: str = "error"

    def __init__(self, message: str, kind: str = "error", fields: dict[str, Any] | None = None) -> None:
        # The base gets all arguments, so that the error can be pickled.
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
    """A setting is invalid; raised by constructors and functions.

    Iteration raises it in one case: a loader without an index finds at the end of its first epoch that no sample has
    a field that a setting names.
    """


class DataError(Error):
    """The data cannot be used: a damaged shard, no samples, a source that cannot be packed."""


class ErrorBudgetError(DataError):
    """More samples are bad than the error budget allows; ``first`` is the first of them."""


class ReadError(Error):
    """A file or a store cannot be read or written."""


class StateError(Error, ValueError):
    """A saved state belongs to another dataset or another order."""


class PlanError(Error):
    """A step, a partition or a parallelism cannot be planned."""


class ModelError(Error, ValueError):
    """A model, a device or a profile is invalid, or does not cover the request."""


class UserCodeError(Error):
    """A user function failed: a cost function, or a call of a transform as a whole."""


class StalledError(Error, TimeoutError):
    """The loader made no progress for longer than allowed; a state taken now resumes exactly."""


class StageError(Error, RuntimeError):
    """A stage of the loader ended without an error, which is a defect."""


class SharedError(Error, RuntimeError):
    """A rank of a shared loader is missing, has ended, or stands elsewhere than the others."""


class ForkError(Error, RuntimeError):
    """This process was forked after threads of the package had started, which do not exist in a fork."""
