"""Takes the times of a whole module apart into what goes by tokens in all and what goes by the length of each
sequence.

A microbatch of sequences takes `linear(tokens in all) + sum of attention(tokens of each)`. Two kinds of runs
show both: packs of short sequences, and single sequences. They leave one number open, the time of attention
over a short sequence: whatever is added to attention in proportion to its tokens and taken from linear work
changes no sum. It is chosen as the least with which attention does not fall as sequences become longer: 0 for
a module that computes all sequences in one, the cost of a launch for one that runs them one by one.

So the parts are those of the cost model's sums, however the module itself packs: where a mask makes attention
go by the square of all tokens, that is in linear work, and attention is next to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from dflop.torch._curve import Curve, median
from dflop.torch._rows import MICROSECONDS_MIN

LINEAR_SHARE_MIN = 0.02
"""Least share of a pack's time that is left for linear work: a guard against noise."""
REACH_MIN = 4
"""Only sequences of so many short ones say what attention over a short one takes: nearer ones say more of the
noise."""

Times = Mapping[int, list[float]]
"""Tokens to repeated times, in one unit."""


def short_attention(packed: Times, single: Times, short: int) -> float:
    """Returns the time of attention over one short sequence.

    - `packed`: times of packs of short sequences, by tokens in all
    - `single`: times of single sequences, by their tokens
    """
    pack = Curve((tokens, median(times)) for tokens, times in packed.items())
    far = [length for length in single if length >= REACH_MIN * short]
    needed = [(pack.at(length) - median(single[length])) / (length / short - 1) for length in far]
    return max([0.0, *needed])


def linear_times(packed: Times, short: int, of_short: float) -> dict[int, list[float]]:
    """Returns the packs' times without attention, of which `of_short` is that over one short sequence."""
    return {
        tokens: [
            max(time - tokens / short * of_short, LINEAR_SHARE_MIN * time, MICROSECONDS_MIN) for time in times
        ]
        for tokens, times in packed.items()
    }


def attention_times(single: Times, linear: Times, short: int, of_short: float) -> dict[int, list[float]]:
    """Returns the single sequences' times without linear work, from the short length on."""
    line = Curve((tokens, median(times)) for tokens, times in linear.items())
    attention = {
        length: [max(time - line.at(length), of_short, MICROSECONDS_MIN) for time in times]
        for length, times in single.items()
        if length > short
    }
    repeats = max(map(len, single.values()), default=1)
    return {short: [max(of_short, MICROSECONDS_MIN)] * repeats, **attention}
