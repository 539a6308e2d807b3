"""Tests `dflop.monitor.Record`: the file of a run's steps, and what ``dflop top`` shows of it."""

import copy
import io
import json
import sys
import tempfile
import unittest
import unittest.mock
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
        self.assertEqual(
            (state["phase"], state["steps_taken"], state["steps"]), ("completed", len(seen), len(seen))
        )
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
        self.path.write_text("")
        with self.assertRaises(OSError):
            next(iter(monitor.Record(loader, self.path / "steps.jsonl")))
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

    def test_the_directory_is_created_and_a_failed_loop_is_recorded(self) -> None:
        path = self.path.parent / "runs" / "first" / "steps.jsonl"
        with self.assertRaises(KeyError), monitor.Record(self.balanced(), path) as record:
            for step in record:
                if step.step == 1:
                    raise KeyError("boom")
        self.assertEqual((top(path)["phase"], top(path)["reason"]), ("failed", "KeyError: 'boom'"))
        self.assertEqual(len(monitor.steps(path)), 1)
        with monitor.Record(self.balanced(), path) as record:
            next(iter(record))
        self.assertEqual((top(path)["phase"], top(path)["reason"]), ("stopped", "the loop ended"))
        with monitor.Record(self.balanced(), path) as record:
            self.assertEqual(sum(1 for _ in record), len(record))
        self.assertEqual(top(path)["phase"], "completed")

    def test_wrappers_nest_in_any_order_and_keep_the_loader(self) -> None:
        def progress(loader: Any) -> Any:
            return monitor.Progress(loader, always=True, interval_seconds=0, file=io.StringIO())

        def record(loader: Any) -> Any:
            return monitor.Record(loader, self.path)

        loader = self.balanced()
        state, length = loader.state_dict(), len(loader)
        for outer, inner in ((progress, record), (record, progress)):
            loader.load_state_dict(state)
            wrapped = outer(inner(loader))
            with monitor.serve(wrapped) as server:
                self.assertTrue(server.port)
                for step in wrapped:
                    wrapped.log(loss=float(step.step))
                    self.assertEqual(monitor.scalars(wrapped)["dflop/loss"], step.step)
                page = monitor.text(wrapped)
            self.assertEqual((len(wrapped), wrapped.step, bool(wrapped)), (length, length, True))
            self.assertEqual([step["loss"] for step in monitor.steps(self.path)], list(range(length)))
            self.assertIn(f'dflop_recorded{{rank="0",name="loss"}} {length - 1}.0\n', page)
            self.assertIn('dflop_recorded{rank="0",name="seconds"} ', page)
            self.assertGreater(monitor.scalars(wrapped)["dflop/step_seconds"], 0.0)
            self.assertEqual(wrapped.state_dict(), loader.state_dict())
        with self.assertRaisesRegex(AttributeError, "no_such"):
            _ = wrapped.no_such
        self.assertEqual(copy.copy(wrapped).path, str(self.path))

    def test_a_nested_record_of_a_restored_loader_starts_with_the_right_step(self) -> None:
        with self.balanced() as loader:
            iterator = iter(loader)
            state = [next(iterator) and loader.state_dict() for _ in range(3)][-1]
        with self.balanced() as loader:
            loader.load_state_dict(state)
            shown = io.StringIO()
            inner = monitor.Record(loader, self.path)
            outer = monitor.Progress(inner, always=True, interval_seconds=0, file=shown)
            self.assertEqual([step.step for step in outer], [3, 4, 5])
        self.assertEqual([step["step"] for step in monitor.steps(self.path)], [3, 4, 5])
        self.assertIn("step 4 of 6 ", shown.getvalue().splitlines()[0])

    def test_runs_and_skipped_samples_are_logged_under_one_name(self) -> None:
        def refuse(values: list[Any]) -> list[int]:
            if any(int(bytes(value)) == 3 for value in values):
                raise ValueError("three")
            return [1 for _ in values]

        loader = dflop.Loader(
            self.shards, batch_size=32, transforms={"cls": refuse}, read=dflop.Read(error_budget=1.0)
        )
        with self.assertLogs("dflop", "INFO") as logged:
            list(monitor.Record(loader, self.path))
        texts = [(entry.levelname, entry.getMessage()) for entry in logged.records]
        self.assertEqual(texts[0], ("INFO", f"records steps from 0 on in {self.path}"))
        self.assertEqual(texts[-1], ("INFO", f"record {self.path} completed"))
        warned = [text for level, text in texts if level == "WARNING"]
        self.assertRegex(warned[0], r"^step 0: skipped samples: [0-9]+; the last: .* ValueError: three$")
        skipped = sum(int(text.split(": ")[2].partition(";")[0]) for text in warned)
        self.assertEqual(skipped, loader.skipped_samples)


class Board:
    """A ``SummaryWriter`` in its place."""

    def __init__(self) -> None:
        self.scalars: list[tuple[int, str, float]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((step, name, value))


class Runs:
    """A run of Weights & Biases in its place."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))


class TestExport(unittest.TestCase):
    def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.path = Path(directory.name, "steps.jsonl")

    def test_every_number_of_a_step_is_written_under_its_step(self) -> None:
        step = {
            "step": 3,
            "time": 1.0,
            "loss": None,
            "tokens": 7,
            "is_skipped": True,
            "start": {"seconds": 1},
        }
        step["evaluation"] = {"loss": 2.5, "samples": 4}
        self.path.write_text(json.dumps(step) + '\n{"step": 4, "loss": 1.5}\n{"step": 5, "lo')
        board, runs = Board(), Runs()
        self.assertEqual(monitor.export(self.path, board, prefix=""), 2)
        evaluation = [(3, "evaluation/loss", 2.5), (3, "evaluation/samples", 4.0)]
        expected = [(3, "tokens", 7.0), (3, "is_skipped", 1.0), *evaluation, (4, "loss", 1.5)]
        self.assertEqual(board.scalars, expected)
        self.assertEqual(monitor.export(self.path.parent, runs), 2)
        self.assertEqual(runs.logged[1], (4, {"dflop/loss": 1.5}))

    def test_a_record_is_followed_to_its_end_and_read_again_where_a_run_resumed(self) -> None:
        self.path.write_text('{"step": 0, "loss": 3.0}\n{"step": 1, "loss": 2.0}\n')
        board = Board()

        kept = '{"step": 0, "loss": 3.0}\n{"step": 1, "loss": 2.5}\n'
        texts = [kept + '{"st', kept + '{"step": 2, "loss": 1.5}\n{"end": "failed"}\n']

        def sleep(_: float) -> None:
            """Writes what comes next in place of a wait."""
            self.path.write_text(texts.pop(0))

        with unittest.mock.patch.object(sys.modules["dflop.monitor.export"].time, "sleep", sleep):
            self.assertEqual(monitor.export(self.path, board, follow=True, prefix=""), 5)
        losses = [(step, value) for step, _, value in board.scalars]
        self.assertEqual(losses, [(0, 3.0), (1, 2.0), (0, 3.0), (1, 2.5), (2, 1.5)])

    def test_what_is_missing_is_named(self) -> None:
        with self.assertRaisesRegex(FileNotFoundError, "steps.jsonl: there is no record of steps"):
            monitor.export(self.path, Board())
        self.path.write_text("")
        with self.assertRaisesRegex(TypeError, "`add_scalar` or `log`, found int"):
            monitor.export(self.path, 3)
        missing = dict.fromkeys(("torch.utils.tensorboard", "tensorboard.summary", "wandb"))
        refused = self.assertRaisesRegex(ImportError, "found neither: `pip install tensorboard`")
        with unittest.mock.patch.dict("sys.modules", missing), refused:
            monitor.export(self.path)


if __name__ == "__main__":
    unittest.main()
