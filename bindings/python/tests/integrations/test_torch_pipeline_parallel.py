"""Stages on several TP ranks: weights that are whole on each rank have whole gradients, or are refused."""

from __future__ import annotations

import unittest
import warnings
from pathlib import Path
from typing import Any

import dflop
import dflop.torch.pipeline
import torch
import torch.distributed as dist
from pipeline_stages import LAYERS, WIDTH, build, made, update
from torch import multiprocessing
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from trainers import WithData

SETTINGS: dict[str, Any] = {"global_batch_size": 12, "steps": 2, "seed": 1}
JOB = dflop.Schedule({"vision": {}, "llm": {"tp": 2}}, microbatches=2)
ALONE = dflop.Schedule({"vision": {}, "llm": {}}, microbatches=2, placement="joint")
CASES = ("whole", "part", "sum")


class Scaled(torch.nn.Module):
    """A weight over the columns of one layer and the rows of another, as norms of heads are."""

    def __init__(self, base: torch.nn.Linear, seed: int) -> None:
        super().__init__()
        self.base, self.out = base, made(seed, torch.nn.Linear, WIDTH, WIDTH)
        self.scale = torch.nn.Parameter(torch.full((1,), 1.5))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scale = self.scale
        if isinstance(scale, DTensor):
            scale = scale.to_local(grad_placements=[Partial()])
        return self.out(torch.tanh(self.base(hidden)) * scale)


def pipeline_of(directory: Path, schedule: dflop.Schedule, case: str) -> dflop.torch.pipeline.Pipeline:
    def stage(module: str, *place: Any) -> torch.nn.Module:
        *place, mesh = place
        own: Any = build(module, *place)
        if module == "vision":
            return own
        for layer in own.blocks:
            own.blocks[layer] = Scaled(own.blocks[layer], 50 + int(layer))
            if case != "whole":
                styles = {"base": ColwiseParallel(), "out": RowwiseParallel()}
                parallelize_module(own.blocks[layer], mesh["tp"], styles)
            if case == "sum":
                scale = distribute_tensor(own.blocks[layer].scale.detach(), mesh["tp"], [Replicate()])
                own.blocks[layer].scale = torch.nn.Parameter(scale)
        return own

    def loader(role: dflop.RankRole) -> dflop.BalancedLoader:
        shards, model = directory / "shards", directory / "model"
        return dflop.BalancedLoader(shards, model=model, role=role, array_type="torch", **SETTINGS)

    return dflop.torch.Pipeline(stage, schedule, loader, layers=LAYERS, timeout=60)


def run(directory: Path, schedule: dflop.Schedule, case: str) -> dict[str, Any]:
    """Returns losses, norms and gradients of all steps, and warnings or the error."""
    found: dict[str, Any] = {"steps": []}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipeline = pipeline_of(directory, schedule, case)
    found["warnings"] = [str(one.message) for one in caught if "TP ranks" in str(one.message)]
    try:
        for step in pipeline:
            loss, norm = pipeline.step(step), pipeline.clip_grad_norm_(0.1)
            gradients = {
                name: one.grad.full_tensor() if isinstance(one.grad, DTensor) else one.grad.clone()
                for name, one in pipeline.module.named_parameters()
            }
            found["steps"].append({"loss": loss, "norm": norm, "gradients": gradients})
            update(pipeline.module.parameters())
    except dflop.PipelineError as error:
        found["error"] = str(error)
    return found


def rank_of_job(rank: int, directory: Path, case: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(directory / f"store-{case}"), JOB.world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=JOB.world_size)
    torch.save(run(directory, JOB, case), directory / f"found-{case}-{rank}")
    dist.destroy_process_group()


class Parallel(WithData):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        # DTensor looks up process groups by names that the next job in a process has again.
        for case in CASES:
            arguments = (cls.directory, case)
            multiprocessing.start_processes(rank_of_job, arguments, JOB.world_size, start_method="fork")

    def found(self, case: str) -> list[dict[str, Any]]:
        return [torch.load(self.directory / f"found-{case}-{rank}") for rank in range(JOB.world_size)]

    def check(self, case: str) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)
        wanted = run(self.directory, ALONE, "whole")
        self.assertEqual(wanted["warnings"], [])
        for found in self.found(case):
            self.assertEqual(len(found["steps"]), SETTINGS["steps"])
            for step, expected in zip(found["steps"], wanted["steps"], strict=True):
                self.assertAlmostEqual(step["loss"], expected["loss"], delta=1e-5)
                self.assertAlmostEqual(step["norm"], expected["norm"], delta=1e-5 * expected["norm"])
                for name, gradient in step["gradients"].items():
                    one = expected["gradients"][name]
                    torch.testing.assert_close(gradient, one, rtol=1e-4, atol=1e-5, msg=name)

    def test_partial_gradients_are_summed(self) -> None:
        self.check("sum")

    def test_a_stage_that_is_whole_on_each_rank_is_a_warning(self) -> None:
        self.check("whole")
        vision, *llm = self.found("whole")
        self.assertEqual(vision["warnings"], [])
        for found in llm:
            self.assertRegex(found["warnings"][0], "stage 0 of `llm` is whole on each of its 2 TP ranks")

    def test_weights_that_are_whole_with_gradients_of_parts_are_refused(self) -> None:
        for found in self.found("part"):
            self.assertEqual(found["steps"], [])
            self.assertRegex(found["error"], r"rank \d, step 0, sum of gradients")
            self.assertIn("the gradient of `blocks.0.scale` differs between TP ranks", found["error"])


if __name__ == "__main__":
    unittest.main()
