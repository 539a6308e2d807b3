"""Measures the peak memory and the CPU time of building an index, by the number of samples.

    python3 benches/index_memory.py --dflop target/dist/dflop [OTHER] [--samples 1000000 10000000] [--runs 3]
                                    [--shard-samples 10000]

Samples have three fields. All shards are hard links of one file, so that any number of them takes no room;
their names differ, which is all that an index wants. Several programs run in turn, so that all see the same
machine, and must write the same bytes. Memory is sampled every 10 ms: `anonymous` is the peak of what no file
backs, `resident` the peak with files, such as the mapped copy of an index over 256 MiB that is opened at the
end.
"""

import argparse
import hashlib
import io
import os
import pathlib
import statistics
import struct
import subprocess
import tarfile
import tempfile
import time

SAMPLED_SECONDS = 0.01
PNG = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR" + struct.pack(">IIBBBBB", 512, 384, 8, 2, 0, 0, 0) + bytes(4)
FIELDS = {"png": PNG, "txt": b"a red kite over the sea", "json": b"{}"}


def write_shards(directory: pathlib.Path, shards: int, shard_samples: int) -> None:
    first = directory / "shard-000000.tar"
    with tarfile.open(first, "w", format=tarfile.USTAR_FORMAT) as archive:
        for sample in range(shard_samples):
            for extension, payload in FIELDS.items():
                entry = tarfile.TarInfo(f"{sample:012}.{extension}")
                entry.size = len(payload)
                archive.addfile(entry, io.BytesIO(payload))
    for shard in range(1, shards):
        os.link(first, directory / f"shard-{shard:06}.tar")


def memory(process: int) -> dict[str, int]:
    """Returns the memory without a file, and the peak of all resident pages."""
    try:
        lines = pathlib.Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return {}
    fields = {line.split(":")[0]: line.split()[1] for line in lines if line.endswith(" kB")}
    names = {"anonymous": "RssAnon", "resident": "VmHWM"}
    return {name: int(fields[field]) * 1024 for name, field in names.items() if field in fields}


def build(dflop: str, shards: pathlib.Path) -> dict[str, object]:
    """Builds the index in a new directory."""
    with tempfile.TemporaryDirectory(dir=shards.parent) as out:
        started = time.perf_counter()
        command = [dflop, "index", str(shards), "--out", out, "--json"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        peaks = {"anonymous": 0, "resident": 0}
        while True:
            ended, status, usage = os.wait4(process.pid, os.WNOHANG)
            if ended:
                break
            peaks |= {name: max(peaks[name], now) for name, now in memory(process.pid).items()}
            time.sleep(SAMPLED_SECONDS)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{dflop} failed: {process.returncode}")
        [index] = pathlib.Path(out).glob("*.arrow")
        with index.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {
            "cpu": usage.ru_utime + usage.ru_stime,
            "wall": time.perf_counter() - started,
            **peaks,
            "bytes": index.stat().st_size,
            "digest": digest,
        }


def measure(programs: list[str], samples: int, shard_samples: int, runs: int) -> None:
    with tempfile.TemporaryDirectory() as work:
        shards = pathlib.Path(work) / "shards"
        shards.mkdir()
        write_shards(shards, samples // shard_samples, shard_samples)
        results: dict[str, list[dict[str, object]]] = {program: [] for program in programs}
        for run in range(runs):
            for program in programs if run % 2 == 0 else reversed(programs):
                results[program].append(build(program, shards))
    digests = {run["digest"] for runs in results.values() for run in runs}
    size = results[programs[0]][0]["bytes"] / samples
    print(f"{samples:,} samples in shards of {shard_samples:,}, {size:.1f} bytes a sample, {len(digests)} content(s)", flush=True)
    for program, runs_of_program in results.items():
        medians = {key: statistics.median(run[key] for run in runs_of_program) for key in ("cpu", "wall")}
        peaks = {key: max(run[key] for run in runs_of_program) for key in ("anonymous", "resident")}
        cpu = [round(run["cpu"], 2) for run in runs_of_program]
        print(
            f"  {program}: anonymous {peaks['anonymous'] / 1e6:,.0f} MB"
            f" ({peaks['anonymous'] / samples:.0f} bytes a sample), resident {peaks['resident'] / 1e6:,.0f} MB,"
            f" wall {medians['wall']:.1f} s, CPU {medians['cpu']:.2f} s {cpu}",
            flush=True,
        )
    if len(digests) > 1:
        raise SystemExit("the programs write different files")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dflop", nargs="+", required=True)
    parser.add_argument("--samples", nargs="+", type=int, default=[1_000_000, 10_000_000])
    parser.add_argument("--shard-samples", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    for samples in arguments.samples:
        measure(arguments.dflop, samples, arguments.shard_samples, arguments.runs)


if __name__ == "__main__":
    main()
