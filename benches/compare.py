#!/usr/bin/env python3
"""Compares `dflop stream` with a bare decode loop, and with other loaders, on one corpus in one run.

Every round measures, one after the other: webdataset, the bare loop, dflop with 1 and 2 workers, then the selected
optional ones: dflop with libjpeg-turbo, spdl, datago; first with decoding, then without. A last
webdataset measurement ends the run, so that every dflop figure has one just before and one just after it.
Ratios are taken within a round, never between runs: other processes on the machine and the clock of the CPU then
affect both sides.

    cargo build --profile dist -p dflop-cli -p dflop-benches
    python3 benches/compare.py --corpus shards/ --peers DIR --python venv/bin/python --json out.json
    python3 benches/compare.py --corpus shards/ --peers DIR --python venv/bin/python --with spdl,datago \\
        --corpus-images shards-without-audio/ --dflop-turbojpeg turbojpeg/dist/dflop

CPU figures are user + system time of all processes of a loader, in milliseconds per sample.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORKERS = (1, 2)
POLL_SECONDS = 0.01
# Optional peers in addition to webdataset. The script of datago reads its shards over HTTP from this port.
EXTRA_PEERS = ("spdl", "datago")
DATAGO_PORT = 8991
SERVER_WAIT_SECONDS = 10
TURBOJPEG = "rgb224 turbojpeg"
# Row of the table: the bound, and whether the value has to be at most or at least that.
TARGETS = {
    "rgb224 / bare loop, 2 workers": ("<=", 1.08),
    "rgb224 / webdataset, 2 workers": ("<=", 0.45),
    "rgb224 turbojpeg / webdataset, 2 workers": ("<=", 0.37),
    "raw / webdataset, 2 workers": ("<=", 0.10),
    "kernel share of CPU, 2 workers": (">=", 0.92),
    "speed-up of 2 workers": (">=", 1.75),
    "first batch s, 2 workers": ("<=", 0.15),
    "peak RssAnon MB, 2 workers": ("<=", 120.0),
}


def script(peer):
    """Returns the file name of a peer's script."""
    return f"bench_{peer}.py"


def parse_arguments():
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "dist"
    parser.add_argument("--corpus", type=Path, required=True, help="directory of uncompressed shards with .jpg entries")
    parser.add_argument("--dflop", type=Path, default=target / "dflop", help="dist build of the dflop binary")
    parser.add_argument("--bare", type=Path, default=target / "bare_loop", help="dist build of the bare loop")
    parser.add_argument("--dflop-turbojpeg", type=Path, metavar="PATH", help="dist build of dflop with the feature "
                        "`turbojpeg`, measured as well")
    parser.add_argument("--bare-turbojpeg", type=Path, metavar="PATH", help="dist build of the bare loop with the "
                        "feature `turbojpeg`, for --dflop-turbojpeg")
    parser.add_argument("--peers", type=Path, metavar="DIR", help=f"directory with {script('webdataset')} and scripts "
                        "of --with; without it no peer is measured")
    parser.add_argument("--python", type=Path, help="interpreter that has the peers and torch, for --peers")
    parser.add_argument("--with", dest="extra", default="", metavar="PEER,...", help="peers in addition to webdataset: "
                        + ", ".join(EXTRA_PEERS))
    parser.add_argument("--corpus-images", type=Path, metavar="DIR", help="the corpus without its audio fields, for "
                        f"datago, served on 127.0.0.1:{DATAGO_PORT} meanwhile")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds [default: 5]")
    parser.add_argument("--batch", type=int, default=32, metavar="N", help="samples in a batch of dflop; "
                        "webdataset's script has 32 [default: 32]")
    parser.add_argument("--peer-limit-s", type=float, default=120, metavar="S", help="seconds after which a webdataset "
                        "measurement ends early [default: 120]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes every measurement here")
    arguments = parser.parse_args()
    arguments.extra = [peer for peer in arguments.extra.split(",") if peer]
    check_arguments(parser, arguments)
    return arguments


def check_arguments(parser, arguments):
    """Exits with a message that names what is missing and how to get it."""
    for binary, package in ((arguments.dflop, "dflop-cli"), (arguments.bare, "dflop-benches")):
        if not os.access(binary, os.X_OK):
            parser.error(f"no binary `{binary}`; run `cargo build --profile dist -p {package}`")
    if not any(arguments.corpus.glob("*.tar")):
        parser.error(f"no .tar file in `{arguments.corpus}`; benches/README.md says how to make a corpus")
    if bool(arguments.peers) != bool(arguments.python):
        parser.error("--peers and --python go together")
    if arguments.dflop_turbojpeg and not os.access(arguments.dflop_turbojpeg, os.X_OK):
        parser.error(f"no binary `{arguments.dflop_turbojpeg}`; run `cargo build --profile dist -p dflop-cli --features "
                     "turbojpeg --target-dir DIR`")
    if arguments.bare_turbojpeg and not arguments.dflop_turbojpeg:
        parser.error("--bare-turbojpeg needs --dflop-turbojpeg")
    check_peers(parser, arguments)
    if arguments.peers and not os.access(arguments.python, os.X_OK):
        parser.error(f"no interpreter `{arguments.python}`")
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")


def check_peers(parser, arguments):
    """Exits with a message if a peer is unknown or cannot be run."""
    for peer in arguments.extra:
        if peer not in EXTRA_PEERS:
            parser.error(f"no peer `{peer}`; known are {', '.join(EXTRA_PEERS)}")
    if arguments.extra and not arguments.peers:
        parser.error("--with needs --peers")
    for peer in ["webdataset", *arguments.extra]:
        if arguments.peers and not (arguments.peers / script(peer)).is_file():
            parser.error(f"no {script(peer)} in `{arguments.peers}`")
    if "datago" in arguments.extra and not any((arguments.corpus_images or Path("none")).glob("*.tar")):
        parser.error("datago needs --corpus-images: a directory with the corpus without audio")


def machine():
    """Names the CPU and the number of cores."""
    model = "unknown CPU"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {"cpu": model, "cores": os.cpu_count()}


def rss_anon_bytes(pid):
    """Reads the resident anonymous memory of a process; 0 after it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def run_json(command, environment=None):
    """Runs a command; returns the JSON object on its last line of output, with peak RssAnon and load added."""
    load = os.getloadavg()[0]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    anon_max = 0
    while process.poll() is None:
        anon_max = max(anon_max, rss_anon_bytes(process.pid))
        time.sleep(POLL_SECONDS)
    out, err = process.communicate()
    if process.returncode != 0:
        sys.exit(f"error: `{Path(command[0]).name}` ended with {process.returncode}: {err.strip()[-2000:]}")
    return json.loads(out.strip().splitlines()[-1]) | {"rss_anon_bytes": anon_max, "load_before": load}


def run_bare(arguments, what="bare", binary=None):
    """Measures the bare loop, of the given binary if there is one."""
    found = run_json([str(binary or arguments.bare), str(arguments.corpus)])
    return found | {"what": what, "cpu_ms": found["cpu_ms_per_picture"]}


def run_dflop(arguments, decode, workers, binary=None):
    """Measures `dflop stream`, of the given binary if there is one."""
    command = [str(binary or arguments.dflop), "stream", str(arguments.corpus), "--decode", decode, "--json"]
    found = run_json(command + ["--batch", str(arguments.batch), "--set", f"read.workers={workers}"])
    if found["skipped"]:
        sys.exit(f"error: {len(found['skipped'])} samples are bad, the first: {found['skipped'][0]}")
    if decode == "rgb224" and found["pictures"] != found["samples"]:
        sys.exit("error: expected one image per sample, the corpus has samples without an image, or with several")
    cpu_ms = 1e3 * found["cpu_seconds"] / found["samples"]
    return found | {"what": TURBOJPEG if binary else decode, "workers": workers, "cpu_ms": cpu_ms}


def run_peer(arguments, decode, workers, peer="webdataset"):
    """Measures a peer with its script in the peers' directory."""
    mode = {"rgb224": "decode", "raw": "raw"}[decode]
    command = [str(arguments.python), str(arguments.peers / script(peer)), "--mode", mode, "--workers", str(workers)]
    corpus = arguments.corpus_images if peer == "datago" else arguments.corpus
    # The scripts import their common part from their own directory, and count shards by absolute paths.
    environment = os.environ | {"CORPUS": str(corpus.resolve())}
    found = run_json(command + ["--limit-s", str(arguments.peer_limit_s)], environment)
    return found | {"what": f"{peer} {decode}", "workers": workers}


@contextlib.contextmanager
def served(arguments):
    """Serves the corpus of datago over HTTP on this machine while the block runs, if datago is selected."""
    if "datago" not in arguments.extra:
        yield
        return
    command = [sys.executable, "-m", "http.server", str(DATAGO_PORT), "--bind", "127.0.0.1"]
    server = subprocess.Popen(command, cwd=arguments.corpus_images, stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL)
    try:
        wait_for_server(server)
        yield
    finally:
        server.terminate()
        server.wait()


def wait_for_server(server):
    """Returns once the server answers; exits if it does not."""
    deadline = time.monotonic() + SERVER_WAIT_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", DATAGO_PORT), timeout=1):
            return
        time.sleep(POLL_SECONDS)
    sys.exit(f"error: no HTTP server on port {DATAGO_PORT}; is the port taken?")


def measure(arguments):
    """Runs all rounds; returns the measurements in the order in which they were taken."""
    runs = []

    def note(round_number, run):
        run["round"] = round_number
        runs.append(run)
        name = f"{run['what']}, workers {run.get('workers', 1)}"
        print(f"round {round_number}: {name:32} {run['cpu_ms']:8.3f} ms CPU a sample", file=sys.stderr, flush=True)

    for number in range(arguments.rounds + 1):
        for decode in ("rgb224", "raw"):
            if arguments.peers:
                for workers in WORKERS:
                    note(number, run_peer(arguments, decode, workers))
            if number == arguments.rounds:
                continue
            if decode == "rgb224":
                note(number, run_bare(arguments))
            for workers in WORKERS:
                note(number, run_dflop(arguments, decode, workers))
            for run in extra_runs(arguments, decode):
                note(number, run)
    return runs


def extra_runs(arguments, decode):
    """Measures the selected peers in addition to dflop, the bare loop and webdataset."""
    if arguments.bare_turbojpeg and decode == "rgb224":
        yield run_bare(arguments, "bare turbojpeg", arguments.bare_turbojpeg)
    if arguments.dflop_turbojpeg and decode == "rgb224":
        for workers in WORKERS:
            yield run_dflop(arguments, decode, workers, arguments.dflop_turbojpeg)
    for peer in arguments.extra:
        # datago always decodes images.
        if (peer, decode) != ("datago", "raw"):
            for workers in WORKERS:
                yield run_peer(arguments, decode, workers, peer)


def select(runs, what, workers=None):
    """Returns the measurements of one kind by round."""
    return {run["round"]: run for run in runs if run["what"] == what and workers in (None, run.get("workers"))}


def pairs_with_peer(runs, decode, workers, what=None):
    """Divides dflop's CPU by webdataset's just before and by webdataset's just after."""
    peers = select(runs, f"webdataset {decode}", workers)
    ratios = []
    for number, ours in select(runs, what or decode, workers).items():
        ratios += [ours["cpu_ms"] / peers[at]["cpu_ms"] for at in (number, number + 1) if at in peers]
    return ratios


def pairs_in_round(runs, decode, peer, workers):
    """Divides dflop's CPU by a peer's in the same round."""
    peers = select(runs, f"{peer} {decode}", workers)
    ours = select(runs, decode, workers)
    return [ours[number]["cpu_ms"] / run["cpu_ms"] for number, run in peers.items()]


def by_workers(name, values_of):
    """Makes a row for each number of workers."""
    return {f"{name}, {workers} worker{'s' * (workers > 1)}": values_of(workers) for workers in WORKERS}


def figures(runs):
    """Returns the rows of the second table: name to values, one a round or a pair."""
    bare = select(runs, "bare")
    decoded = {workers: select(runs, "rgb224", workers) for workers in WORKERS}

    def each(value_of):
        return lambda workers: [value_of(run) for run in decoded[workers].values()]

    one, two = decoded.values()
    rows = by_workers("rgb224 / bare loop", each(lambda run: run["cpu_ms"] / bare[run["round"]]["cpu_ms"]))
    rows |= by_workers("rgb224 / webdataset", lambda workers: pairs_with_peer(runs, "rgb224", workers))
    turbo = {workers: select(runs, TURBOJPEG, workers) for workers in WORKERS}
    bare_turbo = select(runs, "bare turbojpeg")
    rows |= by_workers("rgb224 turbojpeg / its bare loop", lambda workers: [
        turbo[workers][number]["cpu_ms"] / run["cpu_ms"] for number, run in bare_turbo.items()])
    rows |= by_workers("rgb224 turbojpeg / webdataset",
                       lambda workers: pairs_with_peer(runs, "rgb224", workers, TURBOJPEG))
    for peer in EXTRA_PEERS:
        rows |= by_workers(f"rgb224 / {peer}", lambda workers, peer=peer: pairs_in_round(runs, "rgb224", peer, workers))
        rows |= by_workers(f"raw / {peer}", lambda workers, peer=peer: pairs_in_round(runs, "raw", peer, workers))
    rows |= by_workers("raw / webdataset", lambda workers: pairs_with_peer(runs, "raw", workers))
    rows |= by_workers("kernel share of CPU", each(lambda run: run["kernel_cpu_seconds"] / run["cpu_seconds"]))
    rows |= by_workers("first batch s", each(lambda run: run["first_batch_seconds"]))
    rows |= by_workers("peak RssAnon MB", each(lambda run: run["rss_anon_bytes"] / 1e6))
    rows |= by_workers("peak VmHWM MB", each(lambda run: run["peak_rss_bytes"] / 1e6))
    rows["speed-up of 2 workers"] = [one[at]["seconds"] / two[at]["seconds"] for at in one]
    return {name: values for name, values in rows.items() if values}


def summarize(values):
    """Returns the smallest, the median and the largest value."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values), "pairs": len(values)}


def table_of_medians(runs):
    """Lays out the medians of CPU per sample."""
    lines = [f"{'median CPU ms a sample':42} {'1 worker':>10} {'2 workers':>10}"]
    bare = list(select(runs, "bare").values())
    for name, part in (("bare loop", "cpu_ms"), ("  decode", "decode_ms"), ("  resize", "resize_ms"),
                       ("  normalize", "normalize_ms")):
        lines.append(f"{name:42} {statistics.median(run[part] for run in bare):10.3f}")
    peers = [f"{peer} {decode}" for decode in ("rgb224", "raw") for peer in ("webdataset", *EXTRA_PEERS)]
    for what in ("rgb224", TURBOJPEG, "raw", *peers):
        cells = [[run["cpu_ms"] for run in select(runs, what, workers).values()] for workers in WORKERS]
        if all(cells):
            lines.append(f"{what:42} " + " ".join(f"{statistics.median(cell):10.3f}" for cell in cells))
    return lines


def verdict(name, summary):
    """Returns the target of a row and whether it is met: by the median; for the speed-up, by the best pair."""
    if name not in TARGETS:
        return ""
    sign, bound = TARGETS[name]
    value = summary["max"] if name == "speed-up of 2 workers" else summary["median"]
    is_met = value <= bound if sign == "<=" else value >= bound
    return f"{sign} {bound:g} {'met' if is_met else 'NOT MET'}"


def table_of_figures(summaries):
    """Lays out ratios, shares, first batches and memory."""
    lines = [f"{'pair by pair':42} {'min':>10} {'median':>10} {'max':>10}   target"]
    for name, summary in summaries.items():
        cells = " ".join(f"{summary[column]:10.3f}" for column in ("min", "median", "max"))
        lines.append(f"{name:42} {cells}   {verdict(name, summary)}".rstrip())
    return lines


def write_json(path, about, summaries, runs):
    """Writes everything, one measurement per line."""
    lines = ",\n".join("  " + json.dumps(run) for run in runs)
    head = json.dumps({"machine": about, "figures": summaries}, indent=1)[:-2]
    path.write_text(f'{head},\n "runs": [\n{lines}\n ]\n}}\n')


def main():
    """Measures, prints the tables and writes the raw figures."""
    arguments = parse_arguments()
    about = machine()
    load_before = os.getloadavg()
    with served(arguments):
        runs = measure(arguments)
    loads = [run["load_before"] for run in runs]
    about |= {"load_before": load_before, "load_after": os.getloadavg(), "rounds": arguments.rounds}
    summaries = {name: summarize(values) for name, values in figures(runs).items()}
    samples = next(iter(select(runs, "rgb224", 1).values()))["samples"]
    print(f"{about['cpu']}, {about['cores']} cores; load average {load_before[0]:.2f} before, {min(loads):.2f} to "
          f"{max(loads):.2f} meanwhile, the runs themselves in it; {arguments.rounds} rounds over {samples} samples\n")
    print("\n".join(table_of_medians(runs) + [""] + table_of_figures(summaries)))
    if arguments.json:
        write_json(arguments.json, about, summaries, runs)


if __name__ == "__main__":
    main()
