"""Builds a wheel for each target with the compiler of Zig, for old C libraries, and checks it.

    python bindings/python/wheels/build.py --out target/wheels x86_64-unknown-linux-gnu

Wants Rust with the standard library of each target, and the packages of requirements.txt. A wheel contains
the licenses of all that is linked into it. `SOURCE_DATE_EPOCH` dates its files, by default the last commit.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import check
import licenses

ROOT = licenses.ROOT
PACKAGE = ROOT / "bindings/python"
# Matched by `license-files` in pyproject.toml; lies there during a build only.
THIRD_PARTY = PACKAGE / "LICENSES-THIRD-PARTY.txt"
# Rust needs a C library of 2.17 at least, and so does everything else in the wheel.
COMPATIBILITY = "manylinux_2_17"
PROFILE = "dist"


class BuildError(Exception):
    """What prevents a build, and what to do."""


def require_targets(targets: list[str]) -> None:
    """Checks that Rust can build for all targets.

    # Errors
    `BuildError` names the targets whose standard library is not installed.
    """
    missing = []
    for target in targets:
        command = ["rustc", "--print", "target-libdir", "--target", target]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if found.returncode != 0:
            raise BuildError(f"rustc does not know the target {target}: {found.stderr.strip()}")
        if not any(Path(found.stdout.strip()).glob("libstd-*")):
            missing.append(target)
    if missing:
        raise BuildError(
            f"the standard library of {', '.join(missing)} is not installed: `rustup target add {' '.join(missing)}`, "
            "or, for a Rust without rustup, the package of its distribution; WHEEL_TARGETS=TARGETS builds for others"
        )


def environment() -> dict[str, str]:
    """Returns the environment of maturin: equal inputs give equal wheels, without names of this machine."""
    env = dict(os.environ)
    date = subprocess.run(
        ["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if date.returncode == 0:
        env.setdefault("SOURCE_DATE_EPOCH", date.stdout.strip())
    directories = check.machine_directories().items()
    flags = [f"--remap-path-prefix={path}={name}" for path, name in directories]
    # `__FILE__` of C sources, of crates that have some.
    mapped = [f"-ffile-prefix-map={path}={name}" for path, name in directories]
    for variable in ("CFLAGS", "CXXFLAGS"):
        env[variable] = " ".join([*env.get(variable, "").split(), *mapped])
    # Paths may have spaces, which RUSTFLAGS would divide.
    given = env.pop("RUSTFLAGS", "").split()
    env["CARGO_ENCODED_RUSTFLAGS"] = "\x1f".join([*given, *flags])
    # maturin and Zig are programs of this interpreter's environment.
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    return env


def build(target: str, out: Path, profile: str) -> Path:
    """Builds the wheel of a target into a directory; returns its path.

    # Errors
    `BuildError` if maturin fails, `licenses.LicenseError` if a license is missing.
    """
    before = {path: path.stat().st_mtime_ns for path in out.glob("*.whl")}
    try:
        licenses.write(target, THIRD_PARTY)
        command = ["maturin", "build", "--locked", "--profile", profile, "--target", target, "--zig"]
        command += ["--compatibility", COMPATIBILITY, "--out", str(out)]
        built = subprocess.run(command, cwd=PACKAGE, env=environment(), check=False)
    finally:
        THIRD_PARTY.unlink(missing_ok=True)
    if built.returncode != 0:
        raise BuildError(f"maturin failed for {target}, see above")
    wheels = [path for path in out.glob("*.whl") if before.get(path) != path.stat().st_mtime_ns]
    if len(wheels) != 1:
        raise BuildError(f"expected one new wheel in {out}, found {[path.name for path in wheels]}")
    return wheels[0]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="+", metavar="TARGET", help="a target of rustc")
    parser.add_argument("--out", type=Path, required=True, help="directory of the wheels, made if need be")
    parser.add_argument("--profile", default=PROFILE, help="profile of cargo (default: %(default)s)")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    try:
        require_targets(arguments.targets)
        for target in arguments.targets:
            wheel = build(target, out, arguments.profile)
            check.check(wheel, target)
    except (BuildError, check.CheckError, licenses.LicenseError) as error:
        print(f"wheels: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
