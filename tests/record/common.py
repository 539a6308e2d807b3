"""Helpers of the scripts that record truth from Hugging Face transformers.

`tests/record/families/FAMILY.py` records all truth of a family: it has `main(golden: Path)`, which writes below the
directory it is given, and ends with `run(main, FAMILY…)`. `make record-models` finds these scripts, runs each into a temporary
directory and compares that with `tests/golden`.

    from common import run

    def main(golden):
        (golden / "tokens" / "gemma3.csv.gz").write_bytes(packed(lines))

    if __name__ == "__main__":
        run(main, "gemma3")
"""

import argparse
import gzip
import importlib.metadata
import io
import json
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def run(main, *families):
    """Runs `main(golden)` for the directory of the command line, and notes the versions under the families' ids."""
    arguments = argparse.ArgumentParser(description=main.__doc__)
    arguments.add_argument("--golden", type=Path, default=GOLDEN, help="directory to write below, tests/golden by default")
    golden = arguments.parse_args().golden
    for name in ["tokens", "model_inputs", "processors", "executor", "flops"]:
        (golden / name).mkdir(parents=True, exist_ok=True)
    main(golden)
    for family in families:
        note_versions(golden, family)


def note_versions(golden, family):
    """Writes `versions/FAMILY.json`: the releases that a family's truth comes from. `family` is the id in Rust."""
    found = {}
    for package in ["transformers", "torch", "torchvision", "pillow"]:
        try:
            found[package] = importlib.metadata.version(package).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    (golden / "versions").mkdir(parents=True, exist_ok=True)
    (golden / "versions" / f"{family}.json").write_text(json.dumps(found, indent=1) + "\n")


def packed(lines):
    """Compresses lines so that the same lines make the same bytes."""
    out = io.BytesIO()
    with gzip.GzipFile(fileobj=out, mode="wb", mtime=0, filename="") as file:
        file.write(("\n".join(lines) + "\n").encode())
    return out.getvalue()


def runs(values):
    """Encodes equal values in a row as `[value, count]`, as `tests/golden/model_inputs/cases.json` has them."""
    found = []
    for value in map(int, values):
        if found and found[-1][0] == value:
            found[-1][1] += 1
        else:
            found.append([value, 1])
    return [value if count == 1 else [value, count] for value, count in found]


def checksum(values):
    """Hashes all bits of all values as f32, in the way of the tests of `processors`."""
    flat = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
    index = np.arange(flat.size, dtype=np.uint64)
    return f"{int((flat.view(np.uint32).astype(np.uint64) * (2 * index + 1)).sum(dtype=np.uint64)):016x}"


def json_lines(value):
    """Writes a list with one line per item."""
    if isinstance(value, list):
        return "[\n" + ",\n".join(json.dumps(item, ensure_ascii=False) for item in value) + "\n]"
    return json.dumps(value, ensure_ascii=False)
