"""Rows of a profile, one per measured run, and the CSV text that the cost model reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dflop.torch._held_out import HeldOut

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
    rows: Iterable[Row],
    metadata: Mapping[str, str],
    widths: Mapping[str, Mapping[str, int]],
    name: str,
    held_out: Iterable[HeldOut] = (),
) -> str:
    """Returns the text of a profile: metadata, widths of modules, held-out microbatches, rows in their order.

    A held-out microbatch is a line `# held-out: <microbatch>,<module>,<tokens>,<pairs>,<microseconds>`, with
    its index, and the median time of forward and backward.
    """
    lines = [f"# dflop-profile: {SCHEMA}"]
    lines += [f"# {key}: {' '.join(str(value).split())}" for key, value in metadata.items()]
    for module, known in widths.items():
        pairs = [f"{key}={width}" for key, width in known.items()] + [f"name={'-'.join(name.split())}"]
        lines.append(f"# {module}: {' '.join(pairs)}")
    lines += [
        f"# held-out: {one.microbatch},{one.module},{one.tokens},{one.pairs},{one.microseconds!r}"
        for one in held_out
    ]
    return "\n".join([*lines, COLUMNS, *map(str, rows)]) + "\n"
