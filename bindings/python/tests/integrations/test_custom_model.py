"""Tests the example of a model that dflop does not know: Qwen3-VL with a processor of its own."""

from __future__ import annotations

import contextlib
import io
import unittest

import torch
from trainers import EXAMPLES, difference, example, gradients_of, run


class Custom(unittest.TestCase):
    def test_it_learns(self) -> None:
        losses = [float(loss) for loss in run(EXAMPLES / "custom_model.py").split()[1:]]
        self.assertEqual(len(losses), 6)
        self.assertLess(losses[-1], losses[0] - 0.2)

    def test_gradients_do_not_depend_on_the_cut(self) -> None:
        custom, found = example("custom_model"), []
        for microbatches in (1, 4):
            torch.manual_seed(0)
            model = custom.model_of()
            step = next(iter(custom.loader_of(microbatches=microbatches))).hold()
            targets = sum(one.target_tokens for one in step.microbatches)
            with contextlib.redirect_stdout(io.StringIO()):
                for one in step.microbatches:
                    model(**one, use_cache=False, num_items_in_batch=targets).loss.backward()
            found.append(gradients_of(model))
        self.assertLess(difference(*found), 1e-4)


if __name__ == "__main__":
    unittest.main()
