"""Measures what it costs to connect the ranks of a job over TCP, by builds of `connect_cost` in turn.

    cargo build --release -p dflop-comm --example connect_cost
    python3 benches/connect.py after=target/release/examples/connect_cost [before=OTHER] [--ranks 2 8 32 64]
                               [--runs 5]

A run starts one process per rank on this machine. Times are those of the slowest rank, from its call of
`connect` until it has joined; threads and files are the largest numbers of a rank, with those of the process
itself. Files are counted with one for the directory that is read.
"""

import argparse
import re
import statistics
import subprocess

LINE = re.compile(
    r"(\d+) ranks: connect ([\d.]+) s; threads/files (\d+)/(\d+), after a sum (\d+)/(\d+), "
    r"after a barrier (\d+)/(\d+)"
)


def measure(program: str, ranks: int) -> tuple[float, list[int], float]:
    """Returns seconds to connect, counts, and seconds of the whole job."""
    output = subprocess.run([program, str(ranks)], capture_output=True, text=True, check=True).stdout
    found = LINE.search(output)
    whole = re.search(r"whole job ([\d.]+) s", output)
    if found is None or whole is None:
        raise SystemExit(f"{program}: expected a line of figures, found {output!r}")
    return float(found[2]), [int(count) for count in found.groups()[2:]], float(whole[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="+", metavar="NAME=PROGRAM")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 8, 32, 64])
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    programs = dict(program.split("=", 1) for program in arguments.programs)
    print("                 seconds to connect: min, median, max   whole job   threads, files of a rank:")
    print("ranks  build                                               median   connected  summed   barrier")
    for ranks in arguments.ranks:
        runs = {name: [] for name in programs}
        for _ in range(arguments.runs):
            for name, program in programs.items():
                runs[name].append(measure(program, ranks))
        for name, results in runs.items():
            seconds = sorted(result[0] for result in results)
            whole = statistics.median(result[2] for result in results)
            counts = [max(result[1][index] for result in results) for index in range(6)]
            pairs = [f"{threads}, {files}" for threads, files in zip(counts[::2], counts[1::2])]
            print(
                f"{ranks:5}  {name:8} {seconds[0]:15.3f} {statistics.median(seconds):9.3f} {seconds[-1]:9.3f}"
                f" {whole:11.3f}   {pairs[0]:9}  {pairs[1]:8} {pairs[2]}",
                flush=True,
            )


if __name__ == "__main__":
    main()
