"""Scenarios of a machine that is too small: little memory, a full disk, few descriptors or threads."""

import json
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable

from common import MIB, Chaos, check, check_account, finish, lines_of, make_shards, sha256
from server import serve

# A user without processes.
NOBODY = 65_533
# Threads with which every command runs, and more.
THREADS_MAX = 7
# Time limit of a run with too little memory, which takes less than a second where memory suffices.
LIMITED_SECONDS_MAX = 20
# Ends of a process that has no memory left which no promise covers.
CRASHES = (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL)


def memory(chaos: Chaos) -> None:
    """The address space is limited to a random size between half of what suffices and all of it.

    A command succeeds with the right output, or ends with a message; its files are whole or absent, and the next run
    without the limit is right. Below the size at which the program itself can be loaded nothing is tried.
    """
    data, source = chaos.place / "memory", chaos.place / "memory-source"
    keys = make_shards(data, 4, 400, 20)
    source.mkdir()
    for number in range(600):
        (source / f"{number:05}.txt").write_text(f"text {number} " * (1 + number * 7 % 1_500))
    base = smallest(chaos, 8 * MIB, lambda: ("--version",))
    faults = chaos.share(0.2, 2)
    memory_of_stream(chaos, data, keys, base, faults)
    memory_of_order(chaos, data, base, faults)
    memory_of_index(chaos, data, base, faults)
    memory_of_pack(chaos, source, base, faults)


def limited(chaos: Chaos, most: int, command: tuple) -> subprocess.CompletedProcess:
    limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (most, most))
    return finish(chaos.start(*command, stdout=subprocess.PIPE, preexec_fn=limit), LIMITED_SECONDS_MAX)


def smallest(chaos: Chaos, low: int, fresh: Callable[[], tuple]) -> int:
    """Returns an address space in which a command succeeds; a sixteenth less does not."""
    high = low
    while limited(chaos, high, fresh()).returncode:
        check(high < 8 << 30, f"`{fresh()}` does not run in 8 GiB")
        low, high = high, 2 * high
    while high - low > high // 16:
        middle = (low + high) // 2
        low, high = (low, middle) if limited(chaos, middle, fresh()).returncode == 0 else (middle, high)
    return high


def repeat(chaos: Chaos, name: str, base: int, faults: int, fresh: Callable[[], tuple], verify: Callable) -> None:
    """Runs a scenario; `verify` gets the outcome of the run with the limit."""
    enough = smallest(chaos, base, fresh)
    half = max(enough // 2, base)

    def once() -> bool:
        most = chaos.random.randint(half, enough)
        done = limited(chaos, most, fresh())
        check(done.returncode not in CRASHES, f"the run ended with {done.returncode} in {most} bytes")
        check(done.returncode == 0 or done.stderr.strip(), f"the run ended with {done.returncode} and no message")
        verify(done)
        return done.returncode != 0

    counts = {"enough_mib": enough // MIB, "least_mib": half // MIB}
    chaos.scenario(f"little memory, {name}", faults, once, counts)


def memory_of_stream(chaos: Chaos, data, keys: list[str], base: int, faults: int) -> None:
    state = chaos.place / "memory-state.json"
    stream = ("stream", data, "--decode", "raw", "--json", "--shuffle-buffer", 500)

    def fresh() -> tuple:
        state.unlink(missing_ok=True)
        return (*stream, "--state-out", state)

    def verify(done: subprocess.CompletedProcess) -> None:
        if done.returncode == 0:
            check(json.loads(done.stdout)["samples"] == len(keys), "samples are missing")
        if not state.exists():
            check(done.returncode != 0, "a run that succeeded saved no state")
            rest = chaos.run(*stream).stdout
            check(json.loads(rest)["samples"] == len(keys), "samples are missing in the next run")
            return
        # A run that fails saves its position, from which the next one delivers the rest.
        delivered = json.loads(state.read_text())["delivered"]
        rest = json.loads(chaos.run(*stream, "--resume", state).stdout)["samples"] if delivered < len(keys) else 0
        check(delivered + rest == len(keys), f"{delivered} samples and {rest} more are not {len(keys)}")

    repeat(chaos, "stream", base, faults, fresh, verify)


def memory_of_order(chaos: Chaos, data, base: int, faults: int) -> None:
    state = chaos.place / "memory-order.json"
    size = ("--global-batch-size", 16, "--dp-size", 2)
    order = ("order", data, *size, "--steps", 20, "--json", "--state-out", state)
    chaos.run("order", data, *size, "--steps", 3, "--state-out", state)
    old = state.read_bytes()
    expected = chaos.run(*order).stdout
    new = state.read_bytes()

    def fresh() -> tuple:
        state.write_bytes(old)
        return order

    def verify(done: subprocess.CompletedProcess) -> None:
        check(done.returncode != 0 or done.stdout == expected, "the order differs")
        check(state.read_bytes() in (old, new), "the state is neither the old nor the new one")
        check(chaos.run(*order).stdout == expected, "the order of the next run differs")

    repeat(chaos, "order", base, faults, fresh, verify)


def memory_of_index(chaos: Chaos, data, base: int, faults: int) -> None:
    out = chaos.place / "memory-index"
    command = ("index", data, "--out", out, "--json")

    def fresh() -> tuple:
        shutil.rmtree(out, ignore_errors=True)
        return command

    chaos.run(*fresh())
    (built,) = out.glob("*.arrow")
    digest = sha256(built)

    def verify(done: subprocess.CompletedProcess) -> None:
        check(done.returncode != 0 or built.exists(), "a run that succeeded wrote no index")
        check(not built.exists() or sha256(built) == digest, "the index differs")
        chaos.run(*command)
        check(sha256(built) == digest, "the index of the next run differs")

    repeat(chaos, "index", base, faults, fresh, verify)


def memory_of_pack(chaos: Chaos, source, base: int, faults: int) -> None:
    reference, out = chaos.place / "memory-reference", chaos.place / "memory-packed"
    command = ("pack", source, out, "--shard-samples", 60, "--zstd")
    chaos.run("pack", source, reference, "--shard-samples", 60, "--zstd")
    digests = [sha256(path) for path in sorted(reference.glob("shard-*"))]

    def fresh() -> tuple:
        shutil.rmtree(out, ignore_errors=True)
        return command

    def verify(done: subprocess.CompletedProcess) -> None:
        visible = [sha256(path) for path in sorted(out.glob("shard-*"))]
        check(visible == digests[: len(visible)], "visible shards are no prefix")
        check(done.returncode != 0 or len(visible) == len(digests), "a run that succeeded wrote too few shards")
        chaos.run(*fresh())
        check([sha256(path) for path in sorted(out.glob("shard-*"))] == digests, "the shards of the next run differ")

    repeat(chaos, "pack", base, faults, fresh, verify)


def full_disk(chaos: Chaos) -> None:
    """The disk of the cache is full: a run reads from the store and delivers everything."""
    data, disk = chaos.place / "disk-data", chaos.place / "disk"
    keys = make_shards(data, 4, 200, 7)
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", disk]
    if subprocess.run(mount, capture_output=True).returncode:
        print("skipped: a full disk, which needs the right to mount", flush=True)
        return
    server, url = serve(data)

    def once() -> bool:
        options = ("--set", f"store.cache={disk / "cache"}", "--set", f"store.cache_bytes={1 << 30}")
        listed = chaos.run("list", f"{url}/shard-{{000..003}}.tar", *options, "--json").stdout
        check_account([row["key"] for row in lines_of(listed)], keys)
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
    order = ("order", data, "--global-batch-size", 16, "--dp-size", 2, "--steps", 20, "--json")
    expected = chaos.run(*order).stdout

    def once() -> bool:
        most = chaos.random.randint(10, 64)
        for command in (order, ("stream", data, "--decode", "raw", "--json")):
            limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            done = chaos.run(*command, status=None, seconds=60, preexec_fn=limit)
            check(done.returncode in (0, 1), f"the run ended with {done.returncode}")
            has_reason = done.returncode == 0 or b"Too many open files" in done.stderr
            check(has_reason, f"no reason: {done.stderr[-300:]!r}")
            check(done.returncode != 0 or command != order or done.stdout == expected, "the order differs")
        return True

    chaos.scenario("few descriptors", chaos.share(0.2), once)


def threads(chaos: Chaos) -> None:
    """Few threads may be started: a run works, or ends with a reason.

    The limit is one of a user, so runs are those of a user that has no other process; root has no such limit.
    """
    data = chaos.place / "threads"
    keys = make_shards(data, 4, 100, 21)
    chaos.place.chmod(0o755)
    try:
        limited_threads(chaos, THREADS_MAX, ("--version",))
    except OSError as error:
        print(f"skipped: few threads, which needs the right to run as another user: {error}", flush=True)
        return
    commands = (("stream", data, "--decode", "raw", "--json"), ("list", data, "--json"))

    def once() -> bool:
        most, command = chaos.random.randint(1, THREADS_MAX), chaos.random.choice(commands)
        done = limited_threads(chaos, most, command)
        shown = f"{command[0]} with {most} threads"
        check(done.returncode not in CRASHES, f"{shown} ended with {done.returncode}")
        check(done.returncode == 0 or done.stderr.strip(), f"{shown} ended with {done.returncode} and no message")
        if done.returncode == 0:
            rows = lines_of(done.stdout)
            delivered = rows[0]["samples"] if command[0] == "stream" else len(rows)
            check(delivered == len(keys), f"{shown} lost samples")
        return done.returncode != 0

    chaos.scenario("few threads", chaos.share(0.1), once)


def limited_threads(chaos: Chaos, most: int, command: tuple) -> subprocess.CompletedProcess:
    limit = lambda: resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    options = {"stdout": subprocess.PIPE, "preexec_fn": limit, "user": NOBODY, "group": NOBODY, "extra_groups": []}
    return finish(chaos.start(*command, **options), LIMITED_SECONDS_MAX)


SCENARIOS = {"memory": memory, "full-disk": full_disk, "descriptors": descriptors, "threads": threads}
