"""Kills and disturbs commands at random moments, and checks what they promise afterwards.

    python3 tests/chaos/chaos.py --dflop target/release/dflop [--kills 100] [--seed 1] [--only index,cache] [--out FILE]

Prints a JSON object per scenario: faults that struck, violations of a promise, and the first of them. Exits with 1 if
there was any.
"""

import argparse
import json
import pathlib
import sys

import calls
import damage
import kills
import lies
import limits
import ranks
import sharing
import stores
from common import Chaos

SCENARIOS = {
    **kills.SCENARIOS,
    **ranks.SCENARIOS,
    **limits.SCENARIOS,
    **damage.SCENARIOS,
    **sharing.SCENARIOS,
    **stores.SCENARIOS,
    **lies.SCENARIOS,
    **calls.SCENARIOS,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dflop", required=True, help="the program")
    parser.add_argument("--kills", type=int, default=100, help="faults of a scenario; most take a fraction")
    parser.add_argument("--seed", type=int, default=1, help="of the random moments")
    parser.add_argument("--only", help="names of scenarios, separated by commas")
    parser.add_argument("--out", type=pathlib.Path, help="file for the rows")
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else list(SCENARIOS)
    if unknown := [name for name in names if name not in SCENARIOS]:
        parser.error(f"no scenario {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
    chaos = Chaos(str(pathlib.Path(arguments.dflop).resolve()), arguments.seed, arguments.kills)
    try:
        for name in names:
            SCENARIOS[name](chaos)
    finally:
        chaos.close()
    total = {name: sum(row[name] for row in chaos.rows) for name in ("faults", "violations")}
    print(json.dumps(total))
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(row) + "\n" for row in [*chaos.rows, total]))
    return 1 if total["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
