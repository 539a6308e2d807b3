"""Splits the times of a whole module into a part by total tokens and a part by the length of each sequence.

A microbatch of sequences takes `linear(total tokens) + sum of attention(tokens of each)`. Two kinds of runs
determine both: packs of short sequences, and single sequences. One number remains free, the time of attention
over a short sequence, because moving time in proportion to tokens from linear work to attention changes no
sum. It is the smallest for which attention does not fall as sequences become longer: 0 for a module that
computes all sequences together, the cost of a launch for one that runs them one by one.

The parts are therefore the terms of the cost model, however the module packs: if a mask makes attention
quadratic in the total tokens, that time is in linear work, and attention is almost 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from dflop._native import TimeCurve
from dflop.torch._rows import MICROSECONDS_MIN

LINEAR_SHARE_MIN = 0.02
"""Minimum share of a pack's time for linear work, against noise."""
REACH_MIN = 4
"""Minimum length, in short sequences, of the sequences that determine attention over a short one; shorter
ones are dominated by noise."""

Times = Mapping[int, list[float]]
"""Tokens to repeated times, in one unit."""


def short_attention(packed: Times, single: Times, short: int) -> float:
    """Returns the time of attention over one short sequence.

    - `packed`: times of packs of short sequences, by total tokens
    - `single`: times of single sequences, by their tokens
    """
    pack = TimeCurve((tokens, median(times)) for tokens, times in packed.items())
    far = [length for length in single if length >= REACH_MIN * short]
    needed = [(pack.at(length) - median(single[length])) / (length / short - 1) for length in far]
    return max([0.0, *needed])


def linear_times(packed: Times, short: int, of_short: float) -> dict[int, list[float]]:
    """Returns the packs' times without attention, which takes `of_short` per short sequence."""
    return {
        tokens: [
            max(time - tokens / short * of_short, LINEAR_SHARE_MIN * time, MICROSECONDS_MIN) for time in times
        ]
        for tokens, times in packed.items()
    }


def attention_times(single: Times, linear: Times, short: int, of_short: float) -> dict[int, list[float]]:
    """Returns the single sequences' times without linear work, from the short length on."""
    line = TimeCurve((tokens, median(times)) for tokens, times in linear.items())
    attention = {
        length: [max(time - line.at(length), of_short, MICROSECONDS_MIN) for time in times]
        for length, times in single.items()
        if length > short
    }
    repeats = max(map(len, single.values()), default=1)
    return {short: [max(of_short, MICROSECONDS_MIN)] * repeats, **attention}
