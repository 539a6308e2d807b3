"""Writes Markdown: filled paragraphs, tables, code blocks."""

import re
import textwrap

COLUMNS = 110
CODE = re.compile(r"`[^`]*`|\]\([^)]*\)")
NO_BREAK = "\0"


def filled(paragraph: str) -> str:
    """Breaks a paragraph into lines; code and link targets stay in one line."""
    kept = CODE.sub(lambda found: found[0].replace(" ", NO_BREAK), " ".join(paragraph.split()))
    lines = textwrap.wrap(kept, COLUMNS, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace(NO_BREAK, " ")


def table(header: list[str], rows: list[list[str]]) -> str:
    """Returns a table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def fence(commands: str) -> str:
    """Returns shell commands as a code block that no test runs."""
    return f"```sh needs=checkout\n{commands}\n```"


def times(ratio: float | None, digits: int = 2) -> str:
    """Returns a ratio with digits after the point; a dash where there is none."""
    return "–" if ratio is None else f"{ratio:.{digits}f}"


def percent(fraction: float | None, digits: int = 1) -> str:
    """Returns a fraction as a percentage."""
    return "–" if fraction is None else f"{100 * fraction:.{digits}f} %"


def span(values: list[float], digits: int = 2) -> str:
    """Returns the range of values, as a single number if both ends are equal."""
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
