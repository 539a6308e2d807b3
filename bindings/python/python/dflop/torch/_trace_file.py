"""Files of trace events, as Perfetto and Chrome read them.

# Source
Google, "Trace Event Format": the JSON array format, whose closing bracket is optional.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from typing import Any


class TraceFile:
    """A file that is complete after every write: a process that is killed leaves what it has written."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115  # closed by `close`
        self._is_first = True
        self._file.write("[")
        self._file.flush()

    def write(self, events: Iterable[dict[str, Any]]) -> None:
        """Appends events, one a line, in one write.

        Raises:
            ValueError: the file is closed.
            OSError: it cannot be written.
        """
        lines = []
        for event in events:
            lines.append(("\n" if self._is_first else ",\n") + json.dumps(_finite(event), allow_nan=False))
            self._is_first = False
        self._file.write("".join(lines))
        self._file.flush()

    def close(self) -> None:
        """Ends the array; a second call does nothing."""
        if not self._file.closed:
            self._file.write("\n]\n")
            self._file.close()


def _finite(value: Any) -> Any:
    """Replaces numbers that JSON does not have by ``None``."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def laid_out(starts: list[float], lengths: list[float], end: float) -> list[tuple[float, float]]:
    """Places bars on a track, in order and apart.

    A bar starts where its microbatch does, or after the bar before it, and all of them are over at `end`;
    only bars that are longer together than the track are shortened, by one factor.

    - `starts`: ascending; the first is the start of the track
    - returns start and length of each bar
    """
    if not starts:
        return []
    room, total = max(end - starts[0], 0.0), sum(lengths)
    factor = min(1.0, room / total) if total > 0 else 1.0
    left, free, bars = total * factor, starts[0], []
    for start, length in zip(starts, lengths, strict=True):
        at = max(free, min(start, end - left))
        bars.append((at, length * factor))
        free, left = at + length * factor, left - length * factor
    return bars
