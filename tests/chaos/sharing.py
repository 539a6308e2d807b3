"""Scenarios of processes that share a directory: one is stopped, or another one is in the way."""

import json
import shutil
import signal
import time

from common import REPOSITORY, Chaos, check, kill, make_shards
from server import serve


def stopped_writer(chaos: Chaos) -> None:
    """A process that fills the cache is stopped: another one reads from the store, and names the process."""
    data, kept = chaos.place / "stopped", chaos.place / "stopped-cache"
    keys = make_shards(data, 1, 20_000, 9)
    server, url = serve(data)

    def once() -> bool:
        shutil.rmtree(kept, ignore_errors=True)
        command = ("stream", f"{url}/shard-000.tar", "--decode", "raw", "--set", f"store.cache={kept}")
        writer = chaos.start(*command)
        deadline = time.monotonic() + 5
        while not list(kept.glob("*.part")) and time.monotonic() < deadline:
            time.sleep(0.001)
        writer.send_signal(signal.SIGSTOP)
        struck = bool(list(kept.glob("*.part")))
        started = time.monotonic()
        done = chaos.run(*command, "--json", seconds=60)
        check(json.loads(done.stdout)["samples"] == len(keys), "samples are missing")
        if struck:
            check(time.monotonic() - started < 30, "the other process waited for too long")
            check(str(writer.pid).encode() in done.stderr, "the holder is not named")
        kill(writer)
        return struck

    chaos.scenario("a stopped writer of the cache", 3, once)
    server.shutdown()


def two_jobs(chaos: Chaos) -> None:
    """Two jobs use one directory of checkpoints: one is refused and names the other."""
    config, folder = chaos.place / "two.toml", chaos.place / "two-checkpoints"
    text = (REPOSITORY / "executor/examples/train-cpu.toml").read_text()
    config.write_text(text + "\n[checkpoint]\nevery = 1\n")

    def once() -> bool:
        shutil.rmtree(folder, ignore_errors=True)
        command = ("train", config, "--steps", 3, "--checkpoints", folder)
        first = chaos.start(*command)
        time.sleep(chaos.random.uniform(0, 0.5))
        second = chaos.start(*command, "--seed", 7)
        errors = [process.communicate(timeout=120)[1] for process in (first, second)]
        codes = [first.returncode, second.returncode]
        check(sorted(map(bool, codes)) == [False, True], f"the jobs ended with {codes}")
        refused = errors[codes.index(0) ^ 1]
        check(str(folder).encode() in refused, f"the refusal does not name the directory: {refused[-300:]!r}")
        return True

    chaos.scenario("two jobs, one directory of checkpoints", 5, once)


SCENARIOS = {"stopped-writer": stopped_writer, "two-jobs": two_jobs}
