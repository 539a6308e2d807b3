"""Tests the Lightning example: gradients by token, exact resumption within and across epochs."""

from __future__ import annotations

import logging
import tempfile
import unittest
import warnings
from pathlib import Path

import dflop.torch
from example_runs import load

try:
    import lightning
    import torch
    import transformers
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader
except ImportError as missing:
    raise unittest.SkipTest(f"{missing.name} is not installed") from missing


class Fit(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        torch.set_num_threads(1)
        transformers.logging.set_verbosity_error()
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
        cls.example = load("lightning_loop")

    def by_hand(self, steps: int) -> tuple[list[float], list[list[str]]]:
        """Compares losses and samples with a loop without Lightning."""
        directory = self.example.DIRECTORY
        ds = dflop.Dataset(directory / "shards")
        torch.manual_seed(0)
        module = self.example.Module()
        optimizer = module.configure_optimizers()
        loader = dflop.BalancedLoader(
            ds, model=directory / "model", global_batch_size=32, microbatches=2, steps=steps
        )
        losses, keys = [], []
        for step in loader:
            for mb in step.microbatches:
                loss = module.model(**mb).loss * mb.loss_scale
                loss.backward()
                losses.append(loss.item())
                keys.append(mb.sample_keys)
            optimizer.step()
            optimizer.zero_grad()
        return losses, keys

    def test_it_trains_as_a_token_true_loop_does_and_resumes_exactly(self) -> None:
        losses, keys = self.by_hand(5)
        with tempfile.TemporaryDirectory() as directory:
            whole = self.example.train(directory, steps=5)
            self.assertEqual(whole.keys, keys)
            for loss, other in zip(whole.losses, losses, strict=True):
                self.assertAlmostEqual(loss, other, delta=1e-4)
            # Three steps are an epoch: one checkpoint is inside the first, the other inside the second.
            for saved in (2, 4):
                resumed = self.example.train(directory, steps=5, resume=f"{directory}/step={saved}.ckpt")
                self.assertEqual(resumed.keys, whole.keys[2 * saved :])
                self.assertEqual(resumed.losses, whole.losses[2 * saved :])

    def fit(
        self, callback: object, *, steps: int = 3, resume: str | None = None, data: object = None, **settings
    ):
        """Trains with a callback that saves; returns the trainer and the module."""
        loader = dflop.BalancedLoader(
            self.example.DIRECTORY / "shards",
            model=self.example.DIRECTORY / "model",
            global_batch_size=32,
            microbatches=2,
            array_type="torch",
        )
        data = dflop.torch.Microbatches(loader) if data is None else data(loader)
        torch.manual_seed(0)
        module = self.example.Module()
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        defaults = {"accumulate_grad_batches": 2, "max_steps": steps, "max_epochs": -1, "accelerator": "cpu"}
        trainer = lightning.Trainer(callbacks=callback, **quiet | defaults | settings)
        trainer.fit(module, data, ckpt_path=resume, weights_only=False)
        return trainer, module

    def microbatches_in(self, directory: str) -> dict[str, int]:
        """Returns for each checkpoint the delivered microbatches of a step that has not ended."""
        saved = {path.name: torch.load(path, weights_only=False) for path in Path(directory).glob("*.ckpt")}
        states = {
            name: one["loops"]["fit_loop"]["state_dict"]["combined_loader"] for name, one in saved.items()
        }
        return {name: state[0]["microbatch"] for name, state in states.items()}

    def test_a_resumed_run_keeps_the_checkpoint_that_it_came_from(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            saves = lambda kind: kind(directory, "{step}", every_n_train_steps=2, save_top_k=-1)
            saved = str(Path(directory, "step=2.ckpt"))
            _, whole = self.fit(saves(dflop.torch.StepCheckpoint))
            _, resumed = self.fit(saves(dflop.torch.StepCheckpoint), resume=saved)
            self.assertEqual(resumed.losses, whole.losses[4:])
            self.assertEqual(self.microbatches_in(directory), {"step=2.ckpt": 0})
            # The premise: Lightning's own callback saves after the first microbatch.
            self.fit(saves(ModelCheckpoint), resume=saved)
            in_step = [name for name, given in self.microbatches_in(directory).items() if given == 1]
            self.assertEqual(len(in_step), 1)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                self.fit(saves(dflop.torch.StepCheckpoint), resume=str(Path(directory, in_step[0])))
            messages = [str(one.message) for one in caught]
            wanted = "after microbatch 1 of 2 of a step: the gradients of those before"
            self.assertTrue(any(wanted in message for message in messages), messages)

    def test_a_checkpoint_in_the_middle_of_a_step_is_refused_whoever_saves_it(self) -> None:
        class Saves(lightning.Callback):
            def on_train_batch_end(self, trainer, module, outputs, batch, place):
                trainer.save_checkpoint(f"{directory}/{place}.ckpt")

        with tempfile.TemporaryDirectory() as directory:
            step_ends = dflop.torch.StepCheckpoint(directory)
            wanted = "middle of a step, after microbatch 1 of 2, whose gradients"
            with self.assertRaisesRegex(dflop.StateError, wanted):
                self.fit([Saves(), step_ends])
            self.assertFalse(list(Path(directory).glob("*.ckpt")))

    def test_an_exception_in_the_last_microbatch_is_in_the_middle_of_its_step(self) -> None:
        class Fails(lightning.Callback):
            def on_before_optimizer_step(self, trainer, module, optimizer):
                if trainer.global_step == 1:
                    raise KeyboardInterrupt

        with tempfile.TemporaryDirectory() as directory:
            saves = dflop.torch.StepCheckpoint(directory, "{step}", save_on_exception=True)
            with self.assertRaises(SystemExit):
                self.fit([Fails(), saves])
            self.assertFalse(list(Path(directory).glob("*.ckpt")))

    def test_data_whose_steps_or_states_lightning_does_not_see_are_refused(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            saves = dflop.torch.StepCheckpoint(directory)
            with self.assertRaisesRegex(ValueError, "^accumulate_grad_batches=4: a step of the loader has 2"):
                self.fit(saves, accumulate_grad_batches=4)

            def loaded(loader):
                return DataLoader(
                    dflop.torch.Microbatches(loader), batch_size=None, collate_fn=dflop.torch.keep
                )

            with self.assertRaisesRegex(
                ValueError, "^train_dataloaders: Lightning saves no state of a DataLoader"
            ):
                self.fit(saves, data=loaded)


if __name__ == "__main__":
    unittest.main()
