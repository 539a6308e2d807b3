"""`dflop.SharedLoader`: one loader for several ranks of a machine that need the same data."""

from __future__ import annotations

import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from dflop._native import __version__
from dflop.batches import Microbatch, Step
from dflop.errors import SharedError
from dflop.shared import channel, failure
from dflop.shared.channel import Kind
from dflop.shared.peer import Peer, await_message, ended
from dflop.shared.reader import NOWHERE, Reader
from dflop.shared.token import key_of


class SharedLoader:
    """Reads and decodes once for several processes of a machine that need the same data.

    The ranks of a tensor-parallel or context-parallel group, and pipeline stages, get the same microbatches.
    Rank 0 creates the loader and decodes; every rank maps the results from shared memory, without a copy.
    The other ranks open no dataset, plan nothing and start no decoder. Use it as the loader itself. With
    PyTorch, `dflop.torch.shared_loader` finds ranks and name by itself.

    All ranks make the same calls: the same iterations, ``load_state_dict`` and ``set_epoch`` with the same
    state and epoch. A rank that stands elsewhere is an error on all of them, and so is an exception of the
    loader: those of this package and Python's own have their type, others are a `SharedError` with type and
    message as text. What is shared is data: numbers, texts, bytes, lists, tuples, sets, dictionaries, arrays
    of NumPy and JAX, dense CPU tensors of PyTorch; no object of another type. Microbatches are delivered
    once: keep them with ``step.hold()`` to go over them again. Arrays may be written to; other ranks do not
    see it. If rank 0 ends, is killed, or is stopped for a minute, the others get a `SharedError`; no memory
    is left behind. A rank that ends, or is stopped for a minute while it is waited for, is left out.

    Args:
        make: creates the loader, a `BalancedLoader` or a `Loader`; called on rank 0 only.
        rank: rank of this process in the group.
        size: number of processes in the group, all on one machine. 1 shares nothing.
        name: name of the group, the same on all of its ranks and of no other group on the machine.
        ahead: microbatches, or batches, that wait in shared memory for the slowest rank, at least 1.
        timeout: seconds that ranks wait for each other when an iteration starts.
        token: secret of the group, at least 16 bytes, the same on all of its ranks, which prove to each other
            that they know it. Default: the environment variable ``DFLOP_JOB_TOKEN``, or else a random one
            that a file in the runtime or cache directory of the user keeps.

    Attributes:
        loader: the loader on rank 0, ``None`` on the others.

    Raises:
        ConfigError: the rank is not below the size, or the token is too short.
        SharedError: another process uses the name, or no directory can keep a token.
        Exception: on rank 0, those of ``make``.

    Examples:
        Two ranks of a tensor-parallel group, here two threads; in a job each is a process:

        >>> import os, threading
        >>> def make():
        ...     settings = {"model": "model/", "global_batch_size": 8, "microbatches": 2}
        ...     return dflop.BalancedLoader("shards/", steps=2, **settings)
        >>> def train(rank, delivered):
        ...     with dflop.SharedLoader(make, rank=rank, size=2, name=f"example-{os.getpid()}") as loader:
        ...         for step in loader:
        ...             delivered += [microbatch.tokens for microbatch in step.microbatches]
        ...         assert loader.state_dict()["step"] == 2
        >>> delivered = [], []
        >>> ranks = [threading.Thread(target=train, args=(rank, delivered[rank])) for rank in range(2)]
        >>> for rank in ranks:
        ...     rank.start()
        >>> for rank in ranks:
        ...     rank.join()
        >>> delivered[0] == delivered[1], len(delivered[0])
        (True, 4)
    """

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        rank: int,
        size: int,
        name: str,
        ahead: int = 2,
        timeout: float = 300.0,
        token: str | bytes | None = None,
    ) -> None:
        from dflop.errors import ConfigError

        if not 0 <= rank < size:
            raise ConfigError(f"invalid `rank`: expected a rank from 0 to {size - 1}, found {rank}", "config")
        if ahead < 1:
            raise ConfigError(f"invalid `ahead`: expected at least 1, found {ahead}", "config")
        self._rank, self._size, self._name, self._timeout = rank, size, name, timeout
        self._key = key_of(name, token) if size > 1 else b""
        self._iteration = 0
        self._position: Any = NOWHERE
        self._is_run_over = False
        self._known: dict[str, Any] | None = None
        self._is_closed = False
        # Whether rank 0 has answered this rank once.
        self._has_begun = False
        self._current: weakref.ref[_Iteration] | None = None
        self.loader: Any = make() if rank == 0 else None
        self._reader: Reader | None = None
        if rank == 0 and size > 1:
            self._reader = Reader(self.loader, name, self._key, size, ahead, timeout)
            # Before the interpreter ends, which its threads would not survive.
            weakref.finalize(self, self._reader.close)

    def __iter__(self) -> Iterator[Any]:
        """Starts an iteration, on all ranks; an earlier one of this loader ends."""
        if self._is_closed:
            raise _closed()
        if self._size == 1:
            return iter(self.loader)
        self._end_iteration()
        self._iteration += 1
        if self._reader is not None:
            connection = self._reader.start(self._position, self._is_run_over)
            # Rank 0 needs no look at its own process.
            peer = None
        else:
            connection, peer = self._connect(self._iteration)
        self._is_run_over = False
        iteration = _Iteration(connection, peer, self._name, self._stand)
        self._current = weakref.ref(iteration)
        return iteration

    def __len__(self) -> int:
        """Number of steps or batches, where the loader knows it."""
        if self.loader is not None:
            return len(self.loader)
        if "len" not in self._facts:
            raise TypeError("the shared loader has no length")
        return int(self._facts["len"])

    def __bool__(self) -> bool:
        return True

    @property
    def step(self) -> int:
        """The next step, after the last one that this rank started."""
        return int(self.state_dict()["step"])

    @property
    def dp_rank(self) -> int:
        """Data-parallel rank of the loader."""
        return int(self._fact("dp_rank"))

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks."""
        return int(self._fact("dp_size"))

    @property
    def global_batch_size(self) -> int:
        """Number of samples of a step, over all data-parallel ranks."""
        return int(self._fact("global_batch_size"))

    @property
    def microbatches(self) -> int:
        """Number of microbatches per data-parallel rank."""
        return int(self._fact("microbatches"))

    @property
    def modules(self) -> list[str]:
        """Names of the model's modules, in the order of their times."""
        return list(self._fact("modules"))

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps that start in one epoch."""
        return int(self._fact("steps_per_epoch"))

    def report_stage_seconds(
        self, step: Step, seconds: dict[str, list[list[float]]], *, interval: int = 32
    ) -> Any:
        """Corrects later plans by measured times, as `BalancedLoader.report_stage_seconds`.

        Call it on all ranks; those above 0 do nothing and return ``None``.

        Examples:
            >>> def make():
            ...     return dflop.BalancedLoader("shards/", model="model/", global_batch_size=8)
            >>> with dflop.SharedLoader(make, rank=0, size=1, name="alone") as loader:
            ...     step = next(iter(loader))
            ...     report = loader.report_stage_seconds(step, {"llm": [[0.08]]})
        """
        if self.loader is None:
            return None
        return self.loader.report_stage_seconds(step, seconds, interval=interval)

    def report_microbatch_seconds(self, step: Step, seconds: list[list[float]], *, interval: int = 32) -> Any:
        """Corrects later plans by measured times, as `BalancedLoader.report_microbatch_seconds`.

        Call it on all ranks; those above 0 do nothing and return ``None``.

        Examples:
            >>> def make():
            ...     return dflop.BalancedLoader("shards/", model="model/", global_batch_size=8)
            >>> with dflop.SharedLoader(make, rank=0, size=1, name="alone") as loader:
            ...     step = next(iter(loader))
            ...     report = loader.report_microbatch_seconds(step, [[0.12]])
        """
        if self.loader is None:
            return None
        return self.loader.report_microbatch_seconds(step, seconds, interval=interval)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state after the last step or batch that this rank got; that of the loader alone."""
        if isinstance(self._position, dict):
            return self._position
        if self.loader is not None:
            return dict(self.loader.state_dict())
        if self._position is not NOWHERE:
            raise SharedError("only rank 0 knows the state of an epoch that has not started", "shared_state")
        return dict(self._facts["state"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resumes from a state, of this class or of the loader; on all ranks.

        Examples:
            >>> def make():
            ...     return dflop.Loader("shards/", batch_size=64)
            >>> with dflop.SharedLoader(make, rank=0, size=1, name="alone") as loader:
            ...     first, state = next(iter(loader)), loader.state_dict()
            ...     loader.load_state_dict(state)
            ...     print(next(iter(loader)).sample_keys[0])
            000064
        """
        self._end_iteration()
        if self.loader is not None:
            self.loader.load_state_dict(state_dict)
        if self._size > 1:
            self._begin_at(dict(state_dict))

    def set_epoch(self, epoch: int) -> None:
        """Starts the next iteration at an epoch, counted from 0; on all ranks.

        Examples:
            >>> make = lambda: dflop.Loader("shards/")
            >>> with dflop.SharedLoader(make, rank=0, size=1, name="alone") as loader:
            ...     loader.set_epoch(7)
            ...     print(next(iter(loader)).samples[0].epoch)
            7
        """
        self._end_iteration()
        if self.loader is not None:
            self.loader.set_epoch(epoch)
        if self._size > 1:
            self._begin_at(("epoch", epoch))

    def close(self) -> None:
        """Ends iterations and, on rank 0, the loader with its threads."""
        self._is_closed = True
        self._end_iteration()
        if self._reader is not None:
            self._reader.close()
        elif self.loader is not None:
            self.loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"SharedLoader(rank={self._rank}, size={self._size}, name={self._name!r}, loader={self.loader!r})"
        )

    def _fact(self, name: str) -> Any:
        if self.loader is not None:
            return getattr(self.loader, name)
        if name not in self._facts:
            raise AttributeError(f"the shared loader has no `{name}`")
        return self._facts[name]

    @property
    def _facts(self) -> dict[str, Any]:
        """Properties of the loader on rank 0, asked for once."""
        if self._known is None:
            connection, peer = self._connect(None)
            try:
                self._known = _expected(connection, peer, Kind.FACTS, self._name)
            finally:
                connection.close()
                peer.close()
        return self._known

    def _connect(self, iteration: int | None) -> tuple[socket.socket, Peer]:
        if self._is_closed:
            raise _closed()
        connection, peer = channel.connect(self._name, self._key, self._timeout, self._has_begun)
        self._has_begun = True
        hello = {
            "version": __version__,
            "rank": self._rank,
            "size": self._size,
            "iteration": iteration,
            "position": self._position,
        }
        try:
            channel.send(connection, Kind.HELLO, hello)
        except BaseException:
            connection.close()
            peer.close()
            raise
        return connection, peer

    def _begin_at(self, position: Any) -> None:
        self._position, self._is_run_over = position, False
        if self._reader is not None:
            self._reader.begin_at(position)

    def _stand(self, position: Any, is_run_over: bool = False) -> None:
        self._position, self._is_run_over = position, is_run_over

    def _end_iteration(self) -> None:
        current = self._current() if self._current is not None else None
        if current is not None:
            current.close()
        self._current = None
        if self._reader is not None:
            self._reader.stop()


class _Iteration(Iterator[Any]):
    """The steps or batches of one iteration, as they come from rank 0."""

    def __init__(
        self, connection: socket.socket, peer: Peer | None, name: str, stand: Callable[..., None]
    ) -> None:
        self._connection, self._peer, self._name, self._stand = connection, peer, name, stand
        self._current: SharedMicrobatches | None = None
        self._is_ended = False
        self._lock = threading.RLock()
        self._closer = weakref.finalize(self, _close, connection, peer)

    def __next__(self) -> Any:
        with self._lock:
            if self._is_ended:
                raise StopIteration
            if self._current is not None:
                self._current.skip()
                self._current = None
            kind, value = self._receive()
            if kind is Kind.BATCH:
                batch, state = value
                self._take()
                self._stand(state)
                return batch
            if kind is Kind.END:
                self._stand(value, True)
                self.close()
                raise StopIteration
            header, length, state = value
            self._stand(state)
            self._current = SharedMicrobatches(self, header.step, length)
            return replace(header, microbatches=self._current)

    def close(self) -> None:
        """Ends the iteration on this rank."""
        self._is_ended = True
        self._closer()

    def microbatch(self, of: SharedMicrobatches) -> Microbatch:
        """Takes the next microbatch of the current step."""
        with self._lock:
            if self._is_ended:
                raise SharedError("the iteration has ended, or its loader is closed", "closed")
            if self._current is not of:
                raise SharedError(
                    f"microbatches of step {of.step} are gone; `step.hold()` keeps all of them",
                    "shared_taken",
                )
            _, microbatch = self._receive()
            self._take()
            return microbatch  # type: ignore[no-any-return]

    def _take(self) -> None:
        """Lets rank 0 go on; its end is found with the next message."""
        try:
            self._connection.send(Kind.TAKEN.value)
        except OSError:
            return

    def _receive(self) -> tuple[Kind, Any]:
        try:
            return _received(self._connection, self._peer, self._name)
        except SharedError:
            self.close()
            raise
        except _Failed as failed:
            described, state = failed.args
            if state is not NOWHERE:
                self._stand(state)
            self.close()
            raise failure.raised(described) from None


class SharedMicrobatches(Sequence[Microbatch]):
    """Microbatches of a step, each delivered once, in order."""

    def __init__(self, iteration: _Iteration, step: int, length: int) -> None:
        self.step = step
        self._iteration, self._length, self._next = iteration, length, 0
        self._in_use: weakref.WeakValueDictionary[int, Microbatch] = weakref.WeakValueDictionary()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(self._length))]
        number = index + self._length if index < 0 else index
        if not 0 <= number < self._length:
            raise IndexError(f"index {index} of {self._length} microbatches")
        if number in self._in_use:
            return self._in_use[number]
        if number < self._next:
            raise SharedError(
                f"microbatch {number} of step {self.step} was delivered already; `step.hold()` keeps all of them",
                "shared_taken",
            )
        while True:
            microbatch = self._iteration.microbatch(self)
            self._next += 1
            if self._next > number:
                self._in_use[number] = microbatch
                return microbatch

    def skip(self) -> None:
        """Takes the microbatches that were not asked for."""
        while self._next < self._length:
            self._iteration.microbatch(self)
            self._next += 1

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)

    def __repr__(self) -> str:
        return f"SharedMicrobatches(step={self.step}, len={self._length})"


class _Failed(Exception):
    """An exception of the loader on rank 0, with the state behind it."""


def _received(connection: socket.socket, peer: Peer | None, name: str) -> tuple[Kind, Any]:
    try:
        if peer is not None:
            await_message(connection, peer, name)
        message = channel.receive(connection)
    except OSError as error:
        raise _closed() from error
    if message is None:
        raise ended(peer, name)
    kind, value = message
    if kind is Kind.ERROR:
        raise _Failed(*value)
    return kind, value


def _expected(connection: socket.socket, peer: Peer, expected: Kind, name: str) -> Any:
    try:
        kind, value = _received(connection, peer, name)
    except _Failed as failed:
        raise failure.raised(failed.args[0]) from None
    if kind is not expected:
        raise SharedError(f"rank 0 of the shared loader `{name}` answered `{kind.name}`", "shared_mismatch")
    return value


def _close(connection: socket.socket, peer: Peer | None) -> None:
    connection.close()
    if peer is not None:
        peer.close()


def _closed() -> SharedError:
    return SharedError("the shared loader is closed; create another one", "closed")
