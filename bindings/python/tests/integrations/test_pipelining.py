"""Tests a pipeline of two stages: one length, equal gradients, an error if a step does not fit."""

from __future__ import annotations

import os
import re
import sys
import unittest
from pathlib import Path

import dflop
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from trainers import EXAMPLES, WithData, difference, example, gradients_of, run, torchrun

TOKENS = 640
SETTINGS = {
    "global_batch_size": 12,
    "microbatches": 4,
    "processor": dflop.Processor(length_buckets=f"fixed:{TOKENS}"),
    "steps": 3,
    "array_type": "torch",
    "plan": dflop.Plan(stages=[1, 1]),
}
SCHEDULES = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}


def steps_of(directory: Path, **settings: object) -> list[dflop.Step]:
    loader = dflop.BalancedLoader(directory / "shards", model=directory / "model", **SETTINGS | settings)
    return [step.hold() for step in loader]


def rank_of_job(directory: Path) -> None:
    """Runs a stage; saves gradients of its part and losses of steps, by schedule."""
    pipelining, pytorch = example("pipelining"), example("pytorch")
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), {}
    for name, schedule_of in SCHEDULES.items():
        model = pytorch.model_of(directory)
        part = [pipelining.Vision, pipelining.Language][rank](model)
        stage = PipelineStage(part, rank, 2, torch.device("cpu"))
        schedule = schedule_of(stage, 4, loss_fn=pipelining.loss_of, scale_grads=False)
        processor = dflop.Processor(length_buckets=f"fixed:{TOKENS}", dtype="none" if rank > 0 else "float32")
        for step in steps_of(directory, processor=processor):
            loss = pipelining.backward(schedule, step, rank)
            gradients = {
                key: one.grad.clone() for key, one in model.named_parameters() if one.grad is not None
            }
            found[name, step.step] = (loss, gradients, step.digest)
            model.zero_grad()
    torch.save(found, directory / f"found-{rank}")
    dist.destroy_process_group()


class Stages(WithData):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        torchrun(__file__, cls.directory, ranks=2)
        cls.found = [torch.load(cls.directory / f"found-{rank}") for rank in range(2)]
        cls.steps = steps_of(cls.directory)

    def test_loss_and_gradients_are_those_without_a_pipeline(self) -> None:
        pytorch = example("pytorch")
        model = pytorch.model_of(self.directory)
        loader = pytorch.loader_of(self.directory, global_batch_size=12, microbatches=1, steps=3)
        whole = [step.hold() for step in loader]
        for step in whole:
            loss = pytorch.backward(model, step)
            wanted = gradients_of(model)
            model.zero_grad()
            for name in SCHEDULES:
                with self.subTest(schedule=name, step=step.step):
                    (_, vision, _), (found_loss, language, _) = (
                        found[name, step.step] for found in self.found
                    )
                    self.assertFalse(vision.keys() & language.keys())
                    self.assertAlmostEqual(found_loss, loss, places=5)
                    self.assertLess(difference(vision | language, wanted), 1e-4)

    def test_both_stages_and_this_process_have_the_same_plan(self) -> None:
        for step in self.steps:
            for found in self.found:
                self.assertEqual(found["1F1B", step.step][2], step.digest)

    def test_microbatches_are_of_one_length_and_padding_is_masked(self) -> None:
        for step in self.steps:
            self.assertEqual(step.target_tokens, sum(one.target_tokens for one in step.microbatches))
            for one in step.microbatches:
                for name, axis in (
                    ("input_ids", 1),
                    ("labels", 1),
                    ("position_ids", 2),
                    ("mm_token_type_ids", 1),
                ):
                    self.assertEqual(one[name].shape[axis], TOKENS, name)
                self.assertEqual(one.tokens + one.padding_tokens, TOKENS)
                self.assertTrue(torch.all(one["labels"][0, one.tokens :] == -100))
                self.assertEqual(int((one["labels"] != -100).sum()), one.target_tokens)
                self.assertEqual(one.cu_seqlens[-1].item(), TOKENS)
                padding = one["position_ids"][0, 0, one.tokens :]
                self.assertEqual(padding.tolist(), list(range(one.padding_tokens)))

    def test_padding_counts_in_the_cost(self) -> None:
        longer = steps_of(self.directory, processor=dflop.Processor(length_buckets=f"fixed:{2 * TOKENS}"))
        plain = steps_of(self.directory, processor=None)
        for one, more, none in zip(self.steps, longer, plain, strict=True):
            cost = [
                sum(each.module_seconds["llm"] for each in step.microbatches) for step in (none, one, more)
            ]
            self.assertTrue(cost[0] < cost[1] < cost[2], cost)

    def test_too_many_tokens_are_an_error_before_the_step(self) -> None:
        for strategy in ("search", "data-blind"):
            plan = dflop.Plan(strategy=strategy, stages=[1, 1])
            loader = dflop.BalancedLoader(
                self.directory / "shards",
                model=self.directory / "model",
                **SETTINGS | {"processor": dflop.Processor(length_buckets="fixed:120"), "plan": plan},
            )
            with (
                self.subTest(strategy=strategy),
                self.assertRaisesRegex(dflop.PlanError, "of at most 120; .* would do"),
            ):
                next(iter(loader))
            self.assertEqual(loader.state_dict()["step"], 0)

    def test_unequal_lengths_are_what_the_pipeline_refuses(self) -> None:
        """Checks that lengths differ without padding."""
        lengths = {
            one["input_ids"].shape[1] for one in steps_of(self.directory, processor=None)[0].microbatches
        }
        self.assertGreater(len(lengths), 1)

    def test_the_example_starts_its_stages_itself(self) -> None:
        printed = run(EXAMPLES / "pipelining.py")
        # Lines of two processes may run into each other.
        losses = [float(loss) for loss in re.findall(r"stage 1, step \d+: loss (\d+\.\d{3})", printed)]
        self.assertEqual(len(losses), 8, printed)
        self.assertLess(losses[-1], losses[0] - 0.5)


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank_of_job(Path(sys.argv[1]))
    else:
        unittest.main()
