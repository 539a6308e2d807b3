"""Tests `dflop.monitor.Record`: the file of a run's steps, and what ``dflop top`` shows of it."""

import json
import tempfile
import unittest
import warnings
from pathlib import Path
from typing import Any

import dflop
from dflop import _native, monitor
from support import WithExample


def top(path: Path) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(_native.command(["top", str(path), "--json"]))
    return answer


class TestRecord(WithExample):
    def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.path = Path(directory.name, "steps.jsonl")

    def balanced(self) -> dflop.BalancedLoader:
        return dflop.BalancedLoader(self.shards, model=self.model, global_batch_size=16, epochs=1)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def test_top_shows_what_is_recorded(self) -> None:
        with self.balanced() as loader:
            record: monitor.Record[dflop.Step] = monitor.Record(
                loader, self.path, title="mine", about=["1 rank", "bf16"]
            )
            seen = []
            for step in record:
                seen.append(step.step)
                self.assertGreater(len(list(step.microbatches)), 0)
                record.log(loss=4.0 - step.step, mfu=0.5, accuracy=0.1)
                if step.step == 0:
                    # A step is recorded when its consumer asks for the next one.
                    self.assertEqual(top(self.path)["phase"], "starting")
                elif step.step == 1:
                    self.assertEqual((top(self.path)["phase"], top(self.path)["loss"]), ("running", 4.0))
            self.assertEqual(len(record), len(seen))
            tokens = sum(source["tokens"] for source in loader.metrics()["sources"])
        state = top(self.path)
        self.assertEqual((state["phase"], state["steps_taken"], state["steps"]), ("completed", len(seen), len(seen)))
        self.assertEqual((state["title"], state["about"]), ("mine", ["1 rank", "bf16"]))
        self.assertEqual((state["loss"], state["mfu"]), (4.0 - seen[-1], 0.5))
        steps = monitor.steps(self.path)
        self.assertEqual([step["step"] for step in steps], seen)
        self.assertEqual(sum(step["tokens"] for step in steps), tokens)
        self.assertTrue(all(step["samples"] > 0 and step["seconds"] > 0.0 for step in steps))
        self.assertEqual(steps[0]["accuracy"], 0.1)
        page = self.path.with_name("report.html")
        written = json.loads(_native.command(["report", str(self.path), "-o", str(page), "--json"]))
        self.assertEqual(written["reports"], 1)
        self.assertIn(f"{len(seen)} steps of ", page.read_text())

    def test_a_resumed_loader_appends_to_the_steps_before_it(self) -> None:
        with self.balanced() as loader:
            for step in monitor.Record(loader, self.path):
                state = loader.state_dict()
                if step.step == 2:
                    break
        self.assertEqual([line.get("step") for line in self.lines()], [None, 0, 1, None])
        self.assertEqual(self.lines()[-1]["end"], "stopped")
        with self.path.open("a") as file:
            file.write('{"step": 2, "sec')
        with self.balanced() as loader:
            loader.load_state_dict(state)
            self.assertEqual([step.step for step in monitor.Record(loader, self.path)][0], 3)
        kept = [step["step"] for step in monitor.steps(self.path)]
        self.assertEqual(kept, [0, 1, *range(3, len(kept) + 1)])
        self.assertEqual(top(self.path)["phase"], "completed")

    def test_plain_loaders_have_no_tokens_and_errors_are_recorded(self) -> None:
        loader = dflop.Loader(self.shards, batch_size=8)
        list(monitor.Record(loader, self.path))
        steps = monitor.steps(self.path)
        self.assertEqual(len(steps), len(loader))
        self.assertEqual((steps[0]["samples"], "tokens" in steps[0]), (8, False))
        iterator = iter(monitor.Record(loader, self.path))
        next(iterator)
        with self.assertRaises(KeyError):
            iterator.throw(KeyError("boom"))  # type: ignore[attr-defined]
        self.assertEqual((top(self.path)["phase"], top(self.path)["reason"]), ("failed", "KeyError: 'boom'"))

    def test_wrong_arguments_are_refused_and_a_full_disk_ends_the_record_alone(self) -> None:
        loader = dflop.Loader(self.shards, batch_size=8)
        with self.assertRaisesRegex(TypeError, "expected a dflop.Loader"):
            monitor.Record([1], self.path)
        with self.assertRaisesRegex(TypeError, "about: expected a list"):
            monitor.Record(loader, self.path, about="bf16")
        with self.assertRaisesRegex(ValueError, "seconds: is measured"):
            monitor.Record(loader, self.path).log(seconds=1.0)
        with self.assertRaises(OSError):
            next(iter(monitor.Record(loader, self.path / "none" / "steps.jsonl")))
        record: monitor.Record[Any] = monitor.Record(loader, self.path)
        for _ in record:
            record.log(loss=float("nan"))
        self.assertIsNone(monitor.steps(self.path)[0]["loss"])
        if Path("/dev/full").exists():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                count = sum(1 for _ in monitor.Record(loader, "/dev/full"))
            self.assertEqual(count, len(loader))
            self.assertIn("the record of steps ends here", str(caught[0].message))


if __name__ == "__main__":
    unittest.main()
