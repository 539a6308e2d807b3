"""Stages of models whose encoder sends features of several levels to the LLM, as Qwen3-VL does (DeepStack).

A row for the LLM is ``[1 + levels, width]``: the features of the last layer, then those of earlier ones. The
first LLM layers each add a level to the tokens of media. Between LLM stages, rows have the levels that are
left, for all tokens; between encoder stages, the hidden states of the layers whose features are not made yet.

# Source
Meng et al., "DeepStack: Deeply Stacking Visual Tokens is Surprisingly Simple and Effective for LMMs", 2024,
arXiv:2406.04334.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dflop._description.decoder import innermost
from dflop.schedule import RoleMicrobatch
from dflop.torch._stage_cut import LLM, Passage, Share, Structure
from dflop.torch._stage_modules import EncoderStage, LlmStage
from dflop.torch._tensors import tensors_of


def has_levels(structure: Structure) -> bool:
    """Returns whether the vision encoder of a model makes features of several levels."""
    return bool(_taps(structure))


def _taps(structure: Structure) -> list[int]:
    """Returns the encoder layers with features of their own, ascending."""
    encoder = structure.parts.encoders.get("vision")
    mergers = getattr(encoder.tower, "deepstack_merger_list", None) if encoder is not None else None
    return [] if mergers is None else sorted(encoder.tower.deepstack_visual_indexes)  # type: ignore


def passage_class(structure: Structure, share: Share) -> Callable[[torch.nn.ModuleList, range], Passage]:
    """Returns what creates the passage of a stage."""
    if share.module != "vision":
        return Passage
    return lambda layers, own: _Taps(layers, own, _taps(structure))


def stage(model: Any, structure: Structure, share: Share, passage: Passage) -> torch.nn.Module:
    """Returns a stage."""
    if share.module == LLM:
        return _Llm(model, structure, share, passage)
    if isinstance(passage, _Taps):
        return _Encoder(model, structure, share, passage)
    return _OtherEncoder(model, structure, share, passage)


class _Taps(Passage):
    """Passage that also keeps the hidden states behind some layers.

    Rows between stages are ``[rows, 1 + taps before the stage, width]``.
    """

    def __init__(self, layers: torch.nn.ModuleList, own: range, taps: list[int]) -> None:
        super().__init__(layers, own)
        self.taps = taps
        self.kept: list[torch.Tensor] = []

    def begin(self, rows: torch.Tensor | None) -> None:
        super().begin(rows)
        self.kept = []

    def rows_behind(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        before = [tap for tap in self.taps if tap < self.own.start]
        return rows[:, 1 + before.index(number)] if number in before else rows[:, 0]

    def keep(self, hidden: torch.Tensor) -> torch.Tensor:
        """Keeps hidden states of a layer, in place of making features of them."""
        self.kept.append(hidden.flatten(0, -2))
        return hidden


class _Encoder(EncoderStage):
    def __init__(self, model: Any, structure: Structure, share: Share, passage: _Taps) -> None:
        super().__init__(model, structure, share, passage)
        self._taps = passage
        self.levels_read = 1 + sum(tap < share.layers.start for tap in passage.taps)
        if not share.is_last:
            for merger in structure.parts.encoders["vision"].tower.deepstack_merger_list:  # type: ignore
                merger.forward = passage.keep

    def leaving(self, hidden: torch.Tensor) -> torch.Tensor:
        kept, self._taps.kept = self._taps.kept, []
        return torch.stack([super().leaving(hidden), *kept], 1)

    def encoded(self, output: Any) -> torch.Tensor:
        levels = [torch.cat(list(tensors_of(level))) for level in output.deepstack_features]
        return torch.stack([super().encoded(output), *levels], 1)


class _OtherEncoder(EncoderStage):
    """An encoder of one level beside one of several, whose rows have the same shape."""

    def __init__(self, model: Any, structure: Structure, share: Share, passage: Passage) -> None:
        super().__init__(model, structure, share, passage)
        self._levels = len(_taps(structure))

    def encoded(self, output: Any) -> torch.Tensor:
        rows = super().encoded(output)
        return torch.cat([rows[:, None], rows.new_zeros(len(rows), self._levels, rows.shape[-1])], 1)


class _Llm(LlmStage):
    def __init__(self, model: Any, structure: Structure, share: Share, passage: Passage) -> None:
        super().__init__(model, structure, share, passage)
        self._count, self._own = len(_taps(structure)), share.layers
        left = max(self._count - share.layers.start, 0)
        self.levels_read = 1 + left if left else 0
        self._levels: torch.Tensor | None = None
        self._places: torch.Tensor | None = None
        innermost(model).register_forward_pre_hook(self._add, with_kwargs=True)

    def embedded(self, rows: torch.Tensor | None, microbatch: RoleMicrobatch) -> torch.Tensor:
        self._levels = None if rows is None else rows[:, 1:]
        self._places = microbatch.media_rows
        return super().embedded(None if rows is None else rows[:, 0], microbatch)

    def received(self, rows: torch.Tensor | None, microbatch: RoleMicrobatch) -> torch.Tensor:
        found = super().received(rows, microbatch)
        self._levels = self._places = None
        if self._own.start >= self._count:
            return found
        self._levels, self._places = found[:, 1:], torch.arange(len(found), device=found.device)
        return found[:, 0]

    def leaving(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._own.stop >= self._count:
            return hidden
        left = hidden.new_zeros(len(hidden), self._count - self._own.stop, hidden.shape[-1])
        if self._levels is not None:
            left = left.index_copy(0, self._places, self._levels[:, self._own.stop - self._own.start :])
        return torch.cat([hidden[:, None], left], 1)

    def _add(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Adds the levels to the arguments of the LLM; those of stages before are zeros."""
        del module
        if self._levels is None:
            return args, kwargs
        levels = list(self._levels.unbind(1))
        levels = [torch.zeros_like(levels[0])] * min(self._own.start, self._count) + levels
        tokens = kwargs["inputs_embeds"].shape[1]
        mask = torch.zeros(1, tokens, dtype=torch.bool, device=levels[0].device)
        mask[0, self._places] = True
        order = torch.argsort(self._places)
        ordered = [level[order] for level in levels]
        return args, kwargs | {"visual_pos_masks": mask, "deepstack_visual_embeds": ordered}
