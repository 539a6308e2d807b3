"""Describes a checkpoint as a document, ``model.json``; ``docs/reference/formats.md`` defines the format."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import secrets
from pathlib import Path
from typing import Any

from dflop._description import checkpoint, decoder, encoder, fits, parts, token_rules
from dflop._measured_tokens import sample_rate_hz
from dflop.errors import ModelError

FORMAT, VERSION = "dflop model", 1
# Sizes in configurations that planning needs beside the counts: names in the document, in configurations.
_SIZES = {
    "hidden": ("hidden_size", "d_model", "embed_dim", "n_embd"),
    "heads": ("num_attention_heads", "num_heads", "encoder_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "ffn": ("intermediate_size", "encoder_ffn_dim", "ffn_dim"),
}


def describe(directory: str | os.PathLike[str], trust_remote_code: bool) -> dict[str, Any]:
    """Describes a checkpoint.

    Raises:
        ModelError: it cannot be described; the message tells what to do.
    """
    opened = checkpoint.open_checkpoint(directory, trust_remote_code)
    problem = f"`{type(opened.model).__name__}` cannot be counted on shapes alone"
    with checkpoint.explained(opened.directory, problem):
        return from_parts(opened, hashlib.sha256((opened.directory / "config.json").read_bytes()).hexdigest())


def from_parts(opened: checkpoint.Checkpoint, config_sha256: str) -> dict[str, Any]:
    """Describes an opened checkpoint.

    Raises:
        ModelError: a part cannot be described; the message names it.
    """
    import torch
    import transformers

    model, config = opened.model, opened.config
    found = decoder.find(model)
    modules = _encoders(opened, decoder.width(model))
    owned = {entry["module"]: entry.pop("owned") for entry in modules}
    # Encoders inside the module that runs the decoder.
    inside = [path for paths in owned.values() for path in paths if path.startswith(f"{found.path}.")]
    described = decoder.measure(model, found, inside)
    llm = {"module": "llm", "path": found.path, "sizes": _sizes(found.config), **described}
    of_llm = {"llm": _llm_paths(model, found)}
    divided = parts.owners(model, owned | of_llm if inside else of_llm | owned)
    for entry in [*modules, llm]:
        entry["parameters"] = sum(divided[entry["module"]].values())
    # Parameters beside the parts, such as newline embeddings, belong to the only encoder if there is one.
    beside = sum(divided[""].values())
    _check_beside(opened, modules, divided[""])
    if len(modules) == 1:
        modules[0]["parameters"] += beside
        beside = 0
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": opened.directory.resolve().name,
        "model_type": config.model_type,
        "config_sha256": config_sha256,
        "made_with": {"torch": torch.__version__, "transformers": transformers.__version__},
        "parameters": parts.parameter_count([model]),
        "parameters_beside_modules": beside,
        "modules": [*modules, llm],
    }


def check_target(path: str | os.PathLike[str]) -> None:
    """Checks that a description can be written, before one is made.

    Raises:
        OSError: the file cannot be written, or is another one than a description.
    """
    target = Path(path).resolve()
    if not target.parent.is_dir():
        raise FileNotFoundError(f"could not write {target}: {target.parent} is not a directory")
    if target.is_dir():
        raise IsADirectoryError(f"could not write {target}: it is a directory")
    if not os.access(target.parent, os.W_OK):
        raise PermissionError(f"could not write {target}: {target.parent} is not writable")
    if target.exists() and not _is_replaceable(target):
        raise FileExistsError(f"could not write {target}: it is another file than a description")


def _is_replaceable(target: Path) -> bool:
    """Whether a file is empty or a description."""
    if not target.is_file():
        return False
    try:
        text = target.read_text(encoding="utf-8")
        return not text or json.loads(text).get("format") == FORMAT
    except (ValueError, AttributeError):
        return False


def write(description: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes a description, whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    target = Path(path).resolve()
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with beside.open("x", encoding="utf-8") as file:
            json.dump(description, file, indent=1)
            file.write("\n")
        beside.replace(target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _check_beside(
    opened: checkpoint.Checkpoint, modules: list[dict[str, Any]], beside: dict[int, int]
) -> None:
    """Checks that hardly any parameters that do work are outside the modules; those that never run may be.

    Videos are left out if they alone reach such parameters.

    Raises:
        ModelError: a part of the model is reached neither by the decoder nor by a features function.
    """
    model = opened.model
    most = parts.parameter_count([model]) * fits.ERROR_MAX
    if sum(beside.values()) <= most:
        return
    ran = {medium: _running(opened, medium) for entry in modules for medium in entry["media"]}
    sizes = _unreached(model, beside, list(ran.values()))
    if sum(sizes.values()) > most and "video" in ran:
        # A tower of its own for videos is not described, and neither are they.
        others = [paths for medium, paths in ran.items() if medium != "video"]
        if sum(_unreached(model, beside, others).values()) <= most:
            for entry in modules:
                entry["media"] = [medium for medium in entry["media"] if medium != "video"]
                entry.pop("video_token_rule", None)
            return
    if sum(sizes.values()) <= most:
        return
    name = max(sizes, key=lambda one: sizes[one])
    inputs = inspect.signature(decoder.innermost(model).forward).parameters
    has_tower = any(_tower_config(model.config, module) is not None for module in ("vision", "audio"))
    if has_tower and any("cross_attention" in one or "encoder_hidden" in one for one in inputs):
        raise ModelError(
            f"`{name}`, {sizes[name]:,} parameters, is read by the decoder's cross-attention: dflop plans "
            "decoders whose inputs are text and media in one sequence"
        )
    raise ModelError(
        f"`{name}`, {sizes[name]:,} parameters, is reached neither by the decoder nor by a function such as "
        "`get_image_features`; describe the model by its sizes with `dflop.ModelDescription`"
    )


def _unreached(model: Any, beside: dict[int, int], ran: list[list[str] | None]) -> dict[str, int]:
    """Returns the sizes of parameters outside the modules in parts that may run, by the path of the part."""
    sizes: dict[str, int] = {}
    for path, parameter in model.named_parameters():
        name = ".".join(path.split(".")[:2])
        runs = any(paths is None or any(f"{one}.".startswith(f"{name}.") for one in paths) for paths in ran)
        if id(parameter) in beside and (runs or not ran):
            sizes[name] = sizes.get(name, 0) + parameter.numel()
    return sizes


def _running(opened: checkpoint.Checkpoint, medium: str) -> list[str] | None:
    """Returns the paths of the modules that a whole forward pass with a medium runs; nothing if it fails."""
    import torch

    from dflop._description import counting, media
    from dflop._description.shape_mode import shapes_only

    values = {"image": media.image(448, 448), "video": media.video(4, 112, 112)}
    value = values.get(medium)
    if value is None:
        value = media.clip(2 * sample_rate_hz(opened.processor))
    try:
        made = dict(media.processed(opened.processor, medium, value)[0])
        with counting.executed(opened.model) as ran, shapes_only(), torch.no_grad():
            opened.model(**made)
    except Exception:  # noqa: BLE001  A model may raise anything.
        return None
    return list(ran)


def _encoders(opened: checkpoint.Checkpoint, width: int) -> list[dict[str, Any]]:
    functions, entries = checkpoint.feature_functions(opened.model), []
    for medium, module in (("image", "vision"), ("audio", "audio")):
        if medium not in functions:
            continue
        function = functions[medium]
        try:
            entries.append(_encoder(opened, medium, module, function, width))
        except ModelError as error:
            raise ModelError(f"{module}: {error}") from error
    return entries


def _encoder(
    opened: checkpoint.Checkpoint, medium: str, module: str, function: Any, width: int
) -> dict[str, Any]:
    model, processor = opened.model, opened.processor
    found = encoder.find(model, processor, medium, function, width)
    found, (described, runs, longest) = _measured(opened, found, function, width)
    config = _tower_config(opened.config, module)
    sizes = vars(opened.config) | ({} if config is None else vars(config))
    work = encoder.Work(processor, function, found, described, runs, longest)
    if medium == "image":
        rule = token_rules.image_rule(processor, sizes, work)
    else:
        rule = token_rules.audio_rule(processor, *_clip_counter(opened, function, width), work)
    sizes_declared = _sizes(config)
    if sizes_declared["hidden"] is None and all(
        run["message_width"] is None for run in described["layer_runs"]
    ):
        sizes_declared["hidden"] = width  # A projection alone, whose vectors are those of the LLM.
    embedding = _path(model, model.get_input_embeddings())
    beside = parts.roots_beside(_path(model, decoder.innermost(model)), found.ran)
    video = None
    if medium == "image" and "video" in checkpoint.feature_functions(model):
        video = token_rules.video_rule(processor, sizes)
    return {
        "module": module,
        "media": [medium] if video is None else [medium, "video"],
        "sizes": sizes_declared,
        "token_rule": rule,
        **({} if video is None else {"video_token_rule": video}),
        "owned": [path for path in beside if path != embedding],
        **described,
    }


def _measured(
    opened: checkpoint.Checkpoint, found: encoder.Encoder, function: Any, width: int
) -> tuple[encoder.Encoder, tuple[dict[str, Any], int, int]]:
    """Counts an encoder by its layers, or its tower as one layer where those follow no polynomial."""
    try:
        return found, encoder.measure(opened.model, opened.processor, function, found, width)
    except fits.FitError:
        whole = encoder.as_whole(opened.model, found)
        if whole.layers.path != found.layers.path:
            with contextlib.suppress(ModelError):
                return whole, encoder.measure(opened.model, opened.processor, function, whole, width)
        raise


def _clip_counter(opened: checkpoint.Checkpoint, function: Any, width: int) -> tuple[Any, str]:
    """Returns a function that counts the LLM tokens of a clip, and what it counts.

    Placeholders are counted where the processor repeats them, because the model drops the embeddings of
    padding; otherwise embeddings are counted.
    """
    import torch

    from dflop._description import media
    from dflop._description.shape_mode import shapes_only

    processor = opened.processor
    second = media.clip(sample_rate_hz(processor))
    if media.repeated_placeholders(processor, "audio", second) > 1:
        return lambda clip: media.repeated_placeholders(processor, "audio", clip), "processor"

    def count(clip: Any) -> int:
        inputs = media.features_inputs(processor, "audio", clip, function)
        with shapes_only(), torch.no_grad():
            return encoder.feature_tokens(function(**inputs), width)

    return count, "features"


def _llm_paths(model: Any, found: decoder.Decoder) -> list[str]:
    if not found.path:
        generating = checkpoint.generating_class(model.config)
        advice = "" if generating is None else f", such as `{generating.__name__}`"
        raise ModelError(
            f"`{type(model).__name__}` has no head: name a class that writes text{advice}, as "
            "`architectures` in `config.json`"
        )
    heads = [] if model.get_output_embeddings() is None else decoder.head_paths(model, found)
    return [found.path, _path(model, model.get_input_embeddings()), *heads]


def _path(model: Any, module: Any) -> str:
    return next((path for path, one in model.named_modules() if one is module), "")


def _tower_config(config: Any, module: str) -> Any:
    names = {"vision": ("vision_config", "visual_config"), "audio": ("audio_config", "encoder_config")}[
        module
    ]
    found = (getattr(config, name, None) for name in names)
    return next((one for one in found if one is not None), None)


def _sizes(config: Any) -> dict[str, int | None]:
    """Returns the sizes that a configuration declares; nothing for those that it does not."""
    sizes: dict[str, int | None] = {}
    for name, fields in _SIZES.items():
        values = (getattr(config, field, None) for field in fields)
        sizes[name] = next((value for value in values if isinstance(value, int)), None)
    return sizes
