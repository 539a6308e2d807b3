"""Tests `dflop.SharedLoader`: one reader for several ranks, over shared memory."""

import hashlib
import itertools
import json
import multiprocessing
import os
import pickle
import signal
import threading
import time
import unittest
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import dflop
import numpy as np
from dflop.shared import payload
from support import InFolder, WithExample

PATIENCE_SECONDS = 60


class Payload(unittest.TestCase):
    def passed(self, value: Any) -> Any:
        memory = payload.write(value)
        try:
            return payload.read(memory)
        finally:
            os.close(memory)

    def test_objects_arrive_as_they_were(self) -> None:
        arrays = {
            str(dtype): np.arange(5_000).astype(dtype).reshape(50, 100)
            for dtype in ("float32", "int64", "uint8", "bool", "float16")
        }
        arrays["small"], arrays["empty"] = np.arange(3), np.zeros((0, 7), np.float32)
        arrays["every second"] = np.arange(20_000)[::2]
        passed = self.passed({"arrays": arrays, "text": "grüße", "none": None, "list": [1, (2, 3)]})
        self.assertEqual((passed["text"], passed["none"], passed["list"]), ("grüße", None, [1, (2, 3)]))
        for name, array in arrays.items():
            np.testing.assert_array_equal(passed["arrays"][name], array)
            self.assertEqual(passed["arrays"][name].dtype, array.dtype)

    def test_a_receiver_writes_to_a_copy_of_its_own(self) -> None:
        memory = payload.write(np.zeros(100_000, np.float32))
        self.addCleanup(os.close, memory)
        first, second = payload.read(memory), payload.read(memory)
        first += 1
        self.assertEqual((first.sum(), second.sum()), (100_000, 0))
        with self.assertRaises(PermissionError):
            os.pwrite(memory, b"x", 0)
        with self.assertRaises(PermissionError):
            os.ftruncate(memory, 1)

    def test_views_take_no_memory_of_their_own(self) -> None:
        memory = payload.write([np.ones(1_000_000) for _ in range(3)])
        self.addCleanup(os.close, memory)
        arrays = payload.read(memory)
        places = [array.__array_interface__["data"][0] for array in arrays]
        self.assertTrue(all(place % payload.ALIGNMENT == 0 for place in places))
        self.assertEqual([second - first for first, second in itertools.pairwise(places)], [8_000_000] * 2)


def digest(value: Any) -> str:
    """Returns a digest of the tensors of a microbatch or batch, with its keys."""
    hasher = hashlib.sha256(json.dumps(value.sample_keys).encode())
    for name in sorted(value):
        array = value[name]
        hasher.update(name.encode())
        hasher.update(array.tobytes() if isinstance(array, np.ndarray) else repr(array).encode())
    return hasher.hexdigest()


def steps_of(loader: Any, steps: int | None = None) -> list[Any]:
    """Iterates over a loader; returns what every step has."""
    found = []
    for step in loader:
        microbatches = [(digest(one), one.tokens, one.loss_scale) for one in step.microbatches]
        found.append((step.step, step.digest, step.target_tokens, microbatches, loader.state_dict()))
        if len(found) == steps:
            break
    return found


class Ranks(WithExample):
    """Ranks are threads here; see `Processes` for processes."""

    def balanced(self, **settings: Any) -> dflop.BalancedLoader:
        settings = {"epochs": 2, "array_type": "numpy", "tokenizer": self.model, **settings}
        return dflop.BalancedLoader(
            self.shards, model=self.model, global_batch_size=32, microbatches=4, **settings
        )

    def group(
        self, size: int, make: Callable[[], Any] | None = None, **settings: Any
    ) -> list[dflop.SharedLoader]:
        name = uuid.uuid4().hex
        settings = {"timeout": PATIENCE_SECONDS, **settings}
        group = [
            dflop.SharedLoader(make or self.balanced, rank=rank, size=size, name=name, **settings)
            for rank in range(size)
        ]
        for loader in reversed(group):
            self.addCleanup(loader.close)
        return group

    def on_all(self, group: list[Any], work: Callable[[Any], Any]) -> list[Any]:
        with ThreadPoolExecutor(len(group)) as pool:
            return list(pool.map(work, group))

    def errors(self, group: list[Any], work: Callable[[Any], Any]) -> list[BaseException | None]:
        def caught(loader: Any) -> BaseException | None:
            try:
                work(loader)
            except Exception as error:  # noqa: BLE001
                return error
            return None

        return self.on_all(group, caught)

    def test_all_ranks_get_what_the_loader_alone_delivers(self) -> None:
        expected = steps_of(self.balanced())
        self.assertEqual(len(expected), 6)
        for size in (1, 2, 4):
            group = self.group(size)
            self.assertEqual(self.on_all(group, steps_of), [expected] * size)
            self.assertEqual([loader.loader is None for loader in group], [False] + [True] * (size - 1))

    def test_properties_are_known_on_all_ranks(self) -> None:
        plain = self.balanced()
        for loader in self.group(3):
            for name in ("dp_rank", "dp_size", "microbatches", "modules", "steps_per_epoch", "step"):
                self.assertEqual(getattr(loader, name), getattr(plain, name), name)
            self.assertEqual((len(loader), loader.state_dict()), (len(plain), plain.state_dict()))
        plain = dflop.Loader(self.shards)
        for loader in self.group(2, lambda: dflop.Loader(self.shards)):
            self.assertEqual(len(loader), len(plain))
            with self.assertRaises(AttributeError):
                _ = loader.modules

    def test_a_loop_that_is_left_goes_on_after_the_last_step(self) -> None:
        expected = steps_of(self.balanced())
        group = self.group(2)
        self.assertEqual(self.on_all(group, lambda loader: steps_of(loader, 2)), [expected[:2]] * 2)
        self.assertEqual(self.on_all(group, steps_of), [expected[2:]] * 2)
        self.assertEqual(
            self.on_all(group, lambda loader: steps_of(loader, 1)), [expected[:1]] * 2, "starts again"
        )

    def test_a_state_resumes_on_all_ranks(self) -> None:
        expected = steps_of(self.balanced())
        state = json.loads(json.dumps(expected[2][-1]))
        for loaded in (state, expected[2][-1]):
            group = self.group(2)
            self.on_all(group, lambda loader, loaded=loaded: loader.load_state_dict(loaded))
            self.assertEqual([loader.step for loader in group], [3, 3])
            self.assertEqual(self.on_all(group, steps_of), [expected[3:]] * 2)
        plain = self.balanced()
        plain.load_state_dict(state)
        self.assertEqual(steps_of(plain), expected[3:])

    def test_epochs_are_set_on_all_ranks(self) -> None:
        plain = self.balanced()
        plain.set_epoch(1)
        expected = steps_of(plain)
        group = self.group(2)
        self.on_all(group, lambda loader: loader.set_epoch(1))
        self.assertEqual(self.on_all(group, steps_of), [expected] * 2)

    def test_ranks_that_stand_elsewhere_are_refused(self) -> None:
        state = steps_of(self.balanced(), 2)[-1][-1]
        group = self.group(3)
        group[2].load_state_dict(state)
        for error in self.errors(group, steps_of):
            self.assertIsInstance(error, dflop.SharedError)
            self.assertRegex(str(error), "rank 2 of the shared loader is at step 2, rank 0 at its start")
            self.assertEqual(error.kind, "shared_mismatch")

    def test_a_rank_that_is_missing_is_named(self) -> None:
        group = self.group(3, timeout=0.3)
        for error in self.errors(group[:2], steps_of):
            self.assertRegex(str(error), "of 3 ranks .* rank 2 did not start to iterate within 0.3 s")
        alone = dflop.SharedLoader(self.balanced, rank=1, size=2, name=uuid.uuid4().hex, timeout=0.2)
        with self.assertRaisesRegex(dflop.SharedError, "rank 0 did not share a loader as `.*` within 0.2 s"):
            iter(alone)

    def test_a_group_is_checked(self) -> None:
        for rank, size in ((2, 2), (-1, 2), (0, 0)):
            with self.assertRaisesRegex(dflop.ConfigError, "rank"):
                dflop.SharedLoader(self.balanced, rank=rank, size=size, name="x")
        with self.assertRaisesRegex(dflop.ConfigError, "ahead"):
            dflop.SharedLoader(self.balanced, rank=0, size=2, name="x", ahead=0)
        group = self.group(2)
        with self.assertRaisesRegex(dflop.SharedError, "in use"):
            dflop.SharedLoader(self.balanced, rank=0, size=2, name=group[0]._name)
        other = dflop.SharedLoader(self.balanced, rank=1, size=3, name=group[0]._name)
        with self.assertRaisesRegex(dflop.SharedError, "rank 1 expects 3 ranks .* rank 0 2"):
            len(other)

    def test_two_processes_of_one_rank_are_refused(self) -> None:
        group = self.group(3)
        twin = dflop.SharedLoader(self.balanced, rank=1, size=3, name=group[0]._name)
        errors = self.errors([*group[:2], twin, *group[2:]], lambda loader: steps_of(loader, 1))
        refused = [
            error for error in errors if error is not None and "two processes are rank 1" in str(error)
        ]
        self.assertEqual(len(refused), 1)

    def test_an_exception_of_the_loader_is_raised_on_all_ranks(self) -> None:
        def divide(texts: list[str]) -> list[str]:
            raise ZeroDivisionError("by nothing")

        def broken() -> dflop.Loader:
            read = dflop.Read(error_budget="0.05:0")
            return dflop.Loader(self.shards, transforms={"json": divide}, read=read)

        for error in self.errors(self.group(2, broken), list):
            self.assertIsInstance(error, dflop.ErrorBudgetError)
            self.assertEqual(error.kind, "error_count")

    def test_batches_of_the_plain_loader_are_shared(self) -> None:
        def plain() -> dflop.Loader:
            return dflop.Loader(self.shards, batch_size=10, image=dflop.Image(16), shuffle_buffer=50)

        def batches(loader: Any) -> list[Any]:
            return [(digest(batch), batch.image_rows, loader.state_dict()) for batch in loader]

        expected = plain()
        passes = [batches(expected), batches(expected)]
        self.assertNotEqual(passes[0], passes[1])
        group = self.group(2, plain)
        for one in passes:
            self.assertEqual(self.on_all(group, batches), [one] * 2)

    def test_user_code_runs_once(self) -> None:
        calls = []

        def inputs(sample: dflop.Sample) -> np.ndarray:
            calls.append(sample.key)
            return np.full((3, 5_000), len(sample.key))

        def make() -> dflop.BalancedLoader:
            def collate(parts: list[np.ndarray]) -> dict[str, np.ndarray]:
                return {"made": np.stack(parts)}

            processor = dflop.CustomProcessor(inputs=inputs, collate=collate)
            return self.balanced(processor=processor, steps=2, tokenizer=None)

        def made(loader: Any) -> list[Any]:
            return [[one["made"].sum() for one in step.microbatches] for step in loader]

        found = self.on_all(self.group(3, make), made)
        self.assertEqual(found, [found[0]] * 3)
        self.assertEqual(len(calls), 64)

    def test_microbatches_are_delivered_once_and_can_be_held(self) -> None:
        def twice(loader: Any) -> Any:
            steps = iter(loader)
            first = next(steps)
            kept = list(first.microbatches)
            self.assertIs(first.microbatches[3], kept[3], "one object while it is in use")
            del kept
            with self.assertRaisesRegex(dflop.SharedError, "delivered already; `step.hold"):
                list(first.microbatches)
            second = next(steps).hold()
            self.assertEqual(len(second.microbatches), 4)
            third = next(steps)
            self.assertEqual((len(third.microbatches), len(third.microbatches[1:3])), (4, 2))
            fourth = next(steps)
            with self.assertRaisesRegex(dflop.SharedError, "microbatch 3 of step 2 was delivered already"):
                third.microbatches[3]
            with self.assertRaises(IndexError):
                fourth.microbatches[4]
            self.assertEqual(pickle.loads(pickle.dumps(fourth)).step, 3)
            return [digest(one) for one in second.microbatches], fourth.step

        results = self.on_all(self.group(2), twice)
        self.assertEqual(results[0], results[1])
        self.assertEqual(results[0][1], 3)

    def test_a_slow_rank_holds_the_reader_back(self) -> None:
        delivered = threading.Semaphore(0)
        counts = []

        class Counting:
            """A loader that counts what is asked of it."""

            def __iter__(self) -> Any:
                for number in range(20):
                    counts.append(number)
                    yield np.full(10_000, number)

            def state_dict(self) -> dict[str, Any]:
                return {"step": len(counts)}

        group = self.group(2, Counting, ahead=3)

        def slow() -> None:
            for _ in group[1]:
                delivered.acquire()

        thread = threading.Thread(target=slow)
        thread.start()
        fast = iter(group[0])
        for _ in range(4):
            next(fast)
        time.sleep(0.5)
        # One was taken, three wait, and the next one is ready.
        self.assertLessEqual(len(counts), 5)
        delivered.release(20)
        self.assertEqual(len(list(fast)), 16)
        thread.join()

    def test_closing_ends_threads_and_other_ranks(self) -> None:
        before = threading.active_count()
        group = self.group(2)
        iterators = self.on_all(group, iter)
        step = next(iterators[0])
        other = next(iterators[1])
        group[0].close()
        with self.assertRaisesRegex(dflop.SharedError, "closed"):
            list(step.microbatches)
        with self.assertRaisesRegex(dflop.SharedError, "rank 0 of the shared loader .* has ended"):
            for _ in range(9):
                list(other.microbatches)
                other = next(iterators[1])
        with self.assertRaisesRegex(dflop.SharedError, "closed"):
            iter(group[0])
        self.assertEqual(threading.active_count(), before)


def rank_of_group(
    shards: Path, model: Path, rank: int, name: str, steps: int, connection: Connection
) -> None:
    """Runs a rank in a process; sends what it got, or its error."""

    def make() -> dflop.BalancedLoader:
        return dflop.BalancedLoader(
            shards, model=model, tokenizer=model, global_batch_size=32, microbatches=4, array_type="numpy"
        )

    loader = dflop.SharedLoader(make, rank=rank, size=3, name=name, timeout=PATIENCE_SECONDS)
    try:
        for step in loader:
            connection.send((step.step, [digest(one) for one in step.microbatches]))
            if step.step + 1 == steps:
                break
        connection.send("done")
    except dflop.SharedError as error:
        connection.send(str(error))


class Processes(WithExample):
    def start(self, steps: int) -> tuple[list[Any], list[Connection]]:
        context = multiprocessing.get_context("spawn")
        name, processes, ends = uuid.uuid4().hex, [], []
        for rank in range(3):
            own, end = context.Pipe(duplex=False)
            process = context.Process(
                target=rank_of_group, args=(self.shards, self.model, rank, name, steps, end)
            )
            process.start()
            end.close()
            self.addCleanup(process.join)
            self.addCleanup(process.kill)
            processes.append(process)
            ends.append(own)
        return processes, ends

    def test_processes_get_the_same(self) -> None:
        _, ends = self.start(4)
        received = [[end.recv() for _ in range(5)] for end in ends]
        self.assertEqual(received, [received[0]] * 3)
        self.assertEqual([step for step, _ in received[0][:4]], [0, 1, 2, 3])
        self.assertEqual(received[0][4], "done")

    def test_a_killed_reader_ends_the_others(self) -> None:
        processes, ends = self.start(1_000_000)
        for end in ends:
            end.recv()
        os.kill(processes[0].pid, signal.SIGKILL)
        for end in ends[1:]:
            message = end.recv()
            while not isinstance(message, str):
                message = end.recv()
            self.assertRegex(
                message, "rank 0 of the shared loader .* has ended its iteration, or its process"
            )

    def test_a_killed_rank_does_not_stop_the_others(self) -> None:
        processes, ends = self.start(200)
        for end in ends:
            end.recv()
        os.kill(processes[2].pid, signal.SIGKILL)
        received: list[list[Any]] = [[], []]
        for rank in range(2):
            message = ends[rank].recv()
            while not isinstance(message, str):
                received[rank].append(message)
                message = ends[rank].recv()
            self.assertEqual(message, "done")
        self.assertEqual(received[0], received[1])
        self.assertEqual(len(received[0]), 199)


class Files(InFolder):
    def test_nothing_is_left_behind(self) -> None:
        path = self.shard({f"{number:02}.txt": b"text" for number in range(20)})
        # The package opens files of its own on first use.
        self.assertEqual(len(list(dflop.Loader(path, batch_size=4))), 5)
        before = set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))
        name = uuid.uuid4().hex
        with (
            dflop.SharedLoader(lambda: dflop.Loader(path, batch_size=4), rank=0, size=2, name=name) as first,
            dflop.SharedLoader(lambda: None, rank=1, size=2, name=name) as second,
            ThreadPoolExecutor(2) as pool,
        ):
            for count in pool.map(lambda loader: len(list(loader)), (first, second)):
                self.assertEqual(count, 5)
        self.assertEqual((set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))), before)


if __name__ == "__main__":
    unittest.main()
