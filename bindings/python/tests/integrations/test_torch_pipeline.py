"""Pipelines over 2 to 8 processes: losses and gradients of every placement and schedule are those of one."""

from __future__ import annotations

import re
import unittest
from pathlib import Path
from typing import Any

import dflop
import dflop.torch.pipeline
import torch
import torch.distributed as dist
from pipeline_stages import LAYERS, build, one_process, parallelize, update
from split_models import FAMILIES, write_model, write_shards
from torch import multiprocessing
from torch.distributed import checkpoint
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from trainers import EXAMPLES, WithData
from trainers import run as run_program

SETTINGS: dict[str, Any] = {"global_batch_size": 12, "steps": 3, "seed": 1}
RANKS = 8
WRAPPERS = ("compiled", "sharded", "parallel")
FROZEN = {
    "frozen encoder": {"vision": ("",)},
    "frozen LLM": {"llm": ("",)},
    "frozen parts": {"vision": ("patch", "blocks"), "llm": ("words", "blocks.1")},
}


def modules(vision: tuple[int, ...], llm: tuple[int, ...]) -> dict[str, Any]:
    """Returns modules with stages and replicas, and TP ranks if there are several."""
    names = ("stages", "dp", "tp")
    sizes = (("vision", vision), ("llm", llm))
    return {module: dict(zip(names, own, strict=False)) for module, own in sizes}


CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "one encoder rank, two replicas": (modules((1, 1), (1, 2)), {}, {}),
    "more encoder ranks than replicas": (modules((1, 3), (1, 2)), {"schedule": "gpipe"}, {}),
    "encoder ranks that do not divide replicas": (modules((1, 2), (1, 3)), {"schedule": "1f1b"}, {}),
    "as many encoder ranks as replicas": (modules((1, 2), (1, 2)), {"schedule": "1f1b-ahead:1"}, {}),
    "LLM stages": (modules((1, 1), (4, 1)), {"schedule": "1f1b"}, {}),
    "LLM stages and replicas": (modules((1, 2), (2, 3)), {"schedule": "1f1b-ahead:2"}, {}),
    "encoder stages": (modules((2, 1), (1, 1)), {"schedule": "gpipe"}, {}),
    "encoder stages and replicas": (modules((2, 2), (2, 2)), {"schedule": "1f1b"}, {}),
    "split backward passes": (modules((1, 2), (2, 2)), {"schedule": "zb-h1"}, {}),
    "split backward passes in an encoder": (modules((2, 1), (2, 2)), {"schedule": "zb-h1"}, {}),
    "joint": (modules((1, 2), (2, 2)), {"placement": "joint"}, {}),
    "colocated": (modules((1, 4), (2, 2)), {"placement": "colocated"}, {}),
    "two stages per rank, colocated": (
        modules((1, 2), (4, 1)),
        {"schedule": "interleaved:2", "placement": "colocated"},
        {},
    ),
    "two stages per rank and replicas, colocated": (
        modules((1, 4), (4, 2)),
        {"schedule": "interleaved:2", "placement": "colocated"},
        {},
    ),
    "recomputed": (modules((1, 1), (2, 1)), {}, {"is_recomputed": True}),
    "recomputed with split passes": (modules((1, 1), (2, 1)), {"schedule": "zb-h1"}, {"is_recomputed": True}),
    **{name: (modules((1, 2), (2, 1)), {}, {"frozen": frozen}) for name, frozen in FROZEN.items()},
    "frozen parts, split passes": (
        modules((2, 1), (2, 1)),
        {"schedule": "zb-h1"},
        {"frozen": FROZEN["frozen parts"]},
    ),
    "adapters": (modules((1, 2), (2, 2)), {}, {"is_adapted": True}),
    "adapters, split passes": (modules((1, 1), (2, 1)), {"schedule": "zb-h1"}, {"is_adapted": True}),
    "compiled": (modules((1, 1), (2, 1)), {}, {"compiled": ("vision", "llm")}),
    "sharded": (modules((1, 2), (1, 2)), {}, {"sharded": ("vision", "llm")}),
    "sharded stages": (modules((2, 2), (2, 2)), {"schedule": "gpipe"}, {"sharded": ("vision", "llm")}),
    "sharded LLM, encoder ahead": (
        modules((1, 1), (2, 2)),
        {"schedule": "1f1b-ahead:1"},
        {"sharded": ("llm",)},
    ),
    "sharded, split passes": (modules((1, 2), (2, 2)), {"schedule": "zb-h1"}, {"sharded": ("vision", "llm")}),
    "sharded, two stages per rank, colocated": (
        modules((1, 4), (4, 2)),
        {"schedule": "interleaved:2", "placement": "colocated"},
        {"sharded": ("vision", "llm")},
    ),
    "sharded, recomputed, adapters": (
        modules((1, 2), (2, 2)),
        {},
        {"sharded": ("vision", "llm"), "is_recomputed": True, "is_adapted": True},
    ),
    "TP in the LLM": (modules((1, 1), (2, 1, 2)), {}, {"parallel": ("llm",)}),
    "TP in both, replicas": (modules((1, 1, 2), (1, 2, 2)), {}, {"parallel": ("vision", "llm")}),
    "TP in the encoder, replicas": (modules((1, 1, 2), (1, 3)), {}, {"parallel": ("vision",)}),
    "more TP ranks in the encoder": (modules((1, 1, 4), (1, 1, 2)), {}, {"parallel": ("vision", "llm")}),
    "TP, split passes": (
        modules((1, 2, 2), (2, 1, 2)),
        {"schedule": "zb-h1"},
        {"parallel": ("vision", "llm")},
    ),
    "TP, colocated, recomputed": (
        modules((1, 2, 2), (1, 2, 2)),
        {"placement": "colocated"},
        {"parallel": ("vision", "llm"), "is_recomputed": True},
    ),
    "TP, adapters": (modules((1, 2), (1, 1, 2)), {}, {"parallel": ("llm",), "is_adapted": True}),
    "TP, joint": (modules((1, 1, 2), (2, 1, 2)), {"placement": "joint"}, {"parallel": ("vision", "llm")}),
    "TP and sharded": (
        modules((1, 2), (1, 2, 2)),
        {},
        {"parallel": ("llm",), "sharded": ("vision", "llm")},
    ),
}
CASES["joint"][0]["vision"] = {}
CASES["TP, joint"][0]["vision"] = {}


def schedule_of(case: str) -> dflop.Schedule:
    sizes, settings, _ = CASES[case]
    return dflop.Schedule(sizes, microbatches=3, **settings)


def rank_of_job(rank: int, directory: Path, cases: list[str]) -> None:
    """Runs a rank through the cases that have it; saves losses, norms and gradients."""
    torch.set_num_threads(1)
    for number, (case, (_, _, options)) in enumerate(CASES.items()):
        schedule = schedule_of(case)
        if case not in cases or rank >= schedule.world_size:
            continue
        store = dist.FileStore(str(directory / f"store-{number}"), schedule.world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=schedule.world_size)
        torch.save(run(directory, schedule, options), directory / f"found-{number}-{rank}")
        dist.destroy_process_group()


def pipeline_of(
    directory: Path, schedule: dflop.Schedule, options: dict[str, Any]
) -> dflop.torch.pipeline.Pipeline:
    def stage(*arguments: Any) -> torch.nn.Module:
        *arguments, mesh = arguments
        assert mesh.mesh_dim_names == ("dp", "tp")
        own = {name: value for name, value in options.items() if name not in WRAPPERS}
        made = build(*arguments, **own)
        if arguments[0] in options.get("parallel", ()):
            made = parallelize(made, mesh["tp"])
        if arguments[0] in options.get("sharded", ()):
            for block in made.blocks.values():
                fully_shard(block, mesh=mesh["dp"])
            made = fully_shard(made, mesh=mesh["dp"])
        return torch.compile(made, backend="eager") if arguments[0] in options.get("compiled", ()) else made

    def loader(role: dflop.RankRole) -> dflop.BalancedLoader:
        return dflop.BalancedLoader(
            directory / "shards", model=directory / "model", role=role, array_type="torch", **SETTINGS
        )

    return dflop.torch.Pipeline(stage, schedule, loader, layers=LAYERS, timeout=60)


def run(directory: Path, schedule: dflop.Schedule, options: dict[str, Any]) -> list[dict[str, Any]]:
    pipeline, found = pipeline_of(directory, schedule, options), []
    for step in pipeline:
        loss = pipeline.step(step)
        norm = pipeline.clip_grad_norm_(1e9)
        gradients = {
            f"{name.split('.')[0]}.{name.split('.', 2)[2].removeprefix('_orig_mod.')}": whole(one.grad)
            for name, one in pipeline.module.named_parameters()
            if one.grad is not None
        }
        found.append({"loss": loss, "norm": norm, "gradients": gradients})
        update(pipeline.module.parameters())
    pipeline.close()
    return found


def whole(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()


class Pipelines(WithData):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        assert all(schedule_of(case).world_size <= RANKS for case in CASES)
        # DTensor looks up process groups by names that the next job in a process has again.
        alone = [case for case, (_, _, options) in CASES.items() if {"sharded", "parallel"} & options.keys()]
        for cases in ([case for case in CASES if case not in alone], *([case] for case in alone)):
            ranks = max(schedule_of(case).world_size for case in cases)
            multiprocessing.start_processes(rank_of_job, (cls.directory, cases), ranks, start_method="fork")
        cls.wanted: dict[str, Any] = {}

    def one_process(self, options: dict[str, Any]) -> list[dict[str, Any]]:
        own = {name: value for name, value in options.items() if name in ("frozen", "is_adapted")}
        if repr(own) not in self.wanted:
            settings = SETTINGS | {"microbatches": 1}
            self.wanted[repr(own)] = one_process(self.directory, settings, **own)
        return self.wanted[repr(own)]

    def test_losses_and_gradients_are_those_of_one_process(self) -> None:
        for number, (case, (_, _, options)) in enumerate(CASES.items()):
            with self.subTest(case):
                wanted, size = self.one_process(options), schedule_of(case).world_size
                ranks = [torch.load(self.directory / f"found-{number}-{rank}") for rank in range(size)]
                for step, expected in enumerate(wanted):
                    names: set[str] = set()
                    for found in (rank[step] for rank in ranks):
                        self.assertAlmostEqual(found["loss"], expected["loss"], delta=1e-5)
                        self.assertAlmostEqual(found["norm"], expected["norm"], delta=1e-5 * expected["norm"])
                        names |= found["gradients"].keys()
                        for name, gradient in found["gradients"].items():
                            torch.testing.assert_close(
                                gradient, expected["gradients"][name], rtol=1e-4, atol=1e-5, msg=name
                            )
                    self.assertEqual(names, expected["gradients"].keys())

    def test_a_checkpoint_resumes(self) -> None:
        store = dist.FileStore(str(self.directory / "alone"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)
        schedule = dflop.Schedule({"vision": {}, "llm": {}}, microbatches=2, placement="joint")
        first = pipeline_of(self.directory, schedule, {})
        steps, losses = iter(first), []
        losses.append(first.step(next(steps)))
        update(first.module.parameters())
        checkpoint.save({"pipeline": first}, checkpoint_id=self.directory / "checkpoint")
        for step in steps:
            losses.append(first.step(step))
            update(first.module.parameters())
        resumed = pipeline_of(self.directory, schedule, {})
        checkpoint.load({"pipeline": resumed}, checkpoint_id=self.directory / "checkpoint")
        for step, expected in zip(resumed, losses[1:], strict=True):
            self.assertEqual(resumed.step(step), expected)
            update(resumed.module.parameters())

    def test_gradients_of_steps_add_up(self) -> None:
        store = dist.FileStore(str(self.directory / "adding"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)
        schedule = dflop.Schedule({"vision": {}, "llm": {}}, microbatches=2, placement="joint")
        both, single = (pipeline_of(self.directory, schedule, {}) for _ in range(2))
        sums: dict[str, torch.Tensor] = {}
        for step, same in zip(both, single, strict=True):
            both.step(step)
            single.step(same)
            for name, one in single.module.named_parameters():
                sums[name] = sums.get(name, 0) + one.grad
                one.grad = None
        for name, one in both.module.named_parameters():
            torch.testing.assert_close(one.grad, sums[name], msg=name)
        norm = both.clip_grad_norm_(1e-3)
        self.assertGreater(norm, 1e-3)
        self.assertAlmostEqual(both.clip_grad_norm_(1.0), 1e-3, delta=1e-7)

    def test_the_example_starts_its_ranks_itself(self) -> None:
        printed = run_program(EXAMPLES / "pipeline_vlm.py")
        losses = [float(loss) for loss in re.findall(r"rank 2, step \d+: loss (\d+\.\d{3})", printed)]
        self.assertEqual(len(losses), 8, printed)
        self.assertLess(losses[-1], losses[0] - 0.5)

    def test_the_example_trains_a_checkpoint(self) -> None:
        checkpoint_directory, shards = self.directory / "qwen", self.directory / "samples"
        write_model(checkpoint_directory, FAMILIES["qwen2_5_vl"])
        write_shards(shards, ("image",), samples=40)
        printed = run_program(EXAMPLES / "pipeline_vlm.py", checkpoint_directory, shards)
        losses = [float(loss) for loss in re.findall(r"rank 2, step \d+: loss (\d+\.\d{3})", printed)]
        self.assertEqual(len(losses), 8, printed)
        self.assertLess(losses[-1], losses[0] - 0.5)

    def test_microbatches_without_media_ran(self) -> None:
        """Checks the premise of the test above."""
        loader = dflop.BalancedLoader(
            self.directory / "shards",
            model=self.directory / "model",
            processor=dflop.Processor(blank_media="never"),
            **SETTINGS | {"microbatches": 3, "dp_size": 3},
        )
        has_media = {"pixel_values" in one for step in loader for one in step.hold().microbatches}
        self.assertEqual(has_media, {True, False})


if __name__ == "__main__":
    unittest.main()
