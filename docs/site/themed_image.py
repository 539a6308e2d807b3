"""Divides a drawing that follows the system's theme into one drawing for each theme.

A reader may choose a theme on the site that is not the system's, which a drawing cannot know. The site shows
one of two drawings instead.
"""

from __future__ import annotations

import re
from pathlib import Path

DARK = re.compile(r"@media \(prefers-color-scheme: dark\) \{(.*?)\n  \}", re.DOTALL)


def is_themed(path: Path) -> bool:
    """Returns whether the file is a drawing with colors for a dark theme."""
    return path.suffix == ".svg" and DARK.search(path.read_text(encoding="utf-8")) is not None


def variants(path: Path) -> list[tuple[str, str]]:
    """Returns the themes and the names of their drawings."""
    return [(theme, f"{path.stem}.{theme}.svg") for theme in ("light", "dark")]


def write_variants(path: Path, directory: Path) -> None:
    """Writes a drawing for each theme."""
    drawing = path.read_text(encoding="utf-8")
    directory.mkdir(parents=True, exist_ok=True)
    for theme, name in variants(path):
        keep = r"\1" if theme == "dark" else ""
        (directory / name).write_text(DARK.sub(keep, drawing), encoding="utf-8")
