"""Scenarios that kill a process: files are complete or absent, states old or new, and what runs next is right."""

import http.server
import json
import os
import pathlib
import shutil
import signal
import subprocess
import threading
import time

from common import Chaos, Violation, check, kill, make_shards, sha256


def index(chaos: Chaos) -> None:
    """One to three processes build the same index; one is killed."""
    data = chaos.place / "index"
    make_shards(data, 12, 400, 1)
    order = ("order", data, "--global-batch", 32, "--dp-size", 2, "--steps", 20, "--json")
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
        out = chaos.place / "pack-out"

        def once(options=options, digests=digests, seconds=seconds, out=out) -> bool:
            shutil.rmtree(out, ignore_errors=True)
            struck = chaos.kill_within(chaos.start("pack", source, out, "--shard-samples", 60, *options), seconds)
            shards = sorted(out.glob("shard-*")) if out.exists() else []
            check([sha256(path) for path in shards] == digests[: len(shards)], "visible shards are no prefix")
            if shards and len(shards) < len(digests):
                check(not list(out.glob(".dflop/*.arrow")), "an incomplete pack has an index")
            return struck

        chaos.scenario(" ".join(["pack", *options]), chaos.kills // 2, once)


def states(chaos: Chaos) -> None:
    """A command that replaces a saved state is killed: the file is the old state or the new one."""
    data = chaos.place / "states"
    make_shards(data, 4, 400, 2)
    size = ("--global-batch", 32, "--dp-size", 2)
    commands = {
        "stream --state-out": lambda out, steps: ("stream", data, "--decode", "raw", "--samples", 100 * steps, "--state-out", out),
        "order --state-out": lambda out, steps: ("order", data, *size, "--steps", steps, "--state-out", out),
    }
    for name, command in commands.items():
        state = chaos.place / "state.json"
        chaos.run(*command(state, 3))
        old = state.read_bytes()
        seconds = chaos.time_of(*command(state, 7))
        new = state.read_bytes()
        check(old != new, "the scenario saves two different states")

        def once(command=command, old=old, new=new, seconds=seconds) -> bool:
            state.write_bytes(old)
            struck = chaos.kill_within(chaos.start(*command(state, 7)), seconds * 1.05)
            check(state.read_bytes() in (old, new), "the state is neither the old nor the new one")
            return struck

        chaos.scenario(name, chaos.kills, once)


class Server(http.server.SimpleHTTPRequestHandler):
    """Serves files with ranges and entity tags."""

    # Part of a body that is sent.
    share = 1.0

    def do_GET(self) -> None:
        self.answer(is_body=True)

    def do_HEAD(self) -> None:
        self.answer(is_body=False)

    def answer(self, *, is_body: bool) -> None:
        path = pathlib.Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        content = path.read_bytes()
        start, end, total = 0, len(content), len(content)
        if wanted := self.headers.get("Range"):
            first, last = wanted.removeprefix("bytes=").split("-")
            start, end = int(first), min(int(last) + 1, total) if last else total
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{total}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(end - start))
        self.send_header("ETag", f'"{total}"')
        self.end_headers()
        if is_body:
            try:
                self.wfile.write(content[start : start + int(self.share * (end - start))])
            except (BrokenPipeError, ConnectionResetError):
                pass

    def log_message(self, *_args) -> None:
        pass


def serve(directory: pathlib.Path, handler: type = Server) -> tuple[http.server.ThreadingHTTPServer, str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), lambda *args: handler(*args, directory=str(directory)))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, f"http://127.0.0.1:{server.server_port}"


def cache(chaos: Chaos) -> None:
    """One to three processes fill a cache of shards, one is killed: kept shards are right, and the limit holds."""
    data = chaos.place / "cached"
    make_shards(data, 6, 300, 3)
    digests = {sha256(path) for path in data.glob("*.tar")}
    largest = max(path.stat().st_size for path in data.glob("*.tar"))
    server, url = serve(data)
    pattern = f"{url}/shard-{{000..005}}.tar"
    listed = chaos.run("list", data / "shard-{000..005}.tar", "--json").stdout.replace(str(data).encode(), url.encode())
    kept = chaos.place / "kept"

    def once() -> bool:
        shutil.rmtree(kept, ignore_errors=True)
        limit = chaos.random.choice([largest + 1, 3 * largest, 20 * largest])
        options = ("--cache", kept, "--cache-bytes", limit)
        stream = ("stream", pattern, "--decode", "raw", *options)
        processes = [chaos.start(*stream) for _ in range(chaos.random.randint(1, 3))]
        struck = chaos.kill_within(processes[0], 0.25)
        for survivor in processes[1:]:
            check(survivor.wait(60) == 0, "a process that was not killed failed")
            survivor.stderr.close()
        check(chaos.run("list", pattern, *options, "--json").stdout == listed, "the samples differ")
        shards = list(kept.glob("*.shard"))
        check(all(sha256(path) in digests for path in shards), "a kept shard differs")
        check(sum(path.stat().st_size for path in shards) <= limit, "the cache exceeds its limit")
        check(not list(kept.glob("*.part")), "a part was left")
        return struck

    chaos.scenario("cache fill", 2 * chaos.kills, once)
    server.shutdown()


REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


def batches(chaos: Chaos) -> None:
    """Writing microbatches is killed: visible files are those of an uninterrupted run, byte for byte."""
    data = chaos.place / "batches-data"
    make_shards(data, 2, 60, 4)
    tokenizer = REPOSITORY / "tests/golden/model_inputs/chatml"
    model = ("--tokenizer", tokenizer, "--model", "qwen2-vl-7b")

    def command(out: pathlib.Path) -> tuple:
        return ("batches", data, *model, "--global-batch", 8, "--dp-size", 1, "--steps", 8, "--out", out)

    reference, out = chaos.place / "batches-reference", chaos.place / "batches-out"
    chaos.run(*command(out))
    seconds = chaos.time_of(*command(reference))
    digests = {path.name: sha256(path) for path in reference.glob("*.safetensors")}
    check(len(digests) > 0, "the scenario writes files")

    def once() -> bool:
        shutil.rmtree(out, ignore_errors=True)
        struck = chaos.kill_within(chaos.start(*command(out)), seconds)
        for path in out.glob("*.safetensors") if out.exists() else []:
            check(sha256(path) == digests[path.name], "a visible file differs")
        return struck

    chaos.scenario("batches --out", chaos.kills // 2, once)


def train(chaos: Chaos) -> None:
    """The launcher or one rank of a training run is killed; it resumes to the losses of a run without a fault."""
    config = chaos.place / "train.toml"
    text = (REPOSITORY / "executor/examples/train-cpu.toml").read_text()
    # Measured times would make plans, and so sums of floats, depend on the machine's load.
    config.write_text(text.replace("enabled = true", "enabled = false") + "\n[checkpoint]\nevery = 1\n")
    folder = chaos.place / "checkpoints"

    def command(*options: object) -> tuple:
        return ("train", config, "--steps", 6, "--checkpoints", folder, "--json", *options)

    def losses(out: bytes) -> dict[int, float]:
        rows = [json.loads(line) for line in out.splitlines() if line.startswith(b"{")]
        return {row["step"]: row["loss"] for row in rows if "loss" in row}

    started = time.monotonic()
    expected = losses(chaos.run(*command()).stdout)
    seconds = time.monotonic() - started
    check(len(expected) == 6, "the scenario trains six steps")

    def once() -> bool:
        shutil.rmtree(folder, ignore_errors=True)
        found: dict[int, float] = {}
        process = chaos.start(*command(), stdout=subprocess.PIPE)
        deadline = time.monotonic() + chaos.random.uniform(0.3 * seconds, seconds)
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        struck = process.poll() is None
        ranks = children(process.pid)
        if struck and ranks and chaos.random.random() < 0.5:
            os.kill(chaos.random.choice(ranks), signal.SIGKILL)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                kill(process)
                raise Violation("the job did not end within 30 s after one of its ranks was killed") from None
            check(process.returncode != 0, "a job whose rank was killed ended with success")
        out = process.stdout.read() if process.poll() is not None else b""
        kill(process)
        found |= losses(out)
        time.sleep(0.05)
        check(not any(pathlib.Path(f"/proc/{rank}").exists() and is_running(rank) for rank in ranks), "a rank was left")
        found |= losses(chaos.run(*command("--resume")).stdout)
        check(all(expected[step] == loss for step, loss in found.items()), "a loss differs after the resumed run")
        check(max(found, default=0) == max(expected), "the resumed run did not reach the last step")
        return struck

    chaos.scenario("train --resume", max(chaos.kills // 5, 1), once)


def children(process: int) -> list[int]:
    try:
        listed = pathlib.Path(f"/proc/{process}/task/{process}/children").read_text()
    except OSError:
        return []
    return [int(word) for word in listed.split()]


def is_running(process: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


SCENARIOS = {"index": index, "pack": pack, "states": states, "cache": cache, "batches": batches, "train": train}
