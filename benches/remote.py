#!/usr/bin/env python3
"""Compares the throughput of shards on a server with latency to that of the same shards as local files.

The server is its own process on the same machine; its CPU time is reported, and its share of the cores is part
of the ratio. Runs take turns and are long enough that their start does not count: each takes at least --seconds.
Both rates are of whole processes; `steady` leaves out the time until the first batch. With `--s3 HOST:PORT` the shards
are uploaded to a bucket of an S3 server that takes unsigned requests, such as moto, and the server with latency is
its proxy; the S3 server's share of the cores is part of the ratio as well.
"""

import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import urllib.request

BUCKET = "dflop-bench"


def server_cpu_seconds(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def put_shards(server, directory):
    """Uploads the shards of a directory to the bucket."""
    for name, body in [("", b""), *((path.name, path.read_bytes()) for path in sorted(directory.glob("*.tar")))]:
        kind = {"Content-Type": "application/octet-stream"}
        request = urllib.request.Request(f"http://{server}/{BUCKET}/{name}", data=body, headers=kind, method="PUT")
        urllib.request.urlopen(request).close()


def stream(binary, shards, epochs, workers, endpoint=None):
    environment = dict(os.environ)
    if endpoint:
        environment |= {"AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
                        "AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}
    command = [binary, "stream", shards, "--decode", "rgb224", "--set", f"read.workers={workers}", "--epochs", str(epochs)]
    out = subprocess.run([*command, "--json"], check=True, stdout=subprocess.PIPE, env=environment).stdout
    report = json.loads(out)
    steady_seconds = report["seconds"] - report["first_batch_seconds"]
    return {
        "samples_per_second": report["samples"] / report["seconds"],
        "steady_samples_per_second": report["samples"] / steady_seconds,
        "first_batch_seconds": report["first_batch_seconds"],
        "cpu_ms_per_sample": 1e3 * report["cpu_seconds"] / report["samples"],
        "seconds": report["seconds"],
        "samples": report["samples"],
    }


def median(runs, key):
    return statistics.median(run[key] for run in runs)


def measured(arguments, directory, latency_ms, epochs):
    server = subprocess.Popen(
        [f"{arguments.bin}/fault_server", arguments.s3 or directory, str(latency_ms)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )
    url = server.stdout.readline().strip()
    names = ",".join(sorted(path.name for path in pathlib.Path(directory).glob("*.tar")))
    elsewhere = f"{url}{{{names}}}" if "," in names else f"{url}{names}"
    endpoint = None
    if arguments.s3:
        elsewhere, endpoint = f"s3://{BUCKET}/", url.rstrip("/")
    local, remote = [], []
    try:
        for _ in range(arguments.runs):
            local.append(stream(f"{arguments.bin}/dflop", directory, epochs, arguments.workers))
            before = server_cpu_seconds(server.pid)
            remote.append(stream(f"{arguments.bin}/dflop", elsewhere, epochs, arguments.workers, endpoint))
            spent = server_cpu_seconds(server.pid) - before
            remote[-1]["server_cpu_ms_per_sample"] = 1e3 * spent / remote[-1]["samples"]
    finally:
        server.stdin.close()
        server.wait()
    keys = ["samples_per_second", "steady_samples_per_second", "first_batch_seconds", "cpu_ms_per_sample"]
    of_remote = {key: median(remote, key) for key in [*keys, "server_cpu_ms_per_sample"]}
    of_local = {key: median(local, key) for key in keys}
    pairs = zip(local, remote, strict=True)
    return {
        "latency_ms": latency_ms,
        "local": of_local,
        "remote": of_remote,
        "ratio": statistics.median(there["samples_per_second"] / here["samples_per_second"] for here, there in pairs),
        "ratio_of_medians": of_remote["samples_per_second"] / of_local["samples_per_second"],
        "ratio_of_medians_steady": of_remote["steady_samples_per_second"] / of_local["steady_samples_per_second"],
        "cpu_ratio": of_local["cpu_ms_per_sample"] / of_remote["cpu_ms_per_sample"],
        "shortest_run_seconds": min(run["seconds"] for run in [*local, *remote]),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", required=True, help="directory of plain .tar shards")
    parser.add_argument("--s3", metavar="HOST:PORT", help="S3 server that the shards are put into")
    parser.add_argument("--bin", default="target/dist", help="directory of `dflop` and `fault_server`")
    parser.add_argument("--latency-ms", type=int, nargs="+", default=[0, 30])
    parser.add_argument("--seconds", type=float, default=20.0, help="minimum seconds of a run")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", help="file for the JSON [default: standard output]")
    arguments = parser.parse_args()
    if arguments.s3:
        put_shards(arguments.s3, pathlib.Path(arguments.corpus))
    once = stream(f"{arguments.bin}/dflop", arguments.corpus, 1, arguments.workers)
    epochs = max(1, round(1.1 * arguments.seconds / once["seconds"] + 0.5))
    report = {
        "s3": bool(arguments.s3),
        "what": f"dflop stream --decode rgb224 --set read.workers={arguments.workers} --epochs {epochs}, medians of "
                f"{arguments.runs} runs by turns; the server is another process of the same machine",
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "samples_per_epoch": once["samples"],
        "latencies": [measured(arguments, arguments.corpus, latency, epochs) for latency in arguments.latency_ms],
        "largest_rss_bytes_of_children": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
    }
    text = json.dumps(report, indent=2) + "\n"
    if arguments.out:
        pathlib.Path(arguments.out).write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
