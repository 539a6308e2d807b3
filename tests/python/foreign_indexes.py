"""Checks that index files written by Energon, wids and webshart lead to the index of a scan.

    DFLOP=target/debug/dflop venv/bin/python tests/python/foreign_indexes.py

Shards contain what the tools treat differently: directories, names without a dot, long names, upper-case extensions,
rotated images. Each tool writes its files with its own command; `dflop index` then checks and follows them, and the
Arrow files must be equal except for the warnings.
"""

import io
import json
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pyarrow.ipc
from PIL import Image

DFLOP = os.environ.get("DFLOP", "target/debug/dflop")
TOOLS = Path(sys.executable).parent
SHARDS = 3
SAMPLES = 8


def picture(width, height, orientation):
    image, out = Image.new("RGB", (width, height), (width, height, 9)), io.BytesIO()
    exif = image.getexif()
    if orientation:
        exif[274] = orientation
    image.save(out, "JPEG", exif=exif)
    return out.getvalue()


def write_shard(path, shard, is_odd):
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT if shard == 2 else tarfile.GNU_FORMAT) as tar:

        def add(name, payload=b"", kind=tarfile.REGTYPE):
            member = tarfile.TarInfo(name)
            member.size, member.type = len(payload), kind
            tar.addfile(member, io.BytesIO(payload))

        if is_odd:
            add("images", kind=tarfile.DIRTYPE)
        for sample in range(SAMPLES):
            key = f"{shard}-{sample:03}"
            if is_odd and sample == 4:
                key = "k" * 150 + key
            add(f"{key}.jpg", picture(40 + sample, 30, 6 if sample == 2 else None))
            add(f"{key}.TXT" if is_odd and sample == 5 else f"{key}.txt", b"a red kite " * sample)
            add(f"{key}.json", json.dumps({"number": sample}).encode())
            if is_odd and sample == 3:
                add("README", b"about")


def run(*args, cwd):
    done = subprocess.run([str(arg) for arg in args], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (args, done.stdout[-2000:], done.stderr[-2000:])


def prepare_energon(folder):
    run(TOOLS / "energon", "prepare", ".", "--non-interactive", "--split-ratio", "8,1,1", "--sample-type",
        "CrudeWebdataset", cwd=folder)
    for shard in range(SHARDS):
        offsets = (folder / f"shard-{shard}.tar.idx").read_bytes()
        assert len(offsets) == 8 * (SAMPLES + 1), "the table has the format that is read"
        assert struct.unpack("<Q", offsets[:8])[0] in (0, 512)


def prepare_webshart(folder):
    run(TOOLS / "webshart", "extract-metadata", "--source", ".", "--destination", "./json",
        "--include-image-geometry", cwd=folder)
    for path in (folder / "json").iterdir():
        path.rename(folder / path.name)
    shutil.rmtree(folder / "json")
    assert (folder / "shard-0.json").is_file()


def prepare_wids(folder):
    run(TOOLS / "widsindex", "create", "--name", "test", *[f"shard-{shard}.tar" for shard in range(SHARDS)],
        cwd=folder)
    assert (folder / "shardindex.json").is_file()


def index(dataset, out, foreign):
    done = subprocess.run([DFLOP, "index", dataset, "--out", out, "--rebuild", "--foreign", foreign, "--json"],
                          capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    return report, pyarrow.ipc.open_file(report["path"]).read_all()


def compare(name, prepare, is_odd, warnings_expected):
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        shards = folder / "shards"
        shards.mkdir()
        for shard in range(SHARDS):
            write_shard(shards / f"shard-{shard}.tar", shard, is_odd)
        own, rows = index(shards, folder / "own", "ignore")
        assert (own["samples"], own["skipped"], own["warnings"]) == (SHARDS * SAMPLES, [], [])
        prepare(shards)
        for foreign in ("check", "follow"):
            report, table = index(shards, folder / foreign, foreign)
            assert report["fingerprint"] == own["fingerprint"], foreign
            assert table.equals(rows), foreign
            kind = f"{name}, {'odd' if is_odd else 'plain'} shards, {foreign}"
            assert len(report["warnings"]) == warnings_expected, (kind, report["warnings"])
            print(f"{kind}: {report['samples']} samples, equal, {len(report['warnings'])} warnings")
        if name == "wids":
            report, table = index(shards / "shardindex.json", folder / "list", "check")
            assert report["fingerprint"] == own["fingerprint"] and table.equals(rows)
            print("wids, the list as the data set: equal")


def main():
    compare("energon", prepare_energon, is_odd=False, warnings_expected=0)
    compare("energon", prepare_energon, is_odd=True, warnings_expected=0)
    compare("webshart", prepare_webshart, is_odd=False, warnings_expected=0)
    compare("webshart", prepare_webshart, is_odd=True, warnings_expected=0)
    compare("wids", prepare_wids, is_odd=False, warnings_expected=0)
    # wids loses entries with long names, and so a sample of each shard: one warning each.
    compare("wids", prepare_wids, is_odd=True, warnings_expected=SHARDS)


if __name__ == "__main__":
    main()
