"""Tests stage times of PyTorch modules, and their reports to the loader."""

from __future__ import annotations

import math
import tempfile
import unittest
import warnings
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import dflop
import dflop.torch
import torch
import torch.distributed as dist
from test_torch_profile import FakeClock, QueueClock, Queued
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration


@dataclass
class Step:
    """The attributes of a `dflop.Step` that the timer reads."""

    step: int
    microbatches: list[object]


def setUpModule() -> None:
    # With one thread, CPU time is measured, which a busy machine does not affect.
    torch.set_num_threads(1)


class Loader:
    def __init__(self) -> None:
        self.reports: list[tuple[int, dict[str, list[list[float]]]]] = []

    def report_stage_seconds(
        self, step: Step, seconds: dict[str, list[list[float]]], *, interval: int = 32
    ) -> None:
        self.reports.append((step.step, seconds))


class Work(torch.autograd.Function):
    """Advances a clock by some seconds forward, and twice as many backward."""

    @staticmethod
    def forward(context, rows, clock, seconds):
        context.clock, context.seconds = clock, seconds
        context.save_for_backward(rows)
        clock.now += seconds * 1e6
        return rows.clone()

    @staticmethod
    def backward(context, gradient):
        # Reading saved tensors makes checkpointing recompute them.
        assert context.saved_tensors
        context.clock.now += 2e6 * context.seconds
        return gradient, None, None


class Stage(nn.Module):
    """A module that takes a second per row of its input."""

    def __init__(self, clock: FakeClock, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.clock, self.is_checkpointed = clock, is_checkpointed
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, rows):
        def body(rows):
            return Work.apply(self.first(rows), self.clock, float(len(rows)))

        rows = checkpoint(body, rows, use_reentrant=False) if self.is_checkpointed else body(rows)
        return {"rows": self.last(rows), "count": len(rows)}


class Model(nn.Module):
    """An encoder, a projector that is not timed, and an LLM that is called by keyword."""

    def __init__(self, clock: FakeClock, **encoder: bool) -> None:
        super().__init__()
        self.encoder, self.llm, self.clock = Stage(clock, **encoder), Stage(clock), clock
        self.projector = nn.Linear(4, 4)

    def forward(self, images, tokens):
        rows = torch.zeros(tokens, 4)
        if images:
            rows = (
                rows
                + Work.apply(
                    self.projector(self.encoder(torch.ones(images, 4))["rows"]), self.clock, 100.0
                ).sum()
            )
        return self.llm(rows=rows)["rows"].sum()


def train(model: Model, timer: dflop.torch.StageTimer, steps, is_marked: bool = False) -> None:
    for number, microbatches in enumerate(steps):
        for index, (images, tokens) in enumerate(microbatches):
            if is_marked:
                timer.microbatch(index)
            model(images, tokens).backward()
        timer.step(Step(number, list(microbatches)))


def timed(clock: FakeClock, model: Model, **settings) -> tuple[Loader, dflop.torch.StageTimer]:
    loader = Loader()
    with mock.patch("dflop.torch.stage_timer.clock_of", lambda device: clock):
        return loader, dflop.torch.StageTimer(loader, encoder=model.encoder, llm=model.llm, **settings)


class Kernels(nn.Module):
    """A module whose passes take the host and the device some microseconds."""

    def __init__(self, clock: QueueClock, host: float, device: float) -> None:
        super().__init__()
        self.clock, self.host, self.device = clock, host, device
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self):
        return Queued.apply(self.weight * 1, self.clock, self.host, self.device)


class Limits(unittest.TestCase):
    def train(self, clock: FakeClock, module: nn.Module, steps: int = 12) -> dflop.torch.StageTimer:
        with mock.patch("dflop.torch.stage_timer.clock_of", lambda device: clock):
            timer = dflop.torch.StageTimer(Loader(), llm=module, delay_steps=1)
        for number in range(steps):
            for _ in range(4):
                loss = module().sum()
                # What the host does between passes.
                clock.now += 50.0
                loss.backward()
                clock.now += 50.0
            clock.settle()
            timer.step(Step(number, [None] * 4))
        return timer

    def test_launches_are_the_limit_where_the_device_waits_for_the_host(self) -> None:
        clock = QueueClock()
        with self.assertWarnsRegex(
            UserWarning, "limited by launches: the device had finished 100%"
        ) as caught:
            timer = self.train(clock, Kernels(clock, host=500.0, device=20.0))
        self.assertEqual(len(caught.warnings), 1, "it warns once")
        self.assertRegex(timer.limit, "^limited by launches: ")
        timer.close()

    def test_a_device_that_is_busy_is_the_limit_itself(self) -> None:
        clock = QueueClock()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            timer = self.train(clock, Kernels(clock, host=20.0, device=500.0))
        self.assertIsNone(timer.limit)
        self.assertGreater(timer._launches.passes, 64)
        self.assertEqual(timer._launches.waits, 0)

    def test_few_passes_say_nothing_and_a_cpu_has_no_launches(self) -> None:
        clock = QueueClock()
        self.assertIsNone(self.train(clock, Kernels(clock, host=500.0, device=20.0), steps=3).limit)
        stage = Stage(FakeClock())
        clock = stage.clock
        module = nn.Sequential(stage)
        with mock.patch("dflop.torch.stage_timer.clock_of", lambda device: clock):
            timer = dflop.torch.StageTimer(Loader(), llm=module)
        for number in range(100):
            module(torch.ones(2, 4))["rows"].sum().backward()
            timer.step(Step(number, [None]))
        self.assertIsNone(timer.limit)

    def test_what_runs_during_a_pause_is_not_counted(self) -> None:
        clock = QueueClock()
        module = Kernels(clock, host=20.0, device=500.0)
        with mock.patch("dflop.torch.stage_timer.clock_of", lambda device: clock):
            timer = dflop.torch.StageTimer(Loader(), llm=module)
        for number in range(40):
            module().sum().backward()
            with timer.paused():
                clock.settle()
                module()
            module().sum().backward()
            timer.step(Step(number, [None, None]))
        self.assertIsNone(timer.limit)
        self.assertEqual(timer._launches.waits, 0)


class StageTimes(unittest.TestCase):
    def test_forward_and_backward_are_reported_by_module_and_microbatch(self) -> None:
        clock = FakeClock()
        model = Model(clock)
        loader, timer = timed(clock, model)
        train(model, timer, [[(1, 5), (2, 7)], [(3, 1), (1, 2)]])
        # Three times the forward pass; nothing of the projector's hundreds of seconds.
        self.assertEqual(
            loader.reports,
            [
                (0, {"vision": [[3.0, 6.0]], "llm": [[15.0, 21.0]]}),
                (1, {"vision": [[9.0, 3.0]], "llm": [[3.0, 6.0]]}),
            ],
        )

    def test_after_the_first_pass_one_parameter_says_where_the_encoders_backward_ends(self) -> None:
        clock = FakeClock()
        model = Model(clock)
        loader, timer = timed(clock, model)
        train(model, timer, [[(1, 5)], [(2, 5)]])
        hooked = [name for name, one in model.named_parameters() if one._post_accumulate_grad_hooks]
        self.assertEqual(len(hooked), 1)
        self.assertTrue(hooked[0].startswith("encoder.first"))
        self.assertEqual([report["vision"] for _, report in loader.reports], [[[3.0]], [[6.0]]])

    def test_what_is_computed_again_is_part_of_the_backward_pass(self) -> None:
        clock = FakeClock()
        model = Model(clock, is_checkpointed=True)
        loader, timer = timed(clock, model)
        train(model, timer, [[(1, 1), (2, 1)]])
        self.assertEqual(loader.reports[0][1]["vision"], [[4.0, 8.0]])

    def test_a_module_that_nothing_asks_a_gradient_of_is_timed_forward(self) -> None:
        clock = FakeClock()
        model = Model(clock)
        model.encoder.requires_grad_(False).eval()
        loader, timer = timed(clock, model)
        train(model, timer, [[(1, 1), (2, 1)]])
        self.assertEqual(loader.reports[0][1], {"vision": [[1.0, 2.0]], "llm": [[3.0, 3.0]]})

    def test_microbatches_without_images_need_to_be_marked(self) -> None:
        clock = FakeClock()
        model = Model(clock)
        loader, timer = timed(clock, model)
        train(model, timer, [[(1, 1), (0, 1), (2, 1)]])
        self.assertTrue(all(map(math.isnan, loader.reports[0][1]["vision"][0])))
        self.assertEqual(loader.reports[0][1]["llm"], [[3.0, 3.0, 3.0]])
        train(model, timer, [[(1, 1), (0, 1), (2, 1)]], is_marked=True)
        first, second, third = loader.reports[1][1]["vision"][0]
        self.assertEqual((first, third, math.isnan(second)), (3.0, 6.0, True))

    def test_an_evaluation_is_left_out(self) -> None:
        clock = FakeClock()
        model = Model(clock)
        loader, timer = timed(clock, model)
        with timer.paused(), torch.no_grad():
            model(4, 4)
        train(model, timer, [[(1, 1)]])
        self.assertEqual(loader.reports[0][1], {"vision": [[3.0]], "llm": [[3.0]]})

    def test_a_pass_whose_backward_never_came_is_not_measured(self) -> None:
        clock = FakeClock()
        model = Model(clock)
        loader, timer = timed(clock, model)
        model(1, 1)
        timer.step(Step(0, [None]))
        self.assertTrue(math.isnan(loader.reports[0][1]["llm"][0][0]))

    def test_late_reports_are_all_made_and_hooks_removed(self) -> None:
        clock = FakeClock()
        model = Model(clock)
        loader, timer = timed(clock, model, delay_steps=2)
        with timer:
            train(model, timer, [[(1, 1)], [(2, 1)], [(3, 1)]])
            self.assertEqual([step for step, _ in loader.reports], [0])
        self.assertEqual([report["vision"] for _, report in loader.reports], [[[3.0]], [[6.0]], [[9.0]]])
        self.assertFalse(any(one._forward_hooks or one._forward_pre_hooks for one in model.modules()))
        self.assertFalse(any(one._post_accumulate_grad_hooks for one in model.parameters()))
        train(model, mock.Mock(), [[(1, 1)]])

    def test_real_clocks_measure_more_work_as_more_time(self) -> None:
        own = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
        loader = Loader()
        with dflop.torch.StageTimer(loader, llm=own) as timer:
            for number in range(5):
                for rows in (16, 4096):
                    own(torch.randn(rows, 256)).sum().backward()
                timer.step(Step(number, [None] * 2))
        small, large = map(min, zip(*(report["llm"][0] for _, report in loader.reports), strict=True))
        self.assertTrue(0 < 3 * small < large < 60, loader.reports)

    def test_settings_that_make_no_sense_are_refused(self) -> None:
        with self.assertRaisesRegex(TypeError, "pass a module to time"):
            dflop.torch.StageTimer(Loader())
        with self.assertRaisesRegex(ValueError, "delay_steps: must be at least 0"):
            dflop.torch.StageTimer(Loader(), llm=nn.Linear(1, 1), delay_steps=-1)
        with self.assertRaisesRegex(ValueError, "torch.distributed is not initialized"):
            dflop.torch.StageTimer(Loader(), llm=nn.Linear(1, 1), group=object())


def rank(index: int, size: int, directory: str) -> None:
    """Runs a data-parallel rank, which writes its reports to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meet", rank=index, world_size=size)
    clock = FakeClock()
    model = Model(clock)
    loader, timer = timed(clock, model)
    train(model, timer, [[(1 + index, 2), (3, 4 + index)]])
    refused = ""
    try:
        timer.step(Step(1, [None] * (1 + index)))
    except ValueError as error:
        refused = str(error)
    dist.destroy_process_group()
    Path(directory, str(index)).write_text(f"{loader.reports}\n{refused}\n", encoding="utf-8")


class Ranks(unittest.TestCase):
    def test_all_ranks_report_the_times_of_all(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            torch.multiprocessing.spawn(rank, args=(2, directory), nprocs=2)
            found = [
                Path(directory, str(index)).read_text(encoding="utf-8").splitlines() for index in range(2)
            ]
        wanted = [(0, {"vision": [[3.0, 9.0], [6.0, 9.0]], "llm": [[6.0, 12.0], [6.0, 15.0]]})]
        for reports, refused in found:
            self.assertEqual(reports, repr(wanted))
            self.assertEqual(refused, "expected equal numbers of microbatches on all ranks, found [1, 2]")


class Answers:
    """A real loader that keeps the answers to reports."""

    def __init__(self, loader: dflop.BalancedLoader) -> None:
        self.loader, self.answers = loader, []

    def report_stage_seconds(
        self, step: dflop.Step, seconds: dict[str, list[list[float]]], *, interval: int = 32
    ) -> None:
        self.answers.append(self.loader.report_stage_seconds(step, seconds, interval=interval))


class RealLoader(unittest.TestCase):
    def test_the_balanced_loader_learns_from_reports(self) -> None:
        directory = dflop.example.directory(samples=64)
        config = Qwen2VLConfig.from_pretrained(directory / "model")
        model = Qwen2VLForConditionalGeneration(config)
        settings = {"global_batch_size": 8, "microbatches": 2}
        costs = dflop.CostModel(directory / "model", device="cpu")
        loader = dflop.BalancedLoader(directory / "shards", model=costs, steps=4, **settings)
        answering = Answers(loader)
        with dflop.torch.StageTimer(
            answering, encoder=model.model.visual, llm=model.model.language_model, interval=2
        ) as timer:
            for step in loader:
                for place, mb in enumerate(step.microbatches):
                    timer.microbatch(place)
                    (model(**mb).loss * mb.loss_scale).backward()
                timer.step(step)
        self.assertEqual([answer is not None for answer in answering.answers], [False, True, False, True])
        # Two steps of two microbatches: the LLM in all of them, the encoder where there are images.
        self.assertIn(answering.answers[1]["observations"], range(5, 9))


if __name__ == "__main__":
    unittest.main()
