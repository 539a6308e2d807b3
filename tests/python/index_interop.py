"""Checks that an index file opens in pyarrow, Polars and DuckDB, with the contents that `dflop list` prints.

    DFLOP=target/debug/dflop venv/bin/python tests/python/index_interop.py
"""

import json
import os
import subprocess
import tempfile
from pathlib import Path

import duckdb
import polars
import pyarrow
import pyarrow.ipc

DFLOP = os.environ.get("DFLOP", "target/debug/dflop")


def dflop(*args):
    """Runs the command; returns the objects that it prints."""
    run = subprocess.run([DFLOP, *args, "--json"], check=True, capture_output=True, text=True)
    return [json.loads(line) for line in run.stdout.splitlines()]


def make_shards(folder):
    """Writes three shards of a text, a JSON and, in every second sample, an opaque field; returns the index file."""
    source = folder / "source"
    source.mkdir()
    for number in range(25):
        (source / f"{number:03}.txt").write_text("a red kite, 日本 " * number)
        (source / f"{number:03}.json").write_text(json.dumps({"number": number}))
        if number % 2:
            (source / f"{number:03}.bin").write_bytes(bytes(number))
    (report,) = dflop("pack", str(source), str(folder / "shards"), "--shard-samples", "10")
    return report["index"]


def read_pyarrow(path):
    """Reads memory-mapped: the arrays are views of the file."""
    with pyarrow.memory_map(path) as source:
        reader = pyarrow.ipc.open_file(source)
        assert reader.num_record_batches == 3, "a record batch per shard"
        metadata = json.loads(reader.schema.metadata[b"dflop"])
        assert [shard["samples"] for shard in metadata["shards"]] == [10, 10, 5]
        table = reader.read_all()
        table.validate(full=True)
        assert table.column("fields").combine_chunks().flatten().field("bytes")[0].as_py() > 0
        return table


def read_polars(path):
    """Reads with Polars' own reader; a row per field, as the README shows."""
    frame = polars.read_ipc(path)
    flat = frame.explode("fields").unnest("fields")
    assert flat["bytes"].sum() == sum(field["bytes"] for row in frame["fields"] for field in row)
    return frame.to_dicts()


def read_duckdb(samples):
    """Queries through pyarrow, without a copy; unnest gives a row per field.

    Reading the file by itself takes DuckDB an extension that it downloads, so that is left out here.
    """
    rows = duckdb.sql("select key, \"offset\", unnest(fields) as field from samples").fetchall()
    flat = duckdb.sql("select key, unnest(fields, recursive := true) from samples")
    payload = sum(row[flat.columns.index("bytes")] for row in flat.fetchall())
    return rows, payload


def main():
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        path = make_shards(folder)
        listed = dflop("list", str(folder / "shards"))
        expected = [
            (sample["key"], {name: field["bytes"] for name, field in sample["fields"].items()}) for sample in listed
        ]
        assert len(expected) == 25

        def shown(rows):
            return [
                (row["key"], {field["extension"]: field["bytes"] for field in row["fields"]}) for row in rows
            ]

        table = read_pyarrow(path)
        rows = table.to_pylist()
        assert shown(rows) == expected
        print(f"pyarrow {pyarrow.__version__}: {table.num_rows} rows")

        polars_rows = read_polars(path)
        assert shown(polars_rows) == expected
        for ours, theirs in zip(rows, polars_rows, strict=True):
            for our_field, their_field in zip(ours["fields"], theirs["fields"], strict=True):
                assert {**their_field, "shape": list(their_field["shape"])} == our_field, (our_field, their_field)
        print(f"polars {polars.__version__}: {len(polars_rows)} rows, all columns equal")

        fields, payload = read_duckdb(table)
        flat = [(row["key"], row["offset"], field) for row in rows for field in row["fields"]]
        assert [(key, offset, {**field, "shape": list(field["shape"])}) for key, offset, field in fields] == flat
        assert payload == sum(field["bytes"] for _, _, field in flat)
        print(f"duckdb {duckdb.__version__}: {len(fields)} fields, {payload} payload bytes")


if __name__ == "__main__":
    main()
