"""A pipeline runs every plan for PyTorch, and the lines that name what to pass to it are a script."""

from __future__ import annotations

import json
import multiprocessing
import random
import runpy
import tempfile
import unittest
from pathlib import Path
from typing import Any

import dflop
import dflop.torch
import torch
import torch.distributed as dist
from dflop.torch._stage_plan import StagePlan
from split_models import FAMILIES, write_model, write_shards
from test_torch_split import RATE, SETTINGS, one_process, quiet
from torch.distributed.tensor import DTensor
from trainers import torchrun

RANKS = 4
PLACEMENTS = ("disaggregated", "colocated", "joint")
SIZES = ((16, 60), (32, 200), (8, 30), (48, 90), (0, 40))
PRESETS = {
    "llava-ov-qwen2.5-7b": "tiles,seq_len",
    "qwen2.5-vl-7b": "patches,seq_len",
    "qwen2-audio-7b": "tiles,seq_len",
    "internvl3-8b": "tiles,seq_len",
}
SCRIPT = """
import sys, dflop, torch
{lines}
torch.distributed.init_process_group("gloo")
checkpoint, shards, plan = sys.argv[1:]
{rest}
for step in pipeline:
    loss = pipeline.step(step)
    if torch.distributed.get_rank() == 0:
        print("loss", loss, flush=True)
    optimizer.step()
    optimizer.zero_grad()
    if step.step == 1:
        break
pipeline.close()
torch.distributed.destroy_process_group()
"""


def write_shapes(path: Path, header: str, sizes: Any) -> Path:
    path.write_text(f"{header}\n" + "".join(f"{media},{tokens}\n" for media, tokens in sizes))
    return path


def plan_of(directory: Path, **settings: Any) -> dflop.ParallelismPlan:
    """Plans the small checkpoint for four GPUs and PyTorch."""
    shapes = write_shapes(directory / "shapes.csv", "patches,seq_len", SIZES)
    batch = SETTINGS["global_batch_size"]
    job: dict[str, Any] = {"gpus": RANKS, "global_batch_size": batch, "batches": 2, "trainer": "torch"}
    # On a GPU, gradient sums of so small a model cost more than further ranks save.
    return dflop.plan_parallelism(shapes=shapes, model=directory / "model", device="cpu", **job, **settings)


def lines_of(plan: dflop.ParallelismPlan, dtype: str) -> str:
    """Returns the lines of a plan without the names of files, with the type of passes."""
    return "\n".join(plan.trainer.python[1:]).replace("bfloat16", dtype)


def rank_of_job(rank: int, directory: Path, names: list[str]) -> None:
    """Runs the lines of all plans on a rank; saves losses."""
    quiet()
    for name in names:
        store = dist.FileStore(str(directory / f"store-{name}"), RANKS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
        plan = dflop.ParallelismPlan(json.loads((directory / f"{name}.json").read_text()))
        files = {"checkpoint": directory / "model", "shards": directory / "shards"}
        script = files | {"plan": directory / f"{name}.json", "dflop": dflop, "torch": torch}
        program = directory / f"{name}-{rank}.py"
        # As many steps as the whole model runs, on the same batches.
        program.write_text(lines_of(plan, "float32").replace("role=role", "role=role, steps=2, seed=1"))
        pipeline, losses = runpy.run_path(str(program), script)["pipeline"], []
        for step in pipeline:
            losses.append(pipeline.step(step))
            with torch.no_grad():
                for one in pipeline.module.parameters():
                    if one.grad is not None:
                        one -= RATE * one.grad
                        one.grad = None
        pipeline.close()
        torch.save(losses, directory / f"found-{name}-{rank}")
        dist.destroy_process_group()


class Plans(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        quiet()
        directory = tempfile.TemporaryDirectory()
        cls.addClassCleanup(directory.cleanup)
        cls.directory = Path(directory.name)
        write_model(cls.directory / "model", FAMILIES["qwen2_5_vl"])
        write_shards(cls.directory / "shards", FAMILIES["qwen2_5_vl"].media)

    def test_printed_lines_run_plans_in_every_placement(self) -> None:
        names = [(placement, True) for placement in PLACEMENTS]
        names.insert(0, (PLACEMENTS[0], False))
        for placement, is_sharded in names:
            plan = plan_of(self.directory, space={"placement": placement, "zero1": is_sharded})
            self.assertEqual((plan.gpus_used, plan.placement), (RANKS, placement))
            self.assertEqual(plan.trainer.is_sharded, is_sharded)
            (self.directory / f"{placement}-{is_sharded}.json").write_text(json.dumps(plan))
        multiprocessing.set_forkserver_preload(
            ["torch", "transformers.modeling_utils", "dflop.torch.pipeline"]
        )
        # DTensor looks up process groups by names that the next job in a process has again.
        jobs = [
            [f"{PLACEMENTS[0]}-False", f"{PLACEMENTS[0]}-True"],
            *([f"{one}-True"] for one in PLACEMENTS[1:]),
        ]
        for job in jobs:
            torch.multiprocessing.start_processes(
                rank_of_job, (self.directory, job), RANKS, start_method="forkserver"
            )
        wanted = one_process(self.directory, ())
        for name in [name for job in jobs for name in job]:
            for rank in range(RANKS):
                losses = torch.load(self.directory / f"found-{name}-{rank}")
                for loss, expected in zip(losses, wanted, strict=True):
                    with self.subTest(plan=name, rank=rank):
                        self.assertAlmostEqual(loss, expected["loss"], delta=1e-5)

    def test_torchrun_runs_the_script(self) -> None:
        plan = plan_of(self.directory)
        path, program = self.directory / "plan.json", self.directory / "train.py"
        path.write_text(json.dumps(plan))
        self.assertEqual(plan.trainer.launch, [f"torchrun --nproc-per-node {RANKS} train.py"])
        first, *rest = plan.trainer.python
        program.write_text(SCRIPT.format(lines=first, rest="\n".join(rest)))
        printed = torchrun(program, self.directory / "model", self.directory / "shards", path, ranks=RANKS)
        losses = [float(line.split()[1]) for line in printed.splitlines() if line.startswith("loss")]
        self.assertEqual(len(losses), 2)
        # Untrained: the loss of words drawn at random, in 16 bits.
        self.assertTrue(all(0 < loss < 100 for loss in losses), losses)

    def test_a_pipeline_accepts_every_plan(self) -> None:
        found: set[tuple[str, bool]] = set()
        for seed in range(24):
            rng = random.Random(seed)
            model, header = rng.choice(list(PRESETS.items()))
            low, high = (16, 4096) if header.startswith("patches") else (0, 9)
            sizes = [(rng.randint(low, high), rng.randint(1500, 6000)) for _ in range(40)]
            shapes = write_shapes(self.directory / f"{seed}.csv", header, sizes)
            space: dict[str, Any] = {"placement": rng.choice(["any", *PLACEMENTS])}
            if rng.random() < 0.3:
                space["kinds"] = "basic"
            if rng.random() < 0.3:
                space["zero1"] = False
            gpus = rng.randint(2, 12)
            job = {"gpus": gpus, "global_batch_size": gpus * rng.randint(1, 3), "batches": 2, "seed": seed}
            settings = {"model": model, "memory_gib": rng.choice([40, 80, 400]), "space": space}
            with self.subTest(model=model, **job):
                try:
                    plan = dflop.plan_parallelism(shapes=shapes, trainer="torch", **job, **settings)
                except dflop.Error as error:
                    self.assertIn("fit", str(error))
                    continue
                schedule = dflop.schedule_from_plan(plan)
                self.assertEqual(schedule.world_size, plan.gpus_used)
                modules = [module["name"] for module in plan.modules]
                self.assertEqual(StagePlan.read(plan, modules).is_sharded, space.get("zero1", True))
                if plan.runner_up is not None:
                    dflop.schedule_from_plan(plan.runner_up)
                found.add((plan.placement, plan.modules[-1]["recompute"]))
        self.assertGreater(len(found), 3, found)

    def test_what_a_pipeline_refuses_is_refused_by_the_command(self) -> None:
        plan = plan_of(self.directory, space={"placement": "disaggregated"})
        llm = {"name": "llm", "tp": 1, "dp": 1, "layers": [4], "recompute": False}
        vision = {"name": "vision", "tp": 1, "dp": 1, "layers": [4], "recompute": False}
        edited = {
            "as planned": {},
            "stages": {"modules": [vision, llm | {"layers": [1, 3]}], "microbatches": 2},
            "other replicas": {"modules": [vision | {"dp": 2}, llm]},
            "experts": {"modules": [vision, llm | {"dp": 2, "ep": 2}]},
            "zb-h1": {"modules": [vision, llm | {"layers": [2, 2]}], "schedule": "zb-h1"},
            "ahead": {"modules": [vision, llm], "schedule": "1f1b-ahead:2", "rounds_ahead": 2},
            "gpipe": {"modules": [vision, llm], "schedule": "gpipe"},
            "unknown": {"modules": [vision, llm], "schedule": "dualpipe"},
        }
        verdicts = set()
        for name, changes in edited.items():
            with self.subTest(name):
                path = self.directory / "edited.json"
                path.write_text(json.dumps(plan | changes))
                refusals = [self.refusal(self.simulate, path), self.refusal(dflop.schedule_from_plan, path)]
                self.assertEqual(*(refusal is None for refusal in refusals), refusals)
                verdicts.add(refusals[0] is None)
        self.assertEqual(verdicts, {True, False})
        # A pipeline runs TP degrees if `build` divides stages, which a split and its plans do not.
        for modules in ([vision, llm | {"tp": 2}], [vision | {"tp": 2}, llm]):
            path.write_text(json.dumps(plan | {"modules": modules}))
            refusal = self.refusal(self.simulate, path) or ""
            self.assertRegex(refusal, r"`(llm|vision)` has a TP degree of 2")
            self.assertEqual(dflop.schedule_from_plan(path).world_size, 3)

    def refusal(self, call: Any, path: Path) -> str | None:
        try:
            call(path)
        except dflop.Error as error:
            return str(error)
        return None

    def simulate(self, path: Path) -> None:
        dflop.simulate(
            shapes=self.directory / "shapes.csv",
            model=self.directory / "model",
            gpus=RANKS,
            global_batch_size=SETTINGS["global_batch_size"],
            steps=1,
            plan=str(path),
            trainer="torch",
        )

    def test_settings_without_effect_are_refused_by_name(self) -> None:
        for space, message in (
            ({"sequence_parallel": True}, "space.sequence_parallel=true.* whose stages run on one rank each"),
            ({"expert_parallel": 2}, "space.expert_parallel=2"),
            ({"encoder_share": "tile"}, "without tiles"),
        ):
            with self.assertRaisesRegex(dflop.ConfigError, message):
                plan_of(self.directory, space=space)
        tiles = write_shapes(self.directory / "tiles.csv", "tiles,seq_len", [(2, 900), (4, 1500)])
        job = {"gpus": RANKS, "global_batch_size": RANKS, "trainer": "torch", "model": "internvl3-8b"}
        with self.assertRaisesRegex(dflop.ConfigError, "shares whole media between ranks"):
            dflop.plan_parallelism(shapes=tiles, space={"encoder_share": "tile"}, **job)

    def test_a_plan_of_another_trainer_or_model_is_refused(self) -> None:
        plan = dict(plan_of(self.directory))
        del plan["trainer"]
        with self.assertRaisesRegex(dflop.ConfigError, "not made for PyTorch: plan with .*--trainer torch"):
            dflop.torch.split(self.directory / "model", plan=plan)
        plan = plan_of(self.directory)
        plan["modules"][0]["name"] = "audio"
        with self.assertRaisesRegex(
            dflop.ConfigError, "modules and those of the model differ in audio, vision"
        ):
            dflop.torch.split(self.directory / "model", plan=plan)

    def test_shared_state_has_32_bits_and_passes_have_16(self) -> None:
        """Counted: 12 bytes per parameter between steps, as planned, and 2 for weights during a step."""
        plan = plan_of(self.directory, space={"placement": "joint"}) | {
            "trainer": {"name": "torch", "is_sharded": True}
        }
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)
        mesh = torch.distributed.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        split = dflop.torch.split(self.directory / "model", dtype=torch.bfloat16, plan=plan)
        stage = split("llm", range(4), True, True, mesh)
        optimizer = torch.optim.AdamW(stage.parameters())
        for one in stage.parameters():
            self.assertIsInstance(one, DTensor)
            one.grad = torch.zeros_like(one)
        optimizer.step()
        weights = list(stage.parameters())
        states = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        held = sum(one.to_local().nbytes for one in weights + states)
        self.assertEqual(held, 12 * sum(one.numel() for one in weights))
        for module in stage.modules():
            if isinstance(module, torch.distributed.fsdp.FSDPModule):
                module.unshard()
        self.assertEqual({one.dtype for one in stage.parameters()}, {torch.bfloat16})


if __name__ == "__main__":
    unittest.main()
