"""A pipeline runs plans of `dflop plan`, and refuses by name what it does not run."""

from __future__ import annotations

import json
import unittest
from pathlib import Path
from typing import Any

import dflop
import dflop.torch.pipeline
import torch
import torch.distributed as dist
from pipeline_stages import build, one_process, parallelize, update
from torch import multiprocessing
from trainers import WithData

SETTINGS: dict[str, Any] = {"global_batch_size": 12, "steps": 2, "seed": 1}
RANKS = 4
PLANS = ("disaggregated", "colocated", "joint")
EDITED = {
    "modules": [
        {"name": "vision", "tp": 1, "dp": 1, "layers": [1, 1]},
        {"name": "llm", "tp": 1, "dp": 1, "layers": [1, 3]},
    ],
    "microbatches": 2,
    "placement": "disaggregated",
    "schedule": "1f1b-ahead:1",
}
PARALLEL = EDITED | {
    "modules": [
        {"name": "vision", "tp": 2, "dp": 1, "layers": [2]},
        {"name": "llm", "tp": 2, "dp": 1, "layers": [4]},
    ]
}


def write_plans(directory: Path) -> None:
    """Writes plans for four GPUs in each placement."""
    shapes = directory / "shapes.csv"
    sizes = ((400, 300), (900, 500), (100, 200), (1600, 800))
    shapes.write_text("patches,seq_len\n" + "".join(f"{patches},{tokens}\n" for patches, tokens in sizes))
    found: dict[str, Any] = {"edited": EDITED, "parallel": PARALLEL}
    for placement in PLANS:
        found[placement] = dflop.plan_parallelism(
            shapes=shapes,
            gpus=RANKS,
            global_batch_size=12,
            model=directory / "model",
            batches=2,
            space={"placement": placement},
        )
    (directory / "plans.json").write_text(json.dumps(found))


def pipeline_of(directory: Path, plan: Any) -> dflop.torch.pipeline.Pipeline:
    def loader(role: dflop.RankRole) -> dflop.BalancedLoader:
        return dflop.BalancedLoader(
            directory / "shards", model=directory / "model", role=role, array_type="torch", **SETTINGS
        )

    def stage(*place: Any) -> torch.nn.Module:
        *place, mesh = place
        made = build(*place)
        return parallelize(made, mesh["tp"]) if mesh["tp"].size() > 1 else made

    return dflop.torch.Pipeline(stage, plan, loader, timeout=60)


def rank_of_job(rank: int, directory: Path) -> None:
    """Runs a rank through all plans, of which some are files; saves losses."""
    torch.set_num_threads(1)
    for name, plan in json.loads((directory / "plans.json").read_text()).items():
        store = dist.FileStore(str(directory / f"store-{name}"), RANKS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
        path = directory / f"{name}.json"
        pipeline, losses = pipeline_of(directory, path if path.exists() else plan), []
        for step in pipeline:
            losses.append(pipeline.step(step))
            update(pipeline.module.parameters())
        torch.save(losses, directory / f"found-{name}-{rank}")
        dist.destroy_process_group()


class Plans(WithData):
    def test_losses_are_those_of_one_process(self) -> None:
        # The parent forks, so it starts no threads of dflop before.
        planner = multiprocessing.get_context("fork").Process(target=write_plans, args=(self.directory,))
        planner.start()
        planner.join()
        found = json.loads((self.directory / "plans.json").read_text())
        used = {name: dflop.schedule_from_plan(plan).world_size for name, plan in found.items()}
        self.assertEqual(set(used.values()), {RANKS}, used)
        self.assertGreater(len({plan["placement"] for plan in found.values()}), 2)
        (self.directory / "joint.json").write_text(json.dumps(found["joint"]))
        multiprocessing.start_processes(rank_of_job, (self.directory,), RANKS, start_method="fork")
        settings = SETTINGS | {"microbatches": 1}
        for name, plan in found.items():
            layers = {"vision": 2, "llm": sum(plan["modules"][-1]["layers"])}
            wanted = one_process(self.directory, settings, layers=layers)
            for rank in range(RANKS):
                losses = torch.load(self.directory / f"found-{name}-{rank}")
                for loss, expected in zip(losses, wanted, strict=True):
                    with self.subTest(plan=name, rank=rank):
                        self.assertAlmostEqual(loss, expected["loss"], delta=1e-5)

    def refused(self, plan: Any) -> str:
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            with self.assertRaises(dflop.ConfigError) as raised:
                pipeline_of(self.directory, plan)
        finally:
            dist.destroy_process_group()
        return str(raised.exception)

    def edited(self, **module: Any) -> dict[str, Any]:
        return EDITED | {"modules": [EDITED["modules"][0], {**EDITED["modules"][1], **module}]}

    def test_plans_that_do_not_run_are_refused_by_name(self) -> None:
        broken, absent = self.directory / "broken.json", self.directory / "absent.json"
        broken.write_text('{"modules": [')
        listed = self.directory / "list.json"
        listed.write_text("[]")
        cases: list[tuple[Any, str]] = [
            (self.edited(ep=2), "experts of `llm` over 2 ranks, .* plan with `space.expert_parallel=1`"),
            (self.edited(name="decoder"), "expected `vision`, `audio`, `llm`, found `decoder`"),
            (self.edited(layers="many"), "modules"),
            (EDITED | {"schedule": "dualpipe"}, "dualpipe"),
            (EDITED | {"microbatches": None}, "plan: expected the output of `dflop plan --json`"),
            ({"modules": EDITED["modules"]}, "expected the output of .*: `microbatches` is missing"),
            ({"modules": [{"name": "llm", "dp": 1, "layers": [2]}]}, "`tp` is missing"),
            ({"modules": 5}, "expected the output of .*: 'int' object is not iterable"),
            (broken, "could not read .*broken.json`: Expecting value"),
            (absent, "could not read .*absent.json`: .*No such file"),
            (str(listed), "list.json` has no fields"),
        ]
        for plan, message in cases:
            with self.subTest(message):
                self.assertRegex(self.refused(plan), message)

    def test_a_schedule_may_have_tensor_parallel_stages(self) -> None:
        schedule = dflop.schedule_from_plan(self.edited(tp=2))
        self.assertEqual((schedule.world_size, len(schedule.stage_ranks(3)[0])), (6, 2))

    def test_the_only_encoder_has_the_name_that_is_given(self) -> None:
        plan = EDITED | {"modules": [{**EDITED["modules"][0], "name": "encoder"}, EDITED["modules"][1]]}
        for encoder in ("vision", "audio"):
            schedule = dflop.schedule_from_plan(plan, encoder=encoder)
            self.assertEqual(schedule.roles(0)[0].module, encoder)


if __name__ == "__main__":
    unittest.main()
