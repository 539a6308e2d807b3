"""Trains a pipeline of two stages, vision tower and language model, with `torch.distributed.pipelining`.

Stages exchange activations of one shape, so `fixed:640` pads all microbatches to one length. Padding is
masked from the loss and has a cost in the plan; a step that does not fit is an error before it starts.
"""

import dflop

if __name__ == "__main__":
    dflop.example.on_ranks(2)  # as `torchrun --nproc-per-node 2` does

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration


class Vision(torch.nn.Sequential):  # keeps the whole model; drop the parts that a large one does not need
    def forward(self, input_ids, pixel_values=None, image_grid_thw=None):
        rows = self[0].get_input_embeddings()(input_ids)
        if pixel_values is None:
            return rows
        images = self[0].model.visual(pixel_values, grid_thw=image_grid_thw).pooler_output
        return rows.masked_scatter((input_ids == self[0].config.image_token_id)[..., None], images)


class Language(torch.nn.Sequential):
    def forward(self, rows, position_ids):
        return self[0](inputs_embeds=rows, position_ids=position_ids, use_cache=False).logits


def loss_of(logits: torch.Tensor, labels: torch.Tensor, scale: float) -> torch.Tensor:
    return scale * torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum")


def backward(schedule: Schedule1F1B, step: dflop.Step, rank: int) -> float:
    """Leaves the step's gradients in the stages; returns its loss, on the last of them."""
    names = [("input_ids", "pixel_values", "image_grid_thw"), ("position_ids",)][rank]
    microbatches = list(step.microbatches)  # a pipeline takes all of them at once
    inputs = [{name: one[name] for name in names if name in one} for one in microbatches]
    scale = {"scale": microbatches[0].loss_scale_sum}  # the same for all sums of a step
    labels, losses = [one["labels"] for one in microbatches], []
    schedule.step(kwarg_mbs=inputs, target_mbs=labels, losses=losses, loss_kwargs=scale)
    return sum(loss.item() for loss in losses)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank, directory = dist.get_rank(), dflop.example.directory()
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig.from_pretrained(directory / "model"))
    stage = PipelineStage([Vision, Language][rank](model), rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=loss_of, scale_grads=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    settings = {"model": directory / "model", "global_batch_size": 16, "microbatches": 4, "steps": 8}
    settings["processor"] = dflop.Processor(
        length_buckets="fixed:640", dtype="none" if rank > 0 else "float32"
    )
    settings["plan"] = dflop.Plan(stages=[1, 1], schedule="1f1b")
    for step in dflop.BalancedLoader(directory / "shards", **settings):
        print(f"stage {rank}, step {step.step}: loss {backward(schedule, step, rank):.3f}", flush=True)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
