"""Kills and disturbs commands at random moments, and checks what they promise afterwards.

    python3 tests/chaos/chaos.py --dflop target/release/dflop [--kills 100] [--seed 1] [--only index,cache] [--out FILE]

Prints a JSON object per scenario: faults that struck, violations of a promise, and the first of them. Exits with 1 if
there was any.
"""

import argparse
import json
import pathlib
import sys

import faults
import kills
from common import Chaos


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dflop", required=True, help="the program")
    parser.add_argument("--kills", type=int, default=100, help="faults of a scenario; some take a multiple or a fraction")
    parser.add_argument("--seed", type=int, default=1, help="of the random moments")
    parser.add_argument("--only", help="names of scenarios, separated by commas")
    parser.add_argument("--out", type=pathlib.Path, help="file for the rows")
    arguments = parser.parse_args()
    scenarios = kills.SCENARIOS | faults.SCENARIOS
    names = arguments.only.split(",") if arguments.only else list(scenarios)
    if unknown := [name for name in names if name not in scenarios]:
        parser.error(f"no scenario {', '.join(unknown)}; there are {', '.join(scenarios)}")
    chaos = Chaos(str(pathlib.Path(arguments.dflop).resolve()), arguments.seed, arguments.kills)
    try:
        for name in names:
            scenarios[name](chaos)
    finally:
        chaos.close()
    total = {"faults": sum(row["faults"] for row in chaos.rows), "violations": sum(row["violations"] for row in chaos.rows)}
    print(json.dumps(total))
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(row) + "\n" for row in [*chaos.rows, total]))
    return 1 if total["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
