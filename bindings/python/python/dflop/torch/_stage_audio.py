"""Audio encoders of models without a function of features, as Qwen2-Audio: masked windows, a projector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dflop.torch._stage_cut import Structure


def masked_features(structure: Structure) -> dict[str, Callable[..., Any]]:
    """Returns the function of features, by medium; nothing for other models.

    The tower counts its frames and the rows that are left of them, by ``_get_feat_extract_output_lengths``.
    """
    encoder = structure.parts.encoders.get("audio")
    counts = getattr(encoder.tower, "_get_feat_extract_output_lengths", None) if encoder is not None else None
    base = structure.parts.model.base_model
    if counts is None or not encoder.projectors or hasattr(base, "get_audio_features"):  # type: ignore
        return {}
    from transformers.masking_utils import create_bidirectional_mask

    tower, projectors = encoder.tower, encoder.projectors  # type: ignore

    def get_audio_features(
        input_features: torch.Tensor, feature_attention_mask: torch.Tensor
    ) -> torch.Tensor:
        frames, rows = counts(feature_attention_mask.sum(-1))
        tokens = (input_features.shape[-1] - 2) // 2 + 1
        is_heard = torch.arange(tokens, device=frames.device) < frames[:, None]
        shape = input_features.new_empty(len(frames), tokens, 1)
        mask = create_bidirectional_mask(
            config=tower.config, inputs_embeds=shape, attention_mask=is_heard.long()
        )
        found = tower(input_features, attention_mask=mask).last_hidden_state
        for projector in projectors:
            found = projector(found)
        kept: torch.Tensor = torch.arange(found.shape[1], device=rows.device) < rows[:, None]
        return found[kept]

    return {"audio": get_audio_features}
