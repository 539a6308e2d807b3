"""Stages of a model of transformers: parts of an encoder, and parts of the LLM."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dflop._description.checkpoint import feature_functions
from dflop.schedule import RoleMicrobatch
from dflop.torch._stage_audio import masked_features
from dflop.torch._stage_cut import Left, Passage, Share, Structure
from dflop.torch._stage_masks import image_masks
from dflop.torch._whole import features
from dflop.torch.token_loss import IGNORED, summed_over_targets

MEDIA = {
    "vision": {"image": "pixel_values", "video": "pixel_values_videos"},
    "audio": {"audio": "input_features"},
}
"""By encoder, its media and the tensor that a microbatch has of each."""


class EncoderStage(torch.nn.Module):
    """Layers of an encoder; the first stage reads the media, the last one has the projector too.

    Called as ``stage(rows, microbatch)``. Returns rows ``[rows, width]``: hidden states for the next stage,
    one row for each LLM token from the last one.

    Attributes:
        levels_read: levels of the rows from the stage before, ``[rows, levels, width]``; 0 for
            ``[rows, width]``.
    """

    levels_read = 0

    def __init__(self, model: Any, structure: Structure, share: Share, passage: Passage) -> None:
        super().__init__()
        self.model, self._passage, self._is_last = model, passage, share.is_last
        self._kinds = MEDIA[share.module]
        self._functions = {
            medium: function
            for medium, function in (feature_functions(model) | masked_features(structure)).items()
            if medium in self._kinds
        }

    def forward(self, rows: torch.Tensor | None, microbatch: RoleMicrobatch) -> torch.Tensor:
        self._passage.begin(rows)
        media = [medium for medium, name in self._kinds.items() if name in microbatch]
        parts = [self._run(self._functions[medium], microbatch) for medium in media]
        if len(parts) == 1:
            return parts[0]
        # Between stages of the encoder, rows stay in the order in which all stages encode kinds.
        if not self._is_last:
            return torch.cat(parts)
        return _in_route_order(dict(zip(media, parts, strict=True)), microbatch)

    def _run(self, function: Callable[..., Any], microbatch: Mapping[str, Any]) -> torch.Tensor:
        names = _names(function) | _names(getattr(self.model.base_model, function.__name__, function))
        self._passage.approach()
        try:
            output = function(**{name: value for name, value in microbatch.items() if name in names})
        except Left as left:
            return self.leaving(left.hidden)
        if not self._is_last:
            raise RuntimeError(f"`{function.__name__}` has not run the layers of the encoder")
        return self.encoded(output)

    def leaving(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the rows for the next stage, ``[rows, ...]``.

        - `hidden`: what the last layer of the stage has returned, ``[..., width]``
        """
        return hidden.flatten(0, -2)

    def encoded(self, output: Any) -> torch.Tensor:
        """Returns the rows for the LLM, ``[tokens, ...]``.

        - `output`: what the model's function of features has returned
        """
        rows: torch.Tensor = features(output)
        return rows.flatten(0, -2)


class LlmStage(torch.nn.Module):
    """Layers of the LLM; the first stage embeds tokens, the last one has the head and returns a summed loss.

    Called as ``stage(rows, microbatch)``, with rows of media ``[media tokens, width]`` or None in the first
    stage, ``[tokens, width]`` in others. The whole model runs on embeddings, with positions and types of
    tokens as the loader delivers them, so that masks and logits are the model's own.

    Attributes:
        levels_read: levels of the rows from the stage before, as in `EncoderStage`.
        tied_weights: names of weights that another stage has too.
    """

    levels_read = 0

    def __init__(self, model: Any, structure: Structure, share: Share, passage: Passage) -> None:
        super().__init__()
        self.model, self._passage = model, passage
        self._is_first, self._is_last = share.is_first, share.is_last
        self._keeps = "logits_to_keep" in _names(model.forward)
        self.tied_weights = [] if share.is_first and share.is_last else self._tied(structure)

    def forward(self, rows: torch.Tensor | None, microbatch: RoleMicrobatch) -> torch.Tensor:
        hidden = self.embedded(rows, microbatch) if self._is_first else self.received(rows, microbatch)
        self._passage.begin(None if self._is_first else hidden)
        arguments = {name: one for name, one in microbatch.items() if name not in ("input_ids", "labels")}
        if "token_type_ids" in microbatch:
            config = self.model.config.get_text_config()
            arguments["attention_mask"] = image_masks(config, microbatch, hidden.dtype)
        targets = torch.nonzero(microbatch["labels"][0, 1:] != IGNORED)[:, 0]
        if self._is_last and self._keeps:
            arguments["logits_to_keep"] = targets
        self._passage.approach()
        try:
            output = self.model(inputs_embeds=hidden[None], **arguments)
        except Left as left:
            return self.leaving(left.hidden[0])
        if not self._is_last:
            raise RuntimeError(f"`{type(self.model).__name__}` has not run the layers of the LLM")
        logits = output.logits[0]
        kept = logits if len(logits) == len(targets) else logits[targets]
        return summed_over_targets(kept, microbatch["labels"][0, 1:][targets])

    def embedded(self, rows: torch.Tensor | None, microbatch: RoleMicrobatch) -> torch.Tensor:
        """Returns the embeddings of all tokens, ``[tokens, width]``, with the rows of media among them."""
        ids = microbatch["input_ids"][0]
        if rows is None:
            return self._words(ids)
        # An embedding may have no row for the tokens that stand for media.
        words = self._words(ids.index_fill(0, microbatch.media_rows, 0))
        return words.index_copy(0, microbatch.media_rows, rows.to(words.dtype))

    def received(self, rows: torch.Tensor | None, microbatch: RoleMicrobatch) -> torch.Tensor:
        """Returns the hidden states ``[tokens, width]`` of the stage before."""
        del microbatch
        if rows is None:
            raise RuntimeError("an LLM stage that is not the first one has received no rows")
        return rows

    def leaving(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the rows for the next stage, ``[tokens, ...]``, from hidden states ``[tokens, width]``."""
        return hidden

    def _tied(self, structure: Structure) -> list[str]:
        """Returns the weights that the first and the last stage have."""
        return [f"model.{name}" for name in structure.tied if name in dict(self.model.named_parameters())]

    def _words(self, ids: torch.Tensor) -> torch.Tensor:
        words: torch.Tensor = self.model.get_input_embeddings()(ids[None])
        return words[0]


def _in_route_order(parts: Mapping[str, torch.Tensor], microbatch: RoleMicrobatch) -> torch.Tensor:
    """Returns the rows of all media, those of each sample together.

    - `parts`: by kind, the rows of all its media
    """
    counts = {kind: [rows for own, rows in microbatch.media_runs if own == kind] for kind in parts}
    for kind, part in parts.items():
        if sum(counts[kind]) != len(part):
            raise ValueError(
                f"the encoder returned {len(part)} rows of {kind}s, expected {sum(counts[kind])}"
            )
    left = {kind: iter(part.split(counts[kind])) for kind, part in parts.items()}
    return torch.cat([next(left[kind]) for kind, _ in microbatch.media_runs])


def _names(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)
