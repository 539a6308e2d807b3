"""Sequences that a module takes: of any length, images of any size, or equal items."""

from __future__ import annotations

import math
from dataclasses import dataclass

TEXT_SHORT = 64
"""Tokens per sequence for measuring linear work of an LLM: a tile of attention."""
IMAGE_SIDE = 8
"""Side of the images for measuring linear work, if sizes are free, in patches."""


@dataclass(frozen=True)
class Sequences:
    """The sequences of a module.

    - `short`: tokens of the sequences that linear work is measured with, or of an item if all items are equal
    - `is_fixed`: whether all items are equal (tiles of a vision tower, windows of an audio tower)
    - `side`: if above 0, sequences are square images whose sides are multiples of this many patches
    """

    short: int
    is_fixed: bool = False
    side: int = 0

    @classmethod
    def text(cls) -> Sequences:
        return cls(TEXT_SHORT)

    @classmethod
    def items(cls, tokens: int) -> Sequences:
        if tokens < 1:
            raise ValueError(f"item_tokens: must be at least 1, found {tokens}")
        return cls(tokens, is_fixed=True)

    @classmethod
    def images(cls, merge: int) -> Sequences:
        side = max(IMAGE_SIDE // merge, 1) * merge
        return cls(side * side, side=merge)

    def snap_packed(self, tokens: int) -> int:
        """Returns the largest number of tokens of whole short sequences that is at most `tokens`."""
        return max(tokens // self.short, 1) * self.short

    def snap_length(self, tokens: int) -> int:
        """Returns the possible length nearest to `tokens`."""
        if not self.side:
            return max(tokens, 1)
        return (max(round(math.sqrt(tokens) / self.side), 1) * self.side) ** 2

    def packed(self, tokens: int) -> tuple[int, ...]:
        """Returns short sequences of `tokens` tokens in total."""
        return (self.short,) * max(tokens // self.short, 1)
