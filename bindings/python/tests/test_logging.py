"""Tests that events of the crates reach Python's `logging`: levels, times, threads, the end of the process."""

import logging
import shutil
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

import dflop
from support import WithExample

# Warns, from the crates, that the index is damaged; nothing waits for the package afterwards.
DAMAGED_INDEX = """
import dflop, logging, pathlib, sys
logging.basicConfig(format="%(levelname)s %(name)s %(message)s", level=sys.argv[2])
dataset = dflop.Dataset(sys.argv[1])
"""


class Events(WithExample):
    def setUp(self) -> None:
        self.shards = Path(self.enterContext(tempfile.TemporaryDirectory()), "shards")
        shutil.copytree(self.directory / "shards", self.shards)
        dflop.index(self.shards)
        (index,) = self.shards.glob(".dflop/*.arrow")
        index.write_bytes(index.read_bytes()[:1000])

    def test_a_warning_of_the_crates_is_a_record_before_the_call_returns(self) -> None:
        begin = time.time()
        with self.assertLogs("dflop", "DEBUG") as logged:
            len(dflop.Dataset(self.shards))
        (record,) = [one for one in logged.records if "built again" in one.getMessage()]
        self.assertEqual((record.name, record.levelno), ("dflop", logging.WARNING))
        self.assertRegex(record.getMessage(), r"the index cannot be read and is built again index=.*\.arrow")
        self.assertTrue(begin - 1 < record.created <= time.time())
        self.assertTrue(record.pathname.endswith("index/cache.rs") and record.lineno > 0)

    def test_levels_and_filters_of_the_logger_apply(self) -> None:
        logger = logging.getLogger("dflop")
        self.addCleanup(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)
        seen = []
        handler = logging.Handler()
        handler.emit = seen.append
        logger.addHandler(handler)
        self.addCleanup(logger.removeHandler, handler)
        len(dflop.Dataset(self.shards))
        self.assertEqual(seen, [])

    def test_an_exception_of_a_handler_does_not_end_the_call(self) -> None:
        def refuse(record: logging.LogRecord) -> bool:
            raise RuntimeError("no")

        logger = logging.getLogger("dflop")
        logger.addFilter(refuse)
        self.addCleanup(logger.removeFilter, refuse)
        raised = []
        hook, sys.unraisablehook = sys.unraisablehook, raised.append
        self.addCleanup(setattr, sys, "unraisablehook", hook)
        self.assertEqual(len(dflop.Dataset(self.shards)), len(dflop.Dataset(self.directory / "shards")))
        self.assertIsInstance(raised[0].exc_value, RuntimeError)

    def test_scripts_show_warnings_by_default_and_the_command_line_prints_its_own(self) -> None:
        script = [sys.executable, "-c", DAMAGED_INDEX + "len(dataset)\n", self.shards]
        shown = subprocess.run([*script, "WARNING"], capture_output=True, text=True, check=True)
        self.assertRegex(shown.stderr, r"^WARNING dflop the index cannot be read and is built again index=")
        self.setUp()
        hidden = subprocess.run(
            [*script[:3], self.shards, "ERROR"], capture_output=True, text=True, check=True
        )
        self.assertEqual(hidden.stderr, "")
        self.setUp()
        command = [sys.executable, "-m", "dflop", "stats", self.shards, "--model", "omni-7b"]
        printed = subprocess.run(command, capture_output=True, text=True, check=True)
        self.assertRegex(printed.stderr, r"(?m)^ ?WARN the index cannot be read")


if __name__ == "__main__":
    unittest.main()
