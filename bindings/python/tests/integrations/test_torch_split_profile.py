"""Profiles of a split measure the stages that a pipeline runs: FLOPs as times, and plans from the files."""

from __future__ import annotations

import tempfile
import unittest
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import dflop
import dflop.torch
import packed_attention
import torch
from dflop.torch._stage_chain import stage_layers
from split_models import FAMILIES, write_model
from test_torch_plans import SIZES, write_shapes
from test_torch_split import quiet
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

TOKENS_MAX = 256
COUNT = TOKENS_MAX // 64
FLOPS_PER_MICROSECOND = 1e4
VARLEN = "varlen_by_boundaries"


class FlopClock(TorchDispatchMode):
    """A clock that counted operations advance, on a device that takes the same time for every FLOP."""

    name, is_queued = "FLOPs", False

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=made)
        return made

    def mark(self) -> float:
        return self.flops / FLOPS_PER_MICROSECOND

    def wait(self, mark: float) -> None:
        return None

    def is_reached(self, mark: float) -> bool:
        return True

    def settle(self) -> None:
        return None

    def microseconds(self, start: float, end: float) -> float:
        return end - start


def profiled(split: Any, **settings: Any) -> dflop.torch.Profile:
    """Profiles by a clock of FLOPs."""
    with FlopClock() as clock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with (
            mock.patch("dflop.torch.profiling.clock_of", lambda device: clock),
            mock.patch("dflop.torch._budget.time.perf_counter", lambda: clock.mark() / 1e6),
            mock.patch("dflop.torch._held_out.MICROBATCHES_MAX", 10),
        ):
            made = {"tokens_max": TOKENS_MAX, "seconds_max": 60.0, "repeats": 3, "device": "cpu"}
            return dflop.torch.profile(split, **made | settings)


def whole_times(profile: dflop.torch.Profile, module: str) -> dict[tuple[int, int, int], float]:
    """Returns forward and backward times by layers, sequences and tokens of each."""
    times: dict[tuple[int, int, int], float] = {}
    for row in profile.rows:
        if (row.module, row.part) == (module, "whole"):
            key = (row.layers, row.batch, row.tokens)
            times[key] = times.get(key, 0.0) + row.microseconds / profile.reports[module].rounds
    return times


class Splits(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        quiet()
        directory = tempfile.TemporaryDirectory()
        cls.addClassCleanup(directory.cleanup)
        cls.directory = Path(directory.name)
        for name in ("qwen2_5_vl", "qwen3_vl", "llava", "gemma3", "qwen2_audio"):
            write_model(cls.directory / name, FAMILIES[name])
        packed_attention.register(VARLEN)
        cls.split = dflop.torch.split(cls.directory / "qwen2_5_vl", attn_implementation=VARLEN)
        cls.profile = profiled(cls.split)

    def test_a_module_takes_the_sum_of_its_stages(self) -> None:
        for module in ("vision", "llm"):
            report = self.profile.reports[module]
            self.assertEqual([one.layers for one in report.stages], [range(1), range(1, 3), range(3, 4)])
            self.assertEqual(report.layers, (4, 2))
            times = whole_times(self.profile, module)
            batch, length = max((batch, length) for layers, batch, length in times if layers == 2)
            first, inner, last = (one.microseconds for one in report.stages)
            self.assertAlmostEqual(times[4, batch, length], first + inner + last, places=6)
            self.assertAlmostEqual(times[2, batch, length], first + last, places=6)
            self.assertTrue(all(one.microseconds > 0 for one in report.stages))

    def test_the_stages_of_the_llm_compute_what_one_stage_computes(self) -> None:
        stage, clock = self.split("llm", range(4), True, True), FlopClock()
        llm = next(one for one in self.profile.subjects if one.name == "llm")
        for shape in ([64] * COUNT, [TOKENS_MAX]):
            microbatch = llm.make_inputs(shape)[0]
            before = clock.mark()
            with clock:
                stage(None, microbatch).backward()
            times = whole_times(self.profile, "llm")
            self.assertAlmostEqual(times[4, len(shape), shape[0]], clock.mark() - before, places=6)

    def test_later_stages_of_an_encoder_embed_zeros(self) -> None:
        """Later stages run the model's own embedding, as they do in a pipeline."""
        stage, clock = self.split("vision", range(4), True, True), FlopClock()
        vision = next(one for one in self.profile.subjects if one.name == "vision")
        shape = [64] * (TOKENS_MAX // 64)
        with clock:
            stage(None, vision.make_inputs(shape)[0]).sum().backward()
        embedding = 2 * 3 * 2 * 14 * 14 * 16 * TOKENS_MAX / FLOPS_PER_MICROSECOND
        times = whole_times(self.profile, "vision")
        self.assertAlmostEqual(times[4, len(shape), 64], clock.mark() + 2 * embedding, places=6)

    def test_a_planner_reads_it(self) -> None:
        shapes = write_shapes(self.directory / "shapes.csv", "patches,seq_len", SIZES)
        paths = self.profile.write(self.directory / "profile")
        self.assertEqual(len(paths), 2)
        job: dict[str, Any] = {"gpus": 4, "global_batch_size": 8, "batches": 2, "trainer": "torch"}
        settings = {"model": self.directory / "qwen2_5_vl", "shapes": shapes, "memory_gib": 80}
        plans = [
            dflop.plan_parallelism(
                profile=self.directory / "profile", space={"placement": one}, **job, **settings
            )
            for one in ("disaggregated", "joint")
        ]
        for plan in plans:
            self.assertEqual(plan.trainer.name, "torch")
            dflop.torch.split(self.directory / "qwen2_5_vl", plan=plan)
        slower = self.directory / "slower"
        slower.mkdir()
        for path in paths:
            text = path.read_text()
            for row in self.profile.rows:
                text = text.replace(f",{row.microseconds!r},", f",{2 * row.microseconds!r},")
            (slower / path.name).write_text(
                "\n".join(line for line in text.splitlines() if "held-out" not in line) + "\n"
            )
        twice = dflop.plan_parallelism(profile=slower, space={"placement": "joint"}, **job, **settings)
        self.assertGreater(twice.step_seconds, 1.5 * plans[1].step_seconds)

    def test_metadata_name_what_was_measured(self) -> None:
        metadata = self.profile.metadata
        self.assertEqual(metadata["stages"], "vision=0-0,1-2,3-3 llm=0-0,1-2,3-3")
        measured = "vision=Qwen2_5_VisionTransformerPretrainedModel llm=Qwen2_5_VLTextModel+head(Linear)+loss"
        self.assertEqual(metadata["measured"], measured)
        self.assertEqual(metadata["packs"], "llm=separate")
        self.assertEqual(metadata["trained"], "all")
        self.assertEqual(metadata["recompute"], "none")
        self.assertEqual(self.profile.model, "Qwen2_5_VLForConditionalGeneration")
        self.assertEqual(self.profile.widths["vision"]["hidden"], 16)
        self.assertEqual(self.profile.widths["llm"]["hidden"], 32)

    def test_check_runs_the_stages(self) -> None:
        with FlopClock() as clock:
            for subject in self.profile.subjects:
                subject.clock = clock
            found = self.profile.check(microbatches=4, repeats=1)
        self.assertEqual(list(found), ["vision", "llm"])

    def test_fewer_layers_are_created_and_measured(self) -> None:
        built: list[tuple[str, range]] = []

        def build(module: str, layers: range, *place: Any) -> torch.nn.Module:
            built.append((module, layers))
            return self.split(module, layers, *place)

        profile = profiled(self.split, build=build, cut_layers=(2, 3))
        ranges = [range(1), range(1, 2), range(3, 4)]
        self.assertEqual(built, [(module, one) for module in ("vision", "llm") for one in ranges])
        self.assertEqual({row.layers for row in profile.rows if row.part == "whole"}, {2, 3})
        several, all_ = (whole_times(one, "llm") for one in (profile, self.profile))
        layer = several[3, COUNT, 64] - several[2, COUNT, 64]
        self.assertAlmostEqual(all_[4, COUNT, 64], several[2, COUNT, 64] + 2 * layer, places=6)

    def test_frozen_and_recomputed_stages_are_measured_as_they_are_trained(self) -> None:
        def frozen(module: str, layers: range, *place: Any) -> torch.nn.Module:
            stage = self.split(module, layers, *place)
            stage.model.gradient_checkpointing_enable({"use_reentrant": False})
            return stage.requires_grad_(module == "vision")

        profile = profiled(self.split, build=frozen)
        self.assertEqual(profile.metadata["trained"], "vision=all llm=nothing")
        self.assertEqual(profile.metadata["recompute"], "layers")
        # The LLM passes gradients on to the encoder.
        times = [row.microseconds for row in profile.rows if row.phase == "backward" and row.part == "whole"]
        self.assertGreater(min(times), 1.0)

    def test_stages_of_other_families_run(self) -> None:
        for name, first in (
            ("qwen3_vl", "vision"),
            ("llava", "vision"),
            ("gemma3", "vision"),
            ("qwen2_audio", "audio"),
        ):
            with self.subTest(name):
                split = dflop.torch.split(self.directory / name)
                cut = None if name != "qwen3_vl" else (2, 4)
                profile = profiled(split, cut_layers=cut, tokens_max=128, seconds_max=30.0)
                self.assertEqual(list(profile.reports), [first, "llm"])
                for report in profile.reports.values():
                    self.assertGreater(min(one.microseconds for one in report.stages), 0)

    def test_layers_of_stages(self) -> None:
        self.assertEqual(stage_layers("llm", 1, None), [range(1)])
        self.assertEqual(stage_layers("llm", 2, None), [range(1), range(1, 2)])
        self.assertEqual(stage_layers("llm", 3, None), [range(1), range(1, 2), range(2, 3)])
        self.assertEqual(stage_layers("llm", 28, None), [range(7), range(7, 21), range(21, 28)])
        self.assertEqual(stage_layers("llm", 80, (2, 6)), [range(1), range(38, 42), range(79, 80)])
        self.assertEqual(stage_layers("llm", 80, (5,)), [range(3), range(78, 80)])
        for counts, message in (
            ((2, 3, 4), "one or two counts, found 3"),
            ((2, 9), "llm has 8 layers, expected 2 to 8, found 9"),
            ((1, 4), "llm has 8 layers, expected 2 to 8, found 1"),
        ):
            with self.assertRaisesRegex(ValueError, f"cut_layers: .*{message}"):
                stage_layers("llm", 8, counts)

    def test_arguments_of_other_modules_are_refused_by_name(self) -> None:
        for arguments in (
            {"layers": 4},
            {"loss": torch.sum},
            {"llm": torch.nn.Linear(2, 2)},
            {"tp_group": object()},
        ):
            name = next(iter(arguments))
            with self.assertRaisesRegex(TypeError, f"a split has its own .*: leave out `{name}`"):
                dflop.torch.profile(self.split, **arguments)
        with self.assertRaisesRegex(TypeError, "`build` is for the stages of a split"):
            dflop.torch.profile(torch.nn.Linear(2, 2), build=self.split)
        with self.assertRaisesRegex(TypeError, "build returned Linear, expected a stage with the cut model"):
            dflop.torch.profile(self.split, build=lambda *place: torch.nn.Linear(2, 2), device="cpu")
        with self.assertRaisesRegex(TypeError, r"vision: the stages refuse the inputs .*make_inputs"):
            wrong = {"vision": lambda lengths: {"pixel_values": torch.ones(1, 3)}}
            dflop.torch.profile(self.split, make_inputs=wrong, item_tokens={"vision": 4}, device="cpu")
        with self.assertRaisesRegex(TypeError, "vision: make_inputs returned Tensor, expected a mapping"):
            wrong = {"vision": lambda lengths: torch.ones(1, 3)}
            dflop.torch.profile(self.split, make_inputs=wrong, item_tokens={"vision": 4}, device="cpu")


if __name__ == "__main__":
    unittest.main()
