"""Tests the `Trainer` example: losses weight all tokens equally, and it resumes exactly."""

from __future__ import annotations

import json
import tempfile
import unittest
from pathlib import Path

import dflop
from example_runs import load, run

try:
    import torch
    import transformers
except ImportError as missing:
    raise unittest.SkipTest(f"{missing.name} is not installed") from missing

SGD = {"optim": "sgd", "lr_scheduler_type": "constant", "learning_rate": 0.5, "max_grad_norm": 0.0}
TWO_RANKS = """
import json, sys, hf_trainer
hf_trainer.transformers.logging.set_verbosity_error()
losses = hf_trainer.train(sys.argv[1], max_steps=3, save_strategy="no")
import torch.distributed as dist
print("RANK", dist.get_rank(), dist.get_world_size(), json.dumps(losses))
"""


class TrainerRuns(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        torch.set_num_threads(1)
        transformers.logging.set_verbosity_error()
        cls.example = load("hf_trainer")

    def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.out = directory.name

    def by_hand(self, steps: int) -> list[float]:
        """Returns losses of plain SGD with the loader's own scales."""
        model = self.example.DIRECTORY / "model"
        ds = dflop.Dataset(self.example.DIRECTORY / "shards", tokenizer=model, model=model)
        loader = dflop.BalancedLoader(ds, model=model, global_batch_size=16, microbatches=2, steps=steps)
        torch.manual_seed(0)
        config = transformers.AutoConfig.from_pretrained(model)
        net = transformers.AutoModelForImageTextToText.from_config(config)
        optimizer = torch.optim.SGD(net.parameters(), lr=SGD["learning_rate"])
        losses = []
        for step in loader:
            step = step.hold()
            self.assertEqual(sum(mb.target_tokens for mb in step.microbatches), step.target_tokens)
            scaled = [net(**mb).loss * mb.loss_scale for mb in step.microbatches]
            sum(scaled).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(sum(scaled).item())
        return losses

    def test_its_losses_and_gradients_are_those_of_a_token_true_loop(self) -> None:
        losses = self.example.train(self.out, max_steps=4, save_strategy="no", **SGD)
        expected = self.by_hand(4)
        self.assertLess(losses[-1], losses[0] - 0.05)
        for loss, other in zip(losses, expected, strict=True):
            self.assertAlmostEqual(loss, other, delta=2e-4)

    def test_a_run_that_resumes_from_a_checkpoint_has_the_losses_of_one_in_one_go(self) -> None:
        whole = self.example.train(self.out, max_steps=5, save_steps=2)
        resumed = self.example.train(self.out, max_steps=5, save_steps=5, resume=f"{self.out}/checkpoint-2")
        self.assertEqual(resumed, whole)
        position = json.loads(Path(self.out, "checkpoint-2", "loader.json").read_text())
        self.assertEqual((position["loader"]["step"], position["microbatch"]), (2, 0))

    def test_without_the_position_nothing_resumes_in_silence(self) -> None:
        self.example.train(self.out, max_steps=1, save_steps=1)
        Path(self.out, "checkpoint-1", "loader.json").unlink()
        with self.assertRaises(FileNotFoundError):
            self.example.train(self.out, max_steps=2, resume=f"{self.out}/checkpoint-1")

    def test_epochs_end_where_the_data_does(self) -> None:
        before = self.example.DIRECTORY
        self.addCleanup(setattr, self.example, "DIRECTORY", before)
        self.example.DIRECTORY = dflop.example.directory(samples=48)
        epochs = self.example.train(self.out, max_steps=-1, num_train_epochs=2, save_strategy="no")
        steps = self.example.train(self.out, max_steps=6, save_strategy="no")
        self.assertEqual((len(epochs), epochs), (6, steps))

    def test_two_processes_have_the_losses_of_one(self) -> None:
        program = Path(self.out, "two_ranks.py")
        program.write_text(TWO_RANKS)
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        out = run(*launch, program, Path(self.out, "run"), ACCELERATE_USE_CPU="1")
        alone = self.example.train(self.out, max_steps=3, save_strategy="no")
        ranks = [line.split(maxsplit=3) for line in out.splitlines() if line.startswith("RANK")]
        self.assertIn(["RANK", "0", "2"], [rank[:3] for rank in ranks])
        losses = json.loads(next(rank[3] for rank in ranks if rank[1] == "0"))
        for loss, other in zip(losses, alone, strict=True):
            self.assertAlmostEqual(loss, other, delta=1e-3)


if __name__ == "__main__":
    unittest.main()
