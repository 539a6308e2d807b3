"""Similar names in errors: "did you mean `search`?"."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

# Below this similarity, 0 to 1, a name is another one, and no slip.
SIMILAR = 0.75
# The name that was found, and where the message lists those that are known.
_FORMS = (
    re.compile(r"unknown \w+ `(?P<found>[^`]+)`, known are (?P<known>[^;\n]+)"),
    re.compile(r"`(?P<found>[^`]+)` is not in (?P<known>[^;\n]+)"),
    re.compile(r"expected (?P<known>.+), found `(?P<found>[^`]+)`"),
)
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


def similar(found: str, known: Iterable[str]) -> str:
    """Returns a question that names the known name next to `found`; empty if none is similar."""
    names = list(known)
    longer = [name for name in names if name.startswith(found + "_")]
    near = longer or get_close_matches(found, names, n=1, cutoff=SIMILAR)
    return f"did you mean `{near[0]}`?" if near and found not in names else ""


def with_hint(message: str) -> str:
    """Returns a message about an unknown name with the name that was meant, if the message lists it."""
    if "did you mean" in message or "similar" in message:
        return message
    for form in _FORMS:
        if (match := form.search(message)) is not None:
            hint = similar(match["found"], _NAME.findall(match["known"]))
            # After the closing quotation mark of the name: the list of those that are known may be long.
            end = match.end("found") + 1
            return f"{message[:end]} ({hint}){message[end:]}" if hint else message
    return message
