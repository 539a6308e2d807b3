"""Divides a whole model into the modules that are measured: encoders with projectors, LLM with head and loss.

Each runs the model's own code. The LLM is the model on text alone, so that embedding, head and loss count as
the model computes them. An encoder is the model's function of features if that accepts the generated inputs,
else the tower and then its projector.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dflop.torch._inputs import config_of
from dflop.torch._subject import call_module
from dflop.torch._tensors import tensors_of
from dflop.torch.model_parts import EncoderParts, ModelParts

FEATURES = {"vision": "get_image_features", "audio": "get_audio_features"}
Way = Callable[[Any], Any]
"""Runs an encoder on generated inputs."""
MASKS = ("feature_attention_mask", "input_features_mask")
"""Arguments that mark the frames of an audio window; all frames are marked."""


class LlmPart(torch.nn.Module):
    """The LLM of a whole model: the model on text, with its parameters of embedding, LLM and head only."""

    def __init__(self, parts: ModelParts) -> None:
        super().__init__()
        self.llm, self.head, self.config = parts.llm, parts.head, getattr(parts.model, "config", None)
        model = parts.model

        @functools.wraps(model.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return model(*args, **kwargs)

        self.forward = forward


class EncoderPart(torch.nn.Module):
    """An encoder of a whole model with its projector, called in the first way that accepts its inputs.

    - `runs_projector`: whether the projector runs too, or there is none besides the tower
    """

    def __init__(self, kind: str, parts: ModelParts) -> None:
        super().__init__()
        self.kind, encoder = kind, parts.encoders[kind]
        self.tower, self.projectors = encoder.tower, encoder.projectors
        for index, projector in enumerate(encoder.projectors):
            self.add_module(f"projector{index}", projector)
        self.config = config_of(kind, encoder.tower)
        self.runs_projector = True
        ways = [_by_features(kind, parts.model), _by_projectors(encoder), _by_tower(encoder)]
        self._ways = [way for way in ways if way is not None]

    def choose_way(self, inputs: Any) -> None:
        """Chooses how the encoder is called, by running it on its smallest inputs without gradients.

        Raises `TypeError` if no way works.
        """
        failures = []
        while self._ways:
            try:
                with torch.no_grad():
                    self(inputs)
                self.runs_projector = len(self._ways) > 1 or not self.projectors
                return
            except Exception as error:  # noqa: BLE001 the next way may work
                failures.append(f"{type(error).__name__}: {error}")
                self._ways.pop(0)
        name = type(self.tower).__name__
        raise TypeError(
            f"{self.kind}: {name} refuses the inputs ({failures[-1]}); pass make_inputs and item_tokens"
        )

    def forward(self, inputs: Any) -> Any:
        return self._ways[0](inputs)


def _by_features(kind: str, model: torch.nn.Module) -> Way | None:
    """Returns a call of the model's function of features, with the inputs of its tower."""
    owners = (model, getattr(model, "model", None), getattr(model, "base_model", None))
    functions = (getattr(owner, FEATURES[kind], None) for owner in owners)
    found = [function for function in functions if callable(function)]
    if not found:
        return None
    # A model may pass all arguments on to the model inside, which names them.
    names = next(filter(None, map(_names, found)), ["pixel_values" if kind == "vision" else "input_features"])

    def call(inputs: Any) -> Any:
        mapped = feature_arguments(kind, inputs, names[0], names)
        kept = {name: one for name, one in mapped.items() if name not in MASKS or name in names}
        return features(found[0](**kept))

    return call


def feature_arguments(kind: str, inputs: Any, first: str, names: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the arguments of a function of features from the inputs of its tower.

    - `first`: name of the argument with the media
    - `names`: arguments that keep their names; others are those of an image
    """
    media, *others = inputs
    mapped = {first: inputs[media]}
    mapped.update((name if name in names else f"image_{name}", inputs[name]) for name in others)
    if kind == "audio":
        frames = inputs[media]
        ones = torch.ones(len(frames), frames.shape[-1], dtype=torch.long, device=frames.device)
        mapped.update((name, ones) for name in MASKS)
    return mapped


def _by_projectors(encoder: EncoderParts) -> Way | None:
    if not encoder.projectors:
        return None

    def call(inputs: Any) -> Any:
        output = call_module(encoder.tower, inputs)
        rows = getattr(output, "last_hidden_state", None)
        rows = next(tensors_of(output)) if rows is None else rows
        for projector in encoder.projectors:
            rows = projector(rows)
        return rows

    return call


def _by_tower(encoder: EncoderParts) -> Way:
    return lambda inputs: call_module(encoder.tower, inputs)


def features(output: Any) -> Any:
    """Returns what goes into the LLM: one tensor, joined as the model joins the items'."""
    pooled = getattr(output, "pooler_output", None)
    rows = output if pooled is None else pooled
    tensors = list(tensors_of(rows))
    return tensors[0] if len(tensors) == 1 else torch.cat([one.flatten(0, -2) for one in tensors])


def _names(function: Callable[..., Any]) -> list[str]:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind not in kinds]
