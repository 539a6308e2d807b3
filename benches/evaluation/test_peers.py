"""Tests of the rules and simulations in `peers`, without the Python package."""

import random
import unittest

import peers
from peers import Sample


class Rules(unittest.TestCase):
    """Partitions have all items, and the known answers."""

    def test_differencing_is_exact_where_the_method_is_known_to_be(self) -> None:
        """Karmarkar and Karp's example for two groups leaves a difference of 2, greedy one of 4."""
        weights = [8, 7, 6, 5, 4]
        groups = peers._differencing(weights, 2, equal=False)
        self.assertEqual(sorted(sum(weights[item] for item in group) for group in groups), [14, 16])
        groups = peers._greedy(weights, 2)
        self.assertEqual(sorted(sum(weights[item] for item in group) for group in groups), [13, 17])

    def test_every_item_is_in_one_group(self) -> None:
        """Counts are equal on request."""
        source = random.Random(1)
        weights = [source.randint(1, 999) for _ in range(48)]
        for equal in (False, True):
            groups = peers._differencing(weights, 8, equal=equal)
            self.assertEqual(sorted(item for group in groups for item in group), list(range(48)))
            self.assertTrue(not equal or {len(group) for group in groups} == {6})
        groups = peers._greedy(weights, 8, most=6)
        self.assertEqual(sorted(item for group in groups for item in group), list(range(48)))
        self.assertEqual({len(group) for group in groups}, {6})

    def test_reordering_keeps_samples_in_their_microbatch(self) -> None:
        """The most expensive sample of a microbatch comes to the first rank."""
        step = [Sample(0, 0, 10, [tiles]) for tiles in (1, 2, 3, 4, 9, 6, 7, 8)]
        cut = peers._reordered(step, peers._dealt(8, 2, 2), 0)
        self.assertEqual([sorted(a + b) for a, b in zip(*cut, strict=True)], [[0, 1, 4, 5], [2, 3, 6, 7]])
        self.assertEqual([max(slot) for slot in cut[0]], [4, 7])


class Simulations(unittest.TestCase):
    """Times of small steps that can be counted by hand."""

    def test_ranks_meet_after_each_module(self) -> None:
        """The slowest encoder and the slowest LLM add up, and media that move share the encoder's time."""
        step = [Sample(6, 1, 5, [1, 1, 1]), Sample(0, 4, 5, [])]
        cut = [[[0]], [[1]]]
        self.assertEqual(peers._lockstep(step, cut), 10)
        self.assertEqual(peers._lockstep(step, cut, peers._linear), 8)

    def test_the_pipeline_fills_and_drains(self) -> None:
        """Equal microbatches take their sum, and that of a microbatch for each further stage."""
        for stages in (1, 2, 4):
            makespan = peers.one_f_one_b([[3.0] * stages] * 8)
            self.assertAlmostEqual(makespan, 3 * (8 + stages - 1))

    def test_a_free_encoder_costs_nothing(self) -> None:
        """The LLM stage bounds the step."""
        self.assertAlmostEqual(peers.one_f_one_b([[0.0, 3.0]] * 5), 15)


if __name__ == "__main__":
    unittest.main()
