"""Tests the installed package: its files, and the modules that importing it loads."""

import importlib.metadata
import importlib.resources
import re
import subprocess
import sys
import unittest

import dflop


class Package(unittest.TestCase):
    def test_version_is_that_of_the_distribution(self) -> None:
        self.assertEqual(dflop.__version__, importlib.metadata.version("dflop"))

    def test_types_are_announced(self) -> None:
        self.assertTrue(importlib.resources.files("dflop").joinpath("py.typed").is_file())

    def test_licenses_are_in_the_distribution(self) -> None:
        names = [file.name for file in importlib.metadata.files("dflop") or []]
        self.assertIn("LICENSE-MIT", names)
        self.assertIn("LICENSE-APACHE", names)

    def test_numpy_is_all_that_it_requires(self) -> None:
        required = importlib.metadata.requires("dflop") or []
        always = [re.split(r"[^\w-]", line)[0] for line in required if "extra ==" not in line]
        self.assertEqual(always, ["numpy"])

    def test_importing_it_imports_nothing_that_takes_long(self) -> None:
        code = "import sys; import dflop; print(*{name.partition('.')[0] for name in sys.modules})"
        imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        slow = {"asyncio", "jax", "multiprocessing", "numpy", "pandas", "pyarrow", "subprocess", "tokenizers"}
        slow |= {"torch", "transformers", "unittest", "urllib"}
        self.assertEqual(slow.intersection(imported.stdout.split()), set())


if __name__ == "__main__":
    unittest.main()
