"""Trains with Hugging Face `Trainer` on balanced microbatches, one per step of gradient accumulation.

`Trainer` gets a `DataLoader` that it neither batches nor shards, since each process has its own microbatches.
It divides summed losses by the labels of the whole global batch, over all processes, which weights all tokens
equally. A callback saves the loader's state next to each checkpoint.
"""

import json
import tempfile
from pathlib import Path

import dflop.torch
import torch
import transformers

DIRECTORY, MICROBATCHES = dflop.example.directory(), 2


class BalancedTrainer(transformers.Trainer):
    def get_train_dataloader(self):
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=None, collate_fn=dflop.torch.keep)


class KeepsPosition(transformers.TrainerCallback):
    def on_save(self, args, state, control, train_dataloader, **kwargs):
        if state.is_world_process_zero:
            self.path(args, state).write_text(json.dumps(train_dataloader.dataset.state_dict()))

    def on_train_begin(self, args, state, control, train_dataloader, **kwargs):
        if state.global_step > 0:
            train_dataloader.dataset.load_state_dict(json.loads(self.path(args, state).read_text()))

    def path(self, args, state):
        return Path(args.output_dir, f"checkpoint-{state.global_step}", "loader.json")


def train(out, *, resume=None, **settings):
    settings = {"max_steps": 8, "learning_rate": 3e-3, "logging_steps": 1, "save_steps": 4} | settings
    settings |= {"gradient_accumulation_steps": MICROBATCHES, "ignore_data_skip": True}
    settings |= {"ddp_find_unused_parameters": False}  # one without images has a blank one
    args = transformers.TrainingArguments(out, report_to="none", disable_tqdm=True, **settings)
    model, rank = DIRECTORY / "model", {"dp_rank": args.process_index, "dp_size": args.world_size}
    ds = dflop.Dataset(DIRECTORY / "shards", tokenizer=model, model=model)
    loader = dflop.BalancedLoader(ds, model=model, global_batch_size=16, microbatches=MICROBATCHES, **rank)
    torch.manual_seed(0)
    # `Trainer` does not load weights that `save_pretrained` renames, so they are loaded here.
    config, auto = transformers.AutoConfig.from_pretrained(model), transformers.AutoModelForImageTextToText
    net = auto.from_pretrained(resume, config=config) if resume else auto.from_config(config)
    dataset = dflop.torch.Microbatches(loader, MICROBATCHES)
    trainer = BalancedTrainer(net, args, train_dataset=dataset, callbacks=[KeepsPosition()])
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as out:
        for name, resume in [("without a stop", None), ("resumed after step 4", f"{out}/checkpoint-4")]:
            print(f"losses {name}:", *(f"{loss:.4f}" for loss in train(out, resume=resume)))
