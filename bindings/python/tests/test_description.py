"""Descriptions of models: polynomials that counts are fitted to, and what happens without PyTorch."""

import importlib.util
import json
import tempfile
import unittest
from fractions import Fraction
from pathlib import Path

import dflop
from dflop._description import fits

SIDES = ((32, 32), (48, 32), (24, 44), (64, 50), (72, 70))


def patches(rows: int, columns: int, frames: int = 1) -> fits.Units:
    return fits.Units(1, frames * rows * columns, ((frames, rows, columns),))


class Fits(unittest.TestCase):
    def test_coefficients_are_exact(self) -> None:
        units = [fits.Units(1, tokens) for tokens in (256, 512, 768)]
        counts = [7 * one.tokens + 3 * one.tokens**2 for one in units]
        found = fits.fit(units, counts, (fits.TOKENS, fits.FULL_PAIRS))
        self.assertEqual(found, fits.Polynomial({"per_token": 7, "per_pair": 3}, Fraction(0)))

    def test_a_fit_needs_a_run_for_the_check(self) -> None:
        units = [fits.Units(1, tokens) for tokens in (256, 512)]
        self.assertIsNone(fits.fit(units, [1, 2], (fits.TOKENS, fits.FULL_PAIRS)))
        self.assertIsNone(fits.fit([units[0]] * 3, [1, 1, 1], (fits.TOKENS,)))

    def test_an_error_shows_at_the_runs_that_were_not_used(self) -> None:
        units = [fits.Units(1, tokens) for tokens in (100, 200, 300)]
        found = fits.fit(units, [1000, 2200, 3000], (fits.TOKENS,))
        assert found is not None
        self.assertEqual(found.error, Fraction(200, 2200))
        self.assertGreater(found.error, fits.ERROR_MAX)

    def test_a_factor_is_between_those_of_runs_that_differ(self) -> None:
        units = [fits.Units(items, 49) for items in (2, 3, 4, 5, 6)]
        # Beside 1000 for each item, up to 12 for what the items share.
        counts = [1000 * one.items + more for one, more in zip(units, (0, 30, 40, 0, 48), strict=True)]
        found = fits.fit(units, counts, (fits.ITEMS,))
        assert found is not None
        self.assertEqual(found.coefficients, {"per_item": 1005})
        self.assertLessEqual(found.error, fits.ERROR_MAX)

    def test_work_of_layers_once_per_sequence_is_a_chunk_of_the_longest(self) -> None:
        units = [fits.Units(1, tokens) for tokens in (50, 130, 225, 375, 512)]
        counts = [11 * one.tokens + 700 for one in units]
        found = fits.best(units, counts, fits.constant_hypotheses(units))
        self.assertEqual(
            found, fits.Polynomial({"per_token": 11, "per_chunk": 700}, Fraction(0), "none", 512)
        )

    def test_chunks_of_other_parts_have_the_length_of_those_before(self) -> None:
        units = [fits.Units(1, tokens) for tokens in (50, 130, 225, 375, 512)]
        counts = [2000 * one.tokens + 900 * one.chunks(15) for one in units]
        hypotheses = fits.outside_hypotheses(None, units, 200)
        found = fits.best(units, counts, hypotheses)
        assert found is not None
        self.assertIn(found.window, (None, 200))
        self.assertTrue(0 < found.error < Fraction(1, 100))

    def test_negative_coefficients_are_no_fit(self) -> None:
        units = [fits.Units(1, tokens) for tokens in (10, 20, 30)]
        counts = [100 * one.tokens - one.tokens**2 for one in units]
        self.assertIsNone(fits.fit(units, counts, (fits.TOKENS, fits.FULL_PAIRS)))

    def test_windows_of_patches_are_found(self) -> None:
        for side in (4, 8, 14):
            units = [patches(*size) for size in SIDES]
            counts = [14 * one.tokens + 5 * one.square_pairs(side) for one in units]
            found = fits.best(units, counts, fits.layer_hypotheses(units))
            expected = fits.Polynomial({"per_token": 14, "per_pair": 5}, Fraction(0), "window", side)
            self.assertEqual(found, expected)

    def test_pairs_within_windows_are_those_counted_one_by_one(self) -> None:
        places = [(row, column) for row in range(7) for column in range(5)]
        pairs = sum(a[0] // 3 == b[0] // 3 and a[1] // 3 == b[1] // 3 for a in places for b in places)
        self.assertEqual(patches(7, 5).square_pairs(3), pairs)
        self.assertEqual(patches(7, 5, frames=2).full_pairs, 2 * 35**2)

    def test_chunks_are_found_and_padding_to_chunks(self) -> None:
        units = [fits.Units(1, tokens) for tokens in (50, 130, 225, 375, 512)]
        counts = [2 * one.tokens + 9 * one.chunk_pairs(100) for one in units]
        found = fits.best(units, counts, fits.layer_hypotheses(units))
        assert found is not None
        self.assertEqual((found.pattern, found.window, found.error), ("chunk", 100, 0))
        counts = [11 * one.tokens + 4000 * one.chunks(13) for one in units]
        found = fits.best(units, counts, fits.outside_hypotheses(None))
        assert found is not None
        self.assertEqual((found.coefficients, found.window), ({"per_token": 11, "per_chunk": 4000}, 13))

    def test_media_of_the_same_items_check_each_other(self) -> None:
        units = [fits.Units(2, 49)] * 3
        found = fits.fit(units, [1000, 1000, 1004], (fits.ITEMS,))
        self.assertEqual(found, fits.Polynomial({"per_item": 500}, Fraction(4, 1004)))
        self.assertIsNone(fits.fit(units[:1], [1000], (fits.ITEMS,)))

    def test_layers_may_run_several_times_per_medium(self) -> None:
        more = (((3, 9),), ((1, 9),), (), ((5, 9),))
        units = [
            fits.Units(1, length, more=runs) for length, runs in zip((16, 25, 36, 49), more, strict=True)
        ]
        self.assertEqual((units[0].tokens, units[0].full_pairs, units[0].all_items), (43, 256 + 3 * 81, 4))
        counts = [2 * one.tokens + 5 * one.full_pairs for one in units]
        found = fits.best(units, counts, fits.layer_hypotheses(units))
        expected = fits.Polynomial({"per_token": 2, "per_pair": 5}, Fraction(0), "full")
        self.assertEqual(found, expected)

    def test_layers_that_pad_to_chunks_and_counts_of_whole_sequences_are_found(self) -> None:
        units = [fits.Units(1, tokens) for tokens in (50, 130, 225, 375, 512)]
        counts = [2 * one.tokens + 9000 * one.chunks(200) for one in units]
        found = fits.best(units, counts, fits.layer_hypotheses(units, {512, 200, 7}))
        expected = fits.Polynomial({"per_token": 2, "per_chunk": 9000}, Fraction(0), "none", 200)
        self.assertEqual(found, expected)
        found = fits.best(
            units, [7 * one.tokens + 640 for one in units], fits.outside_hypotheses(None, units)
        )
        self.assertEqual(found, fits.Polynomial({"per_token": 7, "per_chunk": 640}, Fraction(0), "none", 512))


class WithoutPyTorch(unittest.TestCase):
    @unittest.skipIf(importlib.util.find_spec("transformers"), "needs an environment without transformers")
    def test_the_message_tells_what_to_install(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
            target = Path(directory) / "model.json"
            with self.assertRaisesRegex(dflop.ModelError, "pip install torch transformers"):
                dflop.hugging_face.describe(directory, path=target)
            self.assertFalse(target.exists())


if __name__ == "__main__":
    unittest.main()
