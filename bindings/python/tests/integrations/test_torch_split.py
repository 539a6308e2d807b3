"""Models of transformers split over processes: losses and gradients are those of the whole model in one."""

from __future__ import annotations

import functools
import multiprocessing
import tempfile
import unittest
from pathlib import Path
from typing import Any

import dflop
import dflop.torch
import torch
import torch.distributed as dist
import transformers
from pipeline_stages import freeze
from split_models import FAMILIES, write_model, write_shards
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

SETTINGS: dict[str, Any] = {"global_batch_size": 8, "steps": 2, "seed": 1}
RATE = 0.05
RANKS = 5
LLM = ("model.language_model", "lm_head")


def modules(vision: tuple[int, ...], llm: tuple[int, ...], encoder: str = "vision") -> dict[str, Any]:
    """Returns modules with stages and replicas, and TP ranks if there are several."""
    names, sizes = ("stages", "dp", "tp"), ((encoder, vision), ("llm", llm))
    return {module: dict(zip(names, own, strict=False)) for module, own in sizes}


def both(vision: tuple[int, int], audio: tuple[int, int], llm: tuple[int, int]) -> dict[str, Any]:
    return modules(vision, llm) | modules(audio, llm, "audio") | modules(vision, llm)


GRID: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "one encoder rank, two replicas": (modules((1, 1), (1, 2)), {"schedule": "gpipe"}, {}),
    "more encoder ranks than replicas": (modules((1, 3), (1, 2)), {"schedule": "1f1b"}, {}),
    "encoder ranks that do not divide replicas": (modules((1, 2), (1, 3)), {"schedule": "gpipe"}, {}),
    "LLM stages and replicas": (modules((1, 1), (2, 2)), {"schedule": "1f1b-ahead:1"}, {}),
    "four LLM stages": (modules((1, 1), (4, 1)), {"schedule": "1f1b"}, {}),
    "encoder stages": (modules((2, 2), (1, 1)), {"schedule": "1f1b"}, {}),
    "split backward passes": (modules((2, 1), (2, 1)), {"schedule": "zb-h1"}, {}),
    "joint": ({"vision": {}, "llm": {"stages": 2, "dp": 2}}, {"placement": "joint"}, {}),
    "colocated": (modules((1, 4), (2, 2)), {"placement": "colocated"}, {}),
    "recomputed": (modules((2, 1), (2, 1)), {}, {"is_recomputed": True}),
    "recomputed, split passes": (modules((1, 1), (2, 1)), {"schedule": "zb-h1"}, {"is_recomputed": True}),
    "frozen encoder": (modules((1, 1), (2, 1)), {}, {"frozen": ("model.visual",)}),
    "frozen LLM": (modules((1, 2), (2, 1)), {"schedule": "1f1b"}, {"frozen": LLM}),
    "frozen parts": (
        modules((2, 1), (2, 1)),
        {"schedule": "zb-h1"},
        {"frozen": ("model.visual.blocks", "model.language_model.layers.1")},
    ),
    "TP in the LLM": (modules((1, 1), (2, 1, 2)), {"schedule": "zb-h1"}, {"is_parallel": True}),
    "TP in both": (
        modules((1, 1, 2), (1, 1, 2)),
        {"schedule": "1f1b"},
        {"is_parallel": True, "is_recomputed": True},
    ),
}
COLUMNS, ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")


def placements(encoder: str) -> dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """Returns every placement and every schedule once."""
    return {
        "disjoint, gpipe": (modules((1, 1), (1, 2), encoder), {"schedule": "gpipe"}, {}),
        "disjoint, 1f1b": (modules((2, 1), (3, 1), encoder), {"schedule": "1f1b"}, {}),
        "disjoint, ahead": (modules((1, 2), (2, 1), encoder), {"schedule": "1f1b-ahead:1"}, {}),
        "disjoint, zb-h1": (modules((2, 1), (2, 1), encoder), {"schedule": "zb-h1"}, {}),
        "joint": ({encoder: {}, "llm": {"stages": 2}}, {"placement": "joint"}, {}),
        "colocated": (modules((1, 2), (1, 2), encoder), {"placement": "colocated"}, {}),
    }


OMNI = {
    "disjoint, 1f1b": (both((1, 2), (2, 1), (1, 1)), {"schedule": "1f1b"}, {}),
    "disjoint, zb-h1": (both((1, 1), (1, 1), (2, 1)), {"schedule": "zb-h1"}, {}),
    "joint": ({"vision": {}, "audio": {}, "llm": {"stages": 2}}, {"placement": "joint"}, {}),
    "colocated": (both((1, 2), (1, 2), (1, 2)), {"placement": "colocated"}, {}),
}
CASES = {
    "qwen2_5_vl": GRID,
    "qwen3_vl": placements("vision"),
    "intern_vl": placements("vision"),
    "llava": {"encoder stages": (modules((2, 1), (1, 1)), {"schedule": "1f1b"}, {})},
    "gemma3": placements("vision"),
    "qwen2_audio": placements("audio"),
    "qwen2_5_omni": OMNI,
    "qwen3_omni": {"levels beside audio": (both((2, 1), (1, 1), (1, 1)), {"schedule": "1f1b"}, {})},
}


def schedule_of(family: str, case: str) -> dflop.Schedule:
    sizes, settings, _ = CASES[family][case]
    return dflop.Schedule(sizes, microbatches=2, **settings)


def rank_of_job(rank: int, directory: Path, family: str, cases: list[str]) -> None:
    """Runs a rank through the cases of a family that have it; saves losses, norms and gradients."""
    quiet()
    split = dflop.torch.split(directory / "model")
    for number, (case, (_, _, options)) in enumerate(CASES[family].items()):
        schedule = schedule_of(family, case)
        if case not in cases or rank >= schedule.world_size:
            continue
        store = dist.FileStore(str(directory / f"store-{number}"), schedule.world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=schedule.world_size)
        torch.save(run(directory, split, schedule, **options), directory / f"found-{number}-{rank}")
        dist.destroy_process_group()


def parallelize(stage: Any, mesh: DeviceMesh) -> None:
    """Divides attention heads and feed-forward widths of the layers that a stage has."""
    kinds = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
    plan = {
        name: kinds[name.rpartition(".")[2]]
        for name, one in stage.named_modules()
        if name.endswith(COLUMNS + ROWS) and "weight" in one._parameters
    }
    assert plan
    parallelize_module(stage, mesh, plan)


def run(
    directory: Path,
    split: Any,
    schedule: dflop.Schedule,
    *,
    frozen: tuple[str, ...] = (),
    is_recomputed: bool = False,
    is_parallel: bool = False,
) -> list[dict[str, Any]]:
    def build(module: str, *place: Any) -> torch.nn.Module:
        *place, mesh = place
        stage = split(module, *place) if is_parallel else split(module, *place, mesh)
        freeze(stage.model, frozen)
        if mesh["tp"].size() > 1:
            parallelize(stage, mesh["tp"])
        if is_recomputed:
            stage.model.gradient_checkpointing_enable()
        return stage

    def loader(role: dflop.RankRole) -> dflop.BalancedLoader:
        return dflop.BalancedLoader(
            directory / "shards", model=directory / "model", role=role, array_type="torch", **SETTINGS
        )

    pipeline, found = dflop.torch.Pipeline(build, schedule, loader, layers=split.layers, timeout=120), []
    for step in pipeline:
        loss, norm = pipeline.step(step), pipeline.clip_grad_norm_(1e9)
        gradients = {
            name.split(".", 3)[3]: one.grad.full_tensor() if isinstance(one, DTensor) else one.grad.clone()
            for name, one in pipeline.module.named_parameters()
            if one.grad is not None
        }
        found.append({"loss": loss, "norm": norm, "gradients": gradients})
        update(pipeline.module)
    pipeline.close()
    return found


def update(module: torch.nn.Module) -> None:
    """Changes weights by their gradients, so that the next step has others."""
    with torch.no_grad():
        for one in module.parameters():
            if one.grad is not None:
                one -= RATE * one.grad
                one.grad = None


def one_process(directory: Path, frozen: tuple[str, ...]) -> list[dict[str, Any]]:
    """Trains the whole model in one process, on padded rows, with masks and positions of its own."""
    model = transformers.AutoModelForMultimodalLM.from_pretrained(directory / "model").train()
    freeze(model, frozen)
    processor = dflop.Processor(blank_media="never", layout="padded")
    loader = dflop.BalancedLoader(
        directory / "shards",
        model=directory / "model",
        processor=processor,
        array_type="torch",
        microbatches=1,
        **SETTINGS,
    )
    found = []
    for step in loader:
        (microbatch,) = step.hold().microbatches
        logits = model(**{name: one for name, one in microbatch.items() if name != "labels"}).logits
        targets = microbatch["labels"][:, 1:]
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), targets, reduction="sum")
        loss = loss / step.target_tokens
        loss.backward()
        gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
        norm = sum(float(one.double().square().sum()) for one in gradients.values()) ** 0.5
        found.append({"loss": loss.item(), "norm": norm, "gradients": gradients})
        update(model)
    return found


def quiet() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


class Split(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        quiet()
        packages = ["torch", "transformers.modeling_utils", "dflop.torch.pipeline"]
        multiprocessing.set_forkserver_preload(packages)

    def check(self, name: str) -> None:
        """Runs all cases of a family, and compares them with one process."""
        directory = Path(self.enterContext(tempfile.TemporaryDirectory()))
        family = FAMILIES[name]
        write_model(directory / "model", family)
        write_shards(directory / "shards", family.media)
        # DTensor looks up process groups by names that the next job in a process has again.
        alone = [case for case, (_, _, options) in CASES[name].items() if "is_parallel" in options]
        for cases in ([case for case in CASES[name] if case not in alone], *([case] for case in alone)):
            # Ranks are forked from a process that has imported packages, but started no threads.
            torch.multiprocessing.start_processes(
                rank_of_job, (directory, name, cases), RANKS, start_method="forkserver"
            )

        wanted = functools.cache(functools.partial(one_process, directory))
        for number, (case, (_, _, options)) in enumerate(CASES[name].items()):
            with self.subTest(case):
                size = schedule_of(name, case).world_size
                ranks = [torch.load(directory / f"found-{number}-{rank}") for rank in range(size)]
                self.compare(ranks, wanted(options.get("frozen", ())))

    def compare(self, ranks: list[Any], wanted: list[dict[str, Any]]) -> None:
        for step, expected in enumerate(wanted):
            names: set[str] = set()
            for found in (rank[step] for rank in ranks):
                self.assertAlmostEqual(found["loss"], expected["loss"], delta=1e-5)
                self.assertAlmostEqual(found["norm"], expected["norm"], delta=1e-5 * expected["norm"])
                names |= found["gradients"].keys()
                for name, gradient in found["gradients"].items():
                    # A weight that the model does not use has no gradient there.
                    one = expected["gradients"].get(name, torch.zeros_like(gradient))
                    torch.testing.assert_close(gradient, one, rtol=1e-4, atol=1e-5, msg=name)
            self.assertEqual(expected["gradients"].keys() - names, set())

    def test_qwen2_5_vl(self) -> None:
        self.check("qwen2_5_vl")

    def test_features_of_several_levels(self) -> None:
        self.check("qwen3_vl")

    def test_tiles(self) -> None:
        self.check("intern_vl")

    def test_features_of_an_earlier_layer(self) -> None:
        self.check("llava")

    def test_tied_weights_and_masks_with_images(self) -> None:
        self.check("gemma3")

    def test_audio(self) -> None:
        self.check("qwen2_audio")

    def test_two_encoders(self) -> None:
        self.check("qwen2_5_omni")

    def test_two_encoders_one_with_features_of_several_levels(self) -> None:
        self.check("qwen3_omni")


if __name__ == "__main__":
    unittest.main()
