"""The command ``dflop describe``, which runs in Python."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dflop.errors import ModelError


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments that ``dflop describe --help`` shows; wrong ones end the process with 2."""
    parser = argparse.ArgumentParser(prog="dflop describe", add_help=False, allow_abbrev=False)
    parser.add_argument("checkpoint", metavar="CHECKPOINT")
    parser.add_argument("-o", "--out", metavar="FILE", default="model.json")
    parser.add_argument("--trust-remote-code", action="store_true")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> int:
    """Describes a checkpoint into a file and returns the exit status."""
    from dflop import hugging_face

    try:
        hugging_face.describe(options.checkpoint, options.trust_remote_code, path=options.out)
    except (ModelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
