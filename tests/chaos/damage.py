"""Scenarios of damage: flipped bits in files that are read again, shards that are shortened."""

import gzip
import os
import shutil
import subprocess
import time

from common import Chaos, check, check_account, flip_bit, lines_of, make_shards
from ranks import STEPS, Job
from server import serve


def index(chaos: Chaos) -> None:
    """One bit of an index is changed: it is built again, and the order stays the same."""
    data = chaos.place / "flips"
    make_shards(data, 3, 100, 5)
    order = ("order", data, "--global-batch-size", 16, "--dp-size", 2, "--steps", 10, "--json")
    expected = chaos.run(*order).stdout
    (built,) = (data / ".dflop").glob("*.arrow")
    content = built.read_bytes()

    def once() -> bool:
        built.write_bytes(flip_bit(content, chaos.random.randrange(8 * len(content))))
        check(chaos.run(*order).stdout == expected, "the order differs")
        check(built.read_bytes() == content, "the index was not built again")
        return True

    chaos.scenario("a bit of the index", chaos.share(0.5), once)


def compressed(chaos: Chaos) -> None:
    """One bit of a compressed shard is changed: the samples are the same, or an error names the shard.

    The checksum of the contents is the last thing in a shard, so damaged contents may have been delivered before the
    error; such runs are counted as `noticed_late`.
    """
    source = chaos.place / "compressed-source"
    make_shards(source, 1, 200, 11)
    plain = source / "shard-000.tar"
    zipped = chaos.place / "zip" / "shard-000.tar.gz"
    zipped.parent.mkdir()
    zipped.write_bytes(gzip.compress(plain.read_bytes(), mtime=0))
    texts = chaos.place / "compressed-texts"
    texts.mkdir()
    for number in range(200):
        (texts / f"{number:05}.txt").write_text(f"text {number} " * (1 + number))
    chaos.run("pack", texts, chaos.place / "zst", "--zstd")
    (packed,) = (chaos.place / "zst").glob("*.tar.zst")
    for name, shard in (("gzip", zipped), ("zstd", packed)):
        content = shard.read_bytes()
        expected = {row["key"]: row["fields"] for row in lines_of(chaos.run("list", shard, "--json").stdout)}
        counts = {"harmless": 0, "noticed": 0, "noticed_late": 0}

        def once(shard=shard, content=content, expected=expected, counts=counts) -> bool:
            shard.write_bytes(flip_bit(content, chaos.random.randrange(8 * len(content))))
            done = chaos.run("list", shard, "--json", status=None, seconds=60)
            found = found_in(done, shard.name)
            is_right = all(expected.get(key) == fields for key, fields in found)
            if done.returncode == 0:
                check_account([key for key, _ in found], expected)
                check(is_right, "damaged contents were delivered without an error")
                counts["harmless"] += 1
            else:
                counts["noticed" if is_right else "noticed_late"] += 1
            return True

        chaos.scenario(f"a bit of a {name} shard", chaos.share(0.25), once, counts)


def found_in(done: subprocess.CompletedProcess, shard: str) -> list[tuple]:
    """Returns keys and fields of a listing, after checking that a failed one names the shard."""
    check(done.returncode in (0, 1), f"the run ended with {done.returncode}: {done.stderr[-300:]!r}")
    is_named = done.returncode == 0 or shard.encode() in done.stderr
    check(is_named, f"the error does not name the shard: {done.stderr[-300:]!r}")
    found = [(row["key"], row["fields"]) for row in lines_of(done.stdout)]
    check(len(dict(found)) == len(found), "a sample came twice")
    return found


def cached(chaos: Chaos) -> None:
    """One bit of a kept shard is changed: a damaged header is an error that names the shard.

    The cache recognizes a shard by name and length and keeps no digest, and tar archives have checksums of headers
    only: damaged contents are delivered as they are. Such runs are counted as `unnoticed`.
    """
    data, kept = chaos.place / "cached-data", chaos.place / "cached-bits"
    make_shards(data, 1, 200, 12)
    server, url = serve(data)
    command = ("list", f"{url}/shard-000.tar", "--set", f"store.cache={kept}", "--json")
    expected = {row["key"]: row["fields"] for row in lines_of(chaos.run(*command).stdout)}
    (shard,) = kept.glob("*.shard")
    content = shard.read_bytes()
    counts = {"harmless": 0, "noticed": 0, "unnoticed": 0}

    def once() -> bool:
        shard.write_bytes(flip_bit(content, chaos.random.randrange(8 * len(content))))
        done = chaos.run(*command, status=None, seconds=60)
        found = found_in(done, "shard-000.tar")
        if done.returncode == 1:
            counts["noticed"] += 1
        else:
            check(len(found) == len(expected), "samples are missing")
            counts["harmless" if dict(found) == expected else "unnoticed"] += 1
        return True

    chaos.scenario("a bit of a kept shard", chaos.share(0.25), once, counts)
    server.shutdown()


def states(chaos: Chaos) -> None:
    """One bit of a saved state is changed: it is refused, or the run that resumes is the same."""
    data = chaos.place / "bits-states"
    keys = make_shards(data, 3, 200, 13)
    size = ("--global-batch-size", 16, "--dp-size", 2)
    state = chaos.place / "bits.json"
    commands = {
        "stream": (
            ("stream", data, "--decode", "raw", "--shuffle-buffer", 20, "--samples", 250, "--state-out", state),
            ("stream", data, "--decode", "raw", "--shuffle-buffer", 20, "--json", "--resume", state),
        ),
        "order": (
            ("order", data, *size, "--steps", 5, "--state-out", state),
            ("order", data, *size, "--steps", 5, "--json", "--resume", state),
        ),
    }
    for name, (save, resume) in commands.items():
        chaos.run(*save)
        content = state.read_bytes()
        expected = delivered(chaos.run(*resume).stdout)
        check(name != "stream" or expected == [len(keys) - 250], "the resumed run delivers the rest")
        counts = {"harmless": 0}

        def once(content=content, resume=resume, expected=expected, counts=counts) -> bool:
            at = chaos.random.randrange(8 * len(content))
            state.write_bytes(flip_bit(content, at))
            done = chaos.run(*resume, status=None, seconds=60)
            if done.returncode == 0:
                part = content[max(at // 8 - 20, 0) : at // 8 + 20].decode()
                is_same = delivered(done.stdout) == expected
                check(is_same, f"a changed bit {at % 8} in the middle of `{part}` changes the run")
                counts["harmless"] += 1
            else:
                check(done.returncode in (1, 2), f"the run ended with {done.returncode}: {done.stderr[-300:]!r}")
                is_named = b"state" in done.stderr or state.name.encode() in done.stderr
                check(is_named, f"the error does not name the state: {done.stderr[-300:]!r}")
            return True

        chaos.scenario(f"a bit of a state of {name}", chaos.share(0.5), once, counts)


def delivered(out: bytes) -> list:
    """Returns what a command delivered: numbers of samples of `stream`, samples of every step of `order`."""
    return [row["samples"] for row in lines_of(out)]


def checkpoint(chaos: Chaos) -> None:
    """One bit of the newest checkpoint is changed: it is named, the one before is used, and losses are the same."""
    job = Job(chaos, "bits-trained")
    original = chaos.place / "bits-original"
    shutil.copytree(job.directory, original)
    newest = max(original.glob("step-*")).name
    files = sorted(path.name for path in (original / newest).iterdir())

    def once() -> bool:
        shutil.rmtree(job.directory)
        shutil.copytree(original, job.directory)
        path = job.directory / newest / chaos.random.choice(files)
        content = path.read_bytes()
        at = chaos.random.randrange(8 * len(content))
        path.write_bytes(flip_bit(content, at))
        done = chaos.run(*job.command("--resume"), status=None, seconds=60)
        found = job.check_results(done.stdout)
        if done.returncode != 0:
            check(newest.encode() in done.stderr, f"the error does not name the checkpoint: {done.stderr[-300:]!r}")
            return True
        shown = f"bit {at} of {path.name}"
        check(found, f"a checkpoint with a changed {shown} was used")
        check(max(found) == STEPS - 1, "the resumed run did not reach the last step")
        check(newest.encode() in done.stderr, f"the checkpoint with a changed {shown} is not named")
        return True

    chaos.scenario("a bit of a checkpoint", chaos.share(0.2), once)


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

    chaos.scenario("a shard is shortened", chaos.share(0.25), once)


SCENARIOS = {
    "bit-of-index": index,
    "bit-of-shard": compressed,
    "bit-of-cache": cached,
    "bit-of-state": states,
    "bit-of-checkpoint": checkpoint,
    "shortened": shortened,
}
