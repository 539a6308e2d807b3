"""Finds the transformer layers of a module, and cuts the module to its first layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dflop.torch._inputs import config_of


def layer_list(module: torch.nn.Module) -> torch.nn.ModuleList | None:
    """Returns the list of a module's layers: the list of one class with the most parameters."""
    found: tuple[int, torch.nn.ModuleList | None] = (0, None)
    for child in module.modules():
        if isinstance(child, torch.nn.ModuleList) and len({type(layer) for layer in child}) == 1:
            count = sum(parameter.numel() for parameter in child.parameters())
            if count > found[0]:
                found = (count, child)
    return found[1]


def layer_count(module: torch.nn.Module) -> int:
    """Returns the number of layers of a module; a module without a list of layers is one layer."""
    layers = layer_list(module)
    return len(layers) if layers is not None else 1


@contextmanager
def cut_to(module: torch.nn.Module, count: int) -> Iterator[None]:
    """Cuts a module to its first `count` layers temporarily.

    Raises `ValueError` if it has fewer layers, or no list of layers.
    """
    layers = layer_list(module)
    if layers is None or not 1 <= count <= len(layers):
        found = "no list of layers" if layers is None else f"{len(layers)} layers"
        raise ValueError(f"cannot cut {type(module).__name__} to {count} layers: it has {found}")
    places = (
        (parent, name)
        for parent in module.modules()
        for name, child in parent.named_children()
        if child is layers
    )
    owner, name = next(places, (None, ""))
    if owner is None:
        raise ValueError(f"cannot cut {type(module).__name__}: it is a list of layers itself")
    setattr(owner, name, torch.nn.ModuleList(list(layers)[:count]))
    try:
        yield
    finally:
        setattr(owner, name, layers)


@contextmanager
def watched(module: torch.nn.Module) -> Iterator[set[bool]]:
    """Yields a set that contains `True` once a backward pass has recomputed a layer."""
    layers = layer_list(module)
    leaves = (child for child in (layers[0] if layers else module).modules() if not list(child.children()))
    seen: set[bool] = set()
    hooks = [leaf.register_forward_pre_hook(lambda *_: seen.add(is_in_backward())) for leaf in leaves]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def is_in_backward() -> bool:
    """Returns whether a backward pass runs in this thread; forward calls in it are recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


def full_attention_layers(name: str, module: torch.nn.Module, layers: int) -> int:
    """Returns how many of the first `layers` layers have attention over whole images rather than windows."""
    return full_attention_count(name, module, range(layers))


def full_attention_count(name: str, module: torch.nn.Module, numbers: Sequence[int]) -> int:
    """Returns how many layers have attention over whole images rather than windows, at least 1.

    - `numbers`: numbers of the layers in the model
    """
    full = getattr(config_of(name, module), "fullatt_block_indexes", None) if name == "vision" else None
    return len(numbers) if full is None else max(sum(1 for layer in full if layer in numbers), 1)


def widths_of(name: str, module: torch.nn.Module) -> dict[str, int]:
    """Returns those of `hidden`, `heads`, `kv_heads` and `ffn` that the module's configuration has."""
    config = config_of(name, module)
    names = {
        "hidden": ("hidden_size", "d_model", "n_embd"),
        "heads": ("num_attention_heads", "num_heads", "encoder_attention_heads", "n_head"),
        "kv_heads": ("num_key_value_heads",),
        "ffn": ("intermediate_size", "encoder_ffn_dim", "ffn_dim", "n_inner"),
    }
    widths = {key: _count(config, *of) for key, of in names.items() if name == "llm" or key != "kv_heads"}
    ratio = getattr(config, "mlp_ratio", None)
    if name != "llm" and _count(config, "embed_dim") and ratio:
        # In Qwen2-VL `hidden_size` is the width of the LLM.
        widths["hidden"] = _count(config, "embed_dim")
        widths["ffn"] = int(config.embed_dim * ratio)
    if name == "llm":
        widths["kv_heads"] = widths["kv_heads"] or widths["heads"]
    return {key: width for key, width in widths.items() if width}


def _count(config: Any, *names: str) -> int | None:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)
