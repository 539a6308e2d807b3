"""A pipeline resumes from steps of a run of 20 on other degrees, with the losses of one process."""

from __future__ import annotations

import unittest
from pathlib import Path
from typing import Any

import dflop
import dflop.torch.pipeline
import torch
import torch.distributed as dist
from pipeline_stages import LAYERS, build, one_process
from torch import multiprocessing
from torch.distributed import checkpoint
from torch.distributed.fsdp import fully_shard
from trainers import WithData

STEPS, MORE = 20, 24
SAVED = (1, 7, 13, STEPS)
NORM_MAX = 0.5
FIRST = ({"vision": {"dp": 2}, "llm": {"stages": 2}}, {"schedule": "1f1b"}, ())
# Modules, schedule and sharded modules of the jobs that resume.
RESUMED: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "more replicas, fewer stages": ({"vision": {}, "llm": {"dp": 3}}, {}, ()),
    "encoder stages, more LLM stages": (
        {"vision": {"stages": 2}, "llm": {"stages": 4}},
        {"schedule": "zb-h1", "microbatches": 4},
        (),
    ),
    "colocated, two stages per rank": (
        {"vision": {"dp": 4}, "llm": {"stages": 4, "dp": 2}},
        {"placement": "colocated", "schedule": "interleaved:2", "microbatches": 2},
        (),
    ),
    "sharded": ({"vision": {"dp": 2}, "llm": {"dp": 2}}, {}, ("vision", "llm")),
    "one rank": ({"vision": {}, "llm": {}}, {"placement": "joint"}, ()),
}


def schedule_of(modules: dict[str, Any], settings: dict[str, Any]) -> dflop.Schedule:
    return dflop.Schedule(modules, **{"microbatches": 3, **settings})


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1)


def settings(steps: int) -> dict[str, Any]:
    return {"global_batch_size": 12, "seed": 1, "steps": steps}


class Training:
    """A pipeline with an optimizer, and the checkpoints of both."""

    def __init__(self, directory: Path, job: Any, steps: int) -> None:
        modules, options, sharded = job

        def stage(module: str, *place: Any) -> torch.nn.Module:
            *place, mesh = place
            made = build(module, *place)
            return fully_shard(made, mesh=mesh["dp"]) if module in sharded else made

        def loader(role: dflop.RankRole) -> dflop.BalancedLoader:
            paths = {"dataset": directory / "shards", "model": directory / "model"}
            return dflop.BalancedLoader(role=role, array_type="torch", **paths, **settings(steps))

        schedule = schedule_of(modules, options)
        self.pipeline = dflop.torch.Pipeline(stage, schedule, loader, layers=LAYERS, timeout=60)
        self.optimizer = optimizer_of(self.pipeline.module.parameters())
        self.state = {
            "pipeline": self.pipeline,
            "optimizer": self.pipeline.optimizer_state(self.optimizer),
        }

    def run(self, save: Any = None) -> list[float]:
        """Trains to the end; returns losses."""
        losses = []
        for step in self.pipeline:
            losses.append(self.pipeline.step(step))
            self.pipeline.clip_grad_norm_(NORM_MAX)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if save is not None and step.step + 1 in SAVED:
                checkpoint.save(self.state, checkpoint_id=save / str(step.step + 1))
        return losses


def rank_of_job(rank: int, directory: Path, name: str) -> None:
    """Runs a rank through the first job, or through a job that resumes from each checkpoint."""
    torch.set_num_threads(1)
    job = RESUMED.get(name, FIRST)
    size = schedule_of(*job[:2]).world_size
    store = dist.FileStore(str(directory / f"store-{name}"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    if name not in RESUMED:
        torch.save(Training(directory, job, STEPS).run(directory / "saved"), directory / f"first-{rank}")
    for saved, steps in [(saved, MORE) for saved in SAVED] + [(STEPS, STEPS)]:
        if name in RESUMED:
            resumed = Training(directory, job, steps)
            checkpoint.load(resumed.state, checkpoint_id=directory / "saved" / str(saved))
            weights = {key: one.clone() for key, one in whole(resumed.pipeline).items()}
            found = {"losses": resumed.run(), "weights": weights}
            resumed.pipeline.close()
            torch.save(found, directory / f"{name}-{saved}-{steps}-{rank}")
    dist.barrier()
    dist.destroy_process_group()


def whole(pipeline: dflop.torch.pipeline.Pipeline) -> dict[str, torch.Tensor]:
    """Returns the weights of a rank by name in checkpoints."""
    state = pipeline.state_dict()
    state.pop("loader")
    return {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in state.items()}


class Resume(WithData):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        # DTensor looks up process groups by names that the next job in a process has again.
        for name, (modules, options, _) in {"first": FIRST, **RESUMED}.items():
            ranks = schedule_of(modules, options).world_size
            multiprocessing.start_processes(rank_of_job, (cls.directory, name), ranks, start_method="fork")
        cls.wanted = one_process(
            cls.directory,
            settings(MORE) | {"microbatches": 1},
            optimizer_of=optimizer_of,
            norm_max=NORM_MAX,
        )

    def losses(self, found: list[float], wanted: list[dict[str, Any]]) -> None:
        self.assertEqual(len(found), len(wanted))
        for place, (loss, expected) in enumerate(zip(found, wanted, strict=True)):
            self.assertAlmostEqual(loss, expected["loss"], delta=1e-5, msg=f"step {place}")

    def test_losses_before_are_those_of_one_process(self) -> None:
        for rank in range(schedule_of(*FIRST[:2]).world_size):
            self.losses(torch.load(self.directory / f"first-{rank}"), self.wanted[:STEPS])

    def test_losses_after_are_those_of_one_process(self) -> None:
        for name, (modules, options, _) in RESUMED.items():
            for saved in SAVED:
                for rank in range(schedule_of(modules, options).world_size):
                    with self.subTest(name, saved=saved, rank=rank):
                        found = torch.load(self.directory / f"{name}-{saved}-{MORE}-{rank}")
                        self.losses(found["losses"], self.wanted[saved:])

    def test_a_job_that_resumes_from_the_last_step_has_its_weights_and_ends(self) -> None:
        for name, (modules, options, _) in RESUMED.items():
            names: set[str] = set()
            for rank in range(schedule_of(modules, options).world_size):
                found = torch.load(self.directory / f"{name}-{STEPS}-{STEPS}-{rank}")
                self.assertEqual(found["losses"], [])
                expected = self.wanted[STEPS - 1]["weights"]
                names |= found["weights"].keys()
                for key, one in found["weights"].items():
                    weight = expected[key.removeprefix("module.")]
                    torch.testing.assert_close(one, weight, rtol=1e-4, atol=1e-5, msg=f"{name}: {key}")
            self.assertEqual({key.removeprefix("module.") for key in names}, set(expected))


if __name__ == "__main__":
    unittest.main()
