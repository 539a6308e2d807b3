"""Checks the dependencies against known advisories: `cargo deny` with a local clone of the RustSec database.

A clone whose newest commit is older than `--days-max` is refused: it says nothing about what was found since.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
DAY = 24 * 3600


def age_days(database: pathlib.Path) -> float:
    """Returns the age of the newest commit."""
    command = ["git", "-C", str(database), "log", "-1", "--format=%ct"]
    return (time.time() - int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)) / DAY


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("database", type=pathlib.Path, nargs="?", help="clone of the database, with its `.git` or bare")
    parser.add_argument("--days-max", type=float, default=90)
    parser.add_argument("--deny", default="cargo deny")
    arguments = parser.parse_args()
    if arguments.database is None:
        print("skipped: advisories, because RUSTSEC_DB names no clone of the RustSec advisory database")
        return 0
    try:
        age = age_days(arguments.database)
    except (subprocess.CalledProcessError, ValueError):
        print(f"{arguments.database} is no clone of the RustSec advisory database", file=sys.stderr)
        return 1
    if age > arguments.days_max:
        limit = f"{arguments.days_max:g} days are allowed"
        print(f"refused: the newest commit of {arguments.database} is {age:.0f} days old, and {limit}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as place:
        # `cargo deny` fetches the branch `main` of a URL with a host; Git takes the clone for this one, which does not exist.
        url = "https://advisories.invalid/advisory-db"
        clone = pathlib.Path(place) / "advisory-db"
        subprocess.run(["git", "clone", "--quiet", arguments.database.resolve(), clone], check=True)
        subprocess.run(["git", "-C", clone, "checkout", "--quiet", "-B", "main"], check=True)
        where = f'[advisories]\ndb-path = "{place}/kept"\ndb-urls = ["{url}"]'
        settings = pathlib.Path(place) / "deny.toml"
        settings.write_text((REPOSITORY / "deny.toml").read_text().replace("[advisories]", where, 1))
        os.mkdir(f"{place}/kept")
        command = [*arguments.deny.split(), "--config", str(settings), "check", "advisories"]
        instead = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": f"url.file://{clone}.insteadOf", "GIT_CONFIG_VALUE_0": url}
        return subprocess.run(command, cwd=REPOSITORY, env={**os.environ, **instead}).returncode


if __name__ == "__main__":
    sys.exit(main())
