"""Every public name has an example in its docstring, and every example runs.

Those that need more than NumPy and pyarrow run beside the other packages, in ``integrations``.
"""

import importlib.util
import tempfile
import unittest
from pathlib import Path

import dflop
from docstrings import (
    MODULES,
    Documented,
    Place,
    faults_of_form,
    is_method,
    members,
    modules,
    public,
)

# Names by page of the documentation site.
PAGES = Path(__file__).parents[3] / "docs/site/api_names.py"
# Names without an example, and the reason.
WITHOUT = {
    "dflop.ForkError": "needs a process that is forked after threads have started",
    "dflop.PipelineError": "needs PyTorch, and a stage that fails",
    "dflop.SharedError": "needs several processes, one of which ends",
    "dflop.StageError": "is raised by a defect",
    "dflop.StalledError": "needs a store that does not answer, and waits for it",
}


def all_public() -> list[Documented]:
    return [one for module in MODULES for one in public(module)]


class Docstrings(unittest.TestCase):
    def test_every_public_name_has_an_example(self) -> None:
        found = {one.name: bool(one.examples) for one in all_public()}
        self.assertGreater(len(found), 60)
        self.assertEqual({name for name, has_example in found.items() if not has_example}, set(WITHOUT))

    @unittest.skipUnless(PAGES.is_file(), "runs in a checkout")
    def test_every_public_name_has_a_page(self) -> None:
        found = importlib.util.spec_from_file_location("api_names", PAGES)
        assert found is not None and found.loader is not None
        api_names = importlib.util.module_from_spec(found)
        found.loader.exec_module(api_names)
        has_torch = importlib.util.find_spec("torch") is not None
        api_names.check(*(() if has_torch else ("dflop.torch",)))

    def test_every_method_is_shown_in_an_example_of_its_class(self) -> None:
        for one in all_public():
            code = one.source + "".join(member.source for member in members(one))
            for member in members(one):
                name = member.name.rpartition(".")[2]
                # A context manager closes at its end.
                is_shown = f".{name}(" in code or (name == "close" and "with " in code)
                with self.subTest(member.name):
                    self.assertTrue(is_shown or not is_method(member.value), "is in no example")
                    self.assertTrue(member.text, "has no docstring")

    def test_docstrings_have_one_form(self) -> None:
        for one in [*modules(*MODULES), *all_public()]:
            for documented in (one, *members(one)):
                with self.subTest(documented.name):
                    self.assertEqual(faults_of_form(documented), [])

    def test_the_checks_of_form_can_fail(self) -> None:
        texts = ("Args: size: pixels.", "Example:\n    >>> 1\n    1", "Sums.\n\n>>> 1\n1")
        for text in texts:
            with self.subTest(text):
                self.assertTrue(faults_of_form(Documented("sums", sum, text)))
        self.assertEqual(Documented("sums", sum, ">>> import torch, json").packages, {"torch"})

    def test_examples_run(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            place = Place(Path(directory))
            self.assertTrue(Documented("wrong", sum, ">>> 1 + 1\n3").run(place.another()))
            for one in [*modules(*MODULES), *all_public()]:
                for documented in (one, *members(one)):
                    if documented.examples and not documented.packages:
                        with self.subTest(documented.name):
                            failures = documented.run(place.another())
                            self.assertFalse(failures, failures)

    def test_names_are_listed_once(self) -> None:
        self.assertEqual(sorted(set(dflop.__all__)), sorted(dflop.__all__))


if __name__ == "__main__":
    unittest.main()
