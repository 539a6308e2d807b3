"""Tests that buckets of lengths and pixels let `torch.compile` make a handful of graphs, at little padding."""

from __future__ import annotations

import dataclasses
import unittest

import dflop
import torch
import torch._dynamo
from trainers import WithData, difference, example, gradients_of

pytorch = example("pytorch")
BUCKETS = dflop.Processor(length_buckets="ladder", media_buckets="ladder")


class Compiled(WithData):
    def steps(self, **settings: object) -> list[dflop.Step]:
        settings = {"global_batch_size": 32, "microbatches": 4, "steps": 10, "array_type": "torch"} | settings
        loader = dflop.BalancedLoader(self.directory / "shards", model=self.directory / "model", **settings)
        return [step.hold() for step in loader]

    def graphs(self, steps: list[dflop.Step], name: str) -> int:
        """Returns how many graphs a compiled function of a tensor has after all microbatches."""
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch._dynamo.config.recompile_limit = 64
        compiled = torch.compile(lambda values: values.sum() * 2, dynamic=False, backend="eager")
        for step in steps:
            for microbatch in step.microbatches:
                if name in microbatch:
                    compiled(microbatch[name])
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    def test_a_handful_of_graphs_at_under_a_tenth_of_padding(self) -> None:
        varying, bucketed = self.steps(), self.steps(processor=BUCKETS)
        for name, most in (("input_ids", 8), ("pixel_values", 10)):
            found = self.graphs(varying, name), self.graphs(bucketed, name)
            self.assertGreater(found[0], 25, name)
            self.assertLessEqual(found[1], most, name)
        microbatches = [microbatch for step in bucketed for microbatch in step.microbatches]
        padding = sum(microbatch.padding_tokens for microbatch in microbatches)
        tokens = sum(microbatch.tokens for microbatch in microbatches)
        self.assertLess(padding / (padding + tokens), 0.1)
        rows = [
            sum(
                mb["pixel_values"].shape[0]
                for step in steps
                for mb in step.microbatches
                if "pixel_values" in mb
            )
            for steps in (varying, bucketed)
        ]
        self.assertLess(1 - rows[0] / rows[1], 0.1)

    def test_buckets_change_no_gradient(self) -> None:
        processor = dataclasses.replace(BUCKETS, layout="packed:8")
        plain, bucketed = self.steps(steps=2), self.steps(steps=2, processor=processor)
        for one, other in zip(plain, bucketed, strict=True):
            found = []
            for step in (one, other):
                model = pytorch.model_of(self.directory)
                found.append((pytorch.backward(model, step), gradients_of(model)))
            self.assertAlmostEqual(found[0][0], found[1][0], places=5)
            self.assertLess(difference(found[1][1], found[0][1]), 1e-4)

    def test_every_sequence_is_a_multiple_for_context_parallelism(self) -> None:
        for step in self.steps(steps=2, processor=dflop.Processor(layout="packed:8")):
            for microbatch in step.microbatches:
                self.assertTrue((microbatch.cu_seqlens % 8 == 0).all())


if __name__ == "__main__":
    unittest.main()
