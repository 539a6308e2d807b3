"""Describes the decoder: parameters, FLOPs by tokens and pairs, experts, and the reach of attention."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dflop._description import counting, fits, parts
from dflop._description.encoder import checked
from dflop._description.shape_mode import made_up_routes, shapes_only
from dflop.errors import ModelError

# Sample lengths that counts are fitted on and checked with: multiples of the chunks of linear attention.
LENGTHS = (256, 512, 768, 1280)
# Longer ones, where layers treat the first chunk of a sample otherwise than the next: its part vanishes.
LONG_LENGTHS = (1024, 2048, 3072)
# Longest sample whose attention masks are made, to see the windows in them.
MASK_TOKENS_MAX = 8448
_WINDOWS = ("sliding_window", "attention_chunk_size", "sliding_window_size", "chunk_size")
_EXPERTS_PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "top_k_experts",
    "moe_k",
    "top_k",
)


@dataclass(frozen=True)
class Decoder:
    """The decoder's parts in the model.

    Attributes:
        module: runs embeddings through the layers.
        path: of the module.
        layers: the layers.
        config: of the decoder.
    """

    module: Any
    path: str
    layers: parts.Layers
    config: Any


def find(model: Any) -> Decoder:
    """Finds the decoder.

    Raises:
        ModelError: the model has none with a list of layers.
    """
    module = innermost(model)
    path = next((path for path, one in model.named_modules() if one is module), "")
    layers = parts.find_layers(module, within=path)
    if layers is None:
        raise ModelError(f"`{path or type(model).__name__}` has no list of layers: it is no decoder")
    config = getattr(module, "config", model.config)
    return Decoder(module, path, layers, getattr(config, "text_config", config))


def innermost(model: Any) -> Any:
    """Returns the decoder, without a head that it may have."""
    module = model.get_decoder()
    while hasattr(module, "get_decoder") and module.get_decoder() is not module:
        module = module.get_decoder()
    if hasattr(module, "lm_head") and hasattr(module, "model"):
        return module.model
    return module


def width(model: Any) -> int:
    """Returns the width of the LLM's embeddings."""
    return int(model.get_input_embeddings().weight.shape[-1])


def measure(model: Any, decoder: Decoder, encoders: Sequence[str] = ()) -> dict[str, Any]:
    """Counts the decoder on samples of several lengths.

    Args:
        model: the whole model.
        decoder: the decoder's parts.
        encoders: paths of encoders inside the decoder's module, which texts do not reach.

    Raises:
        ModelError: it does not run on shapes alone, or counts follow no polynomial.
    """
    try:
        return _measured_at_lengths(model, decoder, encoders)
    except _NotRunError:
        # Experts that run one by one, on tokens that are routed to them.
        with made_up_routes(), contextlib.suppress(ModelError):
            return _measured_at_lengths(model, decoder, encoders)
        raise


class _NotRunError(ModelError):
    """The decoder does not run on shapes alone."""


def _measured_at_lengths(model: Any, decoder: Decoder, encoders: Sequence[str]) -> dict[str, Any]:
    lengths = _lengths(decoder.config)
    if lengths != LENGTHS:
        return _measured(model, decoder, lengths, encoders)
    try:
        return _measured(model, decoder, LENGTHS, encoders)
    except fits.FitError:
        return _measured(model, decoder, LONG_LENGTHS, encoders)


def _measured(
    model: Any, decoder: Decoder, lengths: Sequence[int], encoders: Sequence[str]
) -> dict[str, Any]:
    hidden = width(model)
    run = _runnable(decoder, hidden, lengths[0], encoders)
    units = [fits.Units(1, length) for length in lengths]
    experts = [parts.find_experts(layer) for layer in decoder.layers.modules]
    watched = [*decoder.layers.modules, *(one.module for one in experts if one is not None)]
    counts = []
    for length in lengths:
        states = torch.empty((1, length, hidden), device="meta", requires_grad=True)
        counts.append(counting.count(lambda states=states: run(states), watched, model.parameters()))  # type: ignore[misc]
    patterns = _patterns(decoder, run, hidden)
    layers = []
    for number, pattern in enumerate(patterns):
        layer = _layer(decoder, units, counts, number, pattern)
        one = experts[number]
        if one is not None:
            place = len(patterns) + sum(before is not None for before in experts[:number])
            layer |= _routed(decoder, units, counts, number, place, one, layer)
        layers.append(layer)
    outside = {}
    for way in ("forward", "backward"):
        values = [
            getattr(one.total, way) - sum(getattr(one.modules[at], way) for at in range(len(patterns)))
            for one in counts
        ]
        name = f"{decoder.path or 'decoder'}, outside the layers"
        wholes = [getattr(one.total, way) for one in counts]
        found = fits.best(units, values, fits.outside_hypotheses(None), wholes)
        outside[f"flops_{way}"] = checked(name, way, values, found, False, units).coefficients
    return {
        "layers_path": decoder.layers.path,
        "unit": "tokens",
        "layer_runs": [
            {"first": first, "count": count, **layer} for first, count, layer in parts.runs_of_equal(layers)
        ],
        "outside_layers": outside,
        "embedding": {"width": hidden, "parameters": int(model.get_input_embeddings().weight.numel())},
        "head": _head(model, decoder, hidden),
    }


def _lengths(config: Any) -> tuple[int, ...]:
    """Returns sample lengths that the decoder has positions for."""
    positions = getattr(config, "max_position_embeddings", None)
    longest = positions if isinstance(positions, int) and positions > 0 else LENGTHS[-1]
    parts_count = max(1, -(-LENGTHS[-1] // longest))
    return tuple(max(at + 1, length // parts_count) for at, length in enumerate(LENGTHS))


def _runnable(decoder: Decoder, hidden: int, tokens: int, encoders: Sequence[str]) -> Callable[[Any], Any]:
    """Returns a function that runs the decoder on embeddings, with arguments that it accepts."""
    problems = []
    for names in (
        ("inputs_embeds",),
        ("inputs_embeds", "attention_mask"),
        ("inputs_embeds", "attention_mask", "position_ids"),
        ("input_ids",),
        ("input_ids", "attention_mask", "position_ids"),
    ):

        def run(states: Any, names: Sequence[str] = names) -> Any:
            length = states.shape[1]
            made = {
                # A copy, which the decoder may change.
                "inputs_embeds": states.clone(),
                "input_ids": torch.ones((1, length), dtype=torch.long),
                "attention_mask": torch.ones((1, length), dtype=torch.long),
                "position_ids": torch.arange(length)[None],
            }
            output = decoder.module(use_cache=False, **{name: made[name] for name in names})
            return output[0] if isinstance(output, tuple) else output.last_hidden_state

        try:
            with counting.executed(decoder.module) as ran, shapes_only(), torch.no_grad():
                run(torch.empty((1, tokens, hidden), device="meta"))
            _check_all_run(decoder, list(ran), encoders)
            return run
        except ModelError:
            raise
        except Exception as error:  # noqa: BLE001  A model may raise anything.
            last = next(reversed(list(ran)), "") or type(decoder.module).__name__
            problems.append(f"in `{last}`: {type(error).__name__}: {error}")
    raise _NotRunError(f"the decoder `{decoder.path}` does not run on shapes alone, {problems[0]}")


def _check_all_run(decoder: Decoder, ran: Sequence[str], encoders: Sequence[str]) -> None:
    """Checks that the decoder has no parts that only media reach.

    Raises:
        ModelError: one does not run on texts; the message names it.
    """
    total = parts.parameter_count([decoder.module])
    for name, child in decoder.module.named_children():
        has_run = any(path == name or path.startswith(f"{name}.") for path in ran)
        path = f"{decoder.path}.{name}".lstrip(".")
        if has_run or isinstance(child, torch.nn.Embedding) or path in encoders:
            continue
        if parts.parameter_count([child]) > total * fits.ERROR_MAX:
            raise ModelError(
                f"`{path}` does not run on texts, and no function such as `get_image_features` runs it"
            )


def _layer(
    decoder: Decoder,
    units: Sequence[fits.Units],
    counts: Sequence[counting.Counted],
    number: int,
    pattern: dict[str, Any],
) -> dict[str, Any]:
    module, name = decoder.layers.modules[number], f"{decoder.layers.path}.{number}"
    described: dict[str, Any] = {"parameters": parts.parameter_count([module])}
    for way in ("forward", "backward"):
        values = [getattr(one.modules[number], way) for one in counts]
        hypotheses = iter([("none", (fits.TOKENS,)), ("full", (fits.TOKENS, fits.FULL_PAIRS))])
        found = checked(name, way, values, fits.best(units, values, hypotheses), False, units)
        described[f"flops_{way}"] = found.coefficients
    has_pairs = bool(described["flops_forward"].get("per_pair"))
    shapes = counts[0].shapes[number]
    described["message_width"] = shapes[0][-1] if shapes else None
    described["attention"] = pattern if has_pairs else {"pattern": "linear", "window": None}
    return described


def _routed(
    decoder: Decoder,
    units: Sequence[fits.Units],
    counts: Sequence[counting.Counted],
    number: int,
    place: int,
    experts: parts.Experts,
    layer: dict[str, Any],
) -> dict[str, Any]:
    """Describes a layer's experts, with the FLOPs of those that a token is routed to.

    Some models run all experts on all tokens, which their counts then contain.
    """
    name = f"{decoder.layers.path}.{number}"
    per_token = _experts_per_token(decoder.config, name, experts.count)
    described: dict[str, Any] = {
        "experts": {
            "count": experts.count,
            "parameters_each": experts.parameters_each,
            "per_token": per_token,
        }
    }
    forward = counts[0].modules[place].forward
    ran = round(forward / (2 * experts.weights_each * units[0].tokens))
    if ran not in (per_token, experts.count):
        raise ModelError(
            f"a token goes through {ran} experts of `{name}`, and its configuration has {per_token} per token"
        )
    idle = 2 * experts.weights_each * (ran - per_token)
    for way, passes in (("forward", 1), ("backward", 2)):
        terms = layer[f"flops_{way}"]
        described[f"flops_{way}"] = terms | {"per_token": terms["per_token"] - passes * idle}
    return described


def _experts_per_token(config: Any, name: str, experts: int) -> int:
    for field in _EXPERTS_PER_TOKEN:
        found = getattr(config, field, None)
        if isinstance(found, int) and 0 < found <= experts:
            return found
    raise ModelError(
        f"`{name}` has {experts} experts, and its configuration has none of {', '.join(_EXPERTS_PER_TOKEN)}"
    )


def _head(model: Any, decoder: Decoder, hidden: int) -> dict[str, Any] | None:
    """Describes what runs on the decoder's output: the output embeddings, and layers before them."""
    last = model.get_output_embeddings()
    if last is None:
        return None
    modules = dict(model.named_modules())
    paths = head_paths(model, decoder)
    states = torch.empty((1, LENGTHS[0], hidden), device="meta", requires_grad=True)
    is_last = [modules[path] for path in paths] == [last]
    found = None if is_last else _whole_run(model)
    if found is None:
        flops = counting.count(lambda: last(states), [], model.parameters()).total
    else:
        counted = counting.count(lambda: found[0](states), [decoder.module], model.parameters())
        inside = counted.modules[0]
        flops = counting.Flops(
            counted.total.forward - inside.forward, counted.total.backward - inside.backward
        )
    embedding = model.get_input_embeddings().weight
    own = {id(one): one.numel() for path in paths for one in modules[path].parameters()}
    is_tied = own.pop(id(embedding), None) is not None
    return {
        "parameters": sum(own.values()),
        "is_tied": is_tied,
        "vocabulary": int(last.weight.shape[0]),
        "flops_forward": {"per_token": flops.forward // LENGTHS[0]},
        "flops_backward": {"per_token": flops.backward // LENGTHS[0]},
    }


def head_paths(model: Any, decoder: Decoder) -> list[str]:
    """Returns the paths of the modules that run beside the decoder on embeddings of texts."""
    last = next(path for path, one in model.named_modules() if one is model.get_output_embeddings())
    whole = _whole_run(model)
    if whole is None:
        return [last]  # The decoder alone is what has to run.
    ran = whole[1]
    found = [
        path
        for path in parts.roots_beside(decoder.path, ran)
        if not path.startswith(f"{decoder.path}.")
        and (path == last or last.startswith(f"{path}.") or path in _after(decoder.path, ran))
    ]
    return found or [last]


def _after(decoder: str, ran: list[str]) -> set[str]:
    """Returns the paths among those that ran, in order, that begin after the decoder has."""
    at = ran.index(decoder) if decoder in ran else 0
    return set(ran[at:])


def _whole_run(model: Any) -> tuple[Callable[[Any], Any], list[str]] | None:
    """Returns a function from `LENGTHS[0]` embeddings to logits, and the modules that it runs, in order.

    Some models take a mask that they make themselves for one that depends on weights.

    Returns:
        tuple | None: nothing if the model runs on no embeddings.
    """
    mask = torch.ones((1, LENGTHS[0]), dtype=torch.long)
    given: dict[str, Any]
    for given in ({}, {"attention_mask": mask}):

        def run(states: Any, given: dict[str, Any] = given) -> Any:
            # A copy, which the decoder may change.
            return model(inputs_embeds=states.clone(), use_cache=False, return_dict=True, **given).logits

        # A model may raise anything.
        with contextlib.suppress(Exception), counting.executed(model) as ran, shapes_only(), torch.no_grad():
            run(torch.empty((1, LENGTHS[0], width(model)), device="meta"))
            return run, list(ran)
    return None


def _patterns(decoder: Decoder, run: Callable[[Any], Any], hidden: int) -> list[dict[str, Any]]:
    """Returns what the attention of each layer reaches, by the pairs that its mask leaves."""
    windows = sorted(set(_windows(decoder.config)))
    seen = [window for window in windows if window + 256 <= MASK_TOKENS_MAX]
    length = max([_lengths(decoder.config)[1], *(window + 256 for window in seen)])
    pairs: dict[int, int | None] = {}
    with contextlib.ExitStack() as hooks:
        for number, layer in enumerate(decoder.layers.modules):

            def before(_: Any, args: Any, kwargs: Any, number: int = number) -> None:
                pairs[number] = _mask_pairs(args, kwargs, length)

            hooks.callback(layer.register_forward_pre_hook(before, with_kwargs=True).remove)
        with shapes_only(), torch.no_grad():
            run(torch.empty((1, length, hidden), device="meta"))
    return [
        _pattern(pairs.get(number), length, windows, _declared(decoder, number))
        for number in range(len(decoder.layers.modules))
    ]


def _pattern(pairs: int | None, length: int, windows: Sequence[int], declared: str) -> dict[str, Any]:
    if pairs is None:
        # Without a mask the layer's kernel is causal by itself.
        return {"pattern": "causal", "window": None}
    if pairs == length * length:
        return {"pattern": "full", "window": None}
    for window in windows:
        rest = length % window
        if window < length and pairs == window * length - window * (window - 1) // 2:
            return {"pattern": "sliding", "window": window}
        if window < length and pairs == length // window * _causal(window) + _causal(rest):
            return {"pattern": "chunk", "window": window}
    if windows and windows[-1] >= length and ("sliding" in declared or "chunk" in declared):
        return {"pattern": "sliding" if "sliding" in declared else "chunk", "window": windows[-1]}
    if pairs == _causal(length):
        return {"pattern": "causal", "window": None}
    return {"pattern": "other", "window": None, "pairs": pairs, "tokens": length}


def _causal(tokens: int) -> int:
    return tokens * (tokens + 1) // 2


def _mask_pairs(args: Any, kwargs: Any, length: int) -> int | None:
    """Counts the pairs that a layer's mask leaves; nothing without a mask whose values are known."""
    named = kwargs.get("attention_mask")
    masks = (
        [named] if isinstance(named, torch.Tensor) else [one for one in args if isinstance(one, torch.Tensor)]
    )
    for mask in masks:
        if mask.is_meta or mask.dim() != 4 or mask.shape[-1] != length or mask.shape[-2] != length:
            continue
        one = mask[0, 0]
        return int((one if one.dtype == torch.bool else one == 0).sum())
    return None


def _windows(config: Any) -> Iterator[int]:
    for field in _WINDOWS:
        found = getattr(config, field, None)
        if isinstance(found, int) and found > 1:
            yield found


def _declared(decoder: Decoder, number: int) -> str:
    types = getattr(decoder.config, "layer_types", None)
    return str(types[number]) if types and number < len(types) else ""
