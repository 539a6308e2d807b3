"""Finds the public names of the package, and runs the examples of their docstrings.

Examples run as the docstring of the package describes it: in a directory with ``shards/`` and ``model/``.
Each docstring has a directory of its own.
"""

import ast
import contextlib
import doctest
import importlib
import importlib.util
import inspect
import io
import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import dflop

MODULES = ("dflop", "dflop.example", "dflop.hugging_face", "dflop.monitor")
# Packages that every environment of the tests has.
PRESENT = {"dflop", "numpy", "pyarrow"}
SECTIONS = ("Args", "Attributes", "Examples", "Raises", "Returns")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_HEADER = re.compile(r"^ *([A-Z][a-z]+):(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Documented:
    """A class, function, method, property or module with its docstring."""

    name: str
    value: object
    text: str

    @property
    def examples(self) -> list[doctest.Example]:
        return doctest.DocTestParser().get_examples(self.text)

    @property
    def source(self) -> str:
        """Code of all examples."""
        return "".join(example.source for example in self.examples)

    @property
    def packages(self) -> set[str]:
        """Packages that the examples import and that some environments lack."""
        found = set()
        for example in self.examples:
            for node in ast.walk(ast.parse(example.source)):
                if isinstance(node, ast.Import):
                    found |= {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    found.add(node.module or "")
        return {name.partition(".")[0] for name in found} - PRESENT - sys.stdlib_module_names

    def run(self, directory: Path) -> str:
        """Runs the examples in a directory and returns what failed."""
        test = doctest.DocTestParser().get_doctest(self.text, {"dflop": dflop}, self.name, None, 0)
        runner, output = doctest.DocTestRunner(verbose=False, optionflags=FLAGS), io.StringIO()
        before = Path.cwd()
        os.chdir(directory)
        try:
            with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
                warnings.simplefilter("error", UserWarning)
                failed = runner.run(test, out=output.write).failed
        finally:
            os.chdir(before)
        return output.getvalue() if failed else ""


class Place:
    """Makes directories with the same shards and model."""

    def __init__(self, directory: Path) -> None:
        self._first, self._made = directory / "first", 0
        dflop.example.write_shards(self._first / "shards")
        dflop.example.write_model(self._first / "model")

    def another(self) -> Path:
        self._made += 1
        path = self._first.with_name(str(self._made))
        shutil.copytree(self._first, path, copy_function=os.link)
        return path


def missing(packages: set[str]) -> set[str]:
    """Returns the packages that are not installed."""
    return {name for name in packages if importlib.util.find_spec(name) is None}


def public(module_name: str) -> Iterator[Documented]:
    """Yields the public classes and functions of a module."""
    module = importlib.import_module(module_name)
    for name in getattr(module, "__all__", None) or _defined(module):
        value = getattr(module, name)
        if inspect.isclass(value) or callable(value):
            yield Documented(f"{module_name}.{name}", value, _text(value))


def modules(*names: str) -> Iterator[Documented]:
    """Yields the docstrings of modules."""
    for name in names:
        module = importlib.import_module(name)
        yield Documented(name, module, _text(module))


def members(owner: Documented) -> Iterator[Documented]:
    """Yields the public methods and properties that a class defines, not its fields."""
    if not inspect.isclass(owner.value):
        return
    for name, value in vars(owner.value).items():
        if name.startswith("_") or inspect.ismemberdescriptor(value):
            continue
        if is_method(value) or isinstance(value, property) or inspect.isgetsetdescriptor(value):
            yield Documented(f"{owner.name}.{name}", value, _text(value))


def is_method(value: object) -> bool:
    return inspect.isroutine(value) or isinstance(value, classmethod | staticmethod)


def faults_of_form(one: Documented) -> list[str]:
    """Returns what is wrong with the sections of a docstring."""
    faults = []
    for found in _HEADER.finditer(one.text):
        title, rest = found.groups()
        if title in SECTIONS and rest.strip():
            faults.append(f"`{title}:` is not alone in its line")
        if title in ("Example", "Return", "Raise", "Arguments", "Parameters", "Usage", "Note"):
            faults.append(f"`{title}:` is none of {', '.join(SECTIONS)}")
    if one.examples and "Examples:" not in one.text and not isinstance(one.value, ModuleType):
        faults.append("examples without the section `Examples:`")
    return faults


def _defined(module: ModuleType) -> list[str]:
    own = [
        name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__
    ]
    return [name for name in own if not name.startswith("_")]


def _text(value: Any) -> str:
    # Not `inspect.getdoc`, which takes the text of a base class.
    return inspect.cleandoc(getattr(value, "__doc__", None) or "")
