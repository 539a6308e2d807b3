"""Exceptions of the package, divided by what the caller can do about them.

Every error has the fields of the Rust error as attributes, such as ``shard``, ``offset`` and ``key``, and its
``kind``, the name of the case in snake case.
"""

from __future__ import annotations

from typing import Any

from dflop._hints import with_hint


class Error(Exception):
    """Base of all errors of this package.

    Attributes:
        kind: name of the case, such as ``"error_budget"``.
        fields: details by name, also available as attributes.

    Examples:
        >>> try:
        ...     dflop.Loader("shards/", batch_size=0)
        ... except dflop.Error as error:
        ...     print(type(error).__name__, error.kind, error.setting, error.reason, sep=" | ")
        ConfigError | config | batch_size | must be at least 1
    """

    kind: str = "error"

    def __init__(self, message: str, kind: str = "error", fields: dict[str, Any] | None = None) -> None:
        # The base gets all arguments, so that the error can be pickled.
        super().__init__(message, kind, fields or {})
        self.kind = kind
        self.fields = fields or {}

    def __str__(self) -> str:
        return with_hint(str(self.args[0]))

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(
            f"`{type(self).__name__}` has no `{name}`; it has {', '.join(fields) or 'no fields'}"
        )


class ConfigError(Error, ValueError):
    """A setting is invalid; raised by constructors and functions.

    Iteration raises it in one case: a loader without an index finds at the end of its first epoch that no
    sample has a field that a setting names.

    Examples:
        >>> dflop.Dataset("shards/*.tgz")
        Traceback (most recent call last):
        dflop.errors.ConfigError: ...
    """


class DataError(Error):
    """The data cannot be used: a damaged shard, no samples, a source that cannot be packed.

    Examples:
        >>> with dflop.Writer("captions/") as writer:
        ...     writer.write({"txt": "a kite"})
        >>> dflop.Writer("captions/")
        Traceback (most recent call last):
        dflop.errors.DataError: `captions/shard-000000.tar` is in the way of new shards; ...
    """


class ErrorBudgetError(DataError):
    """More samples are bad than the error budget allows; ``first`` is the first of them.

    Examples:
        >>> def refuse(values):
        ...     raise ValueError("no labels today")
        >>> try:
        ...     batches = list(dflop.Loader("shards/", transforms={"cls": refuse}))
        ... except dflop.ErrorBudgetError as error:
        ...     print(error.skipped, error.first["key"], error.first["reason"])
        256 000000 ValueError: no labels today
    """


class ReadError(Error):
    """A file or a store cannot be read or written.

    Examples:
        >>> dflop.from_mds("missing/", "packed/")
        Traceback (most recent call last):
        dflop.errors.ReadError: could not access `missing/index.json`
        ...
    """


class StateError(Error, ValueError):
    """A saved state belongs to another dataset or another order.

    Examples:
        >>> state = dflop.Loader("shards/").state_dict()
        >>> dflop.Loader("shards/000.tar").load_state_dict(state)
        Traceback (most recent call last):
        dflop.errors.StateError: state does not fit: it is of 4 shards, not of 1
    """


class PlanError(Error):
    """A step, a partition or a parallelism cannot be planned.

    Examples:
        >>> dflop.balance({"n": 2, "m": 1, "c": 1, "d": [[1], [2]], "tok": [5, 6]}, tokens_max=4)
        Traceback (most recent call last):
        dflop.errors.PlanError: item 0 alone has 5 tokens, above the cap of 4 per group
    """


class ModelError(Error, ValueError):
    """A model, a device or a profile is invalid, or does not cover the request.

    Examples:
        >>> dflop.CostModel("qwen25-vl-7b")
        Traceback (most recent call last):
        dflop.errors.ModelError: unknown model `qwen25-vl-7b` (did you mean `qwen2.5-vl-7b`?), known are ...
    """


class UserCodeError(Error):
    """A user function failed: a cost function, or a call of a transform as a whole.

    Examples:
        >>> batches = list(dflop.Loader("shards/", transforms={"cls": lambda values: values[:1]}))
        Traceback (most recent call last):
        dflop.errors.UserCodeError: the transform of `cls` failed
        ...
    """


class StalledError(Error, TimeoutError):
    """The loader made no progress for longer than allowed; a state taken now resumes exactly."""


class StageError(Error, RuntimeError):
    """A stage of the loader ended without an error, which is a defect."""


class SharedError(Error, RuntimeError):
    """A rank of a shared loader is missing, has ended, or stands elsewhere than the others."""


class ForkError(Error, RuntimeError):
    """This process was forked after threads of the package had started, which do not exist in a fork."""


class PipelineError(Error, RuntimeError):
    """A step of a `dflop.torch.Pipeline` failed on this rank, or on another one that this rank waited for.

    Attributes:
        rank: rank that failed first, as far as this rank knows.
        step: number of the step; ``None`` while stages are built.
        action: action that failed, with its microbatch and stage.
    """
