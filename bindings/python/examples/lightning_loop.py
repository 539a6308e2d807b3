"""Trains with Lightning on balanced microbatches; its checkpoints hold the loader's state.

Lightning averages gradients over processes, which `dflop.torch.loss` is made for, and divides the loss by
`accumulate_grad_batches`, which is undone. `dflop.torch.Microbatches` has a `state_dict`, and the length of
an epoch, without which Lightning would read ahead of what it has trained. `dflop.torch.StepCheckpoint` saves
at step ends only: checkpoints hold no accumulated gradients.
"""

import tempfile

import dflop.torch
import lightning
import torch
import transformers

DIRECTORY, MICROBATCHES = dflop.example.directory(samples=96), 2


class Data(lightning.LightningDataModule):
    def train_dataloader(self):
        model, rank, size = DIRECTORY / "model", self.trainer.global_rank, self.trainer.world_size
        ds = dflop.Dataset(DIRECTORY / "shards")
        settings = {"global_batch_size": 32, "microbatches": MICROBATCHES, "dp_rank": rank, "dp_size": size}
        loader = dflop.BalancedLoader(ds, model=model, **settings)
        return dflop.torch.Microbatches(loader, MICROBATCHES)


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        config = transformers.AutoConfig.from_pretrained(DIRECTORY / "model")
        self.model = transformers.AutoModelForImageTextToText.from_config(config)
        self.losses, self.keys = [], []

    def training_step(self, microbatch, place):
        loss = dflop.torch.loss(self.model, microbatch)
        self.losses.append(loss.item())
        self.keys.append(microbatch.sample_keys)
        return loss * self.trainer.accumulate_grad_batches

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def train(directory, *, steps, resume=None):
    torch.manual_seed(0)
    saves = dflop.torch.StepCheckpoint(directory, "{step}", every_n_train_steps=2, save_top_k=-1)
    module = Module()
    settings = {"accumulate_grad_batches": MICROBATCHES, "max_steps": steps, "callbacks": [saves]}
    settings |= {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_epochs=-1, accelerator="cpu", **settings)
    trainer.fit(module, Data(), ckpt_path=resume, weights_only=False)
    return module


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        for name, resume in [("without a stop", None), ("resumed after step 2", f"{directory}/step=2.ckpt")]:
            parts = iter(train(directory, steps=5, resume=resume).losses)
            print(f"losses {name}:", *(f"{sum(both):.4f}" for both in zip(parts, parts, strict=True)))
