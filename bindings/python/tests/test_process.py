"""Tests processes and threads: free interpreter, Ctrl-C in a wait, refused forks, spawned processes."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import unittest
from pathlib import Path

import dflop
from support import WithExample

PATIENCE_SECONDS = 120


def keys_of(shards: Path) -> list[str]:
    return [key for batch in dflop.Loader(shards) for key in batch.sample_keys]


class Processes(WithExample):
    def test_spawned_processes_load(self) -> None:
        expected = keys_of(self.shards)
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            self.assertEqual(pool.map(keys_of, [self.shards] * 2), [expected] * 2)

    def fork(self, before: str, inside: str) -> str:
        """Runs code in a process, and more in a fork of it; returns what the fork prints."""
        code = f"""
import os, sys, dflop
shards = {str(self.shards)!r}
{before}
if os.fork() == 0:
    {inside}
    sys.stdout.flush()
    os._exit(0)
os.wait()
"""
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            check=False,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return done.stdout

    def test_a_fork_of_a_loader_is_refused_with_advice(self) -> None:
        inside = """
    try:
        next(batches)
    except dflop.ForkError as error:
        print(error)
    try:
        dflop.Loader(shards)
    except dflop.ForkError as error:
        print(error.kind)
    del batches, loader"""
        printed = self.fork(
            "loader = dflop.Loader(shards, batch_size=2)\nbatches = iter(loader)\nnext(batches)", inside
        )
        self.assertIn("spawn", printed)
        self.assertTrue(printed.endswith("forked\n"), printed)

    def test_a_fork_before_the_first_loader_works(self) -> None:
        printed = self.fork("", "print(sum(len(batch.samples) for batch in dflop.Loader(shards)))")
        self.assertEqual(printed, "96\n")

    def test_the_interpreter_is_free_while_a_loader_waits(self) -> None:
        pipe = self.directory / "pipe.tar"
        os.mkfifo(pipe)
        ticks, done = [], threading.Event()

        def tick() -> None:
            while not done.is_set():
                ticks.append(time.perf_counter())
                time.sleep(0.01)

        def feed() -> None:
            with pipe.open("wb") as out:
                time.sleep(0.5)
                out.write((self.shards / "000.tar").read_bytes())

        threads = [threading.Thread(target=tick), threading.Thread(target=feed)]
        for thread in threads:
            thread.start()
        loaded = sum(
            len(batch.samples) for batch in dflop.Loader(dflop.Dataset(f"pipe:cat {pipe}", allow="pipe"))
        )
        done.set()
        for thread in threads:
            thread.join()
        self.assertEqual(loaded, 32)
        self.assertGreater(len(ticks), 10)

    def test_ctrl_c_ends_a_wait(self) -> None:
        code = """
import dflop
print("ready", flush=True)
try:
    next(iter(dflop.Loader(dflop.Dataset("pipe:exec sleep 30 2> /dev/null", allow="pipe"))))
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        self.addCleanup(process.kill)
        self.assertEqual(process.stdout.readline(), "ready\n")
        time.sleep(0.5)
        sent = time.perf_counter()
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.stdout.readline(), "interrupted\n")
        self.assertEqual(process.wait(PATIENCE_SECONDS), 0)
        self.assertLess(time.perf_counter() - sent, PATIENCE_SECONDS / 2)
        process.stdout.close()

    def test_threads_share_an_iterator(self) -> None:
        batches, found, lock = iter(dflop.Loader(self.shards, batch_size=4)), [], threading.Lock()

        def take() -> None:
            for batch in batches:
                with lock:
                    found.extend(batch.sample_keys)

        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(sorted(found), sorted(keys_of(self.shards)))

    def test_a_process_that_drops_a_running_loader_ends(self) -> None:
        code = f"""
import dflop
batches = iter(dflop.Loader({str(self.shards)!r}, batch_size=1, epochs=1000, transforms={{"cls": list}}))
next(batches)
"""
        subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_SECONDS)


if __name__ == "__main__":
    unittest.main()
