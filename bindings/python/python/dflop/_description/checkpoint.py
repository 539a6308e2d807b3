"""Opens a checkpoint directory: the configuration, the model on the meta device, and the processor.

Nothing is downloaded, and no weights are read. Code in the checkpoint runs only on request.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflop.errors import ModelError

# First release whose models share the interfaces that a description reads.
TRANSFORMERS_MIN = (5, 0)
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_TRUST = "`trust_remote_code=True`, or `--trust-remote-code`"
# Fields by which configurations of other libraries are known.
_LIBRARIES = {"_class_name": "diffusers", "architecture": "timm", "model_cfg": "open_clip"}
# Files of checkpoints that have no `config.json`.
_FILES = {
    "model_index.json": "a pipeline of diffusers, which generates media: dflop plans models that write text",
    "params.json": "the format of the model's own code: download the one for transformers",
    "*.gguf": "converted weights: describe the checkpoint that they were converted from",
}
_AUTO_CLASSES = ("AutoModelForImageTextToText", "AutoModelForMultimodalLM", "AutoModelForCausalLM")


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint.

    Attributes:
        directory: of the checkpoint.
        config: as transformers reads it.
        model: on the meta device, in evaluation mode.
        processor: of the checkpoint; nothing if the model has no encoders.
    """

    directory: Path
    config: Any
    model: Any
    processor: Any


def open_checkpoint(directory: str | os.PathLike[str], trust_remote_code: bool) -> Checkpoint:
    """Opens a checkpoint.

    Raises:
        ModelError: the checkpoint cannot be described; the message tells what to do.
    """
    path = Path(directory)
    check_packages()
    document = read_config(path, trust_remote_code)
    with explained(path, f"{path} cannot be opened"), offline():
        config = writing_config(parsed_config(path, document, trust_remote_code))
        model = build(config, trust_remote_code)
        processor = _processor(path, trust_remote_code) if feature_functions(model) else None
    return Checkpoint(path, config, model, processor)


@contextlib.contextmanager
def explained(path: Path, problem: str) -> Iterator[None]:
    """Turns every exception into a `ModelError`, with advice if the checkpoint needs newer packages.

    Code of models and processors runs, which may raise anything.

    Args:
        path: checkpoint directory.
        problem: what went wrong if an exception does not tell.
    """
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split())
        if not isinstance(error, ModelError):
            text = (
                f"{problem}: {type(error).__name__}: {text}; "
                "describe the model by its sizes with `dflop.ModelDescription`"
            )
        raise ModelError(text + _newer(path)) from error


def _newer(path: Path) -> str:
    """Returns the advice for a checkpoint that was saved by a newer transformers; else nothing."""
    import transformers

    saved, installed = None, transformers.__version__
    with contextlib.suppress(OSError, ValueError, AttributeError):
        saved = json.loads((path / "config.json").read_text(encoding="utf-8")).get("transformers_version")
    if not isinstance(saved, str) or _version(saved) <= _version(installed):
        return ""
    return (
        f"; the checkpoint was saved by transformers {saved}, and {installed} is installed: "
        "pip install --upgrade transformers"
    )


def _version(text: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def writing_config(config: Any) -> Any:
    """Returns the configuration of the part that writes, in a model that also speaks; else the whole one."""
    return getattr(config, "thinker_config", None) or config


def feature_functions(model: Any) -> dict[str, Any]:
    """Returns the model's functions from media to LLM embeddings, by medium."""
    found = {}
    for medium in ("image", "video", "audio"):
        part = "audio_config" if medium == "audio" else "vision_config"
        if getattr(model.config, part, model) is None:
            continue
        function = _features_function(model, f"get_{medium}_features")
        if function is None and medium == "audio":
            function = _tower_and_projector(model)
        if function is not None:
            found[medium] = function if medium == "audio" else _with_projector(model, function)
    return found


def _features_function(model: Any, name: str) -> Any:
    """Returns the function that names its arguments: the base model's, to which a head's delegates."""
    owners = [getattr(model, "base_model", None), getattr(model, "model", None), model]
    functions = [getattr(owner, name) for owner in owners if hasattr(owner, name)]
    kinds = [{one.kind for one in inspect.signature(function).parameters.values()} for function in functions]
    own = [
        function
        for function, found in zip(functions, kinds, strict=True)
        if inspect.Parameter.VAR_POSITIONAL not in found
    ]
    return next(iter([*own, *functions]), None)


def _with_projector(model: Any, function: Any) -> Any:
    """Returns a features function that runs the projector, which the model of some types runs after it."""
    projector = getattr(getattr(model, "base_model", model), "multi_modal_projector", None)
    if projector is None:
        return function

    @functools.wraps(function)
    def features(*arguments: Any, **named: Any) -> Any:
        ran: list[Any] = []
        handle = projector.register_forward_hook(lambda *_: ran.append(projector))
        try:
            output = function(*arguments, **named)
        finally:
            handle.remove()
        states = getattr(output, "last_hidden_state", None)
        if ran or states is None:
            return output
        return projector(states.reshape(-1, states.shape[-1]))

    return features


def _tower_and_projector(model: Any) -> Any:
    """Returns the function from spectrograms to embeddings of a model that has only the parts of it."""
    base = getattr(model, "base_model", model)
    tower = getattr(base, "audio_tower", None)
    projector = getattr(base, "multi_modal_projector", None)
    if tower is None or projector is None:
        return None

    def get_audio_features(input_features: Any) -> Any:
        return projector(tower(input_features).last_hidden_state)

    return get_audio_features


def check_packages() -> None:
    """Checks that PyTorch and a recent transformers are installed.

    Raises:
        ModelError: one is missing, or transformers is too old.
    """
    try:
        import torch  # noqa: F401
        import transformers
    except ImportError as error:
        raise ModelError(
            f"a description needs torch and transformers: pip install torch transformers ({error})"
        ) from error
    if _version(transformers.__version__) < TRANSFORMERS_MIN:
        needed = ".".join(map(str, TRANSFORMERS_MIN))
        raise ModelError(
            f"expected transformers {needed} or newer, found {transformers.__version__}: "
            "pip install --upgrade transformers"
        )


def read_config(path: Path, trust_remote_code: bool) -> dict[str, Any]:
    """Reads ``config.json`` and checks that transformers can tell the model from it.

    Raises:
        ModelError: there is none, it has no known type, or the model is code that was not asked to run.
    """
    file = path / "config.json"
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ModelError(
            f"expected a checkpoint directory with a `config.json`, found none at {file}{_instead(path)}"
        ) from error
    except (OSError, ValueError) as error:
        raise ModelError(f"could not read {file}: {error}") from error
    if not isinstance(document, dict):
        raise ModelError(f"expected an object in {file}, found {type(document).__name__}")
    if "auto_map" in document and not trust_remote_code and not _is_known(document.get("model_type")):
        raise ModelError(f"the model of {path} is Python code in the checkpoint: read it, then pass {_TRUST}")
    if not isinstance(document.get("model_type"), str):
        library = next((name for field, name in _LIBRARIES.items() if field in document), None)
        found = f"is a configuration of {library}" if library else "has no `model_type`"
        raise ModelError(f"{file} {found}: add the type that transformers has for this model")
    if not _is_known(document["model_type"]) and "auto_map" not in document:
        import transformers

        raise ModelError(
            f"transformers {transformers.__version__} does not know the `model_type` "
            f'"{document["model_type"]}" in {file}: install a version that does'
        )
    return document


def _instead(path: Path) -> str:
    """Returns what there is in place of a checkpoint of transformers, and what to do with it."""
    if not path.exists():
        name = path.as_posix()
        if path.is_absolute() or name.count("/") != 1:
            return ""
        return f": download it first, such as by `hf download {name} --local-dir {path.name}`"
    if path.is_file():
        if path.suffix == ".gguf":
            return f": {path} is a file of weights, describe the checkpoint that it was converted from"
        return f": {path} is a file"
    adapter = path / "adapter_config.json"
    if adapter.is_file():
        base = None
        with contextlib.suppress(OSError, ValueError, AttributeError):
            base = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
        model = f"its base model, `{base}`" if isinstance(base, str) else "its base model"
        return f": {path} is an adapter, describe {model}"
    for pattern, advice in _FILES.items():
        if next(path.glob(pattern), None):
            return f": {path} has {advice}"
    inside = sorted(path.glob("*/config.json")) or sorted(path.glob("snapshots/*/config.json"))
    return f": describe {inside[0].parent}" if inside else ""


def build(config: Any, trust_remote_code: bool = False) -> Any:
    """Builds the model of a configuration on the meta device, with attention that is counted pair by pair.

    Raises:
        ModelError: the class is unknown or does not build.
    """
    import torch
    import transformers

    prepare(config)
    model_class = find_class(config, trust_remote_code)
    problems = []
    for attention in ("eager", "sdpa", None):
        arguments = {} if attention is None else {"attn_implementation": attention}
        try:
            with torch.device("meta"), without_initial_values(transformers):
                made = model_class._from_config(config, **arguments)
            _move_parameters(made)
            made.tie_weights()
            break
        except Exception as error:  # noqa: BLE001  Any class of a model may raise anything.
            problems.append(f"{type(error).__name__}: {error}")
    else:
        raise ModelError(
            f"`{model_class.__name__}` cannot be built without weights: {problems[0]}; "
            "describe the model by its sizes with `dflop.ModelDescription`"
        )
    if getattr(made.config, "is_encoder_decoder", False):
        raise ModelError(
            f"`{model_class.__name__}` has an encoder that the decoder reads by cross-attention: dflop plans "
            "decoders whose inputs are text and media in one sequence"
        )
    return made.eval()


def _move_parameters(model: Any) -> None:
    """Moves parameters that were made of random numbers to the meta device."""
    import torch

    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_meta:
                setattr(module, name, torch.nn.Parameter(parameter.to("meta"), parameter.requires_grad))


def prepare(config: Any) -> None:
    """Asks for experts whose products are counted for the rows that are routed, in all parts.

    Weights of 8 bits and fewer become 32-bit ones: PyTorch creates no modules of the former.
    """
    for part in [config, *sub_configs(config)]:
        with contextlib.suppress(Exception):
            part._experts_implementation = "batched_mm"
        dtype = getattr(part, "dtype", None)
        if getattr(dtype, "itemsize", 4) < 2:
            part.dtype = None


def sub_configs(config: Any) -> list[Any]:
    """Returns the configurations of the parts, parts of parts included."""
    found: list[Any] = []
    for value in vars(config).values():
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            found += [value, *sub_configs(value)]
    return found


def _is_known(model_type: Any) -> bool:
    from transformers import CONFIG_MAPPING

    return isinstance(model_type, str) and model_type in CONFIG_MAPPING


def parsed_config(path: Path, document: dict[str, Any], trust_remote_code: bool) -> Any:
    """Returns the configuration of a checkpoint as transformers reads it.

    Raises:
        ModelError: transformers does not read it.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:
        raise ModelError(
            f'transformers does not read {path / "config.json"} of type "{document["model_type"]}": {error}'
        ) from error


def find_class(config: Any, trust_remote_code: bool) -> Any:
    """Returns the class of a configuration's model.

    Raises:
        ModelError: transformers has none that generates.
    """
    import transformers

    names = getattr(config, "architectures", None) or ()
    for name in [names] if isinstance(names, str) else names:
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    found = generating_class(config)
    if found is not None:
        return found
    auto_map = getattr(config, "auto_map", None) or {}
    for name in (*_AUTO_CLASSES, "AutoModel"):
        if trust_remote_code and name in auto_map:
            from transformers.dynamic_module_utils import get_class_from_dynamic_module

            return get_class_from_dynamic_module(auto_map[name], config._name_or_path, local_files_only=True)
    raise ModelError(
        f'transformers has no generating model of type "{config.model_type}": name its class as '
        "`architectures` in `config.json`"
    )


def generating_class(config: Any) -> Any:
    """Returns the class that generates text for a configuration; nothing if transformers has none."""
    import transformers

    for name in _AUTO_CLASSES:
        mapping = getattr(getattr(transformers, name, None), "_model_mapping", {})
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    return None


def _processor(path: Path, trust_remote_code: bool) -> Any:
    import transformers

    try:
        found = transformers.AutoProcessor.from_pretrained(
            path, trust_remote_code=trust_remote_code, local_files_only=True
        )
        if isinstance(found, transformers.PreTrainedTokenizerBase):
            raise TypeError("it loads the tokenizer alone")
        return found
    except Exception as error:
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise ModelError(
                f"the processor of {path} is Python code in the checkpoint: read it, then pass {_TRUST}"
            ) from error
        advice = "copy `preprocessor_config.json`, `processor_config.json` and the tokenizer's files into it"
        if any((path / name).is_file() for name in ("preprocessor_config.json", "processor_config.json")):
            advice = "correct its files, or copy them from the published checkpoint"
        raise ModelError(
            f"{path} has encoders but no processor that transformers loads: {advice} "
            f"({type(error).__name__}: {error})"
        ) from error


@contextlib.contextmanager
def without_initial_values(transformers: Any) -> Iterator[None]:
    """Skips random initial values, which nobody reads."""
    module = getattr(transformers, "initialization", None)
    skip = getattr(module, "no_init_weights", contextlib.nullcontext)
    with skip():
        yield


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Keeps the libraries of Hugging Face from the network."""
    before = {name: os.environ.get(name) for name in _OFFLINE}
    os.environ.update(dict.fromkeys(_OFFLINE, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
