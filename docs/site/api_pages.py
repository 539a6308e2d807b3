"""Writes the pages of the Python API: one directive for each public name, which mkdocstrings fills."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path

import griffe
from api_names import GROUPS, ApiError, Group, check
from repository import GENERATOR


def write(pages: Path, package: Path) -> list[Path]:
    """Writes all pages of the API below a directory, and returns their places in it.

    ``package`` is the directory that the package is read from; it is importable, too.

    Raises:
        ApiError: a public name is missing, or a page has a name that is not public.
    """
    check()
    directory = pages / "api"
    directory.mkdir(parents=True, exist_ok=True)
    for group in GROUPS:
        (directory / f"{group.file}.md").write_text(page(group), encoding="utf-8")
    (directory / "index.md").write_text(overview(package), encoding="utf-8")
    return [Path("api/index.md"), *(Path(f"api/{group.file}.md") for group in GROUPS)]


def page(group: Group) -> str:
    """Returns the page of a group."""
    about = group.about or inspect.getdoc(import_module(group.module)) or ""
    # Names in a module's documentation link to their section.
    for name in group.names:
        about = about.replace(f"`{name}`", f"[`{name}`][{group.module}.{name}]")
    directives = "\n\n".join(f"::: {group.module}.{name}" for name in group.names)
    return f"# {group.title}\n\n{about}\n\n{directives}\n"


def overview(package: Path) -> str:
    """Returns the page that lists every public name with the first sentence of its documentation."""
    extensions = griffe.load_extensions(GENERATOR / "griffe_dflop.py")
    read = griffe.load("dflop", search_paths=[package], extensions=extensions, allow_inspection=False)
    text = [
        "# Python API",
        "",
        "Every public name, with the signatures of the stubs that type checkers read.",
        "",
    ]
    for group in GROUPS:
        text += [f"## [{group.title}]({group.file}.md)", "", "| name | does |", "| --- | --- |"]
        within = read if group.module == "dflop" else read[group.module.removeprefix("dflop.")]
        for name in group.names:
            docstring = within[name].docstring
            if docstring is None:
                raise ApiError(f"{group.module}.{name} has no docstring")
            text.append(f"| [`{name}`][{group.module}.{name}] | {summary(docstring.value)} |")
        text.append("")
    return "\n".join(text)


def summary(documentation: str) -> str:
    """Returns the first sentence, without its full stop."""
    paragraph = documentation.split("\n\n")[0].replace("\n", " ")
    return paragraph.split(". ")[0].replace("|", "\\|").rstrip(".:")
