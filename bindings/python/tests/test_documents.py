"""Runs the Python snippets of the documents, and compiles those that need more than a test has.

Blocks marked ``python run`` of one document run in order, in one namespace and in a directory with small shards and a
model; ``dflop_tests::markdown`` explains the marks.
"""

import contextlib
import copy
import importlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
import textwrap
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import dflop
from dflop import example

ROOT = Path(__file__).parents[3]
BLOCK = re.compile(r"^```python(?: (\S+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Words of the questions for levels of support.
LEVELS = {
    "everything": {"cost", "plan", "inputs", "train"},
    "PyTorch": {"cost", "plan", "inputs"},
    "your processor": {"cost", "plan"},
    "text": {"cost", "inputs"},
}
SKIPPED = {"target", "venv", "golden", "node_modules"}


class Loss:
    """A loss, as far as the documents use one."""

    loss: "Loss"

    def __init__(self) -> None:
        self.loss = self

    def __mul__(self, scale: float) -> "Loss":
        return self

    def backward(self) -> None:
        """Does nothing: there is no model to train."""


def model(**inputs: Any) -> Loss:
    """Takes microbatches in place of a model."""
    assert "input_ids" in inputs
    return Loss()


def documents() -> list[Path]:
    """Returns the Markdown files of the checkout; none where the tests lie elsewhere."""
    found = [path for path in ROOT.rglob("*.md") if (ROOT / "docs").is_dir()]
    return [path for path in found if not SKIPPED.intersection(path.relative_to(ROOT).parts)]


def blocks(document: Path) -> list[tuple[int, str, str]]:
    """Returns line, mark and code of the Python blocks of a document."""
    text = document.read_text(encoding="utf-8")
    return [(text.count("\n", 0, found.start(2)), found[1] or "", found[2]) for found in BLOCK.finditer(text)]


def fill(directory: Path) -> None:
    """Makes the files that snippets name."""
    example.write_shards(directory / "shards", samples=128, shards=2)
    for model_directory in ("model", "Qwen2.5-VL-7B-Instruct"):
        example.write_model(directory / model_directory)
    for name in ("photos", "clips"):
        example.write_shards(directory / name, samples=32, shards=1)
    shutil.copy(ROOT / "bindings/cli/examples/shapes.csv", directory)
    shutil.copy(ROOT / "tests/golden/data_in/kites.parquet", directory)


class Documents(unittest.TestCase):
    def test_snippets_compile(self) -> None:
        for document in documents():
            for line, _, code in blocks(document):
                with self.subTest(document=document.name, line=line):
                    compile("\n" * line + textwrap.dedent(code), str(document), "exec")

    def test_snippets_run(self) -> None:
        for document in documents():
            runs = [(line, code) for line, mark, code in blocks(document) if mark == "run"]
            if not runs:
                continue
            namespace: dict[str, Any] = {"__name__": "__main__", "rank": 0, "world": 2, "model": model}
            with tempfile.TemporaryDirectory() as directory:
                fill(Path(directory))
                for line, code in runs:
                    with self.subTest(document=document.name, line=line), inside(directory):
                        exec(compile("\n" * line + code, str(document), "exec"), namespace)  # noqa: S102

    @unittest.skipUnless((ROOT / "docs").is_dir(), "no checkout")
    def test_the_table_of_types_is_that_of_the_record(self) -> None:
        with mock.patch.object(sys, "path", [str(ROOT / "tests" / "python"), *sys.path]):
            types_table = importlib.import_module("types_table")
        record = json.loads(types_table.RECORD.read_text(encoding="utf-8"))
        text = types_table.DOCUMENT.read_text(encoding="utf-8")
        self.assertEqual(types_table.with_table(text, record), text, "run tests/python/types_table.py")
        self.assertEqual({row["level"] for row in record["types"].values()}, set(types_table.LEVELS))
        changed = copy.deepcopy(record)
        name = next(name for name, row in record["types"].items() if row["level"] == "trained")
        changed["types"][name] |= {"level": "missing", "lacks": "a part"}
        (line,) = types_table.changes(record, changed)
        self.assertIn("-> missing", line)
        self.assertTrue(line.startswith(f"{name}: trained") and line.endswith(": a part"), line)


class Answers(unittest.TestCase):
    @unittest.skipUnless((ROOT / "docs").is_dir(), "runs in a checkout")
    def test_models_of_the_questions_have_the_support_that_is_written(self) -> None:
        levels = {
            name: set(family.levels) for family in dflop.models().families for name in family.model_types
        }
        written = (ROOT / "docs/faq.md").read_text().partition("### Is my model supported?")[2]
        seen = []
        for row in written.partition("\n- ")[0].splitlines():
            cells = row.strip("|").split("|")
            types = re.findall("`([a-z0-9_]+)`", cells[1]) if len(cells) == 3 else []
            for model_type in types:
                with self.subTest(model_type):
                    seen.append(model_type)
                    self.assertLessEqual(LEVELS[cells[2].strip()], levels[model_type])
                    if cells[2].strip() == "your processor":
                        self.assertNotIn("inputs", levels[model_type])
        self.assertGreater(len(seen), 25)
        self.assertEqual(len(seen), len(set(seen)))


@contextlib.contextmanager
def inside(directory: str) -> Any:
    """Runs in a directory, without output."""
    before = Path.cwd()
    os.chdir(directory)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        os.chdir(before)


if __name__ == "__main__":
    unittest.main()
