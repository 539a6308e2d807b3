"""Fits counts as exact polynomials in a run's units, and checks them on runs that the fit has not used."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from dflop.errors import ModelError

# Largest relative difference between a count and its polynomial.
ERROR_MAX = Fraction(5, 1000)
# Largest side of an attention window in patches, and longest window in tokens, that are tried.
WINDOW_SIDE_MAX, WINDOW_TOKENS_MAX = 64, 4096
# Longest chunk in tokens, to which a stem pads, that is tried.
CHUNK_TOKENS_MAX = 256


class FitError(ModelError):
    """Counts that no polynomial of the right form fits."""


@dataclass(frozen=True)
class Units:
    """Units of one run: what counts are polynomials of.

    Attributes:
        items: sequences in the batch, such as tiles.
        length: positions in each sequence.
        grids: frames, rows and columns of the patches of each medium, if the model reads them.
        more: items and their length in further runs of the layers.
    """

    items: int
    length: int
    grids: tuple[tuple[int, int, int], ...] = ()
    more: tuple[tuple[int, int], ...] = ()

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        return ((self.items, self.length), *self.more)

    @property
    def all_items(self) -> int:
        return sum(items for items, _ in self.sequences)

    @property
    def tokens(self) -> int:
        return sum(items * length for items, length in self.sequences)

    @property
    def is_uniform(self) -> bool:
        return all(length == self.length for _, length in self.more)

    @property
    def longest(self) -> int:
        return max(length for _, length in self.sequences)

    @property
    def full_pairs(self) -> int:
        if self.grids and sum(t * h * w for t, h, w in self.grids) == self.tokens:
            return sum(t * (h * w) ** 2 for t, h, w in self.grids)
        return sum(items * length**2 for items, length in self.sequences)

    def square_pairs(self, side: int) -> int:
        """Returns the query-key pairs if attention stays within squares of ``side`` x ``side`` patches."""
        return sum(t * _squares(h, side) * _squares(w, side) for t, h, w in self.grids)

    def chunk_pairs(self, length: int) -> int:
        """Returns the query-key pairs if attention stays within chunks of ``length`` positions."""
        return sum(items * _squares(own, length) for items, own in self.sequences)

    def chunks(self, length: int) -> int:
        return sum(items * -(-own // length) for items, own in self.sequences)


@dataclass(frozen=True)
class Term:
    """A unit that counts depend on, under its name in the description."""

    name: str
    value: Callable[[Units], int]
    window: int | None = None


@dataclass(frozen=True)
class Polynomial:
    """Integer coefficients by term, and the largest relative error on runs that the fit has not used."""

    coefficients: Mapping[str, int]
    error: Fraction
    pattern: str = "none"
    window: int | None = None


ITEMS = Term("per_item", lambda units: units.all_items)
TOKENS = Term("per_token", lambda units: units.tokens)
FULL_PAIRS = Term("per_pair", lambda units: units.full_pairs)


def fit(
    runs: Sequence[Units], counts: Sequence[int], terms: Sequence[Term], wholes: Sequence[int] | None = None
) -> Polynomial | None:
    """Returns the polynomial through as many runs as there are terms, checked on all others.

    Args:
        runs: units of each run.
        counts: FLOPs of each run.
        terms: what the counts may depend on.
        wholes: counts that errors are relative to: those of the module that a part belongs to. Default: ``counts``.

    Returns:
        Polynomial | None: nothing if the runs do not determine the coefficients, if one is negative, or if no
        run is left for the check. Media that all become the same items are checks of each other.
    """
    rows = [[Fraction(term.value(units)) for term in terms] for units in runs]
    chosen = _independent(rows, len(terms))
    different = len({tuple(row) for row in rows})
    are_same_items = tuple(terms) == (ITEMS,) and different == 1 and len(runs) > 1
    if chosen is None or (len(chosen) == different and not are_same_items):
        return None
    weights = [max(whole, 1) for whole in wholes or counts]
    found = _checked(
        rows, counts, terms, _solved([[*rows[at], Fraction(counts[at])] for at in chosen]), weights
    )
    if found is not None and found.error > ERROR_MAX and len(terms) == 1:
        # A factor between those of some runs, which the other runs check.
        values = [row[0] for row in rows]
        factor = _nearest(values[::2], counts[::2], weights[::2])
        found = _checked(rows, counts, terms, [factor], weights)
    return found


def _checked(
    rows: Sequence[Sequence[Fraction]],
    counts: Sequence[int],
    terms: Sequence[Term],
    solution: Sequence[Fraction],
    weights: Sequence[int],
) -> Polynomial | None:
    """Returns the polynomial of a solution with its error on all runs; nothing with negative coefficients."""
    coefficients = {term.name: round(value) for term, value in zip(terms, solution, strict=True)}
    if any(value < 0 for value in coefficients.values()):
        return None
    error = Fraction(0)
    for row, count, weight in zip(rows, counts, weights, strict=True):
        predicted = sum(int(value) * coefficients[term.name] for value, term in zip(row, terms, strict=True))
        error = max(error, Fraction(abs(predicted - count), weight))
    return Polynomial(coefficients, error)


def _nearest(values: Sequence[Fraction], counts: Sequence[int], weights: Sequence[int]) -> Fraction:
    """Returns the factor of values whose largest error is least, relative to the weights."""
    scaled = [
        (value / weight, Fraction(count, weight))
        for value, count, weight in zip(values, counts, weights, strict=True)
        if value
    ]
    # The largest error is least where that of one run rises as much as that of another falls.
    factors = {(y + z) / (x + w) for x, y in scaled for w, z in scaled}
    return min(sorted(factors), key=lambda factor: max(abs(x * factor - y) for x, y in scaled))


def best(
    runs: Sequence[Units],
    counts: Sequence[int],
    hypotheses: Iterator[tuple[str, Sequence[Term]]],
    wholes: Sequence[int] | None = None,
) -> Polynomial | None:
    """Returns the first exact polynomial among hypotheses, or the most exact.

    Args:
        runs: units of each run.
        counts: FLOPs of each run.
        hypotheses: attention pattern and terms.
        wholes: counts that errors are relative to. Default: ``counts``.
    """
    found: Polynomial | None = None
    for pattern, terms in hypotheses:
        fitted = fit(runs, counts, terms, wholes)
        if fitted is None or (found is not None and fitted.error >= found.error):
            continue
        window = next((term.window for term in terms if term.window), None)
        found = Polynomial(fitted.coefficients, fitted.error, pattern, window)
        if found.error == 0:
            break
    return found


def layer_hypotheses(
    runs: Sequence[Units], declared: Collection[int] = ()
) -> Iterator[tuple[str, Sequence[Term]]]:
    """Yields what a layer's FLOPs may depend on: tokens, pairs within what attention reaches, padded chunks.

    Chunks that layers pad to have lengths that the configuration declares: many lengths fit the same runs.
    """
    yield "none", (TOKENS,)
    yield "full", (TOKENS, FULL_PAIRS)
    if all(units.grids for units in runs):
        for side in range(2, WINDOW_SIDE_MAX + 1):
            pairs = Term("per_pair", lambda units, side=side: units.square_pairs(side), side)  # type: ignore[misc]
            yield "window", (TOKENS, pairs)
    longest = max(units.longest for units in runs)
    for length in range(2, min(longest, WINDOW_TOKENS_MAX)):
        pairs = Term("per_pair", lambda units, length=length: units.chunk_pairs(length), length)  # type: ignore[misc]
        yield "chunk", (TOKENS, pairs)
    for length in sorted(set(declared)):
        if 1 < length < longest:
            yield "none", (TOKENS, _chunks(length))


def constant_hypotheses(runs: Sequence[Units]) -> Iterator[tuple[str, Sequence[Term]]]:
    """Yields that a layer does some work once per sequence: a chunk of the longest one."""
    yield "none", (TOKENS, _chunks(max(units.longest for units in runs)))


def outside_hypotheses(
    window: int | None, runs: Sequence[Units] = (), chunk: int | None = None
) -> Iterator[tuple[str, Sequence[Term]]]:
    """Yields what FLOPs outside the layers may depend on: tokens, whole sequences, padding to chunks.

    Args:
        window: window of the layers, whose length chunks may have.
        runs: runs of an encoder; none for a decoder.
        chunk: length of the chunks of other parts, which is that of this one. Default: any.
    """
    yield "none", (TOKENS,)
    yield "none", (TOKENS, FULL_PAIRS)
    if not runs:
        yield "none", (ITEMS,)
        yield "none", (TOKENS, ITEMS)
    longest = [max(units.longest for units in runs)] if runs else []
    lengths = [*longest, *([window] if window else []), *range(2, CHUNK_TOKENS_MAX)]
    for length in [chunk] if chunk else lengths:
        yield "none", (_chunks(length),)
        yield "none", (TOKENS, _chunks(length))


def _chunks(length: int) -> Term:
    return Term("per_chunk", lambda units: units.chunks(length), length)


def _squares(length: int, part: int) -> int:
    return length // part * part**2 + (length % part) ** 2


def _independent(rows: Sequence[Sequence[Fraction]], count: int) -> list[int] | None:
    """Returns the first rows that are linearly independent, as many as there are columns."""
    kept: list[list[Fraction]] = []
    chosen = []
    for at, row in enumerate(rows):
        rest = list(row)
        for base in kept:
            lead = next(column for column, value in enumerate(base) if value)
            factor = rest[lead] / base[lead]
            rest = [value - factor * other for value, other in zip(rest, base, strict=True)]
        if any(rest):
            kept.append(rest)
            chosen.append(at)
        if len(chosen) == count:
            return chosen
    return None


def _solved(rows: list[list[Fraction]]) -> list[Fraction]:
    """Solves a system of independent equations, whose last column is the right side."""
    count = len(rows)
    for column in range(count):
        pivot = next(at for at in range(column, count) if rows[at][column])
        rows[column], rows[pivot] = rows[pivot], rows[column]
        rows[column] = [value / rows[column][column] for value in rows[column]]
        for at in range(count):
            if at != column and rows[at][column]:
                factor = rows[at][column]
                rows[at] = [
                    value - factor * other for value, other in zip(rows[at], rows[column], strict=True)
                ]
    return [row[-1] for row in rows]
