"""Scenarios of stores that lie or stall: commands end in time and in bounded memory, and name the shard."""

import itertools
import json
import subprocess
import time

from common import MIB, Chaos, check, finish, kill, lines_of, make_shards
from server import Server, serve, wanted_range

# Most memory of a command that reads from a store that lies; it reads shards of a few MB.
RESIDENT_BYTES_MAX = 256 * MIB
# Time for which a store is asked again; by default it is five minutes.
RETRIES = ("--set", f"store.retry_seconds={60}")
# Longest run against a store that answers at once, whatever it answers.
LIAR_SECONDS_MAX = 90
# The deadline of a read of at most 16 MiB, and the time limit of the request in flight.
STALL_SECONDS_MAX = 60 + 30
SHARD = "shard-000.tar"


class Lying(Server):
    """Answers as the first part of the path names."""

    protocol_version = "HTTP/1.1"

    def answer(self, *, is_body: bool) -> None:
        lie, name = self.path.strip("/").split("/")
        self.path = f"/{name}"
        content = self.content()
        start, end = wanted_range(self.headers.get("Range"), len(content))
        # Every lie comes over a connection of its own.
        self.close_connection = True
        getattr(self, lie)(content, start, end, is_body)

    def head(self, status: int, length: int | None, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        if length is not None:
            self.send_header("Content-Length", str(length))
        for name, value in (("ETag", '"a"'), ("Connection", "close"), *headers):
            self.send_header(name, value)
        self.end_headers()

    def part(self, start: int, end: int, total: int) -> tuple[str, str]:
        return "Content-Range", f"bytes {start}-{end - 1}/{total}"

    def huge(self, content: bytes, start: int, end: int, is_body: bool) -> None:
        """States a length of 2^62 bytes."""
        if not is_body:
            return self.head(200, 1 << 62)
        start, end = wanted_range(self.headers.get("Range"), 1 << 62)
        self.head(206, end - start, self.part(start, end, 1 << 62))
        self.wfile.write(content)

    def empty(self, content: bytes, start: int, end: int, is_body: bool) -> None:
        """States a length of 0."""
        self.head(206 if is_body else 200, 0)

    def longer(self, content: bytes, start: int, end: int, is_body: bool) -> None:
        """States more bytes than it sends, and hangs up."""
        if not is_body:
            return self.head(200, len(content))
        self.head(206, end - start, self.part(start, end, len(content)))
        self.wfile.write(content[start : (start + end) // 2])

    def shorter(self, content: bytes, start: int, end: int, is_body: bool) -> None:
        """States and sends fewer bytes than its range has."""
        if not is_body:
            return self.head(200, len(content))
        self.head(206, (end - start) // 2, self.part(start, end, len(content)))
        self.wfile.write(content[start:end])

    def shifted(self, content: bytes, start: int, end: int, is_body: bool) -> None:
        """Sends another range than the requested one, and says so."""
        if not is_body:
            return self.head(200, len(content))
        self.head(206, end - start, self.part(start + 512, end + 512, len(content)))
        self.wfile.write(content[start + 512 : end + 512].ljust(end - start, b"\0"))

    def growing(self, content: bytes, start: int, end: int, is_body: bool) -> None:
        """States another length of the object with every body."""
        if not is_body:
            return self.head(200, len(content))
        self.head(206, end - start, self.part(start, end, len(content) + 512))
        self.wfile.write(content[start:end])

    def loop(self, content: bytes, start: int, end: int, is_body: bool) -> None:
        """Redirects to itself."""
        self.head(302, 0, ("Location", f"/loop{self.path}"))

    def pair(self, content: bytes, start: int, end: int, is_body: bool) -> None:
        """Redirects to a longer address every time."""
        self.head(302, 0, ("Location", f"/pair{self.path}?{time.monotonic()}"))

    def elsewhere(self, content: bytes, start: int, end: int, is_body: bool) -> None:
        """Redirects to a file of the machine."""
        self.head(302, 0, ("Location", "file:///etc/passwd"))

    def endless(self, content: bytes, start: int, end: int, is_body: bool) -> None:
        """Sends chunks without end."""
        if not is_body:
            return self.head(200, len(content))
        self.head(206, None, ("Transfer-Encoding", "chunked"), self.part(start, end, len(content)))
        while True:
            self.wfile.write(b"10000\r\n" + bytes(1 << 16) + b"\r\n")

    def whole(self, content: bytes, start: int, end: int, is_body: bool) -> None:
        """Ignores the range, and sends chunks without end in place of the object."""
        if not is_body:
            return self.head(200, len(content))
        self.head(200, None, ("Transfer-Encoding", "chunked"))
        while True:
            self.wfile.write(b"10000\r\n" + bytes(1 << 16) + b"\r\n")

    def headers_only(self, content: bytes, start: int, end: int, is_body: bool) -> None:
        """Sends headers of 12 MB."""
        self.send_response(200)
        for number in range(200):
            self.send_header(f"X-{number}", "y" * 60_000)
        self.end_headers()

    # The following ones send nothing, or not enough, for as long as somebody listens.

    def silent(self, content: bytes, start: int, end: int, is_body: bool) -> None:
        """Sends headers and no byte."""
        if not is_body:
            return self.head(200, len(content))
        self.head(206, end - start, self.part(start, end, len(content)))
        self.hold()

    def half(self, content: bytes, start: int, end: int, is_body: bool) -> None:
        """Sends half of the first body, then nothing more."""
        if not is_body:
            return self.head(200, len(content))
        self.head(206, end - start, self.part(start, end, len(content)))
        if start == 0:
            self.wfile.write(content[: end // 2])
        self.hold()

    def drip(self, content: bytes, start: int, end: int, is_body: bool) -> None:
        """Sends a byte every half second."""
        if not is_body:
            return self.head(200, len(content))
        self.head(206, end - start, self.part(start, end, len(content)))
        for at in range(start, end):
            self.wfile.write(content[at : at + 1])
            time.sleep(0.5)

    def later(self, content: bytes, start: int, end: int, is_body: bool) -> None:
        """Asks to come back in 30 years."""
        self.head(503, 0, ("Retry-After", "999999999"))

    def mute(self, content: bytes, start: int, end: int, is_body: bool) -> None:
        """Takes requests and answers none."""
        self.hold()

    def hold(self) -> None:
        time.sleep(2 * STALL_SECONDS_MAX)


LIES = "huge empty longer shorter shifted growing loop pair elsewhere endless whole headers_only".split()
STALLS = "silent half drip later mute".split()


def lying(chaos: Chaos) -> None:
    """A store lies about lengths, ranges and addresses: the samples are right, or an error names the shard."""
    data = chaos.place / "lying"
    make_shards(data, 1, 300, 16)
    server, url = serve(data, Lying)
    plain = {row["key"]: row["fields"] for row in lines_of(chaos.run("list", data / SHARD, "--json").stdout)}
    longest = {"longest_seconds": 0.0, "resident_mib": 0}
    lies = itertools.cycle(LIES)

    def once() -> bool:
        lie = next(lies)
        started = time.monotonic()
        shard = f"{url}/{lie}/{SHARD}"
        done, resident = chaos.run_measured("list", shard, "--json", *RETRIES, seconds=LIAR_SECONDS_MAX)
        longest["longest_seconds"] = max(longest["longest_seconds"], round(time.monotonic() - started, 1))
        longest["resident_mib"] = max(longest["resident_mib"], resident // MIB)
        check(resident < RESIDENT_BYTES_MAX, f"{lie}: {resident // MIB} MiB were resident")
        check(done.returncode in (0, 1), f"{lie}: the run ended with {done.returncode}: {done.stderr[-300:]!r}")
        found = {row["key"]: row["fields"] for row in lines_of(done.stdout)}
        if done.returncode == 0:
            check(found == plain, f"{lie}: the samples differ")
        else:
            check(SHARD.encode() in done.stderr, f"{lie}: the error does not name the shard: {done.stderr[-300:]!r}")
            check(found.items() <= plain.items(), f"{lie}: samples came that the shard does not have")
        return True

    chaos.scenario("a store that lies", chaos.share(0.16, len(LIES)), once, longest)
    server.shutdown()


def stalling(chaos: Chaos) -> None:
    """A store stalls: a run ends within the time that it was given, or within the deadline of reads.

    Runs without a limit take minutes, so one of each kind waits while those with a limit follow each other.
    """
    data = chaos.place / "stalling"
    keys = make_shards(data, 1, 300, 17)
    server, url = serve(data, Lying)
    started = time.monotonic()
    stream = lambda stall, *options: ("stream", f"{url}/{stall}/{SHARD}", "--decode", "raw", "--json", *RETRIES, *options)
    patient = {stall: chaos.start(*stream(stall), stdout=subprocess.PIPE) for stall in STALLS}
    state = chaos.place / "stalled.json"
    stalls = itertools.cycle(STALLS)

    def limited() -> bool:
        stall, seconds = next(stalls), chaos.random.randint(1, 3)
        state.unlink(missing_ok=True)
        began = time.monotonic()
        options = ("--set", f"read.stall_seconds={seconds}", "--state-out", state)
        done, resident = chaos.run_measured(*stream(stall, *options), seconds=30)
        took = time.monotonic() - began
        check(done.returncode == 1, f"{stall}: the run ended with {done.returncode}")
        check(seconds - 0.5 <= took < 2 * seconds + 3, f"{stall}: the run ended after {took:.1f} s of {seconds} s")
        is_named = b"stuck" in done.stderr and SHARD.encode() in done.stderr
        check(is_named, f"{stall}: the error does not name stage and shard: {done.stderr[-300:]!r}")
        check(resident < RESIDENT_BYTES_MAX, f"{stall}: {resident // MIB} MiB were resident")
        # The state that was saved resumes to the rest, once the store answers.
        delivered = json.loads(state.read_text())["delivered"] if state.exists() else 0
        resume = ("--resume", state) if state.exists() else ()
        rest = json.loads(chaos.run("stream", data / SHARD, "--decode", "raw", "--json", *resume).stdout)["samples"]
        check(delivered + rest == len(keys), f"{stall}: {delivered} samples and {rest} more are not {len(keys)}")
        return True

    waits = iter(patient.items())
    longest = {"longest_seconds": 0.0}

    def deadline() -> bool:
        stall, process = next(waits)
        done = finish(process, max(started + STALL_SECONDS_MAX + 30 - time.monotonic(), 1))
        longest["longest_seconds"] = round(time.monotonic() - started, 1)
        check(done.returncode == 1, f"{stall}: the run ended with {done.returncode}")
        check(SHARD.encode() in done.stderr, f"{stall}: the error does not name the shard: {done.stderr[-300:]!r}")
        return True

    try:
        chaos.scenario("a store that stalls, with a limit", chaos.share(0.2, len(STALLS)), limited)
        chaos.scenario("a store that stalls, without a limit", len(STALLS), deadline, longest)
    finally:
        for process in patient.values():
            if process.poll() is None:
                kill(process)
        server.shutdown()


SCENARIOS = {"store-lies": lying, "store-stalls": stalling}
