"""Turns a document of the repository into a page of the site.

Documents are read on the code host as they are. What a page has beyond them is written in comments, which
the code host does not show:

- ``<!-- include PATH -->`` is followed by the file, as code;
- ``<!-- tabs -->`` ... ``<!-- end of tabs -->`` makes tabs of the headings between them;
- ``<!-- buttons -->`` makes buttons of the links in the next line, which dots separate;
- ``<!-- wide -->`` gives the whole width to a page with a large table, without a table of contents beside it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from repository import DOCUMENTS, GENERATOR, ROOT, address_of
from themed_image import is_themed, variants

FENCE = re.compile(r"^```(?P<language>\w*)(?: (?P<mark>\S+))?$")
INCLUDE = re.compile(r"^<!-- include (\S+) -->$")
LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^()\s]+)\)")
# Brackets after brackets are text on the code host, and a reference for the generator.
LINK_OR_GAP = re.compile(rf"{LINK.pattern}|\] \[")
# Code ends in its paragraph, or in its row of a table.
CODE = re.compile(r"`+(?:[^`\n]|\n(?!\s*(?:\n|\|)))*`+")
WIDE, WIDE_HEADER = "<!-- wide -->", "---\nhide:\n  - toc\n---\n"
BUTTONS, DOT = "<!-- buttons -->", " · "
TABS, TABS_END = "<!-- tabs -->", "<!-- end of tabs -->"


class PageError(Exception):
    """A document cannot become a page; the message names file and line."""


def page(document: Path) -> str:
    """Returns the page of a document, in the Markdown of the generator.

    Raises:
        PageError: a link, an included file or a pair of marks is broken.
    """
    lines = document.read_text(encoding="utf-8").splitlines()
    converted = _with_buttons([line for line in _converted(document, lines) if line != WIDE])
    header = WIDE_HEADER if WIDE in lines else ""
    return header + "\n".join(_with_tabs(document, converted)) + "\n"


def _converted(document: Path, lines: list[str]) -> Iterator[str]:
    """Converts fences, links and inclusions, line by line; a link may be broken into two lines."""
    is_code = False
    prose: list[str] = []
    for number, line in enumerate(lines, 1):
        fence = FENCE.match(line)
        included = None if is_code else INCLUDE.match(line)
        if is_code or fence or included:
            yield from _linked(document, number, prose)
            prose = []
        if included:
            yield from _included(document, number, included[1])
        elif fence:
            is_code = not is_code
            yield _opened(fence) if is_code else line
        elif is_code:
            yield line
        else:
            prose.append(line)
    yield from _linked(document, len(lines), prose)


def _opened(fence: re.Match[str]) -> str:
    """The opening line of a code block: marks of tests are left out, names of files become titles."""
    language, mark = fence["language"] or "text", fence["mark"] or ""
    kind, _, path = mark.partition("=")
    title = f' title="{path.rpartition("/")[2]}"' if kind in ("file", "from") else ""
    return f"```{language}{title}"


def _included(document: Path, number: int, target: str) -> list[str]:
    path = (document.parent / target).resolve()
    if not path.is_file():
        raise PageError(f"{document}:{number}: there is no file {target} to include")
    language = {".py": "python", ".sh": "sh", ".toml": "toml", ".json": "json"}.get(path.suffix, "text")
    code = path.read_text(encoding="utf-8").rstrip().splitlines()
    return [f'```{language} title="{path.name}"', *code, "```"]


def _linked(document: Path, number: int, prose: list[str]) -> list[str]:
    """Converts the links of a run of lines outside of code."""
    text = "\n".join(prose)
    codes = [found.span() for found in CODE.finditer(text)]

    def converted(found: re.Match[str]) -> str:
        is_in_code = any(start <= found.start() < end for start, end in codes)
        if is_in_code or found[0] == "] [":
            return found[0] if is_in_code else "] \\["
        return _link(document, number, found)

    return LINK_OR_GAP.sub(converted, text).split("\n") if prose else []


def _link(document: Path, number: int, found: re.Match[str]) -> str:
    """Leaves links between pages, and turns those to other files into addresses on the code host."""
    target, image = found["target"], found["image"]
    if "://" in target or target.startswith(("#", "mailto:")):
        return found[0]
    name, mark, anchor = target.partition("#")
    path = (document.parent / name).resolve()
    if not path.exists():
        raise PageError(f"{document}:{number}: the link leads to no file: {target}")
    if image:
        return _image(found["text"], name, path)
    # Text of a link may hold a link of its own: an image.
    text = LINK.sub(lambda inner: _link(document, number, inner), found["text"])
    if path.suffix == ".md" and DOCUMENTS in path.parents and GENERATOR not in path.parents:
        return f"[{text}]({target})"
    if not path.is_relative_to(ROOT):
        raise PageError(f"{document}:{number}: the link leads out of the repository: {target}")
    return f"[{text}]({address_of(path)}{mark}{anchor})"


def _image(text: str, name: str, path: Path) -> str:
    if DOCUMENTS not in path.parents:
        raise PageError(f"{path}: images of pages lie in docs/")
    if not is_themed(path):
        return f"![{text}]({name})"
    return " ".join(f"![{text}]({Path(name).parent / made}#only-{theme})" for theme, made in variants(path))


def _with_buttons(lines: list[str]) -> list[str]:
    """Turns the links in a line after the mark into buttons."""
    made = []
    for before, line in zip(["", *lines], lines, strict=False):
        links = line.split(DOT) if before == BUTTONS else []
        made.append(" ".join(f"{link}{{ .md-button }}" for link in links) or line)
    return [line for line in made if line != BUTTONS]


def _with_tabs(document: Path, lines: list[str]) -> Iterator[str]:
    """Turns each heading between the marks into a tab with what follows it."""
    is_inside, is_code, has_tab = False, False, False
    for line in lines:
        is_code ^= line.startswith("```")
        if line in (TABS, TABS_END):
            if is_inside == (line == TABS):
                raise PageError(f"{document}: `{line}` without its counterpart")
            is_inside, has_tab = line == TABS, False
        elif not is_inside:
            yield line
        elif line.startswith("#") and not is_code:
            has_tab = True
            yield from ("", f'=== "{line.lstrip("# ")}"', "")
        elif line and not has_tab:
            raise PageError(f"{document}: text between `{TABS}` and the first heading: {line}")
        else:
            yield f"    {line}" if line else ""
    if is_inside:
        raise PageError(f"{document}: `{TABS}` without `{TABS_END}`")


def written(document: Path, pages: Path, convert: Callable[[Path], str] = page) -> Path:
    """Writes the page of a document below a directory, and returns its place in it."""
    place = document.relative_to(DOCUMENTS)
    file = pages / place
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(convert(document), encoding="utf-8")
    return place
