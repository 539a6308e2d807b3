"""Scenarios that kill a process: files are complete or absent, states old or new, and what runs next is right."""

import json
import pathlib
import shutil
import subprocess

from common import REPOSITORY, Chaos, check, check_account, finish, lines_of, make_shards, sha256
from server import serve


def index(chaos: Chaos) -> None:
    """One to three processes build the same index; one is killed."""
    data = chaos.place / "index"
    make_shards(data, 12, 400, 1)
    order = ("order", data, "--global-batch-size", 32, "--dp-size", 2, "--steps", 20, "--json")
    seconds = chaos.time_of("index", data, "--json")
    (built,) = (data / ".dflop").glob("*.arrow")
    digest, listed = sha256(built), chaos.run(*order).stdout

    def once() -> bool:
        shutil.rmtree(data / ".dflop")
        processes = [chaos.start("index", data, "--json") for _ in range(chaos.random.randint(1, 3))]
        struck = chaos.kill_within(processes[0], seconds)
        for survivor in processes[1:]:
            check(survivor.wait(60) == 0, "a process that was not killed failed")
            survivor.stderr.close()
        for path in (data / ".dflop").glob("*.arrow"):
            check(sha256(path) == digest, "the index differs")
        check(chaos.run(*order).stdout == listed, "the order differs")
        return struck

    chaos.scenario("index", chaos.kills, once)


def pack(chaos: Chaos) -> None:
    """Packing is killed: every visible shard is whole, and all together are a prefix."""
    source = chaos.place / "pack-source"
    source.mkdir()
    for number in range(1_200):
        (source / f"{number:05}.txt").write_text(f"text {number} " * (1 + number % 700))
    for options in ([], ["--zstd"]):
        reference = chaos.place / f"pack-reference{len(options)}"
        seconds = chaos.time_of("pack", source, reference, "--shard-samples", 60, *options)
        digests = [sha256(path) for path in sorted(reference.glob("shard-*"))]
        keys = [row["key"] for row in lines_of(chaos.run("list", reference, "--json").stdout)]
        check(len(keys) == 1_200, "the scenario packs 1,200 samples")
        out = chaos.place / "pack-out"

        def once(options=options, digests=digests, keys=keys, seconds=seconds, out=out) -> bool:
            shutil.rmtree(out, ignore_errors=True)
            struck = chaos.kill_within(chaos.start("pack", source, out, "--shard-samples", 60, *options), seconds)
            shards = sorted(out.glob("shard-*")) if out.exists() else []
            check([sha256(path) for path in shards] == digests[: len(shards)], "visible shards are no prefix")
            if shards and len(shards) < len(digests):
                check(not list(out.glob(".dflop/*.arrow")), "an incomplete pack has an index")
            if shards:
                listed = chaos.run("list", *shards, "--json").stdout
                check_account([row["key"] for row in lines_of(listed)], keys[: 60 * len(shards)])
            return struck

        chaos.scenario(" ".join(["pack", *options]), chaos.share(0.5), once)


def states(chaos: Chaos) -> None:
    """A command that replaces a saved state is killed: the file is the old state or the new one."""
    data = chaos.place / "states"
    keys = make_shards(data, 4, 400, 2)
    size, stream = ("--global-batch-size", 32, "--dp-size", 2), ("stream", data, "--decode", "raw")
    commands = {
        "stream --state-out": lambda out, steps: (*stream, "--samples", 100 * steps, "--state-out", out),
        "order --state-out": lambda out, steps: ("order", data, *size, "--steps", steps, "--state-out", out),
    }
    for name, command in commands.items():
        state = chaos.place / "state.json"
        chaos.run(*command(state, 3))
        old = state.read_bytes()
        seconds = chaos.time_of(*command(state, 7))
        new = state.read_bytes()
        check(old != new, "the scenario saves two different states")

        def once(name=name, command=command, old=old, new=new, seconds=seconds) -> bool:
            state.write_bytes(old)
            struck = chaos.kill_within(chaos.start(*command(state, 7)), seconds * 1.05)
            check(state.read_bytes() in (old, new), "the state is neither the old nor the new one")
            if name.startswith("stream"):
                delivered = json.loads(state.read_text())["delivered"]
                rest = chaos.run(*stream, "--json", "--resume", state).stdout
                is_all = delivered + json.loads(rest)["samples"] == len(keys)
                check(is_all, "what was delivered and the rest are not the dataset")
            return struck

        chaos.scenario(name, chaos.kills, once)


def cache(chaos: Chaos) -> None:
    """Up to three processes fill a cache of shards, one is killed: kept shards are right, and the limit holds."""
    data = chaos.place / "cached"
    keys = make_shards(data, 6, 300, 3)
    digests = {sha256(path) for path in data.glob("*.tar")}
    largest = max(path.stat().st_size for path in data.glob("*.tar"))
    server, url = serve(data)
    pattern = f"{url}/shard-{{000..005}}.tar"
    listed = chaos.run("list", data / "shard-{000..005}.tar", "--json").stdout
    listed = listed.replace(str(data).encode(), url.encode())
    kept = chaos.place / "kept"

    def once(*count: int) -> bool:
        shutil.rmtree(kept, ignore_errors=True)
        limit = chaos.random.choice([largest + 1, 3 * largest, 20 * largest])
        options = ("--set", f"store.cache={kept}", "--set", f"store.cache_bytes={limit}")
        stream = ("stream", pattern, "--decode", "raw", "--json", *options)
        processes = [chaos.start(*stream, stdout=subprocess.PIPE) for _ in range(chaos.random.randint(*count))]
        struck = chaos.kill_within(processes[0], 0.25)
        for survivor in processes[1:]:
            done = finish(survivor, 60)
            check(done.returncode == 0, "a process that was not killed failed")
            check(json.loads(done.stdout)["samples"] == len(keys), "a process that was not killed lost samples")
        found = chaos.run("list", pattern, *options, "--json").stdout
        check_account([row["key"] for row in lines_of(found)], keys)
        check(found == listed, "the samples differ")
        shards = list(kept.glob("*.shard"))
        check(all(sha256(path) in digests for path in shards), "a kept shard differs")
        check(sum(path.stat().st_size for path in shards) <= limit, "the cache exceeds its limit")
        check(not list(kept.glob("*.part")), "a part was left")
        return struck

    chaos.scenario("cache fill, one process", chaos.share(0.5), lambda: once(1, 1))
    chaos.scenario("cache fill, two or three processes", chaos.share(0.66), lambda: once(2, 3))
    server.shutdown()


def batches(chaos: Chaos) -> None:
    """Writing microbatches is killed: visible files are those of an uninterrupted run, byte for byte."""
    data = chaos.place / "batches-data"
    make_shards(data, 2, 60, 4)
    tokenizer = REPOSITORY / "tests/golden/model_inputs/chatml"
    model = ("--tokenizer", tokenizer, "--model", "qwen2-vl-7b")

    def command(out: pathlib.Path) -> tuple:
        return ("batches", data, *model, "--global-batch-size", 8, "--dp-size", 1, "--steps", 8, "--out", out)

    reference, out = chaos.place / "batches-reference", chaos.place / "batches-out"
    chaos.run(*command(out))
    seconds = chaos.time_of(*command(reference))
    digests = {path.name: sha256(path) for path in reference.glob("*.safetensors")}
    check(len(digests) > 0, "the scenario writes files")
    steps = lines_of(chaos.run(*command(reference), "--json").stdout)
    delivered = [key for row in steps for key in row.get("keys", [])]

    def once() -> bool:
        shutil.rmtree(out, ignore_errors=True)
        struck = chaos.kill_within(chaos.start(*command(out)), seconds)
        for path in out.glob("*.safetensors") if out.exists() else []:
            check(sha256(path) == digests[path.name], "a visible file differs")
        again = lines_of(chaos.run(*command(out), "--json").stdout)
        check_account([key for row in again for key in row.get("keys", [])], delivered)
        found = {path.name: sha256(path) for path in out.glob("*.safetensors")}
        check(found == digests, "the files of the next run differ")
        return struck

    chaos.scenario("batches --out", chaos.share(0.5), once)


SCENARIOS = {"index": index, "pack": pack, "states": states, "cache": cache, "batches": batches}
