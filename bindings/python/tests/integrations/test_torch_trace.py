"""Tests traces of a training loop: the format, tracks, memory, a process that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

import dflop
import dflop.torch
import torch
from dflop import example, monitor
from dflop.torch._trace_file import TraceFile, laid_out
from torch import nn

KINDS = {"M", "X", "C"}
KILLED = """
import os, signal, sys
import dflop, dflop.torch
loader = dflop.BalancedLoader(sys.argv[1], model=sys.argv[2], global_batch_size=16, microbatches=2, epochs=1)
for step in dflop.torch.Trace(loader, None, sys.argv[3]):
    list(step.microbatches)
    if step.step == 4:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def setUpModule() -> None:
    # With one thread, CPU time is measured, which a busy machine does not affect.
    torch.set_num_threads(1)


class Model(nn.Module):
    """Two modules that work a little for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.vision, self.llm = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, tokens: int) -> torch.Tensor:
        return self.llm(self.vision(torch.ones(tokens, 8))).sum()


def checked(path: Path) -> list[dict[str, Any]]:
    """Reads a trace and checks that it is one: whole events in order, no bars of a track that cross."""
    text = path.read_text()
    events = json.loads(text if text.rstrip().endswith("]") else text + "]")
    last = 0.0
    open_until: dict[tuple[int, int], list[float]] = {}
    for event in events:
        assert event["ph"] in KINDS and isinstance(event["name"], str), event
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int), event
        assert event["ts"] >= last, (event, last)
        last = event["ts"]
        if event["ph"] == "X":
            ends = open_until.setdefault((event["pid"], event["tid"]), [])
            while ends and ends[-1] <= event["ts"] + 2e-3:
                ends.pop()
            end = event["ts"] + event["dur"]
            assert not ends or end <= ends[-1] + 2e-3, event
            ends.append(end)
        if event["ph"] == "C":
            assert all(isinstance(value, (int, float)) for value in event["args"].values()), event
    return events


class Traces(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        directory = tempfile.TemporaryDirectory()
        cls.addClassCleanup(directory.cleanup)
        cls.directory = Path(directory.name)
        cls.shards, cls.model = cls.directory / "shards", cls.directory / "model"
        example.write_shards(cls.shards, samples=96, shards=3)
        example.write_model(cls.model)

    def loader(self, **settings: object) -> dflop.BalancedLoader:
        settings = {"model": self.model, "global_batch_size": 16, "microbatches": 2, "epochs": 1} | settings
        return dflop.BalancedLoader(self.shards, **settings)

    def train(self, path: Path, loader: dflop.BalancedLoader, **settings: int) -> list[list[list[str]]]:
        """Trains and returns the keys by step and microbatch."""
        model, keys = Model(), []
        timer = dflop.torch.StageTimer(loader, encoder=model.vision, llm=model.llm, **settings)
        with dflop.torch.Trace(loader, timer, path) as trace:
            for step in trace:
                keys.append([])
                for mb in step.microbatches:
                    model(mb.tokens).backward()
                    keys[-1].append(mb.sample_keys)
                timer.step(step)
            timer.close()
        return keys

    def test_a_trace_has_steps_microbatches_stages_and_counters(self) -> None:
        for delay in (0, 1, 3):
            path = self.directory / f"trace-{delay}.json"
            keys = self.train(path, self.loader(), delay_steps=delay)
            events = checked(path)
            self.assertEqual({event["pid"] for event in events}, {0})
            names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
            expected = ["steps", "data wait", "microbatches (host)", "vision, measured"]
            expected += ["vision, predicted (scaled)", "llm, measured", "llm, predicted (scaled)"]
            self.assertEqual(list(names.values()), expected)
            by_track: dict[str, list[dict[str, Any]]] = {}
            for event in events:
                if event["ph"] == "X":
                    by_track.setdefault(names[event["tid"]], []).append(event)
            counts = {name: len(track) for name, track in by_track.items()}
            self.assertEqual(counts, dict(zip(expected, [6, 18, 12, 12, 12, 12, 12], strict=True)))
            host = by_track["microbatches (host)"]
            written = [event["args"]["sample_keys"] for event in host]
            self.assertEqual(written, [mb for step in keys for mb in step])
            self.assertTrue(all(event["args"]["tokens"] > 0 for event in host))
            measured, predicted = by_track["llm, measured"], by_track["llm, predicted (scaled)"]
            for one, other in zip(measured, predicted, strict=True):
                self.assertAlmostEqual(one["dur"], 1e6 * one["args"]["seconds"], delta=2e-3)
                expected_dur = 1e6 * other["args"]["scale"] * other["args"]["predicted_seconds"]
                self.assertAlmostEqual(other["dur"], expected_dur, delta=1e-2 + 1e-3 * expected_dur)
            sums = {name: sum(e["dur"] for e in track) for name, track in by_track.items()}
            both = [sum(v for name, v in sums.items() if end in name) for end in ("measured", "predicted")]
            self.assertAlmostEqual(both[0], both[1], delta=1e-2 * both[0])
            counters = {event["name"] for event in events if event["ph"] == "C"}
            self.assertEqual(counters, {"queue depth", "bytes", "data wait"})

    def test_module_seconds_add_up_to_the_bars(self) -> None:
        path, loader, model = self.directory / "sum.json", self.loader(), Model()
        timer = dflop.torch.StageTimer(loader, llm=model.llm)
        with timer, dflop.torch.Trace(loader, timer, path) as trace:
            self.assertEqual(len(trace), 6)
            for step in trace:
                for mb in step.microbatches:
                    model(mb.tokens).backward()
                timer.step(step)
        bars = [event["args"] for event in checked(path) if event["tid"] == 6 and event["ph"] == "X"]
        self.assertAlmostEqual(sum(bar["seconds"] for bar in bars), timer.module_seconds["llm"], places=9)

    def test_steps_are_delivered_unchanged(self) -> None:
        watched = dflop.torch.Trace(self.loader(), None, self.directory / "same.json")
        for step, plain in zip(watched, self.loader(), strict=True):
            self.assertEqual((step.step, step.digest, len(step.microbatches)), (plain.step, plain.digest, 2))
            for mb, other in zip(step.microbatches, plain.microbatches, strict=True):
                self.assertEqual(mb.sample_keys, other.sample_keys)
        watched.close()
        watched.close()
        events = checked(self.directory / "same.json")
        self.assertEqual(sum(event["name"].startswith("step") for event in events if event["ph"] == "X"), 6)

    def test_a_trace_nests_with_a_record_and_a_progress_and_creates_its_directory(self) -> None:
        for order in ("inside", "outside"):
            path, steps = self.directory / order / "trace.json", self.directory / order / "steps.jsonl"
            loader = self.loader()
            if order == "inside":
                with dflop.torch.Trace(loader, None, path) as trace:
                    wrapped = monitor.Progress(monitor.Record(trace, steps))
                    seen = [step.step for step in wrapped if list(step.microbatches)]
            else:
                with dflop.torch.Trace(monitor.Record(loader, steps), None, path) as wrapped:
                    seen = [step.step for step in wrapped if list(step.microbatches)]
            self.assertEqual((seen, len(wrapped), wrapped.step), ([*range(6)], 6, 6))
            self.assertEqual([step["step"] for step in monitor.steps(steps)], seen)
            bars = [event["name"] for event in checked(path) if event["ph"] == "X"]
            self.assertEqual(sum(name.startswith("step") for name in bars), 6)

    def test_a_killed_run_leaves_a_trace(self) -> None:
        path = self.directory / "killed.json"
        command = [sys.executable, "-c", KILLED, str(self.shards), str(self.model), str(path)]
        killed = subprocess.run(command, check=False, env=dict(os.environ), timeout=300)
        self.assertEqual(killed.returncode, -signal.SIGKILL)
        steps = [event for event in checked(path) if event["name"].startswith("step") and event["ph"] == "X"]
        self.assertEqual([event["name"] for event in steps], ["step 0", "step 1", "step 2", "step 3"])

    def test_few_steps_wait_for_times_that_never_come(self) -> None:
        loader, model = self.loader(epochs=5), Model()
        timer = dflop.torch.StageTimer(loader, llm=model.llm)
        trace = dflop.torch.Trace(loader, timer, self.directory / "untimed.json")
        for step in trace:
            list(step.microbatches)
            self.assertLessEqual(len(trace._waiting), 8)
        trace.close()
        steps = [e for e in checked(self.directory / "untimed.json") if e["tid"] == 1 and e["ph"] == "X"]
        self.assertEqual(len(steps), 30)

    def test_a_loop_that_is_left_early_is_written(self) -> None:
        path = self.directory / "early.json"
        loader = self.loader(dp_rank=1, dp_size=2)
        with dflop.torch.Trace(loader, None, path) as trace:
            for step in trace:
                next(iter(step.microbatches))
                if step.step == 1:
                    break
        events = checked(path)
        self.assertEqual({event["pid"] for event in events}, {1})
        self.assertEqual(sum(event["tid"] == 3 and event["ph"] == "X" for event in events), 2)

    def test_wrong_arguments_are_refused(self) -> None:
        with self.assertRaisesRegex(TypeError, "expected a dflop.BalancedLoader, found Loader"):
            dflop.torch.Trace(dflop.Loader(self.shards), None, self.directory / "none.json")
        with self.assertRaises(OSError):
            dflop.torch.Trace(self.loader(), None, __file__ + "/trace.json")


class Files(unittest.TestCase):
    def test_bars_are_apart_and_over_at_the_end(self) -> None:
        self.assertEqual(laid_out([0.0, 5.0], [2.0, 2.0], 10.0), [(0.0, 2.0), (5.0, 2.0)])
        self.assertEqual(laid_out([0.0, 5.0], [6.0, 2.0], 10.0), [(0.0, 6.0), (6.0, 2.0)])
        self.assertEqual(laid_out([0.0, 9.0], [2.0, 4.0], 10.0), [(0.0, 2.0), (6.0, 4.0)])
        self.assertEqual(laid_out([0.0, 5.0], [10.0, 10.0], 10.0), [(0.0, 5.0), (5.0, 5.0)])
        self.assertEqual(laid_out([], [], 1.0), [])
        self.assertEqual(laid_out([3.0], [0.0], 3.0), [(3.0, 0.0)])

    def test_numbers_that_json_lacks_are_null(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "trace.json"
            file = TraceFile(path)
            file.write([{"ph": "X", "args": {"a": [float("nan"), float("inf"), 1.0]}}])
            self.assertEqual(
                json.loads(path.read_text() + "]"), [{"ph": "X", "args": {"a": [None, None, 1.0]}}]
            )
            file.close()
            self.assertEqual(len(json.loads(path.read_text())), 1)


if __name__ == "__main__":
    unittest.main()
