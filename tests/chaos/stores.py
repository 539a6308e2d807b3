"""Scenarios of stores that fail for a moment, and of shards that are replaced while they are read."""

import itertools
import shutil
import subprocess
import threading

from common import REPOSITORY, Chaos, check, check_account, lines_of, make_shards
from server import Server, serve, time_header

SHARDS = ("shard-000.tar", "shard-001.tar", "shard-002.tar")


class Failing(Server):
    """Fails at random: 503, a reset, a short body."""

    source = None

    def answer(self, *, is_body: bool) -> None:
        draw = Failing.source.random()
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


def failing(chaos: Chaos) -> None:
    """A store fails one request in five in three ways: every sample arrives once."""
    data = chaos.place / "failing"
    keys = make_shards(data, 3, 300, 10)
    Failing.source = chaos.random
    server, url = serve(data, Failing)
    listed = chaos.run("list", data / "shard-{000..002}.tar", "--json").stdout
    listed = listed.replace(str(data).encode(), url.encode())

    def once() -> bool:
        found = chaos.run("list", f"{url}/shard-{{000..002}}.tar", "--json").stdout
        check_account([row["key"] for row in lines_of(found)], keys)
        check(found == listed, "the samples differ")
        return True

    chaos.scenario("a store that fails", chaos.share(0.25), once)
    server.shutdown()


class Changing(Server):
    """Serves another version of every shard after a number of requests."""

    versions: tuple = ()
    kind = "tag"
    requests = itertools.count()
    answered = 0
    last = 0
    lock = threading.Lock()

    def answer(self, *, is_body: bool) -> None:
        with Changing.lock:
            Changing.answered = next(Changing.requests)
        self.number = int(Changing.answered >= Changing.last)
        self.directory = str(Changing.versions[self.number])
        super().answer(is_body=is_body)

    def version(self, content: bytes) -> dict[str, str]:
        modified = time_header(1_700_000_000 + 60 * self.number)
        if Changing.kind == "time":
            return {"Last-Modified": modified}
        return {"ETag": f'"{self.number}-{len(content)}"', "Last-Modified": modified}

    @classmethod
    def change_after(cls, requests: int, kind: str, versions: tuple) -> None:
        cls.versions, cls.kind, cls.last, cls.requests, cls.answered = versions, kind, requests, itertools.count(), 0

    @classmethod
    def has_changed(cls) -> bool:
        return cls.answered >= cls.last


def make_versions(chaos: Chaos, name: str, samples: int, repeats: tuple[int, int]) -> dict[str, tuple]:
    """Writes two versions of three shards, of equal and of other lengths; all keys and texts differ."""
    places = {part: chaos.place / name / part for part in ("old", "new", "longer")}
    make_shards(places["old"], 3, samples, 14, prefix="a", repeats=repeats)
    make_shards(places["new"], 3, samples, 14, prefix="b", repeats=repeats, text="a boat over the sea ")
    make_shards(places["longer"], 3, samples, 15, prefix="b", repeats=repeats, text="a boat over the sea ")
    same, longer = (places["old"], places["new"]), (places["old"], places["longer"])
    return {"tag": same, "time": same, "length": longer}


def check_versions(done: subprocess.CompletedProcess, found: dict[str, dict], versions: list[dict[str, dict]]) -> None:
    """Checks what came of every shard: samples of one version, all of them unless an error names a shard."""
    check(done.returncode in (0, 1), f"the run ended with {done.returncode}: {done.stderr[-300:]!r}")
    named = [shard for shard in SHARDS if shard.encode() in done.stderr]
    check(done.returncode == 0 or named, f"the error names no shard: {done.stderr[-300:]!r}")
    for shard, samples in found.items():
        fitting = [version[shard] for version in versions if samples.items() <= version[shard].items()]
        check(fitting, f"{shard} is a mixture of two versions")
        check(done.returncode == 1 or len(samples) == len(fitting[0]), f"samples of {shard} were lost")
    check(done.returncode == 1 or len(found) == len(SHARDS), "a shard was lost")


def changed_plain(chaos: Chaos) -> None:
    """Shards are replaced in the store while they are read from start to end."""
    versions = make_versions(chaos, "changed-plain", 12, (20_000, 100_000))
    server, url = serve(chaos.place, Changing)
    command = ("list", *(f"{url}/{shard}" for shard in SHARDS), "--json")

    def listed(done: subprocess.CompletedProcess) -> dict[str, dict]:
        found: dict[str, dict] = {}
        for row in lines_of(done.stdout):
            samples = found.setdefault(row["url"].rsplit("/", 1)[1], {})
            check(row["key"] not in samples, "a sample came twice")
            samples[row["key"]] = row["fields"]
        return found

    def of_version(kind: str, requests: int) -> dict[str, dict]:
        Changing.change_after(requests, kind, versions[kind])
        return listed(chaos.run(*command))

    expected = {kind: [of_version(kind, 1 << 30), of_version(kind, 0)] for kind in versions}
    Changing.change_after(1 << 30, "tag", versions["tag"])
    chaos.run(*command)
    requests = Changing.answered
    counts = {"noticed": 0}

    def once() -> bool:
        kind = chaos.random.choice(list(versions))
        Changing.change_after(chaos.random.randint(1, requests), kind, versions[kind])
        done = chaos.run(*command, status=None, seconds=60)
        check_versions(done, listed(done), expected[kind])
        counts["noticed"] += done.returncode
        return Changing.has_changed()

    chaos.scenario("shards replaced, read from start to end", chaos.share(0.25), once, counts)
    server.shutdown()


def changed_balanced(chaos: Chaos) -> None:
    """Shards are replaced in the store while the balanced loader reads samples that an index locates."""
    versions = make_versions(chaos, "changed-balanced", 40, (1, 400))
    server, url = serve(chaos.place, Changing)
    out = chaos.place / "changed-index"
    shards = [f"{url}/{shard}" for shard in SHARDS]
    tokenizer = REPOSITORY / "tests/golden/model_inputs/chatml"
    model = ("--tokenizer", tokenizer, "--model", "qwen2-vl-7b", "--values", "--json")
    size = ("--global-batch-size", 8, "--dp-size", 1, "--steps", 15, "--epochs", 1, "--set", "order.tail=drop")
    command = ("batches", *shards, "--set", f"index.directory={out}", *model, *size)

    def indexed(kind: str, requests: int) -> None:
        """Builds the index of a version."""
        shutil.rmtree(out, ignore_errors=True)
        Changing.change_after(requests, kind, versions[kind])
        chaos.run("index", *shards, "--out", out)

    def prepared(done: subprocess.CompletedProcess) -> dict[str, dict]:
        """Returns the tokens of every sample by shard and key."""
        found: dict[str, dict] = {}
        for row in lines_of(done.stdout):
            tensors = {tensor["name"]: tensor for tensor in row.get("tensors", [])}
            for key, (start, end) in zip(row.get("keys", []), itertools.pairwise(row.get("cu_seqlens", []))):
                samples = found.setdefault(SHARDS[int(key[1:]) // 40], {})
                check(key not in samples, "a sample came twice")
                samples[key] = tuple(values_of(tensors["input_ids"])[start:end])
        return found

    expected, requests = {}, 0
    for kind in versions:
        expected[kind] = []
        for last in (1 << 30, 0):
            indexed(kind, last)
            expected[kind].append(prepared(chaos.run(*command)))
            check(sum(map(len, expected[kind][-1].values())) == 120, "the scenario delivers an epoch")
            requests = Changing.answered
    counts = {"noticed": 0}

    def once() -> bool:
        kind = chaos.random.choice(list(versions))
        indexed(kind, 1 << 30)
        Changing.change_after(chaos.random.randint(0, requests), kind, versions[kind])
        done = chaos.run(*command, status=None, seconds=60)
        check_versions(done, prepared(done), expected[kind])
        counts["noticed"] += done.returncode
        return Changing.has_changed()

    chaos.scenario("shards replaced, read by index", chaos.share(0.25), once, counts)
    server.shutdown()


def values_of(tensor: dict) -> list:
    """Returns the numbers of a tensor of one row."""
    values = tensor["values"]
    return values[0] if values and isinstance(values[0], list) else values


SCENARIOS = {"store-fails": failing, "store-changes": changed_plain, "store-changes-indexed": changed_balanced}
