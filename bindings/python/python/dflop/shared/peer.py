"""The process at the other end of a connection: whether it has ended, or is stopped.

Its sockets do not tell: a child that it forked keeps them open after its end.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from pathlib import Path

from dflop.errors import SharedError

# Time for which a process that is stopped is waited for, and the interval in which that is looked at.
STOPPED_SECONDS = 60.0
LOOK_SECONDS = 1.0
# Intervals after which nothing is known of the time between two looks.
LOOKS_APART = 10
_CREDENTIALS = struct.Struct("3i")


class Peer:
    """A process, which the kernel names by the connection.

    Attributes:
        process: its number; 0 in another namespace of processes, from where only its sockets show its end.
    """

    def __init__(self, connection: socket.socket) -> None:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.process, self._user, _ = _CREDENTIALS.unpack(credentials)
        # Since when the process is known to be stopped, and when that was looked at.
        self._stopped_since: float | None = None
        self._looked = 0.0
        self._descriptor: int | None = None
        if self.process > 0:
            # Without pidfds, of Linux 5.3, the sockets have to do.
            with contextlib.suppress(OSError):
                self._descriptor = os.pidfd_open(self.process)

    def check_user(self) -> None:
        """Checks that the process belongs to the user of this one.

        Raises:
            SharedError: it belongs to another user.
        """
        if self._user != os.geteuid():
            message = (
                f"process {self.process} at the other end belongs to user {self._user}, not to {os.geteuid()}"
            )
            raise SharedError(message, "shared_user")

    def fileno(self) -> int:
        """Returns a descriptor that is readable once the process has ended; -1 without one."""
        return -1 if self._descriptor is None else self._descriptor

    def is_stuck(self) -> bool:
        """Returns whether the process has been stopped for `STOPPED_SECONDS`; asked again and again."""
        now, looked = time.monotonic(), self._looked
        self._looked = now
        if not self._is_stopped():
            self._stopped_since = None
            return False
        if self._stopped_since is None or now - looked > LOOKS_APART * LOOK_SECONDS:
            self._stopped_since = now
        return now - self._stopped_since >= STOPPED_SECONDS

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __str__(self) -> str:
        return f"process {self.process}" if self.process > 0 else "its process"

    def _is_stopped(self) -> bool:
        if self.process <= 0:
            return False
        try:
            status = Path(f"/proc/{self.process}/stat").read_bytes()
        except OSError:
            return False
        # The name of the program before the state may contain anything.
        return status.rpartition(b")")[2].split()[:1] == [b"T"]


def await_message(connection: socket.socket, peer: Peer, name: str) -> None:
    """Waits until a connection has a message, or its end.

    Raises:
        SharedError: the process at the other end has ended without one, or has been stopped for too long.
        OSError: the connection is closed on this side.
    """
    while True:
        descriptor = connection.fileno()
        if descriptor < 0:
            raise OSError("the connection is closed")
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if peer.fileno() >= 0:
            poll.register(peer.fileno(), select.POLLIN)
        ready = {one for one, _ in poll.poll(1000 * LOOK_SECONDS)}
        if descriptor in ready:
            return
        if ready:
            poll.unregister(peer.fileno())
            # What it sent before its end comes first.
            if not poll.poll(0):
                raise ended(peer, name)
            return
        if peer.is_stuck():
            message = (
                f"rank 0 of the shared loader `{name}`, {peer}, has been stopped for {STOPPED_SECONDS:g} s"
            )
            raise SharedError(message, "shared_stopped")


def ended(peer: Peer | None, name: str) -> SharedError:
    """Returns the error of the end of rank 0."""
    who = f"rank 0 of the shared loader `{name}`" + (f", {peer}," if peer is not None else "")
    return SharedError(f"{who} has ended its iteration, or its process", "shared_end")
