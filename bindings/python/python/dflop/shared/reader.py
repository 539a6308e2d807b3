"""The reader of a shared loader: reads and decodes once on rank 0, and hands the results to all ranks."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from dflop._native import BalancedLoader, __version__
from dflop.batches import Step
from dflop.errors import SharedError
from dflop.shared import channel, failure, payload
from dflop.shared.channel import Kind
from dflop.shared.peer import LOOK_SECONDS, STOPPED_SECONDS, Peer

logger = logging.getLogger(__name__)
# Time in which a process that has proven the token introduces itself.
HELLO_SECONDS = 30.0
# Properties of a loader that every rank knows.
FACTS = ("dp_rank", "dp_size", "global_batch_size", "microbatches", "modules", "steps_per_epoch")
NOWHERE: Any = None
# What errors call the objects of a message.
NAMES: dict[Kind, str | tuple[str, ...]] = {
    Kind.START: ("the step", "the number of microbatches", "the state"),
    Kind.MICROBATCH: "the microbatch",
    Kind.BATCH: ("the batch", "the state"),
    Kind.END: "the state",
}


class Reader:
    """Runs a loader for a group of ranks.

    One thread accepts connections as long as the reader lives; another one delivers an iteration. Of each
    iteration every rank, 0 included, has a connection of its own.
    """

    def __init__(self, loader: Any, name: str, key: bytes, size: int, ahead: int, timeout: float) -> None:
        self.loader = loader
        # Where rank 0 stands: a state, an epoch that was set, or nowhere yet.
        self.position: Any = NOWHERE
        # The number of ranks, and of microbatches that wait for the slowest one.
        self.size, self.ahead = size, ahead
        self.name, self._key, self._timeout = name, key, timeout
        # Where the loader was set to begin, and whether it was sent elsewhere since.
        self._first, self._was_sent = loader.state_dict(), False
        self._iteration = 0
        # Connections of ranks to an iteration, by both numbers.
        self._arrived: dict[tuple[int, int], _Arrival] = {}
        self._admitted: set[tuple[int, int]] = set()
        self._changed = threading.Condition()
        self._delivery: _Delivery | None = None
        self._listener = channel.listen(name)
        self._is_closed = False
        self._accepting = threading.Thread(target=self._accept, name="dflop-shared-accept", daemon=True)
        self._accepting.start()

    def begin_at(self, position: Any) -> None:
        """Notes that the user set where the loader begins."""
        self.position = position
        self._first, self._was_sent = self.loader.state_dict(), False

    def start(self, position: Any, is_run_over: bool) -> socket.socket:
        """Starts the next iteration; returns the connection of rank 0.

        - `position`: where rank 0 stands
        - `is_run_over`: whether the last iteration went to the end of the run
        """
        self.stop()
        self.position = position
        if isinstance(self.loader, BalancedLoader) and isinstance(position, dict):
            if is_run_over and self._was_sent:
                self.loader.load_state_dict(self._first)
                self._was_sent = False
            elif not is_run_over and position != self.loader.state_dict():
                # The loader was ahead of the ranks.
                self.loader.load_state_dict(position)
                self._was_sent = True
        with self._changed:
            self._iteration += 1
            self._admitted.clear()
        own, delivered = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._delivery = _Delivery(self, delivered, self._iteration, self.position)
        return own

    def stop(self) -> None:
        """Ends the current iteration; what was sent stays readable."""
        delivery, self._delivery = self._delivery, None
        if delivery is not None:
            delivery.stop()

    def close(self) -> None:
        """Ends the iteration, the threads and the loader."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
        self.stop()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()
        for arrival in self._arrived.values():
            arrival.close()
        if hasattr(self.loader, "close"):
            self.loader.close()

    def arrived(self, iteration: int, is_stopped: Callable[[], bool]) -> dict[int, _Arrival]:
        """Waits for the ranks above 0; returns connections and positions of those that came in time."""
        expected = range(1, self.size)
        with self._changed:
            self._changed.wait_for(
                lambda: is_stopped() or all((iteration, rank) in self._arrived for rank in expected),
                self._timeout,
            )
            came = [rank for rank in expected if (iteration, rank) in self._arrived]
            self._admitted.update((iteration, rank) for rank in came)
            return {rank: self._arrived.pop((iteration, rank)) for rank in came}

    def missing(self, ranks: Sequence[int]) -> SharedError:
        """Returns the error of ranks that did not come."""
        message = (
            f"of {self.size} ranks of the shared loader `{self.name}`, {_listed(ranks)} did not start to iterate"
            f" within {self._timeout:g} s"
        )
        return SharedError(message, "shared_timeout")

    def wake(self) -> None:
        """Ends a wait for ranks that was stopped."""
        with self._changed:
            self._changed.notify_all()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            peer = None
            try:
                peer = channel.accept(connection, self._key)
                connection.settimeout(HELLO_SECONDS)
                hello = channel.receive(connection)
                connection.settimeout(None)
                if (
                    hello is None
                    or hello[0] is not Kind.HELLO
                    or not self._introduce(connection, peer, hello[1])
                ):
                    _Arrival(connection, peer, NOWHERE).close()
            except Exception as error:  # noqa: BLE001 - one process must not keep the others from connecting
                connection.close()
                if peer is not None:
                    peer.close()
                logger.debug("a process that connected to `%s` is refused: %s", self.name, error)

    def _introduce(self, connection: socket.socket, peer: Peer, hello: dict[str, Any]) -> bool:
        """Answers a rank; returns whether its connection is kept."""
        rank, iteration = hello["rank"], hello["iteration"]
        refusal = self._refusal(hello)
        if refusal is not None:
            described = failure.described(SharedError(refusal, "shared_mismatch"))
            channel.send(connection, Kind.ERROR, (described, NOWHERE))
            return False
        if iteration is None:
            channel.send(connection, Kind.FACTS, self._facts())
            return False
        with self._changed:
            self._arrived[iteration, rank] = _Arrival(connection, peer, hello["position"])
            self._changed.notify_all()
        return True

    def _refusal(self, hello: dict[str, Any]) -> str | None:
        rank, size, iteration = hello["rank"], hello["size"], hello["iteration"]
        if hello["version"] != __version__:
            return f"rank {rank} has version {hello['version']} of the package, rank 0 has {__version__}"
        if size != self.size:
            return f"rank {rank} expects {size} ranks of the shared loader `{self.name}`, rank 0 {self.size}"
        if not 0 < rank < self.size:
            return f"expected a rank from 1 to {self.size - 1}, found {rank}"
        if iteration is not None and iteration < self._iteration:
            return f"rank {rank} starts iteration {iteration} of the shared loader `{self.name}`, rank 0 is at {self._iteration}"
        with self._changed:
            if (iteration, rank) in self._arrived or (iteration, rank) in self._admitted:
                return f"two processes are rank {rank} of the shared loader `{self.name}`"
        return None

    def _facts(self) -> dict[str, Any]:
        facts = {name: getattr(self.loader, name) for name in FACTS if hasattr(self.loader, name)}
        with contextlib.suppress(TypeError):
            facts["len"] = len(self.loader)
        facts["state"] = self.loader.state_dict()
        return facts


class _Arrival(NamedTuple):
    """A rank that came to an iteration."""

    connection: socket.socket
    peer: Peer
    position: Any

    def close(self) -> None:
        self.connection.close()
        self.peer.close()


class _Delivery:
    """One iteration, on a thread of its own."""

    def __init__(self, reader: Reader, own: socket.socket, iteration: int, position: Any) -> None:
        self._reader, self._iteration, self._position = reader, iteration, position
        # Connections by rank, with the microbatches that the rank has not taken yet.
        self._own, self._ranks = own, {0: own}
        self._waiting = {0: 0}
        # Processes of the ranks above 0.
        self._peers: dict[int, Peer] = {}
        self._is_stopped = False
        self._items: Any = None
        self._thread = threading.Thread(target=self._run, name="dflop-shared", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._is_stopped = True
        # Wakes a wait for the rank, and one for the loader.
        with contextlib.suppress(OSError):
            self._own.shutdown(socket.SHUT_RDWR)
        self._reader.wake()
        if hasattr(self._items, "close"):
            self._items.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._admit()
            self._items = iter(self._reader.loader)
            # A stop that came before the iterator was there did not end it.
            if self._is_stopped:
                return
            for kind, value in self._messages(self._items):
                self._publish(kind, value)
            self._publish(Kind.END, self._reader.loader.state_dict())
        except _Left:
            pass
        except BaseException as error:  # noqa: BLE001 - raised on all ranks
            if not self._is_stopped:
                self._fail(error)
        finally:
            if hasattr(self._items, "close"):
                self._items.close()
            for connection in self._ranks.values():
                connection.close()
            for peer in self._peers.values():
                peer.close()

    def _admit(self) -> None:
        """Waits for all ranks, which have to stand at the same place."""
        arrived = self._reader.arrived(self._iteration, lambda: self._is_stopped)
        for rank, arrival in arrived.items():
            self._ranks[rank], self._waiting[rank] = arrival.connection, 0
            self._peers[rank] = arrival.peer
        missing = [rank for rank in range(1, self._reader.size) if rank not in arrived]
        if missing:
            raise self._reader.missing(missing)
        for rank, (_, _, position) in arrived.items():
            if position != self._position:
                message = f"rank {rank} of the shared loader is at {_place(position)}, rank 0 at {_place(self._position)}"
                raise SharedError(message, "shared_mismatch")

    def _messages(self, items: Any) -> Iterator[tuple[Kind, Any]]:
        loader = self._reader.loader
        for item in items:
            if not isinstance(item, Step):
                yield Kind.BATCH, (item, loader.state_dict())
                continue
            header = replace(item, microbatches=())
            yield Kind.START, (header, len(item.microbatches), loader.state_dict())
            for microbatch in item.microbatches:
                yield Kind.MICROBATCH, microbatch

    def _publish(self, kind: Kind, value: Any) -> None:
        """Sends an object to all ranks, once the slowest one has room."""
        memory = payload.write(value, NAMES[kind])
        del value
        try:
            is_counted = kind in (Kind.MICROBATCH, Kind.BATCH)
            if is_counted:
                self._await_room()
            for rank, connection in list(self._ranks.items()):
                try:
                    channel.send_memory(connection, kind, memory)
                    self._waiting[rank] += is_counted
                except OSError:
                    self._leave(rank)
        finally:
            os.close(memory)

    def _await_room(self) -> None:
        while max(self._waiting.values()) >= self._reader.ahead:
            poll = select.poll()
            rank_of = {connection.fileno(): rank for rank, connection in self._ranks.items()}
            ends = {peer.fileno(): rank for rank, peer in self._peers.items() if peer.fileno() >= 0}
            for descriptor in (*rank_of, *ends):
                poll.register(descriptor, select.POLLIN)
            ready = [descriptor for descriptor, _ in poll.poll(1000 * LOOK_SECONDS)]
            if not ready:
                self._leave_stuck()
            for descriptor in ready:
                # What a rank sent before its end comes first.
                rank = rank_of.get(descriptor, ends.get(descriptor, 0))
                if descriptor not in rank_of:
                    if rank in self._ranks and self._ranks[rank].fileno() not in ready:
                        self._leave(rank)
                    continue
                try:
                    has_taken = self._ranks[rank].recv(1) == Kind.TAKEN.value
                except OSError:
                    has_taken = False
                if has_taken:
                    self._waiting[rank] -= 1
                else:
                    self._leave(rank)

    def _leave_stuck(self) -> None:
        """Goes on without the ranks that are waited for, but have been stopped for too long."""
        for rank, peer in list(self._peers.items()):
            if self._waiting[rank] >= self._reader.ahead and peer.is_stuck():
                logger.warning(
                    "rank %d of the shared loader `%s`, %s, has been stopped for %g s: the others go on without it",
                    rank,
                    self._reader.name,
                    peer,
                    STOPPED_SECONDS,
                )
                self._leave(rank)

    def _leave(self, rank: int) -> None:
        """Goes on without a rank; without rank 0 the iteration ends."""
        connection = self._ranks.pop(rank)
        # A child that the rank forked keeps the connection open: it ends for that one, too.
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()
        del self._waiting[rank]
        if rank in self._peers:
            self._peers.pop(rank).close()
        if rank == 0:
            raise _Left

    def _fail(self, error: BaseException) -> None:
        """Raises an exception of the loader on all ranks."""
        state = NOWHERE
        with contextlib.suppress(Exception):
            state = self._reader.loader.state_dict()
        try:
            memory = payload.write((failure.described(error), state))
        except TypeError:
            memory = payload.write((failure.described(error), NOWHERE))
        for connection in self._ranks.values():
            with contextlib.suppress(OSError):
                channel.send_memory(connection, Kind.ERROR, memory)
        os.close(memory)


class _Left(Exception):
    """Rank 0 has left the iteration."""


def _listed(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _place(position: Any) -> str:
    if isinstance(position, dict) and "step" in position:
        return f"step {position['step']}"
    if isinstance(position, tuple):
        return f"the start of epoch {position[1]}"
    return "its start" if position is NOWHERE else "another state"
