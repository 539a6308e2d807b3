"""Trains with Hugging Face Accelerate on balanced microbatches; run it directly or with `accelerate launch`.

`prepare` takes model and optimizer, not the loader, which already delivers every process its share of each
global batch. DDP averages gradients over processes, which `dflop.torch.loss` is made for, and
`Accelerator.backward` divides by the steps of gradient accumulation, which is undone. Losses are the same on
any number of processes. `save_state` saves the loader's state with everything else.
"""

import accelerate
import dflop
import torch
import transformers

DIRECTORY, MICROBATCHES = dflop.example.directory(), 2


def train(checkpoint, *, steps, is_resumed=False):
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=MICROBATCHES)
    rank = {"dp_rank": accelerator.process_index, "dp_size": accelerator.num_processes}
    ds = dflop.Dataset(DIRECTORY / "shards")
    loader = dflop.BalancedLoader(
        ds, model=DIRECTORY / "model", global_batch_size=16, microbatches=MICROBATCHES, **rank
    )
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(DIRECTORY / "model")
    model = transformers.AutoModelForImageTextToText.from_config(config)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    accelerator.register_for_checkpointing(loader)
    if is_resumed:
        accelerator.load_state(checkpoint)
    losses = []
    for step in loader:
        total = torch.zeros((), device=accelerator.device)
        for microbatch in step.microbatches:
            with accelerator.accumulate(model):
                inputs = microbatch.to(accelerator.device)
                loss = dflop.torch.loss(model, inputs, step)
                accelerator.backward(loss * MICROBATCHES)
                optimizer.step()
                optimizer.zero_grad()
                total += loss.detach()
        losses.append(accelerator.reduce(total, "mean").item())
        accelerator.print(f"step {step.step}: loss {losses[-1]:.4f} of {step.target_tokens} tokens")
        if step.step + 1 == steps:
            break
    accelerator.save_state(checkpoint)
    return losses


if __name__ == "__main__":
    accelerator = accelerate.Accelerator()
    checkpoint = accelerate.utils.broadcast_object_list([str(DIRECTORY / "checkpoint")])[0]
    train(checkpoint, steps=4)
    train(checkpoint, steps=8, is_resumed=True)
    accelerator.wait_for_everyone()
    accelerator.end_training()
