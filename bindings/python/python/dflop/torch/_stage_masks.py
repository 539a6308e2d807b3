"""Masks for packed rows whose images attend to themselves in both directions, as in Gemma 3.

transformers 5.24 looks for the images of all samples at the positions in the first one, in layers with a
window.
"""

from __future__ import annotations

from typing import Any

import torch

from dflop.errors import ModelError
from dflop.schedule import RoleMicrobatch

IMAGE = 1
"""Type of a token that stands for an image."""


def image_masks(config: Any, microbatch: RoleMicrobatch, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Returns masks ``[1, 1, tokens, tokens]`` by type of layer.

    - `config`: of the LLM
    - `microbatch`: with `token_type_ids`
    - `dtype`: of hidden states

    A token attends to those before it and to those of its image, in its sample, and in a window if its layer
    has one.

    Raises:
        ModelError: the attention takes no masks.
    """
    attention = config._attn_implementation
    if attention not in ("sdpa", "eager"):
        raise ModelError(f'images attend in both directions: expected "sdpa" or "eager", found "{attention}"')
    is_image = microbatch["token_type_ids"][0] == IMAGE
    places = torch.arange(len(is_image), device=is_image.device)
    samples = torch.bucketize(places, microbatch.cu_seqlens, right=True)
    images = torch.where(is_image, torch.cumsum(~is_image, 0), -1 - places)
    distances = places[:, None] - places
    seen = (distances >= 0) | (images[:, None] == images)
    seen &= samples[:, None] == samples
    masks = {"full_attention": seen}
    if getattr(config, "sliding_window", None):
        masks["sliding_attention"] = seen & (distances < config.sliding_window)
    if attention == "eager":
        lowest = torch.finfo(dtype).min
        masks = {name: (~mask).to(dtype) * lowest for name, mask in masks.items()}
    return {name: mask[None, None] for name, mask in masks.items()}
