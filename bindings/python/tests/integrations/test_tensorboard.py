"""Tests `dflop.monitor` with TensorBoard's writer and the bar of tqdm."""

import io
import tempfile
import unittest
from functools import partial
from pathlib import Path

import dflop
from dflop import example, monitor
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
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

    def test_tqdm_draws_the_progress(self) -> None:
        drawn = io.StringIO()
        bar = partial(tqdm, file=drawn, mininterval=0, ncols=160)
        steps = [step.step for step in monitor.Progress(self.loader(), tqdm=bar) if list(step.microbatches)]
        self.assertEqual(steps, [0, 1, 2, 3])
        self.assertRegex(drawn.getvalue(), r"4/4 .*samples/s, .*tokens/s, wait .* %, (data|compute)")


if __name__ == "__main__":
    unittest.main()
