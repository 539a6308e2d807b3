"""Renders the recorded levels of the types of transformers as the table in `docs/models.md`, and compares two recordings.

    python3 tests/python/types_table.py                    # writes the table
    python3 tests/python/types_table.py types.jsonl        # prints what differs in new outcomes
    python3 tests/python/types_table.py types.jsonl update # takes them over, and writes the table

Needs no packages: `describe_types.py` makes the outcomes.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests" / "golden" / "described_types.json"
DOCUMENT = ROOT / "docs" / "models.md"
LEVELS = ("missing", "described", "trained")
FIELDS = ("kind", "name", "level", "by_hand", "layout", "lacks")
BEGIN, END = "<!-- described types -->\n", "<!-- end -->"


def main():
    arguments = sys.argv[1:]
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {"transformers": "", "types": {}}
    if arguments:
        new = recorded(Path(arguments[0]), record)
        for line in changes(record, new):
            print(line)
        if "update" not in arguments[1:]:
            return
        record = new
        RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    DOCUMENT.write_text(with_table(DOCUMENT.read_text(encoding="utf-8"), record), encoding="utf-8")


def recorded(outcomes, before):
    """Returns a record with new outcomes, the last of each type; types that have not run keep theirs."""
    types, version = dict(before["types"]), before["transformers"]
    for line in outcomes.read_text(encoding="utf-8").splitlines():
        outcome = json.loads(line)
        version = outcome["transformers"]
        types[outcome["type"]] = {name: outcome[name] for name in FIELDS if outcome.get(name) not in (None, "")}
    return {"transformers": version, "types": types}


def changes(before, after):
    """Yields what differs between two records, worse levels first."""
    names = sorted({*before["types"], *after["types"]})
    rows = [(name, before["types"].get(name, {}), after["types"].get(name, {})) for name in names]
    rank = lambda row: LEVELS.index(row.get("level", "missing"))
    for name, old, new in sorted(rows, key=lambda row: rank(row[2]) - rank(row[1])):
        if old != new:
            why = f": {new['lacks']}" if new.get("lacks") else ""
            print_old = f"{old.get('level', 'no')} {old.get('layout', '')}".strip()
            yield f"{name}: {print_old} -> {new.get('level', 'no')} {new.get('layout', '')}{why}".rstrip()


def table(record):
    """Returns the rows of the table in Markdown."""
    lines = ["| type | name | reads | counted | level | lacks |", "| --- | --- | --- | --- | --- | --- |"]
    for name, row in sorted(record["types"].items()):
        level = " ".join(filter(None, (row["level"], f"({row['layout']})" if row.get("layout") else "")))
        counted = "by hand" if row.get("by_hand") else "" if row["level"] == "missing" else "described"
        cells = (f"`{name}`", row["name"], row["kind"], counted, level, row.get("lacks", ""))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def summary(record):
    """Returns how many types of each kind reach which level."""
    counts = []
    for kind in ("text", "image", "audio"):
        levels = [LEVELS.index(row["level"]) for row in record["types"].values() if row["kind"].startswith(kind)]
        at_least = [sum(level >= least for level in levels) for least in (1, 2)]
        counts.append(f"{kind}: {len(levels)} types, {at_least[0]} described, {at_least[1]} trained")
    return f"transformers {record['transformers']}. " + "; ".join(counts) + ".\n"


def with_table(text, record):
    """Returns the document with the table between its marks."""
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"{DOCUMENT} has no {BEGIN.strip()}")
    return pattern.sub(lambda _: BEGIN + summary(record) + "\n" + table(record) + END, text)


if __name__ == "__main__":
    main()
