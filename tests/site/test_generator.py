"""Tests how documents become pages, and that the generator refuses what is broken.

    PYTHONPATH=docs/site python -m unittest discover -s tests/site

`make test-site` runs it, with the generator installed.
"""

import tempfile
import unittest
from pathlib import Path

import api_names
import build
import griffe_dflop
import page
import themed_image
from repository import DOCUMENTS, ROOT


class Pages(unittest.TestCase):
    def setUp(self) -> None:
        # Documents lie in docs/, on which links depend.
        directory = tempfile.TemporaryDirectory(dir=DOCUMENTS, prefix=".test-")
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)

    def page(self, *lines: str) -> str:
        document = self.directory / "one.md"
        document.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return page.page(document)

    def test_links_between_documents_stay_and_others_lead_to_the_code_host(self) -> None:
        made = self.page(
            "[a](../faq.md#data-and-batches) [b](../../README.md#start) [c](../../executor/cuda)"
        )
        self.assertIn("[a](../faq.md#data-and-batches)", made)
        self.assertIn("[b](https://github.com/dflop/dflop/blob/main/README.md#start)", made)
        self.assertIn("[c](https://github.com/dflop/dflop/tree/main/executor/cuda)", made)

    def test_a_link_may_be_broken_into_two_lines(self) -> None:
        self.assertIn("[two\nlines](https://", self.page("[two", "lines](../../README.md)"))

    def test_links_in_code_are_left(self) -> None:
        lines = ["`[a](no.md)`", "```text", "[b](no.md)", "```"]
        self.assertEqual(self.page(*lines), "\n".join(lines) + "\n")

    def test_broken_links_inclusions_and_marks_are_refused(self) -> None:
        cases = {
            "[a](no.md)": "leads to no file: no.md",
            "<!-- include no.py -->": "no file no.py",
            "<!-- tabs -->": "without `<!-- end of tabs -->`",
            "<!-- end of tabs -->": "without its counterpart",
            "<!-- tabs -->\ntext": "before|text between",
        }
        for text, message in cases.items():
            with self.subTest(text), self.assertRaisesRegex(page.PageError, message):
                self.page(text)

    def test_marks_of_tests_are_left_out_and_files_become_titles(self) -> None:
        self.assertEqual(self.page("```sh run", "ls", "```"), "```sh\nls\n```\n")
        self.assertIn('```json title="a.json"', self.page("```json file=a.json", "{}", "```"))

    def test_headings_between_the_marks_become_tabs(self) -> None:
        made = self.page(
            "<!-- tabs -->", "### A", "text", "```sh", "# no heading", "```", "### B", "<!-- end of tabs -->"
        )
        self.assertEqual(made, '\n=== "A"\n\n    text\n    ```sh\n    # no heading\n    ```\n\n=== "B"\n\n')

    def test_an_included_file_is_code_with_its_name(self) -> None:
        made = self.page("<!-- include ../../bindings/python/examples/ddp.py -->")
        self.assertTrue(made.startswith('```python title="ddp.py"\n"""Trains'), made[:80])
        self.assertTrue(made.endswith("\n```\n"))

    def test_brackets_after_brackets_are_text(self) -> None:
        self.assertEqual(
            self.page("[default: a] [possible values: b]"), "[default: a] \\[possible values: b]\n"
        )

    def test_links_after_the_mark_become_buttons(self) -> None:
        made = self.page("<!-- buttons -->", "[a](../faq.md) · [b](../faq.md)")
        self.assertEqual(made, "[a](../faq.md){ .md-button } [b](../faq.md){ .md-button }\n")

    def test_a_wide_page_has_no_table_of_contents(self) -> None:
        self.assertEqual(self.page("# One", "<!-- wide -->", "two"), "---\nhide:\n  - toc\n---\n# One\ntwo\n")

    def test_a_drawing_is_divided_by_theme(self) -> None:
        drawing = self.directory / "one.svg"
        drawing.write_text(
            "<style>\n  .a { fill: red }\n  @media (prefers-color-scheme: dark) {\n    .a { fill: blue }\n"
            "  }\n</style>"
        )
        themed_image.write_variants(drawing, self.directory)
        light, dark = ((self.directory / f"one.{theme}.svg").read_text() for theme in ("light", "dark"))
        self.assertTrue("blue" not in light and "red" in light)
        self.assertTrue(dark.index("red") < dark.index("blue") and "@media" not in dark)


class Documents(unittest.TestCase):
    def test_every_example_is_on_a_page_of_trainers(self) -> None:
        pages = [DOCUMENTS / "trainers.md", *(DOCUMENTS / "trainers").glob("*.md")]
        made = "".join(page.page(document) for document in pages)
        names = {path.name for path in (ROOT / "bindings/python/examples").glob("*.py")}
        missing = {name for name in names if f"`{name}`]" not in made}
        self.assertEqual(missing, {"first_steps.py"})


class Tables(unittest.TestCase):
    def test_cells_have_the_heading_of_their_column(self) -> None:
        table = (
            '<table><thead><tr><th>a</th><th><code>b</code> &amp; "c"</th></tr></thead><tbody>\n'
            '<tr><td>1</td><td style="x">2</td></tr></tbody></table>'
        )
        cells = '<td data-label="a"><span>1</span></td><td style="x" data-label="b &amp; &quot;c&quot;"><span>2</span></td>'
        self.assertIn(cells, build.labeled(table))


class Docstrings(unittest.TestCase):
    def test_run_in_sections_have_a_line_for_each_parameter(self) -> None:
        text = "Reads.\n\nArgs: size: of a batch. Default: 32. seed: of\nall choices, with ``x: y``.\n\nMore."
        made = griffe_dflop.sections(text, ["size", "seed"])
        self.assertEqual(
            made,
            "Reads.\n\nArgs:\n    size: of a batch. Default: 32.\n"
            "    seed: of all choices, with ``x: y``.\n\nMore.",
        )

    def test_exceptions_of_one_line_are_divided(self) -> None:
        made = griffe_dflop.sections("Raises:\n    ConfigError: bad. ModelError: unknown.", [])
        self.assertEqual(made, "Raises:\n    ConfigError: bad.\n    ModelError: unknown.")


class Site(unittest.TestCase):
    def test_a_name_without_a_page_is_an_error(self) -> None:
        groups = api_names.GROUPS
        api_names.GROUPS = tuple(group for group in groups if group.file != "errors")
        try:
            with self.assertRaisesRegex(api_names.ApiError, "PlanError"):
                api_names.check()
        finally:
            api_names.GROUPS = groups

    def test_a_document_without_a_place_is_an_error(self) -> None:
        with self.assertRaisesRegex(build.SiteError, "faq.md"):
            build.check_navigation([Path("index.md")])

    def test_a_broken_anchor_is_an_error(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            work = Path(directory)
            (work / "pages").mkdir()
            (work / "overrides").mkdir()
            (work / "pages/index.md").write_text("# One\n\n[two](#two)\n")
            with self.assertRaisesRegex(build.SiteError, "anchor does not exist"):
                build.generate(work, work)


if __name__ == "__main__":
    unittest.main()
