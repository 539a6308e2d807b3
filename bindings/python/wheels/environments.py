"""Installs a wheel into a clean environment of each Python that is there, and runs the tests in it.

    python bindings/python/wheels/environments.py --work target/wheel-tests target/wheels/dflop-0.1.0-….whl

Pythons are looked for in `DFLOP_PYTHONS`, a list of programs divided by colons, as `python3.N` on PATH, and
in the versions of pyenv. A version that is not found is named, and fails the run with `--all`. Packages come
from PyPI, as wheels.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TESTS = ROOT / "bindings/python/tests"
REQUIREMENTS = TESTS / "requirements.txt"
# Prints what a Python is, and that it can make environments.
ASK = "import ensurepip, sys, venv; print(sys.implementation.name, '%d.%d' % sys.version_info[:2])"
# Prints where the package was imported from.
WHERE = "import dflop; print(dflop.__file__, dflop.__version__)"


def candidates(version: str) -> list[str]:
    """Returns programs that may be a Python of this version."""
    named = [program for program in os.environ.get("DFLOP_PYTHONS", "").split(os.pathsep) if program]
    on_path = shutil.which(f"python{version}")
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions")
    installed = sorted(pyenv.glob(f"{version}.*/bin/python{version}"), reverse=True)
    return [*named, *([on_path] if on_path else []), *map(str, installed)]


def find(version: str) -> str | None:
    """Returns the first CPython of this version that can make environments."""
    for program in candidates(version):
        try:
            answer = subprocess.run([program, "-c", ASK], capture_output=True, text=True, check=False)
        except OSError:
            continue
        if answer.stdout.split() == ["cpython", version]:
            return program
    return None


def clean_environment() -> dict[str, str]:
    """Returns the environment of this process without what leads Python elsewhere."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
    }


def run(python: Path, *arguments: str, cwd: Path) -> None:
    """Runs a Python; raises `CalledProcessError` if it fails."""
    subprocess.run([python, *arguments], cwd=cwd, env=clean_environment(), check=True)


def test(wheel: Path, program: str, work: Path) -> None:
    """Makes an environment, installs the wheel and what its tests want, and runs the tests.

    # Errors
    `CalledProcessError` if a command fails; `RuntimeError` if the package comes from elsewhere.
    """
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    subprocess.run([program, "-m", "venv", work / "environment"], env=clean_environment(), check=True)
    python = work / "environment/bin/python"
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:"]
    # First the wheel alone: it must bring what it needs.
    run(python, *pip, str(wheel), cwd=work)
    where = subprocess.run(
        [python, "-c", WHERE], cwd=work, env=clean_environment(), check=True, capture_output=True, text=True
    )
    if not where.stdout.startswith(str(work / "environment")):
        raise RuntimeError(f"expected the package in {work / 'environment'}, found {where.stdout.strip()}")
    run(python, "-m", "dflop", "--version", cwd=work)
    run(python, *pip, "--requirement", str(REQUIREMENTS), cwd=work)
    run(python, "-m", "pip", "check", "--disable-pip-version-check", cwd=work)
    run(python, "-m", "unittest", "discover", "-s", str(TESTS), cwd=work)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--pythons", default="3.11 3.12 3.13 3.14", help="versions (default: %(default)s)")
    parser.add_argument(
        "--work", type=Path, required=True, help="directory of the environments, emptied first"
    )
    parser.add_argument("--all", action="store_true", help="fail if a version is missing")
    arguments = parser.parse_args()
    wheel = arguments.wheel.resolve(strict=True)
    missing, passed, failed = [], [], []
    for version in arguments.pythons.split():
        program = find(version)
        if program is None:
            missing.append(version)
            continue
        print(f"== CPython {version}: {program}", flush=True)
        try:
            test(wheel, program, arguments.work.resolve() / version)
            passed.append(version)
        except (subprocess.CalledProcessError, RuntimeError) as error:
            print(f"CPython {version}: {error}", file=sys.stderr)
            failed.append(version)
    print(f"{wheel.name}: passed on CPython {', '.join(passed) or 'none'}", flush=True)
    if failed:
        print(f"failed on CPython {', '.join(failed)}", file=sys.stderr)
    if missing:
        print(
            f"not found: CPython {', '.join(missing)}; on PATH as python3.N with venv, or in DFLOP_PYTHONS",
            file=sys.stderr,
        )
    return int(bool(failed) or not passed or (arguments.all and bool(missing)))


if __name__ == "__main__":
    sys.exit(main())
