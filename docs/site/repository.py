"""Finds files of the repository, and their addresses on the code host."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ROOT / "docs"
PACKAGE = ROOT / "bindings/python/python/dflop"
ADDRESS = "https://github.com/dflop/dflop"
# Beside the documents lies what makes the site of them, which is no part of it.
GENERATOR = DOCUMENTS / "site"


def documents() -> list[Path]:
    """Returns the Markdown files that become pages, in alphabetical order."""
    return sorted(path for path in DOCUMENTS.rglob("*.md") if GENERATOR not in path.parents)


def address_of(path: Path) -> str:
    """Returns the address of a file or directory on the code host."""
    kind = "tree" if path.is_dir() else "blob"
    return f"{ADDRESS}/{kind}/main/{path.relative_to(ROOT).as_posix()}".removesuffix("/.")
