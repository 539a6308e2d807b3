"""Attention over packed sequences for `transformers`, by a name that it takes for FlashAttention; runs on the CPU.

`use(model)` makes every part of a model compute it: over the boundaries that it is given, or those where
`position_ids` start from 0 again.
"""

from __future__ import annotations

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
import itertools

NAME = "flash_by_boundaries"


def attention(
    module,
    query,
    key,
    value,
    attention_mask,
    scaling=None,
    is_causal=None,
    cu_seq_lens_q=None,
    position_ids=None,
    **_,
):
    tokens = query.shape[2]
    if cu_seq_lens_q is not None:
        bounds = cu_seq_lens_q.tolist()
    elif position_ids is not None:
        starts = (position_ids.reshape(-1, tokens)[0] == 0).nonzero().flatten().tolist()
        bounds = [*starts, tokens]
    else:
        bounds = [0, tokens]
    groups = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(groups, dim=1) for one in (key, value))
    rows = [
        torch.nn.functional.scaled_dot_product_attention(
            *(one[:, :, start:end] for one in (query, key, value)),
            is_causal=module.is_causal if is_causal is None else is_causal,
            scale=scaling,
        )
        for start, end in itertools.pairwise(bounds)
    ]
    return torch.cat(rows, dim=2).transpose(1, 2), None


def register(name: str) -> None:
    """Lets `attn_implementation` name the attention."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, lambda *_, **__: None)


def use(model: torch.nn.Module) -> torch.nn.Module:
    """Sets the attention of every part of a model."""
    register(NAME)
    for module in model.modules():
        config = getattr(module, "config", None)
        for part in (config, *(getattr(config, name, None) for name in ("text_config", "vision_config"))):
            if part is not None:
                part._attn_implementation_internal = NAME
    return model
