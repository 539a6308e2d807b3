"""Media are assigned to ranks by predicted cost, as VeOmni's functions of the same signature do."""

import unittest

import dflop
import dflop.torch
import torch

MODEL = "qwen3-vl-8b"
RANKS = 4


def table(lengths: list[int]) -> torch.Tensor:
    """Rows of rank, place and length, as ranks gather them."""
    return torch.tensor([[index % RANKS, index // RANKS, length] for index, length in enumerate(lengths)])


def largest(assigned: list[list[torch.Tensor]], cost_fn) -> int:
    sums = [sum(int(cost_fn(row[2:3])[0]) for row in rows) for rows in assigned]
    return max(sums)


class EncoderBalanceTest(unittest.TestCase):
    def setUp(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.lengths = (torch.rand(60, generator=generator) ** 3 * 16000).long().mul(4).add(16).tolist()

    def test_every_row_is_assigned_once(self) -> None:
        rows = table(self.lengths)
        for cost_fn in (None, dflop.torch.encoder_cost_fn(MODEL)):
            assigned = dflop.torch.assign_media(rows, RANKS, 2, cost_fn=cost_fn)
            self.assertEqual(len(assigned), RANKS)
            found = torch.stack([row for own in assigned for row in own])
            key = found[:, 0] + RANKS * found[:, 1]
            self.assertTrue(torch.equal(found[key.argsort()], rows))

    def test_the_largest_sum_is_smaller_than_by_squares(self) -> None:
        rows, cost_fn = table(self.lengths), dflop.torch.encoder_cost_fn(MODEL, device="h100")
        by_cost = largest(dflop.torch.assign_media(rows, RANKS, 2, cost_fn=cost_fn), cost_fn)
        by_square = largest(dflop.torch.assign_media(rows, RANKS, 2), cost_fn)
        self.assertLess(by_cost, by_square)
        mean = int(cost_fn(rows[:, 2]).sum()) / RANKS
        self.assertLess(by_cost, 1.02 * mean)

    def test_costs_are_those_of_the_model(self) -> None:
        model = dflop.CostModel(MODEL)
        cost = model.cost(images=[(448, 448)])
        (expected,) = model.sequence_times("vision", [cost["encoder_tokens"]])
        self.assertAlmostEqual(expected / 1e9, cost["seconds"]["vision"])
        lengths = torch.tensor([[1024, 4096], [16, 1024]])
        found = dflop.torch.encoder_cost_fn(model)(lengths)
        self.assertEqual(found[0, 0], found[1, 1])
        self.assertEqual(found.flatten().tolist(), model.sequence_times("vision", [1024, 4096, 16, 1024]))

    def test_fewer_media_than_ranks(self) -> None:
        rows = table([8, 12])
        assigned = dflop.torch.assign_media(rows, RANKS, 2)
        self.assertEqual([len(own) for own in assigned], [1, 1, 0, 0])
        self.assertEqual(dflop.torch.assign_media(rows[:0], 2, 2), [[], []])

    def test_a_function_that_changes_its_argument_changes_no_row(self) -> None:
        rows = table(self.lengths)
        before = rows.clone()
        dflop.torch.assign_media(rows, RANKS, 2, cost_fn=lambda lengths: lengths.mul_(2).float())
        self.assertTrue(torch.equal(rows, before))

    def test_mistakes_are_named(self) -> None:
        rows = table(self.lengths)
        for cost_fn, message in [
            (lambda lengths: lengths[1:], "expected 60 costs, found 59"),
            (lambda lengths: -lengths, "not negative"),
            (lambda lengths: lengths / 0, "finite"),
        ]:
            with self.assertRaisesRegex(dflop.ConfigError, message):
                dflop.torch.assign_media(rows, RANKS, 2, cost_fn=cost_fn)
        with self.assertRaisesRegex(dflop.ConfigError, "num_replicas: expected at least 1, found 0"):
            dflop.torch.assign_media(rows, 0, 2)
        with self.assertRaisesRegex(dflop.ConfigError, "`vision`, `llm`, found `audio`"):
            dflop.torch.encoder_cost_fn(MODEL, module="audio")


if __name__ == "__main__":
    unittest.main()
