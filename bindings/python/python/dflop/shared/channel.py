"""Connections between the ranks of a shared loader: messages with objects in shared memory.

Sockets are Unix sockets of the abstract namespace, which leave no file behind; both ends check that the other
process belongs to the same user, because objects are unpickled.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from enum import Enum
from typing import Any

from dflop.errors import SharedError
from dflop.shared import payload

# Connections that wait to be accepted.
BACKLOG = 1024
RETRY_SECONDS = 0.05
_CREDENTIALS = struct.Struct("3i")


class Kind(Enum):
    """What a message carries."""

    HELLO = b"h"
    FACTS = b"f"
    START = b"s"
    MICROBATCH = b"m"
    BATCH = b"b"
    END = b"e"
    ERROR = b"x"
    TAKEN = b"t"


def listen(name: str) -> socket.socket:
    """Opens the socket that rank 0 listens on.

    Raises:
        SharedError: another process listens under this name.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(_address(name))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise SharedError(
            f"cannot share a loader as `{name}`: {error.strerror or error}", "shared_name"
        ) from error
    return listener


def connect(name: str, timeout: float) -> socket.socket:
    """Connects to rank 0, which may not listen yet.

    Raises:
        SharedError: it does not within ``timeout`` seconds, or the process belongs to another user.
    """
    give_up = time.monotonic() + timeout
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(_address(name))
            check_user(connection)
            return connection
        except (ConnectionRefusedError, FileNotFoundError) as error:
            connection.close()
            if time.monotonic() >= give_up:
                message = (
                    f"rank 0 did not share a loader as `{name}` within {timeout:g} s; it has to run on the same"
                    " machine, in the same network namespace"
                )
                raise SharedError(message, "shared_timeout") from error
            time.sleep(RETRY_SECONDS)
        except BaseException:
            connection.close()
            raise


def check_user(connection: socket.socket) -> None:
    """Checks that the process at the other end belongs to the user of this one.

    Raises:
        SharedError: it belongs to another user.
    """
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.geteuid():
        message = f"process {process} at the other end belongs to user {user}, not to {os.geteuid()}"
        raise SharedError(message, "shared_user")


def send(connection: socket.socket, kind: Kind, value: Any) -> None:
    """Sends an object.

    Raises:
        OSError: the other end is closed.
    """
    memory = payload.write(value)
    try:
        send_memory(connection, kind, memory)
    finally:
        os.close(memory)


def send_memory(connection: socket.socket, kind: Kind, memory: int) -> None:
    """Sends an object that is in shared memory already."""
    socket.send_fds(connection, [kind.value], [memory])


def receive(connection: socket.socket) -> tuple[Kind, Any] | None:
    """Waits for the next message; ``None`` once the other end is closed."""
    message = receive_memory(connection)
    if message is None:
        return None
    kind, memory = message
    try:
        return kind, payload.read(memory)
    finally:
        os.close(memory)


def receive_memory(connection: socket.socket) -> tuple[Kind, int] | None:
    """Waits for the next message; returns the descriptor of its object, which the caller closes."""
    while True:
        try:
            kind, memories, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
            break
        except ConnectionResetError:
            # Reported once, before what the other end had sent: it closed without reading all of ours.
            continue
    if not kind:
        return None
    if len(memories) != 1:
        raise SharedError(
            "a message came without its memory: this process has too many open files", "shared_files"
        )
    return Kind(kind), memories[0]


def _address(name: str) -> bytes:
    return b"\0dflop/shared/" + os.fsencode(name)
