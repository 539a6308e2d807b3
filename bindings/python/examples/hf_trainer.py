"""Trains with Hugging Face `Trainer` on balanced microbatches, one per step of gradient accumulation.

`dflop.torch.BalancedTrainer` is a `Trainer` that reads microbatches one by one and divides their losses by
the targets of the whole global batch, over all processes, for every model. Its checkpoints hold the loader's
state, from which it resumes exactly.
"""

import tempfile

import dflop.torch
import torch
import transformers

DIRECTORY, MICROBATCHES = dflop.example.directory(), 2


def train(out, *, resume=None, **settings):
    settings = {"max_steps": 8, "learning_rate": 3e-3, "logging_steps": 1, "save_steps": 4} | settings
    settings |= {"ddp_find_unused_parameters": False}  # one without images has a blank one
    args = transformers.TrainingArguments(out, report_to="none", disable_tqdm=True, **settings)
    model, rank = DIRECTORY / "model", {"dp_rank": args.process_index, "dp_size": args.world_size}
    ds = dflop.Dataset(DIRECTORY / "shards")
    loader = dflop.BalancedLoader(ds, model=model, global_batch_size=16, microbatches=MICROBATCHES, **rank)
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(model)
    net = transformers.AutoModelForImageTextToText.from_config(config)
    trainer = dflop.torch.BalancedTrainer(net, args, train_dataset=loader)
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as out:
        for name, resume in [("without a stop", None), ("resumed after step 4", f"{out}/checkpoint-4")]:
            print(f"losses {name}:", *(f"{loss:.4f}" for loss in train(out, resume=resume)))
