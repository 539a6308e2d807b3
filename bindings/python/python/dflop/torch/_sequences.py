"""What sequences a module is given: of any length, images of any size, or items that are all alike."""

from __future__ import annotations

import math
from dataclasses import dataclass

TEXT_SHORT = 64
"""Tokens of each sequence where linear work of an LLM is measured: a tile of attention."""
IMAGE_SIDE = 8
"""Side of the images where linear work is measured and sizes are free, in patches."""


@dataclass(frozen=True)
class Sequences:
    """The sequences of a module.

    - `short`: tokens of the sequences that linear work is measured with; of each item, where items are all
      alike
    - `is_fixed`: whether items are all alike (tiles of a vision tower, windows of an audio tower)
    - `side`: where above 0, sequences are square images whose sides are multiples of so many patches
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
            raise ValueError(f"item_tokens: must be at least 1, not {tokens}")
        return cls(tokens, is_fixed=True)

    @classmethod
    def images(cls, merge: int) -> Sequences:
        side = max(IMAGE_SIDE // merge, 1) * merge
        return cls(side * side, side=merge)

    def snap_packed(self, tokens: int) -> int:
        """Returns the number of tokens, of whole short sequences, nearest below one that is wanted."""
        return max(tokens // self.short, 1) * self.short

    def snap_length(self, tokens: int) -> int:
        """Returns the length nearest to one that is wanted."""
        if not self.side:
            return max(tokens, 1)
        return (max(round(math.sqrt(tokens) / self.side), 1) * self.side) ** 2

    def packed(self, tokens: int) -> tuple[int, ...]:
        """Returns short sequences of so many tokens in all."""
        return (self.short,) * max(tokens // self.short, 1)
