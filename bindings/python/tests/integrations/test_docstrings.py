"""Examples of docstrings that need PyTorch or other packages; those that are not installed are named.

Every public name of `dflop.torch` has an example.
"""

import sys
import tempfile
import unittest
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from docstrings import (
    MODULES,
    Documented,
    Place,
    faults_of_form,
    is_method,
    members,
    missing,
    modules,
    public,
)


def of_torch() -> list[Documented]:
    return list(public("dflop.torch"))


class TorchDocstrings(unittest.TestCase):
    def test_every_public_name_has_an_example(self) -> None:
        found = of_torch()
        self.assertGreater(len(found), 12)
        self.assertEqual([one.name for one in found if not one.examples], [])

    def test_every_method_is_shown_in_an_example_of_its_class(self) -> None:
        for one in of_torch():
            for member in filter(lambda member: is_method(member.value), members(one)):
                name = member.name.rpartition(".")[2]
                with self.subTest(member.name):
                    self.assertTrue(f".{name}(" in one.source or (name == "close" and "with " in one.source))
                    self.assertTrue(member.text)

    def test_docstrings_have_one_form(self) -> None:
        for one in of_torch():
            for documented in (one, *members(one)):
                with self.subTest(documented.name):
                    self.assertEqual(faults_of_form(documented), [])

    def test_examples_run(self) -> None:
        names = [*modules(*MODULES), *(one for name in MODULES for one in public(name)), *of_torch()]
        with tempfile.TemporaryDirectory() as directory:
            place = Place(Path(directory))
            for one in names:
                for documented in (one, *members(one)):
                    if documented.examples and documented.packages:
                        self.check(documented, place)

    def check(self, documented: Documented, place: Place) -> None:
        with self.subTest(documented.name):
            if lacks := missing(documented.packages):
                self.skipTest(f"not installed: {', '.join(sorted(lacks))}")
            failures = documented.run(place.another())
            self.assertFalse(failures, failures)


if __name__ == "__main__":
    unittest.main()
