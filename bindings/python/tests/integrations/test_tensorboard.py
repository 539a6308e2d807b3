"""Tests `dflop.monitor` with TensorBoard's writer and the bar of tqdm."""

import io
import json
import subprocess
import sys
import tempfile
import unittest
from functools import partial
from pathlib import Path

import dflop
from dflop import example, monitor
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


class Boards(unittest.TestCase):
    def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)
        example.write_shards(self.directory / "shards", samples=64, shards=2)
        example.write_model(self.directory / "model")

    def loader(self) -> dflop.BalancedLoader:
        settings = {"model": self.directory / "model", "global_batch_size": 16, "epochs": 1}
        return dflop.BalancedLoader(self.directory / "shards", **settings)

    def test_tensorboard_reads_the_scalars(self) -> None:
        loader, samples = self.loader(), []
        with SummaryWriter(str(self.directory / "runs")) as writer:
            for step in loader:
                samples.append(sum(len(mb.samples) for mb in step.microbatches))
                monitor.log(loader, writer)
        board = EventAccumulator(str(self.directory / "runs"))
        board.Reload()
        events = board.Scalars("dflop/source/shards/samples")
        self.assertEqual([event.step for event in events], [0, 1, 2, 3])
        self.assertEqual([event.value for event in events], [16, 32, 48, 64])
        self.assertIn("dflop/stage/decode/busy_share", board.Tags()["scalars"])

    def test_tensorboard_reads_the_loss_of_a_record(self) -> None:
        record = monitor.Record(self.loader(), self.directory / "run" / "steps.jsonl")
        with SummaryWriter(str(self.directory / "runs")) as writer:
            for step in record:
                list(step.microbatches)
                record.log(loss=4.0 - step.step)
                monitor.log(record, writer)
        board = EventAccumulator(str(self.directory / "runs"))
        board.Reload()
        events = [(event.step, event.value) for event in board.Scalars("dflop/loss")]
        self.assertEqual(events, [(0, 4.0), (1, 3.0), (2, 2.0), (3, 1.0)])
        self.assertEqual([event.step for event in board.Scalars("dflop/step_seconds")], [1, 2, 3])

    def events(self, directory: Path, name: str) -> list[tuple[int, float, float]]:
        board = EventAccumulator(str(directory))
        board.Reload()
        if name in board.Tags()["scalars"]:
            return [(event.step, event.value, event.wall_time) for event in board.Scalars(name)]
        # What TensorBoard's own writer writes: scalars as tensors without axes.
        values = [(event, float(make_ndarray(event.tensor_proto))) for event in board.Tensors(name)]
        return [(event.step, value, event.wall_time) for event, value in values]

    def test_a_record_is_exported_with_its_times_and_once(self) -> None:
        path = self.directory / "run" / "steps.jsonl"
        path.parent.mkdir()
        lines = [
            {"format": "dflop-steps", "version": 1, "end_step": 2, "time": 1000.0},
            {"step": 0, "time": 1001.5, "seconds": 1.5, "loss": 4.0, "is_skipped": True},
            {"step": 1, "time": 1003.0, "seconds": 1.5, "loss": 3.0, "evaluation": {"loss": 3.5}},
            {"end": "completed", "time": 1003.5},
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        for where in (path, path.parent):
            self.assertEqual(monitor.export(where, follow=True), 2)
            board = path.parent / "tensorboard"
            self.assertEqual(self.events(board, "dflop/loss"), [(0, 4.0, 1001.5), (1, 3.0, 1003.0)])
            self.assertEqual(self.events(board, "dflop/evaluation/loss"), [(1, 3.5, 1003.0)])
            self.assertEqual(self.events(board, "dflop/is_skipped"), [(0, 1.0, 1001.5)])

    def test_tensorboard_alone_is_enough_and_the_command_follows_a_run(self) -> None:
        run = self.directory / "run"
        run.mkdir()
        program = (
            "import sys; sys.modules['torch.utils.tensorboard'] = None\n"
            "sys.argv[1:] = [sys.argv[1], '--follow']\n"
            "from dflop.monitor.__main__ import main; sys.exit(main())"
        )
        command = [sys.executable, "-c", program, str(run)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        with open(run / "steps.jsonl", "w", buffering=1) as record:
            record.writelines(f'{{"step": {step}, "loss": {4 - step}}}\n' for step in range(3))
            record.write('{"end": "stopped"}\n')
        output, errors = process.communicate(timeout=120)
        self.assertEqual((process.returncode, output), (0, "3 steps\n"), errors)
        events = [event[:2] for event in self.events(run / "tensorboard", "dflop/loss")]
        self.assertEqual(events, [(0, 4.0), (1, 3.0), (2, 2.0)])

    def test_tqdm_draws_the_progress(self) -> None:
        drawn = io.StringIO()
        bar = partial(tqdm, file=drawn, mininterval=0, ncols=160)
        steps = [step.step for step in monitor.Progress(self.loader(), tqdm=bar) if list(step.microbatches)]
        self.assertEqual(steps, [0, 1, 2, 3])
        self.assertRegex(drawn.getvalue(), r"4/4 .*samples/s, .*tokens/s, wait .* %, (data|compute)")


if __name__ == "__main__":
    unittest.main()
