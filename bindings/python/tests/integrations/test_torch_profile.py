"""Tests profiles of PyTorch modules: measured times, restored state, and what the Rust side reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import unittest
import warnings
from pathlib import Path
from statistics import median
from unittest import mock

import dflop
import dflop.torch
import torch
from dflop._native import MicrobatchCurve, TimeCurve
from dflop.torch._held_out import MICROBATCHES_MAX, draw
from dflop.torch._rows import MICROSECONDS_MIN, Row, to_csv
from dflop.torch._sequences import Sequences
from dflop.torch._split import attention_times, linear_times, short_attention


def command(*args: str) -> str:
    """Runs the command line: the program in DFLOP, else the package's."""
    program = [os.environ["DFLOP"]] if "DFLOP" in os.environ else [sys.executable, "-m", "dflop"]
    done = subprocess.run([*program, *args], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise AssertionError(done.stderr)
    return done.stdout


def setUpModule() -> None:
    # With one thread, CPU time is measured, which a busy machine does not affect.
    torch.set_num_threads(1)


class FakeClock:
    """A clock that modules advance themselves."""

    name = "fake"
    is_queued = False

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now

    def wait(self, mark: float) -> None:
        return None

    def is_reached(self, mark: float) -> bool:
        return True

    def settle(self) -> None:
        return None

    def microseconds(self, start: float, end: float) -> float:
        return end - start


class QueueClock(FakeClock):
    """The clock of a device: the host queues work, and runs ahead of it. `now` is the host's time."""

    is_queued = True

    def __init__(self) -> None:
        super().__init__()
        self.device = 0.0

    def queue(self, host: float, device: float) -> None:
        """Takes the host some time to queue work that takes the device some time."""
        self.now += host
        self.device = max(self.device, self.now) + device

    def mark(self) -> float:
        return max(self.device, self.now)

    def is_reached(self, mark: float) -> bool:
        return self.now >= mark

    def wait(self, mark: float) -> None:
        self.now = max(self.now, mark)

    def settle(self) -> None:
        self.wait(self.device)


class Queued(torch.autograd.Function):
    """Queues work in both passes, which takes the device twice as long in the backward pass."""

    @staticmethod
    def forward(context, rows, clock, host, device):
        context.work = (clock, host, device)
        clock.queue(host, device)
        return rows.clone()

    @staticmethod
    def backward(context, gradient):
        clock, host, device = context.work
        clock.queue(host, 2 * device)
        return gradient, None, None, None


class Timed(torch.autograd.Function):
    """Advances the clock in both passes."""

    @staticmethod
    def forward(context, rows, clock, microseconds):
        context.clock, context.microseconds = clock, microseconds
        clock.now += microseconds
        return rows.clone()

    @staticmethod
    def backward(context, gradient):
        context.clock.now += 2 * context.microseconds
        return gradient, None, None


class FakeLayer(torch.nn.Module):
    """A layer of `linear` microseconds per token and `square` per squared token of each sequence."""

    def __init__(
        self, clock: FakeClock, linear: float = 3.0, square: float = 0.01, call: float = 0.0
    ) -> None:
        super().__init__()
        self.clock, self.linear, self.square, self.call = clock, linear, square, call
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, rows: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        time = self.linear * sum(lengths) + sum(self.call + self.square * length**2 for length in lengths)
        return Timed.apply(rows * self.weight, self.clock, time)


class FakeModel(torch.nn.Module):
    """Layers, and a part outside of them of `ends` microseconds and 2 per token."""

    def __init__(self, clock: FakeClock, layers: int = 4, ends: float = 500.0, **layer: float) -> None:
        super().__init__()
        self.clock, self.ends = clock, ends
        self.layers = torch.nn.ModuleList(FakeLayer(clock, **layer) for _ in range(layers))

    def forward(self, lengths: list[int]) -> torch.Tensor:
        rows = Timed.apply(torch.ones(1, requires_grad=True), self.clock, self.ends + 2.0 * sum(lengths))
        for layer in self.layers:
            rows = layer(rows, lengths)
        return rows


def fake_inputs(lengths: list[int]) -> dict[str, list[int]]:
    return {"lengths": lengths}


def fake_profile(clock: FakeClock, module: torch.nn.Module, **settings):
    seconds = {"seconds_max": 60.0, **settings}
    with (
        mock.patch("dflop.torch.profiling.clock_of", lambda device: clock),
        mock.patch("dflop.torch._budget.time.perf_counter", lambda: clock.now / 1e6),
    ):
        return dflop.torch.profile(module, make_inputs=fake_inputs, model="fake", **seconds)


class Splitting(unittest.TestCase):
    def predicts(self, time, lengths: list[int]) -> float:
        """Predicts a microbatch from packs and single sequences that take `time(lengths)`."""
        packed = {64 * count: [time([64] * count)] for count in (1, 2, 4, 8, 16, 32, 64)}
        single = {length: [time([length])] for length in (64, 128, 256, 512, 1024, 2048, 4096)}
        of_short = short_attention(packed, single, 64)
        linear = linear_times(packed, 64, of_short)
        attention = attention_times(single, linear, 64, of_short)
        pack = TimeCurve((tokens, median(times)) for tokens, times in linear.items())
        alone = TimeCurve(((tokens, median(times)) for tokens, times in attention.items()), is_squared=True)
        return pack.at(sum(lengths)) + sum(map(alone.at, lengths))

    def test_mixed_microbatches_are_predicted_from_packs_and_single_sequences(self) -> None:
        def fused(lengths):
            return 700 + 3 * sum(lengths) + sum(0.01 * length**2 for length in lengths)

        def one_by_one(lengths):
            return fused(lengths) + 90 * len(lengths)

        def masked(lengths):
            return 700 + 3 * sum(lengths) + 0.01 * sum(lengths) ** 2

        for time in (fused, one_by_one, masked):
            for lengths in ([300, 80, 1500], [700], [128] * 9, [2000, 900, 65, 70]):
                error = self.predicts(time, lengths) / time(lengths) - 1
                self.assertLess(abs(error), 0.03, (time.__name__, lengths))

    def test_attention_of_a_masked_pack_is_next_to_nothing(self) -> None:
        packed = {64 * count: [1000.0 + (64 * count) ** 2] for count in (1, 4, 16)}
        single = {length: [1000.0 + length**2] for length in (64, 256, 1024)}
        of_short = short_attention(packed, single, 64)
        attention = attention_times(single, linear_times(packed, 64, of_short), 64, of_short)
        self.assertEqual({time for times in attention.values() for time in times}, {MICROSECONDS_MIN})


class Curves(unittest.TestCase):
    def curve(self, time, shapes, layers=(2,)) -> MicrobatchCurve:
        """Fits packs of (sequences, tokens of each), whose backward pass takes twice the forward pass."""
        rows = [
            Row("llm", "whole", phase, 1, count, batch, tokens, factor * count * time([tokens] * batch))
            for count in layers
            for batch, tokens in shapes
            for phase, factor in (("forward", 1.0), ("backward", 2.0))
        ]
        return MicrobatchCurve(to_csv(rows, {"device": "abacus"}, {}, "m"), "llm")

    def test_a_microbatch_is_predicted_from_its_tokens_and_pairs(self) -> None:
        def time(lengths):
            return 500 + 3 * sum(lengths) + sum(0.01 * length**2 for length in lengths)

        shapes = [(1, 64), (4, 64), (16, 64), (64, 64), (1, 256), (1, 1024), (1, 4096), (8, 512)]
        curve = self.curve(time, shapes, layers=(1, 2))
        self.assertEqual(curve.layers, 2)
        for lengths in ([300, 80, 1500], [700], [128] * 9):
            self.assertAlmostEqual(curve.microseconds(lengths) / (6 * time(lengths)), 1.0, places=6)
        self.assertEqual(curve.microseconds([]), 0.0)

    def test_a_floor_is_the_least_time_of_a_microbatch(self) -> None:
        def time(lengths):
            return max(900.0, 3 * sum(lengths))

        curve = self.curve(time, [(1, 64), (2, 64), (4, 64), (16, 64), (64, 64)])
        self.assertAlmostEqual(curve.floor_microseconds, 2 * 3 * 900.0, places=3)
        self.assertAlmostEqual(curve.microseconds([10]), 2 * 3 * 900.0, places=3)

    def test_a_profile_without_whole_modules_has_no_curve(self) -> None:
        text = to_csv([Row("llm", "linear", "forward", 1, 2, 1, 64, 5.0)], {"device": "abacus"}, {}, "m")
        with self.assertRaisesRegex(ValueError, "no times of the whole module llm"):
            MicrobatchCurve(text, "llm")
        with self.assertRaisesRegex(ValueError, "unknown module head"):
            MicrobatchCurve(text, "head")
        with self.assertRaises(dflop.Error):
            MicrobatchCurve("tokens,time", "llm")

    def test_a_curve_does_not_fall_and_is_linear_in_work_beyond_its_points(self) -> None:
        curve = TimeCurve([(10, 5.0), (20, 4.0), (40, 9.0)])
        self.assertEqual([curve.at(x) for x in (0, 10, 20)], [0.0, 4.5, 4.5])
        square = TimeCurve([(100, 1e4), (200, 4e4)], is_squared=True)
        self.assertAlmostEqual(square.at(400), 16e4)


class Budgets(unittest.TestCase):
    """A module that is slow: the limit is in seconds of its clock."""

    def profile(self, seconds_max: float, slow: float = 1.0, **layer: float):
        clock = FakeClock()
        model = FakeModel(clock, ends=500.0 * slow, linear=3.0 * slow, square=0.001 * slow, **layer)
        profile = fake_profile(clock, model, tokens_max=4096, seconds_max=seconds_max)
        return profile, clock.now / 1e6

    def test_a_limit_is_kept_by_fewer_repeats_and_shapes(self) -> None:
        # A pack of 4,096 tokens takes 0.18 s, the smallest set of shapes with its repeats 2 s.
        for seconds_max in (4.0, 6.0, 10.0, 20.0, 40.0):
            with self.subTest(seconds_max), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                profile, seconds = self.profile(seconds_max)
                report = profile.reports["llm"]
                self.assertLessEqual(seconds, 1.1 * seconds_max)
                self.assertGreaterEqual(report.rounds, 3)
                self.assertGreaterEqual(seconds, 0.6 * min(seconds_max, 20.0))
                self.assertLessEqual(report.seconds, 0.85 * seconds_max)
                self.assertIn(64, report.shapes.points)
                self.assertIn(4096, report.shapes.points)
                self.assertIn(4096, report.lengths.points)

    def test_a_longer_limit_gives_more_shapes(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            few, more = (self.profile(seconds)[0] for seconds in (4.0, 40.0))
        self.assertLess(len(few.reports["llm"].shapes.points), len(more.reports["llm"].shapes.points))
        self.assertLess(len(few.held_out), len(more.held_out))

    def test_a_limit_that_is_too_short_is_exceeded_with_a_warning(self) -> None:
        with self.assertWarnsRegex(UserWarning, "smallest set of shapes took .* s, seconds_max is 5"):
            profile, seconds = self.profile(5.0, slow=20.0)
        self.assertGreater(seconds, 5.5)
        self.assertEqual(profile.reports["llm"].rounds, 3)
        self.assertEqual(profile.reports["llm"].shapes.points, (64, 4096))
        self.assertEqual(profile.held_out, ())

    def test_modules_share_the_time_by_need(self) -> None:
        clock = FakeClock()
        fast, slow = FakeModel(clock, linear=0.5, ends=50.0), FakeModel(clock, linear=5.0)
        with (
            warnings.catch_warnings(),
            mock.patch("dflop.torch.profiling.clock_of", lambda device: clock),
            mock.patch("dflop.torch._budget.time.perf_counter", lambda: clock.now / 1e6),
        ):
            warnings.simplefilter("ignore")
            profile = dflop.torch.profile(
                encoder=fast,
                llm=slow,
                make_inputs={"vision": fake_inputs, "llm": fake_inputs},
                item_tokens={"vision": "free"},
                seconds_max=30.0,
            )
        self.assertLessEqual(clock.now / 1e6, 33.0)
        self.assertGreater(profile.reports["llm"].seconds_max, 2 * profile.reports["vision"].seconds_max)

    def test_modules_run_in_turns_in_held_out_microbatches(self) -> None:
        clock = FakeClock()
        order: list[str] = []

        def noted(name: str):
            def make(lengths: list[int]):
                order.append(name)
                return fake_inputs(lengths)

            return make

        with (
            warnings.catch_warnings(),
            mock.patch("dflop.torch.profiling.clock_of", lambda device: clock),
            mock.patch("dflop.torch._budget.time.perf_counter", lambda: clock.now / 1e6),
        ):
            warnings.simplefilter("ignore")
            profile = dflop.torch.profile(
                encoder=FakeModel(clock),
                llm=FakeModel(clock),
                make_inputs={"vision": noted("vision"), "llm": noted("llm")},
                item_tokens={"vision": "free"},
                seconds_max=200.0,
            )
        counts = {name: sum(one.module == name for one in profile.held_out) for name in ("vision", "llm")}
        self.assertEqual(counts["vision"], counts["llm"])
        turns = ["vision", "llm"] * (3 * counts["llm"])
        self.assertEqual(order[-len(turns) :], turns)


class LaunchTimes(unittest.TestCase):
    def test_shapes_that_the_host_limits_are_reported(self) -> None:
        class Kernels(torch.nn.Module):
            """Kernels that take the host 1 ms, and the device 1 us a token."""

            def __init__(self, clock: QueueClock) -> None:
                super().__init__()
                self.clock, self.weight = clock, torch.nn.Parameter(torch.ones(1))

            def forward(self, lengths: list[int]) -> torch.Tensor:
                rows = self.weight * 1
                for _ in range(10):
                    rows = Queued.apply(rows, self.clock, 100.0, sum(lengths) / 10)
                return rows

        clock = QueueClock()
        profile = fake_profile(clock, Kernels(clock), tokens_max=8192)
        report = profile.reports["llm"]
        self.assertAlmostEqual(report.launch_microseconds, 2000.0)
        # The device takes 3 us a token.
        self.assertLess(report.launch_tokens, 900)
        self.assertGreaterEqual(report.launch_tokens, 192)
        self.assertEqual(profile.metadata["launches"], "llm=2000")

    def test_nothing_is_reported_where_nothing_is_queued(self) -> None:
        clock = FakeClock()
        profile = fake_profile(clock, FakeModel(clock), tokens_max=256)
        self.assertIsNone(profile.reports["llm"].launch_microseconds)
        self.assertNotIn("launches", profile.metadata)


class HeldOuts(unittest.TestCase):
    def test_held_out_microbatches_are_lines_of_their_modules_file(self) -> None:
        clock = FakeClock()
        profile = fake_profile(clock, FakeModel(clock), tokens_max=2048)
        self.assertEqual(len(profile.held_out), MICROBATCHES_MAX)
        lines = profile.to_csv("llm").splitlines()
        found = [line.removeprefix("# held-out: ") for line in lines if line.startswith("# held-out: ")]
        header = lines.index("module,part,phase,tp,layers,batch,tokens,microseconds,bytes")
        self.assertTrue(all(line.startswith("# held-out: ") for line in lines[header - len(found) : header]))
        self.assertGreater(len({len(one.lengths) for one in profile.held_out}), 5)
        for index, (line, one) in enumerate(zip(found, profile.held_out, strict=True)):
            tokens, pairs = sum(one.lengths), sum(length**2 for length in one.lengths)
            # Four layers of 3 us a token and 0.01 us a pair, 2 us a token and 500 us besides, three passes.
            time = 3 * (500 + 14 * tokens + 0.04 * pairs)
            number, module, *numbers = line.split(",")
            self.assertEqual((number, module), (str(index), "llm"))
            self.assertEqual([float(one) for one in numbers[:2]], [tokens, pairs])
            self.assertAlmostEqual(float(numbers[2]), time, delta=1e-3)
        self.assertEqual(profile.to_csv("vision").count("held-out"), 0)

    def test_few_held_out_microbatches_are_warned_of(self) -> None:
        clock = FakeClock()
        with self.assertWarnsRegex(UserWarning, r"too little time for 20 held-out microbatches \(\d+\)"):
            fake_profile(clock, FakeModel(clock), tokens_max=4096, seconds_max=6.0)


class Profiles(unittest.TestCase):
    def test_predictions_of_mixed_microbatches_are_right(self) -> None:
        clock = FakeClock()
        profile = fake_profile(clock, FakeModel(clock, call=25.0), tokens_max=2048, error_bound=0.02)
        self.assertEqual(profile.reports["llm"].rounds, 7)
        self.assertLessEqual(profile.reports["llm"].error_max, 0.02)
        found = profile.check(microbatches=20, repeats=2)["llm"]
        self.assertTrue(found.is_within, str(found))
        self.assertLess(found.p95, 0.03)
        self.assertGreater(len({len(one.lengths) for one in found.microbatches}), 3)

    def test_the_check_sees_a_profile_that_is_wrong(self) -> None:
        clock = FakeClock()
        model = FakeModel(clock)
        profile = fake_profile(clock, model, tokens_max=1024)
        for layer in model.layers:
            layer.linear *= 1.3
        found = profile.check(microbatches=6, repeats=1)["llm"]
        self.assertFalse(found.is_within)
        self.assertLess(found.bias, -0.1)

    def test_points_go_where_the_time_bends(self) -> None:
        class Bent(FakeModel):
            def forward(self, lengths):
                over = max(sum(lengths) - 1500, 0)
                return Timed.apply(super().forward(lengths), self.clock, 20.0 * over)

        clock = FakeClock()
        report = fake_profile(
            clock, Bent(clock), tokens_max=8192, error_bound=0.02, seconds_max=600.0
        ).reports["llm"]
        near = [size for size in report.shapes.points if 750 < size < 3000]
        far = [size for size in report.shapes.points if 187 < size < 750]
        self.assertGreater(len(near), len(far), report.shapes.points)

    def test_two_layer_counts_tell_layers_from_the_rest(self) -> None:
        clock = FakeClock()
        model = FakeModel(clock, layers=6, ends=4000.0)
        whole = fake_profile(clock, model, tokens_max=512)
        cut = fake_profile(clock, model, tokens_max=512, cut_layers=(2, 4))
        self.assertEqual(len(model.layers), 6)
        self.assertEqual({row.layers for row in cut.rows if row.part == "linear"}, {2, 4})

        def linear(profile, layers, tokens):
            return median(
                row.microseconds
                for row in profile.rows
                if (row.part, row.phase, row.layers, row.batch * row.tokens)
                == ("linear", "forward", layers, tokens)
            )

        slope = (linear(cut, 4, 512) - linear(cut, 2, 512)) / 2
        self.assertAlmostEqual(linear(cut, 2, 512) + 4 * slope, linear(whole, 6, 512), delta=2.0)
        with tempfile.TemporaryDirectory() as directory:
            cut.write(directory)
            (observed,) = whole.write(Path(directory, "whole"))
            found = json.loads(
                command("accuracy", "--json", "--profile", directory, "--observed", str(observed))
            )
        parts = {(part["part"], part["phase"]): part["errors"] for part in found["modules"][0]["parts"]}
        self.assertLess(parts["linear", "forward"]["max"], 0.01)
        # The shortest sequence takes almost no time, which layers do not scale.
        self.assertLess(parts["attention", "backward"]["p50"], 0.01)

    def test_a_module_is_left_as_it_was(self) -> None:
        class Own(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first = torch.nn.Linear(8, 8)
                self.norm = torch.nn.BatchNorm1d(8)
                self.drop = torch.nn.Dropout(0.5)

            def forward(self, rows):
                return self.drop(self.norm(self.first(rows)))

        own = Own().eval()
        own.norm.train()
        own.first.bias.grad = torch.full((8,), 3.0)
        own.first.weight.requires_grad_(False)
        before = {name: value.clone() for name, value in own.state_dict().items()}
        random = torch.random.get_rng_state()
        profile = dflop.torch.profile(
            encoder=own,
            make_inputs=lambda lengths: torch.randn(sum(lengths), 8),
            item_tokens=4,
            tokens_max=16,
            seconds_max=0.5,
            repeats=3,
            optimizer=torch.optim.AdamW,
        )
        self.assertTrue(torch.equal(random, torch.random.get_rng_state()))
        for name, value in own.state_dict().items():
            self.assertTrue(torch.equal(value, before[name]), name)
        self.assertEqual([own.training, own.norm.training, own.drop.training], [False, True, False])
        self.assertEqual(own.first.bias.grad.tolist(), [3.0] * 8)
        self.assertIsNone(own.norm.weight.grad)
        self.assertEqual(profile.metadata["trained"], "partly")
        optimizer = [row for row in profile.rows if row.phase == "optimizer"]
        self.assertEqual([(row.part, row.batch, row.tokens) for row in optimizer], [("whole", 0, 0)] * 3)
        self.assertGreater(optimizer[0].bytes, 4 * (64 + 24 * 3))

    def test_what_asks_for_no_gradient_has_no_backward_pass(self) -> None:
        own = torch.nn.Linear(8, 8).requires_grad_(False)
        profile = dflop.torch.profile(
            encoder=own,
            make_inputs=lambda lengths: torch.randn(sum(lengths), 8),
            item_tokens=4,
            tokens_max=16,
            seconds_max=0.2,
            repeats=3,
        )
        backward = {row.microseconds for row in profile.rows if row.phase == "backward"}
        self.assertEqual((backward, profile.metadata["trained"]), ({MICROSECONDS_MIN}, "nothing"))

    def test_activations_that_are_computed_again_are_noticed(self) -> None:
        from torch.utils.checkpoint import checkpoint

        class Own(torch.nn.Module):
            def __init__(self, is_checkpointed: bool) -> None:
                super().__init__()
                self.is_checkpointed = is_checkpointed
                self.body = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))

            def forward(self, rows):
                return (
                    checkpoint(self.body, rows, use_reentrant=False)
                    if self.is_checkpointed
                    else self.body(rows)
                )

        for is_checkpointed, recompute in ((True, "layers"), (False, "none")):
            own = Own(is_checkpointed)
            profile = dflop.torch.profile(
                encoder=own,
                make_inputs=lambda lengths: torch.randn(sum(lengths), 8),
                item_tokens=4,
                tokens_max=16,
                seconds_max=0.2,
                repeats=3,
            )
            self.assertEqual(profile.metadata["recompute"], recompute)
            self.assertFalse(any(module._forward_pre_hooks for module in own.modules()))

    def test_settings_that_make_no_sense_are_refused(self) -> None:
        own = torch.nn.Linear(8, 8)
        inputs = {"make_inputs": lambda lengths: torch.randn(sum(lengths), 8)}
        for error, words, settings in (
            (TypeError, "pass a whole model, or a module", {}),
            (TypeError, "no inputs are known for Linear; pass make_inputs", {"encoder": own}),
            (TypeError, "llm: no inputs are known for Linear", {"llm": own}),
            (TypeError, "needs item_tokens", {"encoder": own, **inputs}),
            (TypeError, "give each setting by name", {"encoder": own, "llm": own, **inputs}),
            (ValueError, "found one for audio", {"llm": own, "make_inputs": {"audio": print}}),
            (ValueError, "tokens_max: must be", {"llm": own, "tokens_max": 0, **inputs}),
            (
                ValueError,
                "cannot cut Linear to 2 layers: it has no list",
                {"llm": own, "cut_layers": [2], **inputs},
            ),
        ):
            with self.subTest(words), self.assertRaisesRegex(error, words):
                dflop.torch.profile(**settings)

    def test_drawn_microbatches_are_of_mixed_lengths_and_within_the_bound(self) -> None:
        import random

        dice = random.Random(1)
        drawn = [draw(Sequences.text(), 1000, dice) for _ in range(50)]
        self.assertTrue(all(0 < sum(lengths) <= 1000 for lengths in drawn))
        self.assertGreater(len({length for lengths in drawn for length in lengths}), 50)
        self.assertTrue(all(set(draw(Sequences.items(49), 1000, dice)) == {49} for _ in range(9)))


def slow_rank(index: int, size: int, directory: str) -> None:
    """A rank of a tensor-parallel group, the second one twice as slow; writes its profile to a file."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{directory}/meet", rank=index, world_size=size
    )
    clock = FakeClock()
    model = FakeModel(clock, linear=3.0 * (1 + index))
    profile = fake_profile(clock, model, tokens_max=512, tp_group=torch.distributed.group.WORLD)
    torch.distributed.destroy_process_group()
    (path,) = profile.write(directory if index == 0 else Path(directory, "second"))
    assert path.name == "fake-llm-tp2.csv", path


class Groups(unittest.TestCase):
    def test_all_ranks_of_a_group_measure_the_same_which_is_the_slowest(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            torch.multiprocessing.spawn(slow_rank, args=(2, directory), nprocs=2)
            first, second = (
                Path(directory, place, "fake-llm-tp2.csv").read_text() for place in ("", "second")
            )
        self.assertEqual(first, second)
        clock = FakeClock()
        alone = fake_profile(clock, FakeModel(clock, linear=6.0), tokens_max=512)
        self.assertEqual(first.replace(",2,4,", ",1,4,"), alone.to_csv())


if __name__ == "__main__":
    unittest.main()
