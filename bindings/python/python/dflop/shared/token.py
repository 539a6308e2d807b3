"""The token that ranks of a shared loader prove to know before anything else that they send is read.

It is given by the caller, as ``dflop.torch.shared_loader`` does with one that the group exchanged; or it is
the token of the job, ``DFLOP_JOB_TOKEN``; or a random one that a file of this user keeps.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dflop.errors import ConfigError, SharedError

JOB_TOKEN = "DFLOP_JOB_TOKEN"
FILE_NAME = "shared-token"
# Least length of a token that is given, and the length of random ones.
TOKEN_BYTES_MIN = 16
TOKEN_BYTES = 32
PROOF_BYTES = 32


def key_of(name: str, token: str | bytes | None) -> bytes:
    """Returns the key of a group: of its token, for its name alone.

    Raises:
        ConfigError: the token is too short.
        SharedError: no token is given, and no directory can keep one.
    """
    given = os.environ.get(JOB_TOKEN, "") if token is None else token
    secret = given if isinstance(given, bytes) else os.fsencode(given)
    if token is not None and len(secret) < TOKEN_BYTES_MIN:
        reason = f"expected at least {TOKEN_BYTES_MIN} bytes, found {len(secret)}"
        raise ConfigError(f"invalid `token`: {reason}", "config", {"setting": "token", "reason": reason})
    if len(secret) < TOKEN_BYTES_MIN:
        secret = _token_of_user()
    return hmac.digest(secret, b"dflop/shared/" + os.fsencode(name), "sha256")


def proof(key: bytes, side: bytes, own: bytes, other: bytes) -> bytes:
    """Returns the proof of one side, for the random numbers of both."""
    return hmac.digest(key, side + own + other, "sha256")


def _token_of_user() -> bytes:
    failures = []
    for directory in _directories():
        try:
            return _kept_in(directory)
        except OSError as error:
            failures.append(f"`{directory}`: {error.strerror or error}")
    message = (
        f"no directory keeps the token of shared loaders: {'; '.join(failures)}; pass `token=` on all ranks"
    )
    raise SharedError(message, "shared_token")


def _directories() -> Iterator[Path]:
    for variable in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):
        if os.environ.get(variable):
            yield Path(os.environ[variable], "dflop")
    if os.environ.get("HOME"):
        yield Path(os.environ["HOME"], ".cache", "dflop")
    yield Path(tempfile.gettempdir(), f"dflop-{os.geteuid()}")


def _kept_in(directory: Path) -> bytes:
    """Reads the token in a directory of this user, and makes it if it is missing.

    Raises:
        OSError: the directory or the file is not this user's alone.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check(os.lstat(directory), stat.S_ISDIR, stat.S_IWGRP | stat.S_IWOTH)
    path = directory / FILE_NAME
    for _ in range(2):
        with contextlib.suppress(FileNotFoundError):
            return _read(path)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=f".{FILE_NAME}-") as file:
            file.write(secrets.token_bytes(TOKEN_BYTES))
            file.flush()
            # Of several processes one is the first; all read its token.
            with contextlib.suppress(FileExistsError):
                os.link(file.name, path)
    raise FileNotFoundError(f"`{path}` cannot be made")


def _read(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check(os.fstat(descriptor), stat.S_ISREG, stat.S_IRWXG | stat.S_IRWXO)
        token = os.read(descriptor, TOKEN_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(token) != TOKEN_BYTES:
        raise OSError(f"`{path}` is damaged; remove it")
    return token


def _check(status: os.stat_result, is_kind: object, forbidden: int) -> None:
    if not is_kind(status.st_mode):  # type: ignore[operator]
        raise OSError("it is a link, or of another kind")
    if status.st_uid != os.geteuid():
        raise OSError(f"it belongs to user {status.st_uid}")
    if status.st_mode & forbidden:
        raise OSError("other users have access to it")
