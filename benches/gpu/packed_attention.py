"""Attention of `transformers` over packed sequences by PyTorch alone, without the package flash-attn.

On a GPU by PyTorch's FlashAttention over sequences of different length, on a CPU one sequence after another. Towers give the
boundaries of their images and windows; those of the samples in a row of the LLM are in `SAMPLES`, because a model hands
boundaries that it is given on to its tower.
"""

import itertools

import torch
from torch.nn import functional
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

# Towers ask for boundaries where the name has "flash" in it.
NAME = "flash_packed"


class Samples:
    """Boundaries of the samples in the packed row that runs: `cu_seqlens` and the longest; one sequence without."""

    boundaries = None


SAMPLES = Samples()


def attention(module, query, key, value, attention_mask, **settings):
    """Attends within sequences; tensors are `[1, heads, tokens, width]`, the result `[1, tokens, heads, width]`."""
    causal = settings.get("is_causal")
    causal = module.is_causal if causal is None else causal
    boundaries, longest = settings.get("cu_seq_lens_q"), settings.get("max_length_q")
    if boundaries is None and SAMPLES.boundaries is not None:
        boundaries, longest = SAMPLES.boundaries
    query, key, value = (part.transpose(1, 2)[0] for part in (query, key, value))
    if boundaries is None:
        longest = query.shape[0]
        boundaries = torch.tensor([0, longest], dtype=torch.int32, device=query.device)
    run = _on_gpu if query.is_cuda else _one_by_one
    return run(query, key, value, boundaries, int(longest), causal, settings.get("scaling"))[None], None


def _on_gpu(query, key, value, boundaries, longest, causal, scale):
    found = torch.ops.aten._flash_attention_forward(
        query, key, value, boundaries, boundaries, longest, longest, 0.0, causal, False, scale=scale
    )
    return found[0]


def _one_by_one(query, key, value, boundaries, longest, causal, scale):
    edges = boundaries.tolist()
    parts = []
    for first, end in itertools.pairwise(edges):
        if end > first:
            one = (part[first:end].transpose(0, 1)[None] for part in (query, key, value))
            found = functional.scaled_dot_product_attention(*one, is_causal=causal, scale=scale, enable_gqa=True)
            parts.append(found[0].transpose(0, 1))
    return torch.cat(parts)


def use(model):
    """Sets the attention of all parts of a model."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    for config in list(configs.values()):
        for part in (config, getattr(config, "text_config", None), getattr(config, "vision_config", None)):
            if part is not None:
                part._attn_implementation_internal = NAME
