"""Runs the tests of the package from a wheel for aarch64 on a machine of another kind, by QEMU.

    python bindings/python/wheels/emulated.py --work target/emulated target/wheels/dflop-….whl

Wants `qemu-aarch64-static` or `qemu-aarch64`, and apt-get and dpkg, with which the Python of this Debian for
arm64 is unpacked into a directory: nothing is installed. Where something is missing, it is named and nothing
is tested.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TESTS = ROOT / "bindings/python/tests"
EMULATORS = ("qemu-aarch64-static", "qemu-aarch64")
# Where Debian and Ubuntu name their archive, the newer way first.
SOURCES = ("sources.list.d/debian.sources", "sources.list.d/ubuntu.sources", "sources.list")
PACKAGES = ("python3", "libpython3-stdlib", "libstdc++6", "ca-certificates")
# Others measure times, or wait with time-outs that are meant for a machine.
MODULES = (
    "test_array",
    "test_balanced",
    "test_commands",
    "test_data_in",
    "test_dataset",
    "test_loader",
    "test_messages",
    "test_microbatches",
    "test_package",
    "test_settings",
    "test_writer",
)
APT = """\
Dir::State "{work}/state";
Dir::State::status "/dev/null";
Dir::Cache "{work}/cache";
Dir::Etc::sourcelist "{sources}";
Dir::Etc::sourceparts "-";
#clear APT::Architectures;
APT::Architecture "arm64";
APT::Architectures {{"arm64";}};
Debug::NoLocking "1";
"""
# Programs that the tests start from `sys.executable` run in QEMU as well.
CUSTOMIZE = "import sys\nsys.executable = {python!r}\n"
WRAPPER = """\
#!/bin/sh
PYTHONPATH={site} exec {emulator} -L {root} {root}/usr/bin/python3 "$@"
"""


def missing() -> str | None:
    """Names the first thing that is missing on this machine."""
    if emulator() is None:
        return "QEMU for aarch64 (on Debian, apt-get install qemu-user-static)"
    absent = [program for program in ("apt-get", "dpkg-deb") if shutil.which(program) is None]
    if not absent and sources() is None:
        return "a list of sources in /etc/apt"
    return ", ".join(absent) or None


def emulator() -> str | None:
    """Returns the path of QEMU."""
    return next((path for path in map(shutil.which, EMULATORS) if path), None)


def sources() -> Path | None:
    """Returns the list of this machine's archive."""
    return next((path for name in SOURCES if (path := Path("/etc/apt", name)).is_file()), None)


def unpack_python(work: Path) -> Path:
    """Unpacks Python and its libraries for arm64 into `work/root`, unless it is there; returns `root`."""
    root = work / "root"
    if (root / "usr/bin/python3").exists():
        return root
    for name in ("state/lists/partial", "cache/archives/partial"):
        (work / name).mkdir(parents=True, exist_ok=True)
    config = work / "apt.conf"
    config.write_text(APT.format(work=work, sources=sources()))
    env = os.environ | {"APT_CONFIG": str(config)}
    subprocess.run(["apt-get", "-qq", "update"], env=env, check=True)
    download = ["apt-get", "-qq", "install", "--yes", "--download-only", "--no-install-recommends", *PACKAGES]
    subprocess.run(download, env=env, check=True)
    unpacked = work / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    for package in sorted((work / "cache/archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "--extract", package, unpacked], check=True)
    unpacked.rename(root)
    return root


def make_python(work: Path, root: Path) -> Path:
    """Writes the program that runs Python in QEMU with the packages in `work/site`; returns its path."""
    site, python = work / "site", work / "python"
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir()
    (site / "sitecustomize.py").write_text(CUSTOMIZE.format(python=str(python)))
    python.write_text(WRAPPER.format(site=site, emulator=emulator(), root=root))
    python.chmod(0o755)
    return python


def install(wheel: Path, work: Path, version: str) -> None:
    """Installs the wheel, and what its tests want, for aarch64 and a version of Python into `work/site`."""
    platforms = [f"manylinux_2_{minor}_aarch64" for minor in (28, 27, 17)] + ["manylinux2014_aarch64"]
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--only-binary",
        ":all:",
    ]
    command += [f"--platform={platform}" for platform in platforms]
    command += ["--implementation=cp", f"--python-version={version}", f"--target={work / 'site'}"]
    subprocess.run([*command, wheel, "--requirement", TESTS / "requirements.txt"], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument(
        "--work", type=Path, required=True, help="directory of the emulated Python, kept for the next run"
    )
    parser.add_argument("--modules", default=" ".join(MODULES), help="test modules (default: %(default)s)")
    arguments = parser.parse_args()
    wheel, work = arguments.wheel.resolve(strict=True), arguments.work.resolve()
    if absent := missing():
        print(f"skipped: {wheel.name} is not tested, because this machine has no {absent}")
        return 0
    work.mkdir(parents=True, exist_ok=True)
    python = make_python(work, unpack_python(work))
    ask = "import platform, sys; print('%d.%d' % sys.version_info[:2], platform.machine())"
    version, machine = subprocess.run(
        [python, "-c", ask], check=True, capture_output=True, text=True
    ).stdout.split()
    if machine != "aarch64":
        print(f"expected Python on aarch64, found {machine}", file=sys.stderr)
        return 1
    install(wheel, work, version)
    start = time.monotonic()
    tests = subprocess.run([python, "-m", "unittest", *arguments.modules.split()], cwd=TESTS, check=False)
    if tests.returncode != 0:
        return 1
    print(f"{wheel.name}: CPython {version} passed in QEMU, {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
