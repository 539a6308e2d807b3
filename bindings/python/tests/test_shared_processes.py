"""Tests who may join a shared loader, what its messages may hold, and what happens to processes that end."""

import json
import logging
import multiprocessing
import os
import pickle
import re
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest
import unittest.mock
import uuid
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import dflop
import dflop.shared
import numpy as np
from dflop.shared import channel, failure, payload, peer, token
from support import InFolder

PATIENCE_SECONDS = 60


class Command:
    """Runs a command once it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


class Numbers:
    """A loader of arrays."""

    def __init__(self, count: int = 5) -> None:
        self.count = count

    def __iter__(self) -> Any:
        for number in range(self.count):
            yield np.full(3_000, number)

    def state_dict(self) -> dict[str, Any]:
        return {"step": 0}


class Raising(Numbers):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __iter__(self) -> Any:
        raise self.error
        yield


def errors_of(make: Any) -> list[BaseException | None]:
    """Iterates on two ranks; returns what each raises."""
    name = uuid.uuid4().hex

    def work(rank: int) -> BaseException | None:
        with dflop.SharedLoader(make, rank=rank, size=2, name=name) as loader:
            try:
                # `list` would ask for the length, too.
                for _ in loader:
                    pass
            except Exception as error:  # noqa: BLE001
                return error
            return None

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, range(2)))


class Strangers(InFolder):
    """Processes of the same user that know the name, as every process of the network namespace does."""

    def connected(self, name: str) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(channel._address(name))
        self.addCleanup(connection.close)
        return connection

    def test_nothing_of_a_stranger_is_read_and_the_group_goes_on(self) -> None:
        marker = self.directory / "marker"
        name = uuid.uuid4().hex
        pickled = pickle.dumps(Command(f"touch {marker}"))
        memory = os.memfd_create("stranger")
        self.addCleanup(os.close, memory)
        os.write(memory, struct.pack("<QQ", 1, len(pickled)) + bytes(48) + pickled)
        with dflop.SharedLoader(Numbers, rank=0, size=2, name=name) as first:
            before = len(os.listdir("/proc/self/fd"))
            for kind in (*channel.Kind, None):
                stranger = self.connected(name)
                self.assertEqual(len(stranger.recv(100)), 32, "rank 0 speaks first")
                if kind is None:
                    stranger.send(os.urandom(64))
                else:
                    socket.send_fds(stranger, [kind.value], [memory])
                self.assertEqual(stranger.recv(100), channel.REFUSED)
                self.assertEqual(stranger.recv(100), b"", "the connection is closed")
                stranger.close()
            self.assertLessEqual(len(os.listdir("/proc/self/fd")), before, "no descriptor is left")
            with (
                dflop.SharedLoader(Numbers, rank=1, size=2, name=name) as second,
                ThreadPoolExecutor(2) as pool,
            ):
                self.assertEqual([len(one) for one in pool.map(list, (first, second))], [5, 5])
        self.assertFalse(marker.exists())

    def test_a_stranger_that_says_nothing_keeps_nobody_out_for_long(self) -> None:
        name = uuid.uuid4().hex
        with (
            unittest.mock.patch.object(channel, "PROOF_SECONDS", 0.3),
            dflop.SharedLoader(Numbers, rank=0, size=2, name=name) as first,
        ):
            for _ in range(3):
                self.connected(name)
            with (
                dflop.SharedLoader(Numbers, rank=1, size=2, name=name) as second,
                ThreadPoolExecutor(2) as pool,
            ):
                self.assertEqual([len(one) for one in pool.map(list, (first, second))], [5, 5])

    def test_a_reader_that_has_closed_is_not_waited_for(self) -> None:
        settings = {"size": 2, "name": uuid.uuid4().hex}
        with dflop.SharedLoader(Numbers, rank=0, **settings) as first:
            second = dflop.SharedLoader(Numbers, rank=1, **settings)
            self.assertEqual(second.state_dict(), first.state_dict())
        begin = time.monotonic()
        with self.assertRaisesRegex(dflop.SharedError, "rank 0 of the shared loader `.*` has ended"):
            iter(second)
        self.assertLess(time.monotonic() - begin, 5)

    def test_another_token_is_refused_on_both_sides(self) -> None:
        name = uuid.uuid4().hex
        settings = {"size": 2, "name": name, "timeout": 5}
        with (
            dflop.SharedLoader(Numbers, rank=0, token="one " * 8, **settings),
            dflop.SharedLoader(Numbers, rank=1, token=b"two " * 8, **settings) as second,
            self.assertRaisesRegex(dflop.SharedError, f"process {os.getpid()}, has another token") as caught,
        ):
            len(second)
        self.assertEqual(caught.exception.kind, "shared_token")
        # A process that listens in place of rank 0 cannot prove the token either.
        listener = channel.listen(name)
        self.addCleanup(listener.close)

        def pretend() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.send(os.urandom(32))
                connection.recv(100)
                connection.send(os.urandom(32))

        with ThreadPoolExecutor(1) as pool:
            pool.submit(pretend)
            with self.assertRaisesRegex(dflop.SharedError, "has another token"):
                channel.connect(name, token.key_of(name, "one " * 8), 5)

    def test_a_proof_is_of_no_use_in_another_connection_or_group(self) -> None:
        own, theirs = os.urandom(32), os.urandom(32)
        key = token.key_of("a", "secret " * 4)
        proofs = {
            token.proof(of, side, *numbers)
            for of in (key, token.key_of("b", "secret " * 4), token.key_of("a", "other " * 4))
            for side in (b"rank", b"reader")
            for numbers in ((own, theirs), (theirs, own), (own, own))
        }
        self.assertEqual(len(proofs), 18)


class Tokens(InFolder):
    def kept(self, **environment: str) -> bytes:
        with unittest.mock.patch.dict(os.environ, environment, clear=True):
            return token.key_of("name", None)

    def test_the_token_is_given_or_of_the_job_or_of_the_user(self) -> None:
        runtime, cache = str(self.directory / "runtime"), str(self.directory / "cache")
        kept = self.kept(XDG_RUNTIME_DIR=runtime)
        self.assertEqual(self.kept(XDG_RUNTIME_DIR=runtime), kept)
        self.assertNotEqual(self.kept(XDG_CACHE_HOME=cache), kept)
        job = self.kept(XDG_RUNTIME_DIR=runtime, DFLOP_JOB_TOKEN="0123456789abcdef")
        self.assertEqual(job, token.key_of("name", "0123456789abcdef"))
        self.assertEqual(self.kept(XDG_RUNTIME_DIR=runtime, DFLOP_JOB_TOKEN="short"), kept)
        with self.assertRaisesRegex(
            dflop.ConfigError, "invalid `token`: expected at least 16 bytes, found 5"
        ):
            dflop.SharedLoader(Numbers, rank=0, size=2, name="x", token="short")
        path = Path(runtime, "dflop", token.FILE_NAME)
        self.assertEqual(stat.S_IMODE(path.stat().st_mode), 0o600)
        self.assertEqual(os.listdir(path.parent), [token.FILE_NAME], "nothing else is left")

    def test_processes_that_begin_together_have_one_token(self) -> None:
        cache = str(self.directory / "together")
        with ThreadPoolExecutor(8) as pool:
            tokens = set(pool.map(lambda _: token._kept_in(Path(cache, "dflop")), range(64)))
        self.assertEqual(len(tokens), 1)

    def test_a_file_that_others_could_know_is_refused_by_reason(self) -> None:
        def refused(prepare: Any) -> str:
            directory = Path(tempfile.mkdtemp(dir=self.directory), "dflop")
            token._kept_in(directory)
            prepare(directory / token.FILE_NAME)
            with self.assertRaises(OSError) as caught:
                token._kept_in(directory)
            return str(caught.exception)

        def link(path: Path) -> None:
            path.rename(path.with_name("elsewhere"))
            path.symlink_to("elsewhere")

        def pipe(path: Path) -> None:
            path.unlink()
            os.mkfifo(path, 0o600)

        self.assertIn("other users", refused(lambda path: path.chmod(0o640)))
        self.assertIn("other users", refused(lambda path: path.parent.chmod(0o777)))
        self.assertIn("damaged", refused(lambda path: path.write_bytes(b"short")))
        self.assertIn("symbolic links", refused(link))
        self.assertIn("of another kind", refused(pipe))
        if os.geteuid() == 0:
            self.assertIn("belongs to user 65534", refused(lambda path: os.chown(path, 65534, 0)))
            self.assertIn("belongs to user 65534", refused(lambda path: os.chown(path.parent, 65534, 0)))


class Values(unittest.TestCase):
    def passed(self, value: Any) -> Any:
        memory = payload.write(value)
        try:
            return payload.read(memory)
        finally:
            os.close(memory)

    def test_values_of_all_kinds_arrive_with_their_types(self) -> None:
        audio = dflop.Audio(np.zeros((8_000, 1), np.float32), 16_000, True)
        video = dflop.Video(np.zeros((2, 4, 4, 3), np.uint8), np.arange(2.0), 25.0)
        values = [
            *(
                None,
                True,
                0,
                -(2**80),
                1.5,
                float("inf"),
                -0.0,
                "",
                "grüße\0\ud800",
                b"",
                b"\0\xff",
                bytearray(9),
            ),
            *(
                [],
                (),
                set(),
                frozenset({1, (2, "x")}),
                {1, 2},
                {},
                {"a": {"list": [1]}},
                {1: "a", (2, 3): None},
            ),
            *(["list", "tuple", "dict", "array"], ["array", 0, "<f4", [1]], {"list": 1, "array": 2}),
            *(np.float32(1.5), np.int64(-3), np.bool_(True), np.datetime64("2026-11-28"), np.str_("x")),
        ]
        for value in values:
            passed = self.passed(value)
            self.assertEqual((type(passed), passed), (type(value), value))
        self.assertTrue(np.isnan(self.passed(float("nan"))))
        for dtype in ("<f8", ">i4", "|b1", "<c16", "<M8[s]", "|S5", "<U3", "<f2"):
            for shape in ((), (0, 7), (3, 5), (70, 30)):
                array = np.arange(int(np.prod(shape))).astype(dtype).reshape(shape)
                passed = self.passed([array])[0]
                np.testing.assert_array_equal(passed, array)
                self.assertEqual((passed.dtype, passed.shape), (array.dtype, array.shape))
                if array.size:
                    passed[...] = passed
        self.assertEqual(self.passed(video).frames_per_second, 25.0)
        passed = self.passed(audio)
        self.assertEqual((passed.samples.shape, passed.is_truncated), ((8_000, 1), True))

    def test_one_array_stays_one_array(self) -> None:
        array = np.arange(10_000)
        passed = self.passed({"by field": [array], "by sample": [{"field": array}], "other": array.copy()})
        self.assertIs(passed["by field"][0], passed["by sample"][0]["field"])
        self.assertIsNot(passed["by field"][0], passed["other"])

    def test_what_cannot_be_shared_is_named_by_its_place(self) -> None:
        sample = dflop.batches.Sample({"png": object()})
        sample.key = "kite-7"
        endless: list[Any] = []
        endless.append(endless)
        for value, names, place in [
            ({"made": [1, 2j]}, "the microbatch", "the microbatch['made'][1], a builtins.complex"),
            (({"a": Path("x")}, {}), ("the batch", "the state"), "the batch['a'], a pathlib.PosixPath"),
            (
                ([], {"rng": print}),
                ("the batch", "the state"),
                "the state['rng'], a builtins.builtin_function",
            ),
            ([sample], "the microbatch", "the microbatch[0] (sample `kite-7`)['png'], a builtins.object"),
            ({"a": np.array([{}])}, "the batch", "the batch['a'], a numpy.ndarray of type object"),
            (endless, "the batch", "nested more than 100 levels"),
        ]:
            with self.assertRaises(TypeError) as caught:
                payload.write(value, names)
            self.assertIn(f"cannot share {place}" if "nested" not in place else place, str(caught.exception))

        class Odd(Numbers):
            def __iter__(self) -> Any:
                yield {"made": Path("x")}

        for error in errors_of(Odd):
            self.assertIsInstance(error, TypeError)
            self.assertIn("cannot share the batch['made'], a pathlib.PosixPath", str(error))

    def test_memory_that_is_no_object_is_refused(self) -> None:
        def memory(document: Any, *, is_sealed: bool = True) -> int:
            text = document if isinstance(document, bytes) else json.dumps(document).encode()
            made = os.memfd_create("odd", os.MFD_ALLOW_SEALING)
            self.addCleanup(os.close, made)
            os.write(made, struct.pack("<Q", len(text)) + text + bytes(100))
            if is_sealed:
                payload.fcntl.fcntl(made, payload.fcntl.F_ADD_SEALS, payload._SEALS)
            return made

        self.assertEqual(payload.read(memory({"value": ["list", 1], "parts": []})), [1])
        with self.assertRaisesRegex(ValueError, "not sealed"):
            payload.read(memory({"value": 1, "parts": []}, is_sealed=False))
        for value in (
            ["os.system", "touch x"],
            ["Path", {"x": 1}, None],
            ["array", 0, "|O", [1]],
            ["number", 0, "object"],
            ["tensor", 0, "load", [1]],
            ["Step", {"__class__": 1}, None],
            ["Sample", {"__dict__": 1}, {}],
            ["array", 7, "<f4", [1]],
            [],
        ):
            with self.assertRaises((ValueError, TypeError, IndexError), msg=value):
                payload.read(memory({"value": value, "parts": [[0, 8]]}))
        with self.assertRaises(ValueError):
            payload.read(memory(pickle.dumps(Command("false"))))

    def test_no_module_of_shared_loaders_knows_pickle(self) -> None:
        for path in Path(dflop.shared.__file__).parent.glob("*.py"):
            self.assertNotRegex(path.read_text(), r"\bimport (pickle|marshal|shelve)|\beval\(|\bexec\(", path)


class Exceptions(unittest.TestCase):
    def test_types_of_the_package_and_of_python_stay_and_others_are_text(self) -> None:
        class Own(ValueError):
            pass

        budget = dflop.ErrorBudgetError("too many", "error_count", {"first": {"key": "a"}, "path": Path("x")})
        for error, of, text in [
            (budget, dflop.ErrorBudgetError, "too many"),
            (ZeroDivisionError("by nothing"), ZeroDivisionError, "by nothing"),
            (KeyError("label"), KeyError, "'label'"),
            (FileNotFoundError(2, "No such file", "a.tar"), FileNotFoundError, "No such file"),
            (UnicodeDecodeError("utf-8", b"x", 0, 1, "odd"), dflop.SharedError, "UnicodeDecodeError: "),
            (Own("mine"), dflop.SharedError, "Own: mine"),
            (json.JSONDecodeError("bad", "x", 0), dflop.SharedError, "JSONDecodeError: bad"),
            (SystemExit(3), dflop.SharedError, "SystemExit: 3"),
            (KeyboardInterrupt(), dflop.SharedError, "KeyboardInterrupt: "),
        ]:
            raised = errors_of(lambda error=error: Raising(error))
            for one in raised:
                self.assertIs(type(one), of, error)
                self.assertIn(text, str(one))
        self.assertEqual(raised[0].kind, "shared_failure")
        again = failure.raised(failure.described(budget))
        self.assertEqual((again.kind, again.first, again.path), ("error_count", {"key": "a"}, "x"))
        for odd in (
            {"type": "Error", "message": "m", "kind": 3, "fields": {}},
            {"type": "os", "message": "m"},
        ):
            self.assertIsInstance(failure.raised(odd), dflop.Error)
        for name in ("SystemExit", "StopIteration", "print", "KeyboardInterrupt"):
            described = {"type": name, "message": "m", "args": ["m"]}
            self.assertIs(type(failure.raised(described)), dflop.SharedError)


def run_rank(rank: int, name: str, end: Connection, forks: bool) -> None:
    """Runs a rank in a process; sends what it got, or its error, and what is logged."""
    peer.STOPPED_SECONDS = 1.5

    class Log(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            end.send(["log", record.getMessage()])

    logging.getLogger("dflop.shared").addHandler(Log())
    loader = dflop.SharedLoader(lambda: Numbers(1_000_000), rank=rank, size=3, name=name)
    try:
        for number, _ in enumerate(loader):
            if number == 5:
                if forks and (child := os.fork()) == 0:
                    time.sleep(PATIENCE_SECONDS)
                    os._exit(0)
                end.send(["pid", child if forks else 0])
            elif number > 5:
                time.sleep(0.01)
                end.send(["item", number])
    except dflop.SharedError as error:
        end.send(["error", str(error)])
    except BrokenPipeError:
        # The test is over.
        return


class Ends(unittest.TestCase):
    def start(self, forking: int | None = None) -> tuple[list[Any], list[Connection]]:
        context = multiprocessing.get_context("spawn")
        name, processes, ends = uuid.uuid4().hex, [], []
        for rank in range(3):
            own, end = context.Pipe(duplex=False)
            process = context.Process(target=run_rank, args=(rank, name, end, rank == forking))
            process.start()
            end.close()
            self.addCleanup(process.join)
            self.addCleanup(process.kill)
            processes.append(process)
            ends.append(own)
        for end in ends:
            _, child = self.await_kind(end, "pid")
            if child:
                self.addCleanup(os.kill, child, signal.SIGKILL)
        return processes, ends

    def await_kind(self, end: Connection, *kinds: str) -> list[Any]:
        begin = time.monotonic()
        while time.monotonic() - begin < PATIENCE_SECONDS and end.poll(PATIENCE_SECONDS):
            message: list[Any] = end.recv()
            if message[0] in kinds:
                return message
        self.fail(f"no {kinds} came")

    def items_after(self, ends: list[Connection]) -> None:
        """Waits until all go on, beyond what could have waited for them."""
        for end in ends:
            _, last = self.await_kind(end, "item")
            while self.await_kind(end, "item")[1] < last + 100:
                pass

    def test_a_killed_reader_whose_child_lives_ends_the_others_by_name(self) -> None:
        processes, ends = self.start(forking=0)
        begin = time.monotonic()
        os.kill(processes[0].pid, signal.SIGKILL)
        for end in ends[1:]:
            _, text = self.await_kind(end, "error")
            self.assertRegex(text, f"rank 0 of the shared loader `.*`, process {processes[0].pid}, has ended")
        self.assertLess(time.monotonic() - begin, 10)

    def test_a_stopped_reader_ends_the_others_by_name(self) -> None:
        processes, ends = self.start()
        os.kill(processes[0].pid, signal.SIGSTOP)
        for end in ends[1:]:
            _, text = self.await_kind(end, "error")
            self.assertRegex(text, f"process {processes[0].pid}, has been stopped for")

    def test_a_killed_rank_whose_child_lives_is_left_out(self) -> None:
        processes, ends = self.start(forking=2)
        os.kill(processes[2].pid, signal.SIGKILL)
        self.items_after(ends[:2])

    def test_a_stopped_rank_is_left_out_by_name_and_learns_of_it(self) -> None:
        processes, ends = self.start()
        os.kill(processes[2].pid, signal.SIGSTOP)
        _, text = self.await_kind(ends[0], "log")
        self.assertRegex(
            text, f"rank 2 of the shared loader `.*`, process {processes[2].pid}, has been stopped for"
        )
        self.items_after(ends[:2])
        os.kill(processes[2].pid, signal.SIGCONT)
        _, text = self.await_kind(ends[2], "error")
        self.assertIn("has ended its iteration", text)

    def test_a_rank_that_is_stopped_for_a_moment_stays(self) -> None:
        processes, ends = self.start()
        for _ in range(3):
            os.kill(processes[2].pid, signal.SIGSTOP)
            time.sleep(0.6)
            os.kill(processes[2].pid, signal.SIGCONT)
            time.sleep(0.3)
        self.items_after(ends)


class Namespaces(InFolder):
    def test_a_container_with_the_network_of_the_host_runs_nothing_in_the_reader(self) -> None:
        """The container sees no file of the user, and finds the socket in ``/proc/net/unix``."""
        probe = ["unshare", "--mount", "--pid", "--fork", "--ipc", "--uts"]
        if subprocess.run([*probe, "true"], check=False, capture_output=True).returncode:
            self.skipTest("this user may not make namespaces")
        marker = self.directory / "marker"
        name = uuid.uuid4().hex
        program = textwrap.dedent(f"""
            import os, pickle, re, socket, struct
            class Command:
                def __reduce__(self):
                    return os.system, ("touch {marker}",)
            names = re.findall(r"@(dflop/shared/{name})", open("/proc/net/unix").read())
            pickled = pickle.dumps(Command())
            memory = os.memfd_create("m")
            os.write(memory, struct.pack("<QQ", 1, len(pickled)) + bytes(48) + pickled)
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.connect(b"\\0" + names[0].encode())
            socket.send_fds(connection, [b"h"], [memory])
            connection.settimeout(10)
            connection.recv(100)
            print("found", connection.recv(100))
        """)
        with dflop.SharedLoader(Numbers, rank=0, size=2, name=name):
            run = subprocess.run(
                [*probe, sys.executable, "-c", program], check=False, capture_output=True, text=True
            )
        self.assertEqual((run.stdout, run.returncode), ("found b'\\x00'\n", 0), run.stderr)
        self.assertFalse(marker.exists())
        self.assertTrue(re.fullmatch("[0-9a-f]+", name))


if __name__ == "__main__":
    unittest.main()
