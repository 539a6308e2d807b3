"""Generates the inputs to measure modules of known kinds with, from their configuration.

- an LLM: one packed row, as loaders deliver it: `input_ids` `[1, tokens]`, or `inputs_embeds`
  `[1, tokens, hidden]` with gradients if it is frozen or takes no ids; `position_ids` start from 0 with every
  sample, and have the shape `[4, 1, tokens]`, the positions in the text first, for models of native
  resolution; `labels` if it takes them
- a vision tower of tiles: `pixel_values` `[items, channels, side, side]`
- a vision tower of native resolution: patches `[tokens, patch_numbers]` and `grid_thw` `[items, 3]`
- an audio tower: `input_features` `[items, mel_bins, frames]`
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dflop.torch._sequences import Sequences

TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
"""Arguments that mark the tokens of media; 0 is text."""
MakeInputs = Callable[[list[int]], Any]
"""Function from the tokens of every sequence or item to the module's arguments: a mapping of keyword
arguments, a tuple of positional ones, or one tensor."""


def default_inputs(
    name: str, module: torch.nn.Module, *, needs_ids: bool = False
) -> tuple[MakeInputs, Sequences]:
    """Returns the function that generates inputs for a module, and the sequences that it takes.

    - `needs_ids`: whether a frozen LLM gets ids too

    Raises `TypeError`, which names the arguments to pass, if the module is of an unknown kind.
    """
    names = _parameter_names(module)
    config = config_of(name, module)
    if name == "llm":
        return _text(module, config, names, needs_ids), Sequences.text()
    if "grid_thw" in names and config is not None:
        return _patches(module, config), Sequences.images(
            int(_first(config, "spatial_merge_size", default=1))
        )
    if "pixel_values" in names and config is not None:
        return _pixels(module, config)
    if "input_features" in names and config is not None:
        return _spectrograms(module, config)
    raise TypeError(
        f"{name}: no inputs are known for {type(module).__name__}; pass make_inputs, a callable from the "
        f"tokens of every item to the module's inputs, and item_tokens (tokens of an item, or 'free' where "
        f"items differ)"
    )


def config_of(name: str, module: torch.nn.Module) -> Any:
    """Returns the configuration of the part `name` of a Hugging Face module; `None` for other modules."""
    config = getattr(module, "config", None)
    part = {"llm": "text_config", "vision": "vision_config", "audio": "audio_config"}[name]
    return getattr(config, part, None) or config


def _text(module: torch.nn.Module, config: Any, names: Sequence[str], needs_ids: bool) -> MakeInputs:
    needs_ids = needs_ids or any(parameter.requires_grad for parameter in module.parameters())
    vocabulary = _first(config, "vocab_size", default=None)
    hidden = _first(config, "hidden_size", "n_embd", "d_model", default=None)
    takes_ids = (
        "input_ids" in names and vocabulary is not None and (needs_ids or "inputs_embeds" not in names)
    )
    if not takes_ids and hidden is None:
        raise TypeError(
            f"llm: no inputs are known for {type(module).__name__}, which has no config of a vocabulary or "
            f"width; pass make_inputs, a callable from the tokens of every sample to the module's inputs"
        )

    ids = _text_ids(getattr(module, "config", None), vocabulary) if vocabulary is not None else None
    # Models hand it on to their LLM, whether they name it or not.
    takes_cache = "use_cache" in names or (hasattr(config, "use_cache") and _takes_others(module))
    rows_of_positions = 4 if _has_positions_in_images(config) else 1

    def make(lengths: list[int]) -> dict[str, Any]:
        device, dtype, tokens = *_place(module), sum(lengths)
        inputs: dict[str, Any] = {}
        if takes_ids and ids is not None:
            inputs["input_ids"] = ids[torch.randint(len(ids), (1, tokens))].to(device)
        else:
            rows = torch.randn(1, tokens, hidden, device=device, dtype=dtype)
            inputs["inputs_embeds" if "inputs_embeds" in names else names[0]] = rows.requires_grad_()
        if "position_ids" in names:
            positions = torch.cat([torch.arange(length, device=device) for length in lengths]).unsqueeze(0)
            inputs["position_ids"] = (
                positions if rows_of_positions == 1 else positions.repeat(rows_of_positions, 1, 1)
            )
        for name in TOKEN_TYPES:
            if name in names and takes_ids:
                inputs[name] = torch.zeros(1, tokens, dtype=torch.long, device=device)
        if takes_cache:
            inputs["use_cache"] = False
        if "labels" in names and ids is not None:
            inputs["labels"] = ids[torch.randint(len(ids), (1, tokens))].to(device)
        return inputs

    return make


def _text_ids(config: Any, vocabulary: int) -> torch.Tensor:
    """Returns the ids of a vocabulary that are no placeholders of media."""
    names = [name for name in dir(config) if name.endswith(("_token_id", "_token_index"))]
    taken = {value for name in names if isinstance(value := getattr(config, name, None), int)}
    ids = torch.arange(vocabulary)
    return ids[~torch.isin(ids, torch.tensor(sorted(taken), dtype=ids.dtype))] if taken else ids


def _has_positions_in_images(config: Any) -> bool:
    """Returns whether positions have rows for layer, row and column of an image."""
    settings = (getattr(config, name, None) for name in ("rope_parameters", "rope_scaling"))
    return any(isinstance(one, Mapping) and "mrope_section" in one for one in settings)


def _pixels(module: torch.nn.Module, config: Any) -> tuple[MakeInputs, Sequences]:
    height, width = _pair(_first(config, "image_size"))
    patch_height, patch_width = _pair(_first(config, "patch_size"))
    channels = _first(config, "num_channels", "in_channels", default=3)

    def make(lengths: list[int]) -> dict[str, Any]:
        device, dtype = _place(module)
        shape = (len(lengths), channels, height, width)
        return {"pixel_values": torch.randn(shape, device=device, dtype=dtype)}

    return make, Sequences.items((height // patch_height) * (width // patch_width))


def _patches(module: torch.nn.Module, config: Any) -> MakeInputs:
    patch = _first(config, "patch_size")
    numbers = _first(config, "in_channels", "in_chans", "num_channels", default=3) * patch * patch
    numbers *= _first(config, "temporal_patch_size", default=1)
    first = _parameter_names(module)[0]

    def make(lengths: list[int]) -> dict[str, Any]:
        device, dtype = _place(module)
        grids = [[1, round(length**0.5), round(length**0.5)] for length in lengths]
        rows = torch.randn(sum(lengths), numbers, device=device, dtype=dtype)
        return {first: rows, "grid_thw": torch.tensor(grids, device=device)}

    return make


def _spectrograms(module: torch.nn.Module, config: Any) -> tuple[MakeInputs, Sequences]:
    tokens = int(_first(config, "max_source_positions"))
    bins = _first(config, "num_mel_bins")

    def make(lengths: list[int]) -> dict[str, Any]:
        device, dtype = _place(module)
        # The second convolution of these towers halves the number of frames.
        return {"input_features": torch.randn(len(lengths), bins, 2 * tokens, device=device, dtype=dtype)}

    return make, Sequences.items(tokens)


def _parameter_names(module: torch.nn.Module) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(module.forward).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def _takes_others(module: torch.nn.Module) -> bool:
    parameters = inspect.signature(module.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def _place(module: torch.nn.Module) -> tuple[torch.device, torch.dtype]:
    """Returns device and floating-point type of a module's first parameter."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            return parameter.device, parameter.dtype
    return torch.device("cpu"), torch.get_default_dtype()


_MISSING = object()


def _first(config: Any, *names: str, default: Any = _MISSING) -> Any:
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    if default is _MISSING:
        raise TypeError(f"the module's config has no `{names[0]}`; pass make_inputs and item_tokens")
    return default


def _pair(size: Any) -> tuple[int, int]:
    return (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))
