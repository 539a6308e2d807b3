"""Tests that the check refuses a wheel that differs from a good one in one thing.

`DFLOP_WHEEL` names a wheel that `make wheels` has built.
"""

import os
import re
import tempfile
import unittest
import zipfile
from collections.abc import Callable
from pathlib import Path

import check
import licenses

WHEEL = Path(os.environ["DFLOP_WHEEL"]).resolve(strict=True)
(ARCHITECTURE,) = (name for name in check.MACHINES if WHEEL.stem.endswith(f"_{name}"))
TARGET = f"{ARCHITECTURE}-unknown-linux-gnu"
THIRD_PARTY = f"licenses/{check.LICENSES[2]}"
LIBRARY = "_native.abi3.so"
# A change of a file: its new content, or None to leave it out.
Change = Callable[[bytes], bytes | None]


class Refusals(unittest.TestCase):
    def changed(self, end: str, change: Change, name: str = WHEEL.name) -> Path:
        """Copies the wheel with a change of the one file whose name has this end."""
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        path = Path(directory.name, name)
        changes = 0
        with zipfile.ZipFile(WHEEL) as old, zipfile.ZipFile(path, "w") as new:
            for file in old.namelist():
                content: bytes | None = old.read(file)
                if file.endswith(end):
                    changes += 1
                    content = change(content)
                if content is not None:
                    new.writestr(file, content)
        self.assertEqual(changes, 1)
        return path

    def refuse(self, path: Path, message: str, target: str = TARGET) -> None:
        with self.assertRaisesRegex(check.CheckError, message):
            check.check(path, target)

    def test_the_wheel_itself_passes(self) -> None:
        check.check(WHEEL, TARGET)

    def test_another_tag(self) -> None:
        name = WHEEL.name.replace("cp311-abi3", "cp312-cp312")
        self.refuse(self.changed("METADATA", lambda text: text, name), "does not have the tags")

    def test_a_missing_license_file(self) -> None:
        self.refuse(
            self.changed("licenses/LICENSE-MIT", lambda _: None), "LICENSE-MIT is declared and missing"
        )

    def test_an_undeclared_license_file(self) -> None:
        undeclared = self.changed(
            "METADATA", lambda text: text.replace(b"License-File: LICENSES", b"Other: L")
        )
        self.refuse(undeclared, "METADATA declares")

    def test_a_crate_that_is_not_listed(self) -> None:
        unlisted = self.changed(THIRD_PARTY, lambda text: text.replace(b"\nzstd-sys ", b"\nzstd-other "))
        self.refuse(unlisted, "does not list zstd-sys")

    def test_a_crate_without_its_text(self) -> None:
        def lose_first(text: bytes) -> bytes:
            return re.sub(rb"\n\[1\] ", b"\n[x] ", text, count=1)

        self.refuse(self.changed(THIRD_PARTY, lose_first), r"has no text \[1\]")

    def test_a_library_of_another_machine(self) -> None:
        # Bytes 18 and 19 of an ELF file are its machine.
        other = {"x86_64": b"\xb7\x00", "aarch64": b"\x3e\x00"}[ARCHITECTURE]
        self.refuse(self.changed(LIBRARY, lambda elf: elf[:18] + other + elf[20:]), "the library is for EM_")

    def test_a_newer_c_library(self) -> None:
        # The names of versions are in the table of strings; no code is changed.
        newer = self.changed(LIBRARY, lambda elf: re.sub(rb"\0GLIBC_2\.17\0", b"\0GLIBC_2.97\0", elf))
        self.refuse(newer, r"glibc \(2, 97\)")

    def test_a_library_that_no_system_has(self) -> None:
        self.refuse(
            self.changed(LIBRARY, lambda elf: elf.replace(b"\0libm.so.6\0", b"\0libz.so.1\0")), "libz.so.1"
        )

    def test_a_directory_of_this_machine(self) -> None:
        leaking = self.changed("METADATA", lambda text: text + str(licenses.ROOT).encode())
        self.refuse(leaking, "a directory of this machine")


if __name__ == "__main__":
    unittest.main()
