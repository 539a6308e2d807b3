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
        ds = dflop.Dataset(self.example.DIRECTORY / "shards")
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

    def trainer(self, trainer: type | None = None, keywords: dict | None = None, **settings: object):
        args = transformers.TrainingArguments(self.out, report_to="none", disable_tqdm=True, **settings)
        return (trainer or dflop.torch.BalancedTrainer)(
            self.net(), args, train_dataset=self.loader(), **keywords or {}
        )

    def loader(self, **settings: object) -> dflop.BalancedLoader:
        model = self.example.DIRECTORY / "model"
        defaults = {"global_batch_size": 16, "microbatches": 2}
        return dflop.BalancedLoader(self.example.DIRECTORY / "shards", model=model, **defaults | settings)

    def net(self) -> torch.nn.Module:
        config = transformers.AutoConfig.from_pretrained(self.example.DIRECTORY / "model")
        torch.manual_seed(0)
        return transformers.AutoModelForImageTextToText.from_config(config)

    def test_it_sets_what_it_must(self) -> None:
        args = self.trainer().args
        found = args.gradient_accumulation_steps, args.ignore_data_skip, args.logging_nan_inf_filter
        self.assertEqual(found, (2, True, False))
        self.assertEqual(self.trainer(gradient_accumulation_steps=2).get_total_train_batch_size(), 16)

    def test_settings_that_change_steps_or_losses_are_refused_by_name(self) -> None:
        refused = {
            "gradient_accumulation_steps": 4,
            "dataloader_num_workers": 2,
            "dataloader_drop_last": True,
            "label_smoothing_factor": 0.1,
            "auto_find_batch_size": True,
            "train_sampling_strategy": "group_by_length",
        }
        for name, value in refused.items():
            with self.subTest(name), self.assertRaisesRegex(ValueError, f"^{name}="):
                self.trainer(**{name: value})
        for name in ("split_batches", "dispatch_batches"):
            with self.subTest(name), self.assertRaisesRegex(ValueError, f"^accelerator_config {name}=True"):
                self.trainer(accelerator_config={name: True})
        with self.assertRaisesRegex(ValueError, "^label_smoothing_factor=.*; compute_loss_func: "):
            self.trainer(keywords={"compute_loss_func": lambda *_, **__: None}, label_smoothing_factor=0.1)

    def test_data_and_ranks_that_are_not_the_loaders_are_refused(self) -> None:
        make, args = dflop.torch.BalancedTrainer, transformers.TrainingArguments(self.out, report_to="none")
        with self.assertRaisesRegex(
            TypeError, "train_dataset: expected a dflop.BalancedLoader .* found list"
        ):
            make(self.net(), args, train_dataset=[])
        with self.assertRaisesRegex(TypeError, "^args: "):
            make(self.net(), train_dataset=self.loader())
        for settings in ({"dp_size": 2}, {"dp_size": 2, "dp_rank": 1}):
            with self.assertRaisesRegex(ValueError, "^dp_size=2: the trainer has 1 data-parallel ranks"):
                make(self.net(), args, train_dataset=self.loader(**settings))

    def test_microbatches_of_a_step_are_read_one_by_one(self) -> None:
        delivered = []

        class Watched(dflop.torch.BalancedTrainer):
            def compute_loss(self, model, inputs, *arguments, **keywords):
                delivered.append(self.train_dataset.state_dict()["microbatch"])
                return super().compute_loss(model, inputs, *arguments, **keywords)

        args = transformers.TrainingArguments(self.out, max_steps=2, report_to="none", disable_tqdm=True)
        Watched(self.net(), args, train_dataset=self.loader(microbatches=4)).train()
        self.assertEqual(delivered, [1, 2, 3, 0] * 2)

    def test_a_checkpoint_before_a_step_has_ended_does_the_step_again(self) -> None:
        whole = self.example.train(self.out, max_steps=4, save_strategy="no", **SGD)

        class Stops(transformers.TrainerCallback):
            """Saves as a signal makes the trainer save: before the gradients of step 2 are applied."""

            trainer = None

            def on_pre_optimizer_step(self, args, state, control, **others):
                if state.global_step == 2:
                    self.trainer._save_checkpoint(self.trainer.model, None)
                    control.should_training_stop = True

        stops = Stops()
        settings = SGD | {"max_steps": 4, "logging_steps": 1, "save_strategy": "no"}
        Stops.trainer = self.trainer(keywords={"callbacks": [stops]}, **settings)
        Stops.trainer.train()
        position = json.loads(Path(self.out, "checkpoint-2", "loader.json").read_text())
        self.assertEqual((position["loader"]["step"], position["microbatch"]), (2, 0))
        resumed = self.example.train(
            self.out, max_steps=4, save_strategy="no", resume=f"{self.out}/checkpoint-2", **SGD
        )
        # The checkpoint has the log of the two steps before it.
        for loss, other in zip(resumed, whole, strict=True):
            self.assertAlmostEqual(loss, other, places=5)

    def test_a_resumed_run_counts_epochs_by_the_data(self) -> None:
        before = self.example.DIRECTORY
        self.addCleanup(setattr, self.example, "DIRECTORY", before)
        self.example.DIRECTORY = dflop.example.directory(samples=64)
        settings = {"max_steps": 6, "save_steps": 2, "logging_steps": 1, **SGD}
        self.trainer(**settings).train()
        resumed = self.trainer(**settings)
        resumed.train(resume_from_checkpoint=f"{self.out}/checkpoint-2")
        self.assertEqual([one["epoch"] for one in resumed.state.log_history if "loss" in one][-1], 1.5)

    def test_a_mixin_makes_other_trainers_balanced(self) -> None:
        class Logged(transformers.Trainer):
            def log(self, logs, *arguments):
                super().log(logs | {"is_logged": True}, *arguments)

        class Balanced(dflop.torch.BalancedTrainerMixin, Logged):
            pass

        trainer = self.trainer(Balanced, max_steps=2, logging_steps=1, save_strategy="no", **SGD)
        trainer.train()
        losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
        self.assertTrue(trainer.state.log_history[0]["is_logged"])
        for loss, other in zip(losses, self.by_hand(2), strict=True):
            self.assertAlmostEqual(loss, other, places=4)

    def test_a_trainer_of_trl_is_made_balanced(self) -> None:
        try:
            import trl
        except ImportError as missing:
            raise unittest.SkipTest(f"{missing.name} is not installed") from missing

        class Balanced(dflop.torch.BalancedTrainerMixin, trl.SFTTrainer):
            pass

        tokenizer = transformers.AutoTokenizer.from_pretrained(self.example.DIRECTORY / "model")
        args = trl.SFTConfig(
            self.out,
            max_steps=2,
            logging_steps=1,
            bf16=False,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **SGD,
        )
        trainer = Balanced(self.net(), args, train_dataset=self.loader(), processing_class=tokenizer)
        trainer.train()
        losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
        for loss, other in zip(losses, self.by_hand(2), strict=True):
            self.assertAlmostEqual(loss, other, places=4)
        args.packing = True
        with self.assertRaisesRegex(ValueError, "^packing=True: "):
            Balanced(self.net(), args, train_dataset=self.loader(), processing_class=tokenizer)

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
