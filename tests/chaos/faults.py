"""Scenarios of other faults: damaged files, full disks, few descriptors, stopped processes, stores that lie."""

import os
import resource
import shutil
import signal
import subprocess
import time

from common import Chaos, check, kill, make_shards
from kills import REPOSITORY, Server, serve


def bit_flips(chaos: Chaos) -> None:
    """One bit of an index is changed: it is built again, and the order stays the same."""
    data = chaos.place / "flips"
    make_shards(data, 3, 100, 5)
    order = ("order", data, "--global-batch", 16, "--dp-size", 2, "--steps", 10, "--json")
    expected = chaos.run(*order).stdout
    (built,) = (data / ".dflop").glob("*.arrow")
    content = built.read_bytes()

    def once() -> bool:
        damaged = bytearray(content)
        damaged[chaos.random.randrange(len(damaged))] ^= 1 << chaos.random.randrange(8)
        built.write_bytes(damaged)
        check(chaos.run(*order).stdout == expected, "the order differs")
        check(built.read_bytes() == content, "the index was not built again")
        return True

    chaos.scenario("a bit of the index", chaos.kills // 2, once)


def shortened(chaos: Chaos) -> None:
    """A shard is shortened while it is read: the run ends with an error that names it."""
    data = chaos.place / "shortened"
    make_shards(data, 1, 3_000, 6)
    shard = data / "shard-000.tar"
    content = shard.read_bytes()

    def once() -> bool:
        shard.write_bytes(content)
        process = chaos.start("stream", shard, "--decode", "raw", "--epochs", 2_000)
        time.sleep(chaos.random.uniform(0.05, 0.3))
        os.truncate(shard, chaos.random.randrange(len(content)))
        _, err = process.communicate(timeout=60)
        check(process.returncode == 1, f"the run ended with {process.returncode}")
        check(b"shard-000.tar" in err, "the error does not name the shard")
        return True

    chaos.scenario("a shard is shortened", chaos.kills // 4, once)


def full_disk(chaos: Chaos) -> None:
    """The disk of the cache is full: a run reads from the store and delivers everything."""
    data, disk = chaos.place / "disk-data", chaos.place / "disk"
    make_shards(data, 4, 200, 7)
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", disk], capture_output=True).returncode:
        print("skipped: a full disk, which needs the right to mount", flush=True)
        return
    server, url = serve(data)
    expected = len(chaos.run("list", data, "--json").stdout.splitlines())

    def once() -> bool:
        options = ("--cache", disk / "cache", "--cache-bytes", 1 << 30)
        listed = chaos.run("list", f"{url}/shard-{{000..003}}.tar", *options, "--json").stdout
        check(len(listed.splitlines()) == expected, "samples are missing")
        packed = chaos.run("pack", data, disk / "packed", status=None)
        check(packed.returncode == 1 and b"No space" in packed.stderr, "packing to a full disk does not say so")
        shutil.rmtree(disk / "packed", ignore_errors=True)
        return True

    try:
        chaos.scenario("a full disk", 5, once)
    finally:
        server.shutdown()
        subprocess.run(["umount", disk], check=False)


def descriptors(chaos: Chaos) -> None:
    """Few descriptors: a run works, or ends with a reason."""
    data = chaos.place / "descriptors"
    make_shards(data, 40, 20, 8)
    order = ("order", data, "--global-batch", 16, "--dp-size", 2, "--steps", 20, "--json")
    expected = chaos.run(*order).stdout

    def once() -> bool:
        most = chaos.random.randint(10, 64)
        for command in (order, ("stream", data, "--decode", "raw", "--json")):
            limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            process = chaos.start(*command, stdout=subprocess.PIPE, preexec_fn=limit)
            out, err = process.communicate(timeout=60)
            check(process.returncode in (0, 1), f"the run ended with {process.returncode}")
            check(process.returncode == 0 or b"Too many open files" in err, f"no reason: {err[-300:]!r}")
            check(process.returncode != 0 or command != order or out == expected, "the order differs")
        return True

    chaos.scenario("few descriptors", chaos.kills // 5, once)


def stopped_writer(chaos: Chaos) -> None:
    """A process that fills the cache is stopped: another one reads from the store, and says who holds the file."""
    data, kept = chaos.place / "stopped", chaos.place / "stopped-cache"
    make_shards(data, 1, 20_000, 9)
    server, url = serve(data)

    def once() -> bool:
        shutil.rmtree(kept, ignore_errors=True)
        command = ("stream", f"{url}/shard-000.tar", "--decode", "raw", "--cache", kept)
        writer = chaos.start(*command)
        deadline = time.monotonic() + 5
        while not list(kept.glob("*.part")) and time.monotonic() < deadline:
            time.sleep(0.001)
        writer.send_signal(signal.SIGSTOP)
        struck = bool(list(kept.glob("*.part")))
        started = time.monotonic()
        done = chaos.run(*command, seconds=60)
        if struck:
            check(time.monotonic() - started < 30, "the other process waited for too long")
            check(str(writer.pid).encode() in done.stderr, "the holder is not named")
        kill(writer)
        return struck

    chaos.scenario("a stopped writer of the cache", 3, once)
    server.shutdown()


class Liar(Server):
    """Fails at random: 503, a reset, a short body, another version."""

    source = None

    def answer(self, *, is_body: bool) -> None:
        draw = Liar.source.random()
        if draw < 0.08:
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif draw < 0.14:
            self.connection.close()
            self.close_connection = True
        elif draw < 0.2 and is_body:
            self.share = 0.5
            super().answer(is_body=True)
            self.close_connection = True
        else:
            super().answer(is_body=is_body)


def lying_store(chaos: Chaos) -> None:
    """A store fails one request in five in four ways: every sample arrives once."""
    data = chaos.place / "lies"
    make_shards(data, 3, 300, 10)
    Liar.source = chaos.random
    server, url = serve(data, Liar)
    listed = chaos.run("list", data / "shard-{000..002}.tar", "--json").stdout.replace(str(data).encode(), url.encode())

    def once() -> bool:
        check(chaos.run("list", f"{url}/shard-{{000..002}}.tar", "--json").stdout == listed, "the samples differ")
        return True

    chaos.scenario("a store that fails", chaos.kills // 4, once)
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


SCENARIOS = {
    "bit-flips": bit_flips,
    "shortened": shortened,
    "full-disk": full_disk,
    "descriptors": descriptors,
    "stopped-writer": stopped_writer,
    "lying-store": lying_store,
    "two-jobs": two_jobs,
}
