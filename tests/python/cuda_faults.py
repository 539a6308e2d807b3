"""Puts faults into the host's side of the CUDA device, one at a time, and checks that its tests find each of them.

Works on a copy of the repository's files in a directory of its own, with a target directory that is kept between runs.
A fault is found if the tests fail or do not compile. The first run, without a fault, must pass.
"""

import argparse
import pathlib
import shutil
import subprocess
import sys
import tomllib

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
LIST = "tests/cuda-stand-in/executor/tests/device/mutants/host.toml"
SECONDS_MAX = 600
# The part of the pipelines' suite that sends rows and gradients between ranks.
SELECTED = ["any_number_of_stages", "schedules_and_recomputation", "replicas_and_cuts"]
# Filters of claims, by the name of the test binary.
TESTS = {
    "device": ["operations::", "steps::", "failures::"],
    "suites": [f"cuda::pipeline::language_models::{claim}" for claim in SELECTED],
}


def copy_files(target: pathlib.Path) -> None:
    """Copies all files that git knows."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True).stdout
    for name in filter(None, names.decode().split("\0")):
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.exists() or place.read_bytes() != (REPOSITORY / name).read_bytes():
            shutil.copyfile(REPOSITORY / name, place)


def passes(copy: pathlib.Path, log: pathlib.Path) -> bool:
    """Runs the tests."""
    base = ["cargo", "test", "--locked", "--manifest-path", "tests/cuda-stand-in/Cargo.toml", "--target-dir", "target"]
    with log.open("w") as output:
        for test, selected in TESTS.items():
            command = [*base, "--workspace", "--test", test, "--", *selected]
            try:
                done = subprocess.run(command, cwd=copy, stdout=output, stderr=output, timeout=SECONDS_MAX)
            except subprocess.TimeoutExpired:
                return False
            if done.returncode != 0:
                return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--copy", type=pathlib.Path, default=REPOSITORY / "target/cuda-faults", help="directory of the copy")
    arguments = parser.parse_args()
    copy = arguments.copy.resolve()
    copy_files(copy)
    log = copy / "faults.log"
    if not passes(copy, log):
        print(f"the tests fail without a fault, see {log}")
        return 1
    missed = []
    faults = tomllib.loads((REPOSITORY / LIST).read_text())["mutant"]
    for fault in faults:
        file = copy / "executor/cuda/src" / fault["file"]
        text = file.read_text()
        if text.count(fault["find"]) != 1:
            print(f"{fault['name']}: `find` occurs {text.count(fault['find'])} times")
            return 1
        file.write_text(text.replace(fault["find"], fault["replace"]))
        is_found = not passes(copy, log)
        file.write_text(text)
        print(f"{fault['name']}: {'found' if is_found else 'NOT FOUND'}", flush=True)
        if not is_found:
            missed.append(fault["name"])
    print(f"{len(faults) - len(missed)} of {len(faults)} faults were found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
