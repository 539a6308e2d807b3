"""Prints where the minutes of a cold `.ci/run` go: its steps, compilation by crate, tests by binary.

    make minutes                                # builds everything anew in target/minutes
    python3 tests/python/minutes.py LOG DIRECTORY    # prints the tables of an earlier run again

Seconds of compilation are those from the start to the end of a crate, by `cargo --timings`; two crates compile at a time, so
they add up to more than the step takes. Columns: *check* is clippy and the documentation, *build* the libraries, build scripts
and programs, *unit tests* libraries compiled once more with their tests, *tests* integration tests and examples.
"""

import argparse
import collections
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
STEP = re.compile(r"^ci: (.+): (\d+) s$")
BINARY = re.compile(r"^\s+(?:Running (?:unittests )?\S+ \(\S*?deps/([^)]+?)-[0-9a-f]+\)|Doc-tests (\S+))")
RESULT = re.compile(r"^test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored; .*finished in ([\d.]+)s")
DOCTESTS = re.compile(r"^all doctests ran in ([\d.]+)s")
PYTHON = re.compile(r"^Ran (\d+) tests in ([\d.]+)s")
UNITS = re.compile(r"UNIT_DATA = (\[.*?\]);\n", re.DOTALL)
COLUMNS = ("check", "build", "unit tests", "tests")
# Crates of other people that are listed by name.
LISTED = 12


def table(heading: list[str], rows: list[list[str]]) -> None:
    """Prints a table in Markdown."""
    for row in [heading, ["---", *["---:"] * (len(heading) - 1)], *rows]:
        print("| " + " | ".join(row) + " |")
    print()


def print_steps(log: list[str]) -> None:
    steps = [(match[1], int(match[2])) for line in log if (match := STEP.match(line))]
    rows = [[name, str(seconds)] for name, seconds in steps]
    table(["step", "s"], [*rows, ["all", str(sum(seconds for _, seconds in steps))]])


def column_of(unit: dict) -> str:
    """Returns the column of a unit, by the words that cargo uses for its target and mode."""
    target = unit["target"]
    if "check" in target or "(doc)" in target:
        return "check"
    if '"test"' in target or '"example"' in target or '"bench"' in target:
        return "tests"
    return "unit tests" if "(test)" in target else "build"


def print_compilation(timings: pathlib.Path) -> None:
    crates: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for page in timings.glob("cargo-timing-*.html"):
        match = UNITS.search(page.read_text())
        for unit in json.loads(match[1]) if match else []:
            crates[unit["name"]][column_of(unit)] += unit["duration"]
    by_size = sorted(crates.items(), key=lambda crate: -crate[1].total())
    own = [crate for crate in by_size if crate[0].startswith("dflop-")]
    others = [crate for crate in by_size if not crate[0].startswith("dflop-")]

    def row(name: str, seconds: collections.Counter[str]) -> list[str]:
        return [name, *(f"{seconds[column]:.0f}" for column in COLUMNS), f"{seconds.total():.0f}"]

    def together(name: str, chosen: list) -> list[str]:
        return row(name, sum((seconds for _, seconds in chosen), collections.Counter()))

    rows = [row(*crate) for crate in own] + [row(*crate) for crate in others[:LISTED]]
    rows.append(together(f"{len(others[LISTED:])} other crates", others[LISTED:]))
    table(["crate-seconds of", *COLUMNS, "all"], [*rows, together("all", by_size)])


def print_tests(log: list[str]) -> None:
    rows, binary = [], "?"
    for line in log:
        if match := BINARY.match(line):
            binary = match[1] or f"documentation of {match[2]}"
        elif match := RESULT.match(line):
            passed, failed, ignored = (int(match[group]) for group in (1, 2, 3))
            rows.append([binary, passed + failed, ignored, float(match[4])])
        elif (match := DOCTESTS.match(line)) and rows:
            rows[-1][3] = float(match[1])
        elif match := PYTHON.match(line):
            rows.append(["Python", int(match[1]), 0, float(match[2])])
    merged: dict[str, list] = {}
    for name, *figures in rows:
        merged[name] = [sum(pair) for pair in zip(merged.get(name, [0, 0, 0]), figures, strict=True)]
    by_time = sorted(merged.items(), key=lambda row: -row[1][2])
    shown = [[name, str(run), str(ignored), f"{seconds:.1f}"] for name, (run, ignored, seconds) in by_time if run]
    totals = [sum(figures[at] for figures in merged.values()) for at in range(3)]
    all_of_them = ["all", str(totals[0]), str(totals[1]), f"{totals[2]:.1f}"]
    table(["tests in", "run", "ignored", "s"], [*shown, all_of_them])


def run_cold(directory: pathlib.Path) -> int:
    """Runs `.ci/run` with an empty directory for what it builds, keeps its output there, and returns its status."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    environment = {**os.environ, "CARGO_TARGET_DIR": str(directory), "TIMINGS": "--timings"}
    command = ["bash", str(REPOSITORY / ".ci/run")]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with (directory / "log").open("w") as log:
        with subprocess.Popen(command, env=environment, cwd=REPOSITORY, **pipes) as process:
            for line in process.stdout:
                log.write(line)
                sys.stderr.write(line)
    return process.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=pathlib.Path, nargs="?", help="output of a run")
    parser.add_argument("directory", type=pathlib.Path, nargs="?", help="where the run has built")
    arguments = parser.parse_args()
    directory, status = arguments.directory, 0
    if directory is None:
        directory = REPOSITORY / "target/minutes"
        status = run_cold(directory)
    log = (arguments.log or directory / "log").read_text().splitlines()
    print_steps(log)
    print_compilation(directory / "cargo-timings")
    print_tests(log)
    return status


if __name__ == "__main__":
    sys.exit(main())
