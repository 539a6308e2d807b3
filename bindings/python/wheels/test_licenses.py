"""Tests the collection of licenses on crates made up for it, and on the standard library of this Rust."""

import tempfile
import unittest
from pathlib import Path

import licenses


class Licenses(unittest.TestCase):
    def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)

    def crate(self, name: str, spdx: str | None, repository: str = "", **files: str) -> dict:
        """Makes the source of a crate with license files; returns its metadata."""
        source = self.directory / name
        source.mkdir()
        (source / "Cargo.toml").touch()
        for file, text in files.items():
            path = source / file.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return {
            "id": name,
            "name": name,
            "version": "1.0.0",
            "license": spdx,
            "repository": repository,
            "homepage": None,
            "authors": ["A. Author"],
            "manifest_path": str(source / "Cargo.toml"),
        }

    def test_texts_of_included_code_are_found_and_those_of_tests_are_not(self) -> None:
        crate = self.crate(
            "a", "MIT", LICENSE="MIT text", vendor__COPYING="of C", tests__LICENSE="of an image"
        )
        (part,) = licenses.crate_parts([crate])
        self.assertEqual(dict(part.texts), {"LICENSE": "MIT text", "vendor/COPYING": "of C"})

    def test_source_files_are_no_licenses(self) -> None:
        (self.directory / "a").mkdir()
        for name in ("license.rs", "notice.c", "licensed.txt"):
            (self.directory / "a" / name).write_text("code")
        self.assertEqual(licenses.read_texts(self.directory / "a"), ())

    def test_a_crate_without_a_text_takes_that_of_its_repository(self) -> None:
        crates = [
            self.crate("other", "MIT", "https://example.org/other", LICENSE="text of other"),
            self.crate("whole", "MIT", "https://example.org/whole.git", LICENSE="text of whole"),
            self.crate("part", "MIT", "https://example.org/whole/"),
        ]
        part = licenses.crate_parts(crates)[2]
        self.assertEqual([text for _, text in part.texts], ["text of whole"])
        self.assertIn("that of whole", part.note)

    def test_apache_alone_has_a_standard_text(self) -> None:
        (part,) = licenses.crate_parts([self.crate("a", "MIT OR Apache-2.0")])
        self.assertIn("Apache License", part.texts[0][1])
        self.assertIn("A. Author", part.note)

    def test_crates_without_a_text_or_an_expression_are_refused_by_name(self) -> None:
        crates = [
            self.crate("a", "MIT", LICENSE="text"),
            self.crate("b", "MIT"),
            self.crate("c", "Apache-2.0 AND BSD-3-Clause"),
            self.crate("d", None, LICENSE="text"),
        ]
        with self.assertRaises(licenses.LicenseError) as raised:
            licenses.crate_parts(crates)
        message = str(raised.exception)
        self.assertIn("b 1.0.0 (MIT), c 1.0.0 (Apache-2.0 AND BSD-3-Clause), d 1.0.0 (no SPDX", message)
        self.assertNotIn("a 1.0.0", message)

    def test_equal_texts_are_printed_once_with_all_that_they_are_of(self) -> None:
        crates = [
            self.crate("a", "MIT", LICENSE="the same\n  text"),
            self.crate("b", "MPL-2.0", "https://example.org/b", LICENSE="the same text"),
        ]
        document = licenses.document(licenses.crate_parts(crates), "a-target")
        self.assertEqual(document.count("the same"), 1)
        self.assertIn("[1] a 1.0.0: LICENSE\n    b 1.0.0: LICENSE", document)
        self.assertIn("    b 1.0.0: https://example.org/b", document)

    def test_the_standard_library_brings_its_notices(self) -> None:
        std, *crates = licenses.standard_library()
        self.assertIn("The Rust Project Developers", std.texts[0][1])
        self.assertNotIn("<p>", std.texts[0][1])
        self.assertIn("hashbrown", {crate.name for crate in crates})
        self.assertTrue(all(crate.texts and crate.spdx for crate in crates))


if __name__ == "__main__":
    unittest.main()
