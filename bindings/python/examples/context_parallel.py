"""Shares long samples between ranks: `python context_parallel.py`, or `torchrun --nproc-per-node 4 ...`.

A sample above the token cap is split over 2 or 4 ranks, others stay whole beside it. Keys and values of split
samples are gathered within their ranks, in every layer; so are the features of their images, of which each
rank encodes some. Losses and gradients are those of whole samples.
"""

import dflop

if __name__ == "__main__":
    dflop.example.on_ranks(4)  # as `torchrun --nproc-per-node 4` does

import torch
import torch.distributed as dist
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, Qwen2VLConfig, Qwen2VLForConditionalGeneration


class Gather(torch.autograd.Function):
    """Rows of all ranks of a group, one rank after the other; gradients of all ranks are added up."""

    @staticmethod
    def forward(ctx, rows, group):
        ctx.group, ctx.place = group, dist.get_rank(group) * len(rows)
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, rows.contiguous(), group)
        ctx.rows = len(rows)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient[ctx.place : ctx.place + ctx.rows], None


def attention(module, query, key, value, attention_mask, *, slices, groups, **options):
    """Attends within samples, ``[1, heads, rows, width]``: largest groups first, then whole samples."""
    query, key, value = (one[0].transpose(0, 1) for one in (query, key, value))
    parts, start = [], 0
    for shared in slices.context.groups:
        rows = slice(*shared.rows)
        both = Gather.apply(torch.cat([key[rows], value[rows]], -1), groups[tuple(shared.ranks)])
        keys, values = both[shared.order].split([key.shape[-1], value.shape[-1]], -1)
        for first, end in zip(shared.cu_seqlens[:-1].tolist(), shared.cu_seqlens[1:].tolist()):
            own = (first <= shared.positions) & (shared.positions < end)
            mask = shared.positions[own, None] >= torch.arange(first, end)
            parts.append(attend(query[rows][own], keys[first:end], values[first:end], mask))
        start = rows.stop
    ends = [end for end in slices.cu_seqlens.tolist() if end > start]
    for end in ends:
        mask = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        parts.append(attend(query[start:end], key[start:end], value[start:end], mask))
        start = end
    return torch.cat(parts)[None], None


def attend(query, key, value, mask):
    heads = [one.transpose(0, 1)[None] for one in (query, key, value)]
    return scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)


class Sliced(torch.nn.Module):
    """Runs a Qwen2-VL on a microbatch with slices."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *, slices, groups, **inputs):
        rows = self.model.get_input_embeddings()(slices["input_ids"])[0]
        if "pixel_values" in inputs:
            encoded = self.model.model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
            own = encoded.pooler_output
        else:
            own = rows[:0]
        start = 0
        for shared in slices.context.groups:
            counts = [sum(one.tokens for one in shared.media if one.rank == rank) for rank in shared.ranks]
            if not max(counts):
                continue
            taken = counts[shared.ranks.index(dist.get_rank())]
            part, own = own[:taken], own[taken:]
            gathered = Gather.apply(pad(part, (0, 0, 0, max(counts) - taken)), groups[tuple(shared.ranks)])
            at = {rank: place * max(counts) for place, rank in enumerate(shared.ranks)}
            order = []
            for one in shared.media:
                order.extend(range(at[one.rank], at[one.rank] + one.tokens))
                at[one.rank] += one.tokens
            is_feature = shared.features >= 0
            places = torch.arange(*shared.rows)[is_feature]
            rows = rows.index_copy(0, places, gathered[order][shared.features[is_feature]])
        if slices.context.groups:
            start = slices.context.groups[-1].rows[1]
        places = start + torch.nonzero(slices["mm_token_type_ids"][0, start:])[:, 0]
        rows = rows.index_copy(0, places, own)
        positions, shares = slices["position_ids"], {"slices": slices, "groups": groups}
        return self.model(inputs_embeds=rows[None], position_ids=positions, use_cache=False, **shares)


def make_groups(ranks):
    """Makes the process groups of 2, 4, ... neighboring ranks; all ranks have to make all of them."""
    sizes = [2**power for power in range(1, ranks.bit_length())]
    groups = [tuple(range(first, first + size)) for size in sizes for first in range(0, ranks, size)]
    return {group: dist.new_group(list(group)) for group in groups}


def model_of(directory):
    torch.manual_seed(0)
    AttentionInterface.register("shared", attention)
    config = Qwen2VLConfig.from_pretrained(directory / "model")
    config._attn_implementation = {"text_config": "shared", "vision_config": "sdpa"}
    return Qwen2VLForConditionalGeneration(config)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    directory = dflop.example.directory()  # the same on every rank; yours must be readable by all ranks
    model, groups = Sliced(model_of(directory)), make_groups(ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # A cap of tokens, so that the long samples of these data are split; costs alone split longer samples.
    plan = dflop.Plan(context=4, tokens_max=200, schedule="microbatch")
    settings = {"global_batch_size": 12, "microbatches": 2, "steps": 4, "plan": plan, "array_type": "torch"}
    loader = dflop.BalancedLoader(
        directory / "shards", model=directory / "model", dp_rank=rank, dp_size=ranks, **settings
    )
    for step in loader:
        for microbatch in step.microbatches:
            dflop.torch.loss(model, microbatch, step, slices=microbatch, groups=groups).backward()
            shared = [(group.ranks, group.lengths) for group in microbatch.context.groups]
            print(f"rank {rank}, step {step.step}: {microbatch.tokens} tokens, shared {shared}", flush=True)
        for parameter in model.parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(gradient)
            parameter.grad = gradient / ranks
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
