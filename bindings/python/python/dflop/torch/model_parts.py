"""Finds the parts of a whole model: encoders with their projectors, the LLM, its head.

A whole model, as `transformers` builds it, has one module that owns the encoders and the LLM side by side.
Parts are found by the attribute names that `transformers` uses, at any depth, and through the wrappers of
PEFT and of data parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

TOWERS = {
    "vision": ("visual", "vision_tower", "vision_model", "vision_encoder", "image_tower", "image_encoder"),
    "audio": ("audio_tower", "audio_encoder", "audio_model", "speech_encoder", "encoder"),
}
"""Attribute names of encoders by kind; ``encoder`` alone is one of audio."""
LLMS = ("language_model", "llm", "language_decoder", "text_model")
"""Attribute names of an LLM beside encoders; a ``text_model`` without LM head is an encoder of texts."""
HEADS = ("lm_head", "output", "score")
"""Attribute names of an LM head, for models without ``get_output_embeddings``."""
PROJECTORS = ("projector", "projection", "connector", "aligner", "merger", "adapter", "qformer", "embed_")
"""Words in attribute names of the modules between encoder and LLM."""
WORDS = {"vision": ("vision", "visual", "image", "video"), "audio": ("audio", "speech")}
"""Words in attribute names of a projector that belongs to the encoder of one kind."""


@dataclass(frozen=True)
class EncoderParts:
    """An encoder of a whole model.

    - `tower`: the encoder; its projector too if it is one of the encoder's own modules, as in Qwen-VL
    - `projectors`: modules between the encoder and the LLM
    """

    tower: torch.nn.Module
    projectors: tuple[torch.nn.Module, ...]


@dataclass(frozen=True)
class ModelParts:
    """The parts of a whole model.

    - `model`: the model, without the wrappers of PEFT and of data parallelism
    - `llm`: the LLM, with its embedding; `head`: its LM head, if that is a module of its own
    - `encoders`: by kind, ``vision`` and ``audio``
    """

    model: torch.nn.Module
    llm: torch.nn.Module
    head: torch.nn.Module | None
    encoders: Mapping[str, EncoderParts]


def find_parts(model: torch.nn.Module) -> ModelParts | None:
    """Returns the parts of a whole model; `None` for a module without encoders, such as an LLM alone."""
    inner = unwrapped(model)
    head = head_of(inner)
    names_of_llms = LLMS if head is not None else LLMS[:-1]
    for owner in inner.modules():
        children = dict(owner.named_children())
        llm = next((children[name] for name in names_of_llms if name in children), None)
        found = {
            kind: next((children[name] for name in names if name in children), None)
            for kind, names in TOWERS.items()
        }
        towers = {kind: tower for kind, tower in found.items() if tower is not None and tower is not llm}
        if llm is not None and towers:
            encoders = {
                kind: EncoderParts(tower, _projectors(kind, children, [llm, *towers.values()]))
                for kind, tower in towers.items()
            }
            return ModelParts(inner, llm, head, encoders)
    return None


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the model inside the wrappers of PEFT and of data parallelism."""
    base: Any = getattr(model, "get_base_model", None)
    if callable(base):
        return unwrapped(base())
    is_wrapper = isinstance(model, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel))
    if is_wrapper:
        inner: Any = model.module
        return unwrapped(inner)
    return model


def head_of(model: torch.nn.Module) -> torch.nn.Module | None:
    """Returns the LM head of a model, or `None`."""
    output: Any = getattr(model, "get_output_embeddings", lambda: None)()
    named = (getattr(model, name, None) for name in HEADS)
    return next((head for head in (output, *named) if isinstance(head, torch.nn.Module)), None)


def _projectors(
    kind: str, children: Mapping[str, torch.nn.Module], others: list[torch.nn.Module]
) -> tuple[torch.nn.Module, ...]:
    """Returns the projectors of one encoder, in the order in which the model has them."""
    foreign = [word for other, words in WORDS.items() if other != kind for word in words]
    return tuple(
        child
        for name, child in children.items()
        if any(word in name for word in PROJECTORS)
        and not any(word in name for word in foreign)
        and not any(child is other for other in others)
    )
