"""Describes an encoder: parameters, FLOPs by unit, widths, and how many LLM tokens media become."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dflop._description import checkpoint, counting, fits, media, parts
from dflop._description.shape_mode import shapes_only
from dflop._measured_tokens import sample_rate_hz
from dflop.errors import ModelError

# Images and clips that counts are fitted on and checked with: width and height in pixels; seconds.
IMAGES = ((448, 448), (672, 448), (336, 616), (896, 700), (1008, 1008), (1400, 640))
CLIPS = (2.0, 5.0, 9.4, 14.0, 22.5, 30.0, 41.0)


@dataclass(frozen=True)
class Run:
    """A run of an encoder on one medium."""

    units: fits.Units
    counted: counting.Counted
    tokens: int


@dataclass(frozen=True)
class Encoder:
    """An encoder's parts in the model.

    Attributes:
        medium: ``image`` or ``audio``.
        layers: the layers.
        connectors: paths of the modules that project into the LLM.
        ran: paths of all modules that run, in order.
    """

    medium: str
    layers: parts.Layers
    connectors: list[str]
    ran: list[str]


def find(model: Any, processor: Any, medium: str, function: Callable[..., Any], width: int) -> Encoder:
    """Finds an encoder by running it.

    Raises:
        ModelError: it does not run on shapes alone, or has no list of layers.
    """
    inputs = features_inputs(processor, medium, IMAGES[0] if medium == "image" else CLIPS[1], function)
    try:
        with counting.executed(model) as ran, shapes_only(), torch.no_grad():
            function(**inputs)
    except Exception as error:
        last = next(reversed(list(ran)), "the model")
        problem = f"{type(error).__name__}: {error}"
        raise ModelError(
            f"`{function.__name__}` does not run on shapes alone, in `{last}`: {problem}"
        ) from error
    layers = parts.find_layers(
        model,
        ran=list(ran),
        work=lambda lists: counting.forward_flops(lambda: function(**inputs), [one.modules for one in lists]),
    )
    if layers is None:
        layers = parts.whole_tower(model, list(ran), _holders(model))
    if layers is None:
        raise ModelError(f"`{function.__name__}` runs no modules with parameters")
    connectors = parts.find_connectors(model, layers, ran, width)
    return Encoder(medium, layers, connectors, [path for path in ran if path])


def as_whole(model: Any, encoder: Encoder) -> Encoder:
    """Returns an encoder whose tower is one layer, for a list of layers that is not all of it."""
    layers = parts.whole_tower(model, encoder.ran, _holders(model)) or encoder.layers
    connectors = [path for path in encoder.connectors if not f"{path}.".startswith(f"{layers.path}.")]
    return dataclasses.replace(encoder, layers=layers, connectors=connectors)


def _holders(model: Any) -> list[str]:
    """Returns the paths of the modules that hold the decoder."""
    inside = model.get_decoder()
    path = next((path for path, one in model.named_modules() if one is inside), "")
    return [".".join(path.split(".")[:end]) for end in range(path.count(".") + 2)]


def features_inputs(processor: Any, medium: str, size: Any, function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the arguments of a features function for an image of a size or a clip of some seconds."""
    if medium == "audio":
        value = media.clip(int(size * sample_rate_hz(processor)))
    else:
        value = media.image(*size)
    return media.features_inputs(processor, medium, value, function)


class Work:
    """Counts the work of media in an encoder, without its layers.

    Args:
        processor: of the checkpoint.
        function: from media to LLM embeddings.
        encoder: the encoder's parts.
        described: what `measure` returned.
        runs: runs of the layers for a medium at most.
        longest: longest sequence that the counts were fitted on.
    """

    def __init__(
        self,
        processor: Any,
        function: Callable[..., Any],
        encoder: Encoder,
        described: dict[str, Any],
        runs: int,
        longest: int,
    ) -> None:
        self._processor, self._function, self._encoder = processor, function, encoder
        self.is_fixed, self._width, self._runs = described["unit"] == "items", described["output_width"], runs
        self._item_tokens = described["tokens_per_item"]
        reaches = [run["attention"] for run in described["layer_runs"]]
        self.windows = next((one for one in reaches if one["window"]), None)
        parts_described = (described["outside_layers"], *described["connectors"])
        self.chunk_tokens = next(
            (part["chunk_tokens"] for part in parts_described if "chunk_tokens" in part), None
        )
        # A chunk for the whole of the longest sequence stands for counts that are the same for all.
        self._length_max = longest if self.chunk_tokens == longest else None

    def units(self, size: Any) -> fits.Units:
        """Returns the units of an image of a size or a clip of some seconds."""
        inputs = features_inputs(self._processor, self._encoder.medium, size, self._function)
        return self._inputs_units(inputs)

    def is_known(self, units: fits.Units) -> bool:
        """Whether the counts hold for the units: not for sequences longer than a chunk for whole ones."""
        return self._length_max is None or units.longest <= self._length_max

    def row(self, units: fits.Units) -> list[int]:
        """Returns items, encoder tokens, and pairs without and with windows."""
        pairs = units.full_pairs
        if self.windows is None:
            within = pairs
        elif self.windows["pattern"] == "window":
            within = units.square_pairs(self.windows["window"])
        else:
            within = units.chunk_pairs(self.windows["window"])
        return [units.all_items, units.tokens, pairs, within]

    def clip_row(self, samples: int) -> list[int]:
        """Returns the row of a clip with so many samples."""
        clip = media.clip(samples)
        inputs = media.features_inputs(self._processor, "audio", clip, self._function)
        return self.row(self._inputs_units(inputs))

    def _inputs_units(self, inputs: dict[str, Any]) -> fits.Units:
        reached: list[tuple[int, ...]] = []

        def stop(_: Any, args: Any, kwargs: Any) -> None:
            states = [one for one in (*args, *kwargs.values()) if counting.is_states(one)]
            reached.extend(tuple(one.shape) for one in states[:1])
            if reached and self._runs == 1:
                raise _Reached

        handle = self._encoder.layers.modules[0].register_forward_pre_hook(stop, with_kwargs=True)
        try:
            with shapes_only(), torch.no_grad():
                output = self._function(**inputs)
        except _Reached:
            output = None
        finally:
            handle.remove()
        if reached:
            return _units(reached, inputs)
        units = _tower_units(feature_tokens(output, self._width), inputs)
        return units if self._item_tokens is None else _padded(units, self._item_tokens)


class _Reached(Exception):
    """Ends a run at the first layer."""


def feature_tokens(output: Any, width: int) -> int:
    """Returns the number of LLM embeddings in what a features function returns."""
    found = [one for one in counting.tensors(_features(output)) if one.dim() and one.shape[-1] == width]
    return sum(one.numel() // width for one in found)


def measure(
    model: Any, processor: Any, function: Callable[..., Any], encoder: Encoder, width: int
) -> tuple[dict[str, Any], int, int]:
    """Counts an encoder on media of several sizes.

    Returns:
        dict: the description without token rule.
        int: most runs of the layers for a medium.
        int: longest sequence.

    Raises:
        ModelError: counts follow no polynomial; the message names the module.
    """
    modules = dict(model.named_modules())
    watched = [*encoder.layers.modules, *(modules[path] for path in encoder.connectors)]
    runs = []
    for size in IMAGES if encoder.medium == "image" else CLIPS:
        inputs = features_inputs(processor, encoder.medium, size, function)
        runs.append(_run(function, inputs, watched, model, width))
    runs = _with_padding(runs)
    layers = len(encoder.layers.modules)
    is_fixed = all(run.units.is_uniform and run.units.length == runs[0].units.length for run in runs)
    fitted: dict[tuple[int, ...], fits.Polynomial] = {}
    described = [
        _layer(encoder, runs, number, is_fixed, _declared(model), fitted) for number in range(layers)
    ]
    window = next((layer["attention"]["window"] for layer in described if layer["attention"]["window"]), None)
    padded = {layer.pop("chunk_tokens") for layer in described if "chunk_tokens" in layer}
    if len(padded) > 1:
        lengths = " and ".join(map(str, sorted(padded)))
        raise fits.FitError(
            f"`{encoder.layers.path}` pad to chunks with {lengths} tokens: chunks of one length are supported; "
            "profile the model with `dflop.torch.profile`"
        )
    # Chunks of all parts have one length.
    chunk = next(iter(padded), None)
    connectors = []
    for at, path in enumerate(encoder.connectors):
        part = _part(runs, [layers + at], path, is_fixed, window, chunk)
        chunk = chunk or part.get("chunk_tokens")
        connectors.append(part | {"path": path, "parameters": parts.parameter_count([modules[path]])})
    name = f"{encoder.layers.path}, outside the layers"
    outside = _part(runs, None, name, is_fixed, window, chunk)
    if padded:
        outside["chunk_tokens"] = chunk
    described_encoder = {
        "layers_path": encoder.layers.path,
        "unit": "items" if is_fixed else "tokens",
        "tokens_per_item": runs[0].units.length if is_fixed else None,
        "layer_runs": [
            {"first": first, "count": count, **layer}
            for first, count, layer in parts.runs_of_equal(described)
        ],
        "outside_layers": outside,
        "connectors": connectors,
        "output_width": width,
        "feature_tokens": [[run.units.all_items, run.units.tokens, run.tokens] for run in runs],
    }
    longest = max(run.units.longest for run in runs)
    return described_encoder, max(len(run.counted.shapes[0]) for run in runs), longest


def _run(
    function: Callable[..., Any], inputs: dict[str, Any], watched: Sequence[Any], model: Any, width: int
) -> Run:
    counted = counting.count(lambda: _features(function(**inputs)), watched, model.parameters())
    tokens, shapes = feature_tokens(counted.output, width), counted.shapes[0]
    return Run(_units(shapes, inputs) if shapes else _tower_units(tokens, inputs), counted, tokens)


def _tower_units(tokens: int, inputs: dict[str, Any]) -> fits.Units:
    """Returns the units of a tower without a list of layers, which begins at the medium, by its embeddings."""
    # Several frames of a patch make one embedding in some towers.
    items = max(1, min(tokens, _item_count(inputs)))
    return fits.Units(items, tokens // items, _grids(inputs))


def _with_padding(runs: list[Run]) -> list[Run]:
    """Replaces units by the embeddings of a tower where it does the same work for all: it pads its media."""
    has_units = any(run.counted.shapes[0] for run in runs)
    works = {(run.counted.total.forward, run.units.items) for run in runs}
    if has_units or len(works) > 1:
        return runs
    longest = max(run.units.length for run in runs)
    return [dataclasses.replace(run, units=_padded(run.units, longest)) for run in runs]


def _padded(units: fits.Units, length: int) -> fits.Units:
    return dataclasses.replace(units, length=length)


def _units(shapes: Sequence[tuple[int, ...]], inputs: dict[str, Any]) -> fits.Units:
    """Returns the units of the hidden states that the first layer receives in each of its runs."""
    first, *more = [_sequences(shape) for shape in shapes]
    return fits.Units(*first, _grids(inputs), tuple(more))


def _sequences(shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns the number of sequences in hidden states, and their length."""
    if len(shape) == 4:
        return shape[0], shape[1] * shape[2]
    return (shape[0], shape[1]) if len(shape) == 3 else (1, shape[0])


def _item_count(inputs: dict[str, Any]) -> int:
    """Returns the number of images or windows of equal size in the arguments of a features function."""
    floating = counting.tensors(inputs)
    if not floating:
        return 1
    largest = max(floating, key=lambda one: one.numel())
    return int(largest.shape[:-3].numel()) if largest.dim() >= 4 else int(largest.shape[0])


def _grids(inputs: dict[str, Any]) -> tuple[tuple[int, int, int], ...]:
    for name, value in inputs.items():
        if name.endswith("grid_thw"):
            return tuple((int(t), int(h), int(w)) for t, h, w in value.tolist())
        if name.endswith(("grid_hw", "spatial_shapes", "target_sizes")):
            return tuple((1, int(h), int(w)) for h, w in value.tolist())
    return ()


def _features(output: Any) -> Any:
    """Returns the embeddings for the LLM among the outputs, those of earlier layers included."""
    if getattr(output, "pooler_output", None) is None:
        states = getattr(output, "last_hidden_state", None)
        return output if states is None else states
    deep = [value for name, value in output.items() if "deepstack" in name]
    return [output.pooler_output, *deep]


def _declared(model: Any) -> set[int]:
    """Returns the whole numbers in the configurations, among which is the length of chunks."""
    configs = [model.config, *checkpoint.sub_configs(model.config)]
    return {one for config in configs for one in vars(config).values() if type(one) is int}


def _layer(
    encoder: Encoder,
    runs: Sequence[Run],
    number: int,
    is_fixed: bool,
    declared: Collection[int],
    fitted: dict[tuple[int, ...], fits.Polynomial],
) -> dict[str, Any]:
    """Describes a layer; equal counts are fitted once."""
    name = f"{encoder.layers.path}.{number}"
    module = encoder.layers.modules[number]
    shapes = runs[0].counted.shapes[number]
    units = [run.units for run in runs]
    counts = [run.counted.modules[number] for run in runs]
    described: dict[str, Any] = {
        "parameters": parts.parameter_count([module]),
        "message_width": shapes[0][-1] if shapes else None,
    }
    pattern, window = "none", None
    for way in ("forward", "backward"):
        values = tuple(getattr(one, way) for one in counts)
        if values not in fitted:
            hypotheses = (
                iter([("full", (fits.ITEMS,))]) if is_fixed else fits.layer_hypotheses(units, declared)
            )
            best = fits.best(units, values, hypotheses)
            if not is_fixed and (best is None or best.error > fits.ERROR_MAX):
                best = fits.best(units, values, fits.constant_hypotheses(units)) or best
            fitted[values] = checked(name, way, values, best, is_fixed, units)
        found = fitted[values]
        described[f"flops_{way}"] = found.coefficients
        if "per_chunk" in found.coefficients:
            described["chunk_tokens"] = found.window
        elif way == "forward":
            pattern, window = found.pattern, found.window
    return described | {"attention": {"pattern": pattern, "window": window}}


def _part(
    runs: Sequence[Run],
    watched: Sequence[int] | None,
    name: str,
    is_fixed: bool,
    window: int | None,
    chunk: int | None,
) -> dict[str, Any]:
    """Describes watched modules, or what remains of the total without them.

    Args:
        chunk: length of the chunks of other parts. Default: any.
    """
    units = [run.units for run in runs]
    described: dict[str, Any] = {}
    for way in ("forward", "backward"):
        if watched is None:
            values = [
                getattr(run.counted.total, way)
                - sum(getattr(one, way) for one in run.counted.modules.values())
                for run in runs
            ]
        else:
            values = [sum(getattr(run.counted.modules[at], way) for at in watched) for run in runs]
        if is_fixed:
            hypotheses = iter([("none", (fits.ITEMS,))])
        else:
            hypotheses = fits.outside_hypotheses(window, units, chunk)
        wholes = [getattr(run.counted.total, way) for run in runs]
        found = checked(name, way, values, fits.best(units, values, hypotheses, wholes), is_fixed, units)
        described[f"flops_{way}"] = found.coefficients
        if found.window:
            described["chunk_tokens"] = chunk = found.window
    return described


def checked(
    name: str,
    way: str,
    counts: Sequence[int],
    found: fits.Polynomial | None,
    is_fixed: bool,
    units: Sequence[fits.Units],
) -> fits.Polynomial:
    """Returns the polynomial if it is exact enough.

    Raises:
        FitError: it is not; the message names the module.
    """
    if found is None or found.error > fits.ERROR_MAX:
        off = (
            "no polynomial in tokens fits"
            if found is None
            else f"the best fit is off by {float(found.error):.1%}"
        )
        raise fits.FitError(
            f"the {way} FLOPs of `{name}` are no polynomial in its tokens: {off}, at most "
            f"{float(fits.ERROR_MAX):.1%} is allowed; profile the model with `dflop.torch.profile`"
        )
    return found
