"""Records the truth of all families anew, into a temporary directory, and prints per family how it differs from `tests/golden`.

    make record-models PYTHON=venv/bin/python            # needs transformers, torch, torchvision, jinja2, Pillow before 12.2
    make record-models NAMES="gemma3 tokens" UPDATE=1    # some scripts; files that differ are copied to tests/golden

Runs every script of `tests/record/families/` and the scripts of the first families, see `common.py`. Exits with 1 if a
script fails; differences are results, not failures.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from changes import changes_of
from common import GOLDEN

HERE = Path(__file__).resolve().parent
# Scripts that record several families at once, from before there was a script for each.
SHARED = ["tokens", "flops", "llm_flops", "processors", "model_inputs", "videos", "executor_parity"]


def scripts(names):
    found = {name: HERE / f"{name}.py" for name in SHARED}
    found |= {path.stem: path for path in sorted((HERE / "families").glob("*.py"))}
    unknown = set(names) - set(found)
    if unknown:
        sys.exit(f"no such script: {', '.join(sorted(unknown))}; there are {', '.join(found)}")
    return {name: path for name, path in found.items() if not names or name in names}


def record(name, path, golden):
    """Runs one script; returns whether it succeeded. Its output goes to a log that is printed if it failed."""
    paths = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(path), "--golden", str(golden)], env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        print(f"{name}: FAILED\n" + "\n".join(done.stdout.splitlines()[-15:]), flush=True)
    return done.returncode == 0


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("names", nargs="*", help="scripts to run, all by default")
    arguments.add_argument("--keep", type=Path, help="directory to record into and keep")
    arguments.add_argument("--update", action="store_true", help="copy what differs to tests/golden")
    options = arguments.parse_args()
    failed = []
    with tempfile.TemporaryDirectory() as temporary:
        golden = (options.keep or Path(temporary)).resolve()
        # Tokenizers are inputs of the scripts, trained once.
        for tokenizer in ["chatml", "llama3"]:
            shutil.copytree(GOLDEN / "model_inputs" / tokenizer, golden / "model_inputs" / tokenizer, dirs_exist_ok=True)
        for name, path in scripts(options.names).items():
            if not record(name, path, golden):
                failed.append(name)
                continue
            print(f"{name}: recorded", flush=True)
        for family, lines in changes_of(GOLDEN, golden).items():
            print(f"{family}: " + ("; ".join(lines) or "unchanged"))
        if options.update:
            shutil.copytree(golden, GOLDEN, dirs_exist_ok=True)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
