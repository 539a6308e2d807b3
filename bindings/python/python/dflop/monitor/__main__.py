"""``python -m dflop.monitor RUN``: copies a record of steps to TensorBoard or Weights & Biases."""

from __future__ import annotations

import argparse
import sys

from dflop.monitor.export import export


def main() -> int:
    """Exports the record that the arguments name, and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m dflop.monitor", description=__doc__)
    parser.add_argument("run", metavar="RUN", help="record of steps, or a directory with `steps.jsonl`")
    parser.add_argument("--follow", action="store_true", help="go on until the run has ended")
    options = parser.parse_args()
    try:
        steps = export(options.run, follow=options.follow)
    except (ImportError, OSError) as error:
        print(f"dflop.monitor: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"{steps} steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
