"""Connections between the ranks of a shared loader: messages with objects in shared memory.

Sockets are Unix sockets of the abstract namespace, which leave no file behind. Any process of the network
namespace can connect to one, so both ends check that the other process belongs to the same user and knows the
token of the group, before they read anything else. Each proves it for a random number of the other:

| rank 0 | rank |
| --- | --- |
| 32 random bytes | |
| | 32 random bytes, and HMAC-SHA256 of `rank` and both |
| HMAC-SHA256 of `reader` and both; one zero byte is a refusal | |

Then messages follow: one byte of `Kind`, and the descriptor of memory that `payload` wrote.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import time
from enum import Enum
from typing import Any

from dflop.errors import SharedError
from dflop.shared import payload
from dflop.shared.peer import Peer, ended
from dflop.shared.token import PROOF_BYTES, proof

# Connections that wait to be accepted.
BACKLOG = 1024
RETRY_SECONDS = 0.05
# Time in which a process that has connected proves that it knows the token.
PROOF_SECONDS = 5.0
REFUSED = b"\0"


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


def connect(name: str, key: bytes, timeout: float, has_begun: bool = False) -> tuple[socket.socket, Peer]:
    """Connects to rank 0, which may not listen yet, unless it ``has_begun``: then it has ended.

    Raises:
        SharedError: it does not answer within ``timeout`` seconds, the process belongs to another user, or it
            has another token.
    """
    give_up = time.monotonic() + timeout
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer = None
        try:
            connection.settimeout(max(give_up - time.monotonic(), RETRY_SECONDS))
            connection.connect(_address(name))
            peer = Peer(connection)
            peer.check_user()
            if _is_proven_to(connection, key):
                connection.settimeout(None)
                return connection, peer
            raise SharedError(
                f"rank 0 of the shared loader `{name}`, {peer}, has another token; all ranks need the same `token`, or"
                " the same DFLOP_JOB_TOKEN, or a user whose cache directory they see",
                "shared_token",
            )
        except (ConnectionError, FileNotFoundError, TimeoutError) as error:
            _close(connection, peer)
            if has_begun and isinstance(error, ConnectionRefusedError):
                raise ended(None, name) from error
            if time.monotonic() >= give_up:
                message = (
                    f"rank 0 did not share a loader as `{name}` within {timeout:g} s; it has to run on the same"
                    " machine, in the same network namespace"
                )
                raise SharedError(message, "shared_timeout") from error
            time.sleep(RETRY_SECONDS)
        except BaseException:
            _close(connection, peer)
            raise


def _close(connection: socket.socket, peer: Peer | None) -> None:
    connection.close()
    if peer is not None:
        peer.close()


def _is_proven_to(connection: socket.socket, key: bytes) -> bool:
    """Proves to rank 0 that this process knows the token; returns whether rank 0 does.

    Raises:
        ConnectionError: it closed the connection.
    """
    theirs = connection.recv(PROOF_BYTES)
    if len(theirs) != PROOF_BYTES:
        raise ConnectionResetError("no random number came")
    own = secrets.token_bytes(PROOF_BYTES)
    connection.sendall(own + proof(key, b"rank", own, theirs))
    answer = connection.recv(PROOF_BYTES)
    if not answer:
        raise ConnectionResetError("no proof came")
    return hmac.compare_digest(answer, proof(key, b"reader", own, theirs))


def accept(connection: socket.socket, key: bytes) -> Peer:
    """Returns the process that has connected, once it has proven that it knows the token.

    Raises:
        SharedError: it does not, or belongs to another user.
        OSError: it does not answer in time.
    """
    peer = Peer(connection)
    try:
        peer.check_user()
        connection.settimeout(PROOF_SECONDS)
        own = secrets.token_bytes(PROOF_BYTES)
        connection.sendall(own)
        # Without room for descriptors: the kernel closes those that a stranger sends.
        answer = connection.recv(2 * PROOF_BYTES)
        theirs, proven = answer[:PROOF_BYTES], answer[PROOF_BYTES:]
        if not hmac.compare_digest(proven, proof(key, b"rank", theirs, own)):
            connection.sendall(REFUSED)
            raise SharedError(f"{peer} does not know the token", "shared_token")
        connection.sendall(proof(key, b"reader", theirs, own))
        return peer
    except BaseException:
        peer.close()
        raise


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
