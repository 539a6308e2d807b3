"""Trains a small vision-language model in one process: the loop that the other examples extend.

A global batch is delivered as microbatches of about the same cost. Losses are divided by the target tokens
of the whole batch, so that the step equals one pass over it. Data and model are generated in a moment.
"""

from pathlib import Path

import dflop
import torch
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

STEPS = 12


def loader_of(directory: Path, **settings: object) -> dflop.BalancedLoader:
    defaults = {"global_batch_size": 16, "microbatches": 4, "steps": STEPS, "array_type": "auto"}
    return dflop.BalancedLoader(directory / "shards", model=directory / "model", **defaults | settings)


def model_of(directory: Path) -> Qwen2VLForConditionalGeneration:
    torch.manual_seed(0)
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig.from_pretrained(directory / "model"))


def backward(model: torch.nn.Module, step: dflop.Step) -> float:
    """Adds the step's gradients to the parameters; returns its loss, the mean over its target tokens."""
    total = 0.0
    for microbatch in step.microbatches:
        loss = dflop.torch.loss(model, microbatch, step)
        loss.backward()
        total += loss.item()
    return total


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: dflop.BalancedLoader
) -> list[float]:
    losses = []
    for step in loader:
        losses.append(backward(model, step))
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step.step}: loss {losses[-1]:.3f} of {step.target_tokens} tokens", flush=True)
    return losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    directory = dflop.example.directory()
    model, loader = model_of(directory), loader_of(directory)
    losses = train(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loader)
    print(
        f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; the state goes on at step {loader.state_dict()['step']}"
    )
