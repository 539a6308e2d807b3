"""Rows of a profile, one per measured run, and the CSV text that the cost model reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SCHEMA = "1"
COLUMNS = "module,part,phase,tp,layers,batch,tokens,microseconds,bytes"
MICROSECONDS_MIN = 1e-3
"""Written for a missing pass, or a part that takes no time, because times are above 0."""


@dataclass(frozen=True)
class Row:
    """One measurement; rows of the same setting are repeats.

    - `module`: `vision`, `audio` or `llm`; `part`: `linear`, `attention` or `whole`
    - `phase`: `forward`, `backward` or `optimizer`, which has `batch` and `tokens` 0
    - `tp`: tensor-parallel degree; `layers`: number of transformer layers that ran
    - `batch`: number of sequences that ran together; `tokens`: tokens of each, inside the module
    - `microseconds`: time of the whole batch; `bytes`: rise of the allocator's peak, or `None`
    """

    module: str
    part: str
    phase: str
    tp: int
    layers: int
    batch: int
    tokens: int
    microseconds: float
    bytes: int | None = None

    def __str__(self) -> str:
        names = f"{self.module},{self.part},{self.phase},{self.tp},{self.layers},{self.batch},{self.tokens}"
        return f"{names},{self.microseconds!r},{'' if self.bytes is None else self.bytes}"


def to_csv(
    rows: Iterable[Row], metadata: Mapping[str, str], widths: Mapping[str, Mapping[str, int]], name: str
) -> str:
    """Returns the text of a profile: metadata, widths of modules, rows in their order."""
    lines = [f"# dflop-profile: {SCHEMA}"]
    lines += [f"# {key}: {' '.join(str(value).split())}" for key, value in metadata.items()]
    for module, known in widths.items():
        pairs = [f"{key}={width}" for key, width in known.items()] + [f"name={'-'.join(name.split())}"]
        lines.append(f"# {module}: {' '.join(pairs)}")
    return "\n".join([*lines, COLUMNS, *map(str, rows)]) + "\n"
