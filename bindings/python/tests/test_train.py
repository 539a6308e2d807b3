"""Tests `dflop.train`: runs of the executor from Python."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import unittest
from pathlib import Path
from typing import Any

import dflop


class Train(unittest.TestCase):
    """Test case with a small model and shards in an empty directory per test."""

    def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)
        dflop.example.write_shards(self.directory / "shards", samples=64, shards=2)
        dflop.example.write_model(self.directory / "model")

    def config(self, **tables: Any) -> dict[str, Any]:
        return {
            "steps": 3,
            "model": {"directory": str(self.directory / "model")},
            "data": {"shards": [str(self.directory / "shards")], "global_batch_size": 8},
            "parallel": {"microbatches": 2},
        } | tables

    def checkpoints(self) -> dict[str, str]:
        return {"directory": str(self.directory / "run")}

    def losses(self, config: Any, **options: Any) -> list[float]:
        steps: list[dflop.TrainStep] = []
        dflop.train(config, on_step=steps.append, **options)
        return [step.loss for step in steps]

    def test_steps_are_reported_in_order_with_every_figure(self) -> None:
        steps: list[dflop.TrainStep] = []
        result = dflop.train(self.config(), on_step=steps.append)
        self.assertEqual(result, dflop.TrainResult(steps=3, checkpoint=None))
        self.assertEqual([step.step for step in steps], [0, 1, 2])
        for step in steps:
            self.assertEqual((step.samples, step.is_skipped, step.dropped_samples), (8, False, 0))
            self.assertGreater(min(step.loss, step.seconds, step.tokens, step.gradient_norm), 0)
            self.assertEqual(step.report["loss"], step.loss)

    def test_an_evaluation_follows_its_steps_and_changes_none(self) -> None:
        shards = [str(self.directory / "shards")]
        steps: list[dflop.TrainStep] = []
        config = self.config(evaluation={"every": 2, "shards": shards, "batches": 2})
        result = dflop.train(config, on_step=steps.append)
        self.assertEqual([step.loss for step in steps], self.losses(self.config()))
        evaluated = [step.evaluation_loss for step in steps]
        self.assertIsNone(evaluated[0])
        self.assertEqual(result.evaluation_loss, evaluated[2])
        for step in steps[1:]:
            report = step.report["evaluation"]
            self.assertEqual((report["loss"], report["samples"]), (step.evaluation_loss, 16))
            self.assertGreater(min(report["loss"], report["target_tokens"], report["seconds"]), 0)
        with self.assertRaisesRegex(dflop.ConfigError, "`evaluation` needs `shards`"):
            dflop.train(self.config(evaluation={"every": 2}))

    def test_a_file_and_its_tables_are_the_same_run(self) -> None:
        path = self.directory / "run.json"
        path.write_text(json.dumps(self.config(model={"directory": "model"})))
        self.assertEqual(self.losses(path), self.losses(self.config()))

    def test_a_run_resumes_with_the_losses_of_an_uninterrupted_one(self) -> None:
        whole = self.losses(self.config())
        config = self.config(checkpoint=self.checkpoints())
        first = self.losses(config, until=2)
        result = dflop.train(config, resume=True, until=2)
        self.assertEqual(result.steps, 2, "resumed at its end")
        self.assertEqual(first + self.losses(config, resume=True), whole)
        record = (self.directory / "run" / "steps.jsonl").read_text().splitlines()
        self.assertEqual([line["step"] for line in map(json.loads, record) if "loss" in line], [0, 1, 2])

    def test_an_exception_of_the_callback_ends_the_run_with_its_state_saved(self) -> None:
        def fail(step: dflop.TrainStep) -> None:
            if step.step == 0:
                raise KeyError("mine")

        config = self.config(steps=500, checkpoint=self.checkpoints())
        with self.assertRaisesRegex(KeyError, "mine"):
            dflop.train(config, on_step=fail)
        steps: list[int] = []
        dflop.train(config, on_step=lambda step: steps.append(step.step), resume=True, until=100)
        self.assertIn(steps[0], range(1, 50))

    def test_ctrl_c_ends_the_run_after_its_step(self) -> None:
        # A shell ignores the signal in what it runs in the background.
        previous = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.addCleanup(signal.signal, signal.SIGINT, previous)
        first = threading.Event()
        timer = threading.Thread(target=lambda: (first.wait(), os.kill(os.getpid(), signal.SIGINT)))
        timer.start()
        config = self.config(steps=100_000, checkpoint=self.checkpoints())
        with self.assertRaises(KeyboardInterrupt):
            dflop.train(config, on_step=lambda _: first.set())
        timer.join()
        result = dflop.train(config, resume=True, until=1)
        self.assertGreaterEqual(result.steps, 1)

    def test_wrong_configurations_are_named(self) -> None:
        for tables, message in [
            ({"steps": 0}, "invalid `steps`"),
            ({"model": {}}, "`model` needs either `directory` or `config`"),
            ({"schedules": {}}, "unknown field `schedules`"),
            ({"parallel": {"compute_device": "tpu"}}, "expected `cpu`, `cuda` or `cuda:N`"),
        ]:
            with self.assertRaisesRegex(dflop.ConfigError, message):
                dflop.train(self.config(**tables))
        with self.assertRaisesRegex(dflop.Error, "no.toml`: No such file"):
            dflop.train(self.directory / "no.toml")

    def test_a_failed_run_names_its_reason(self) -> None:
        data = {"shards": [str(self.directory / "none.tar")]}
        with self.assertRaisesRegex(dflop.Error, "none.tar"):
            dflop.train(self.config(data=data))

    def test_a_process_is_a_rank_under_a_launcher(self) -> None:
        path = self.directory / "run.json"
        path.write_text(json.dumps(self.config()))
        program = "import dflop, sys; dflop.train(sys.argv[1], on_step=lambda step: print(step.loss))"
        environment = os.environ | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        environment |= {"DFLOP_JOB_TOKEN": "a secret of this test"}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", program, str(path)],
                env=environment | {"RANK": rank, "LOCAL_RANK": rank},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in ("0", "1")
        ]
        printed = [rank.communicate(timeout=120)[0] for rank in ranks]
        self.assertEqual([rank.returncode for rank in ranks], [0, 0])
        self.assertEqual([float(line) for line in printed[0].split()], self.losses(self.config()))
        self.assertEqual(printed[1], "")


def free_port() -> int:
    """Returns a port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    unittest.main()
