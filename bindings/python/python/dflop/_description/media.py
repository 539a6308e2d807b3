"""Makes media of given sizes and has the checkpoint's own processor turn them into inputs of the model."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from dflop._description.shape_mode import shapes_only
from dflop._measured_tokens import sample_rate_hz
from dflop.errors import ModelError

# Roles of placeholders in processors and tokenizers, by medium.
_PLACEHOLDERS = {
    "image": ("image_token", "boi_token", "fake_image_token", "image_placeholder"),
    "video": ("video_token",),
    "audio": ("audio_token", "audio_soft_token", "boa_token"),
}
_COMMON = {
    "image": ("<image>", "<|image|>", "<|image_pad|>", "<image_soft_token>", "<start_of_image>", "[IMG]"),
    "video": ("<video>", "<|video_pad|>"),
    "audio": ("<|AUDIO|>", "<audio>", "<|audio|>", "<audio_soft_token>"),
}
_TEXT_INPUTS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "position_ids"}


@lru_cache(maxsize=4)
def image(width: int, height: int) -> Any:
    """Returns an image of noise: blank ones are taken for padding by some models."""
    from PIL import Image

    noise = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def video(frames: int, width: int, height: int) -> Any:
    """Returns frames of noise, uint8 ``[frames, height, width, 3]``."""
    return np.random.default_rng(0).integers(0, 255, (frames, height, width, 3), dtype=np.uint8)


def video_metadata(frames: int, frames_per_second: float = 2.0) -> dict[str, Any]:
    """Returns what processors ask to know about a video whose frames have been sampled."""
    return {
        "fps": frames_per_second,
        "total_num_frames": frames,
        "duration": frames / frames_per_second,
        "frames_indices": list(range(frames)),
    }


def clip(samples: int) -> Any:
    """Returns an audio clip of noise at `sample_rate_hz`."""
    return np.random.default_rng(0).normal(0, 0.1, samples).astype(np.float32)


def placeholders(processor: Any, medium: str) -> list[str]:
    """Returns the texts that may stand for a medium, the processor's own first."""
    found = []
    for owner in (processor, getattr(processor, "tokenizer", None)):
        for name in _PLACEHOLDERS[medium]:
            token = getattr(owner, name, None)
            token = getattr(token, "content", token)
            if isinstance(token, str) and token not in found:
                found.append(token)
    return found + [token for token in _COMMON[medium] if token not in found]


def template_text(processor: Any, medium: str | None) -> str | None:
    """Returns what the chat template makes of a user's turn, with a medium or of text alone.

    Returns:
        str | None: nothing without a chat template, or if it rejects the medium.
    """
    content: list[dict[str, str]] = [{"type": "text", "text": "a"}]
    if medium is not None:
        content.insert(0, {"type": medium})
    try:
        made = processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    except Exception:  # noqa: BLE001  A template may raise anything.
        return None
    return made if isinstance(made, str) else None


def processed(processor: Any, medium: str, value: Any) -> tuple[Mapping[str, Any], str]:
    """Returns what the processor makes of one medium, and the text that it was given with it.

    Raises:
        ModelError: it accepts no text that stands for the medium.
    """
    texts = [text for text in (template_text(processor, medium),) if text]
    own = ["\n", "a"] if not texts and _puts_placeholders(processor, medium) else []
    problems = []
    for text in own + texts + placeholders(processor, medium) + _wrapped(processor, medium):
        for arguments in _arguments(processor, medium, value):
            try:
                made: Mapping[str, Any] = processor(text=[text], return_tensors="pt", **arguments)
            except Exception as error:  # noqa: BLE001  A processor may raise anything.
                problems.append(f"{type(error).__name__}: {error}")
                continue
            if set(made) <= _TEXT_INPUTS:
                problems.append(f"it ignores the {medium} with the text {json.dumps(text)}")
                continue
            return made, text
    raise ModelError(
        f"{type(processor).__name__} makes no inputs of {medium}: {problems[0] if problems else 'no text'}; "
        "correct the settings in `preprocessor_config.json`, or count tokens with `dflop.Custom`"
    )


def repeated_placeholders(processor: Any, medium: str, value: Any) -> int:
    """Returns the placeholders that a processor puts in the text for one medium; 0 if they are not known."""
    made, text = processed(processor, medium, value)
    tokens = [token for token in placeholders(processor, medium) if token in text]
    ids = made["input_ids"][0].tolist()
    return max((ids.count(processor.tokenizer.convert_tokens_to_ids(token)) for token in tokens), default=0)


def _wrapped(processor: Any, medium: str) -> list[str]:
    """Returns placeholders between the tokens that begin and end a medium."""
    pairs = [
        (f"{medium}_start_token", f"{medium}_end_token"),
        ("boi_token", "eoi_token"),
        ("boa_token", "eoa_token"),
    ]
    found = [(getattr(processor, start, None), getattr(processor, end, None)) for start, end in pairs]
    return [f"{start}{placeholders(processor, medium)[0]}{end}" for start, end in found if start and end]


@lru_cache(maxsize=4)
def _puts_placeholders(processor: Any, medium: str) -> bool:
    """Whether a processor puts a placeholder before texts by itself, beside one that is there."""
    if medium != "image":
        return False
    for token in placeholders(processor, medium):
        counts = []
        for text in ("a", token):
            try:
                made = processor(text=[text], images=[image(56, 56)], return_tensors="pt")
                counts.append(processor.tokenizer.decode(made["input_ids"][0]).count(token))
            except Exception:  # noqa: BLE001  A processor may raise anything.
                break
        if len(counts) == 2 and counts[0] > 0:
            return counts[1] == counts[0] + 1
    return False


def features_inputs(processor: Any, medium: str, value: Any, function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the arguments that a model's function from a medium to embeddings takes.

    Raises:
        ModelError: the processor does not make an argument that the function requires.
    """
    signature = inspect.signature(function).parameters
    required = {
        name
        for name, one in signature.items()
        if one.default is inspect.Parameter.empty and one.kind is not inspect.Parameter.VAR_KEYWORD
    }
    part = getattr(processor, {"image": "image_processor", "video": "video_processor"}.get(medium, ""), None)
    if part is not None:
        try:
            own = _part_defaults(processor, f"{medium}s_kwargs")
            made = dict(part(**own | {f"{medium}s": [value], "return_tensors": "pt"}))
        except Exception:  # noqa: BLE001  The whole processor tells what is wrong.
            made = {}
        if required <= set(made):
            return {name: found for name, found in made.items() if name in signature}
    made = dict(processed(processor, medium, value)[0])
    missing = sorted(required - set(made))
    if missing:
        passed = _passed(function, made)
        if required <= set(passed):
            return passed
        raise ModelError(
            f"`{function.__name__}` requires {', '.join(missing)}, and {type(processor).__name__} makes "
            f"{', '.join(sorted(made))}; describe the model by its sizes with `dflop.ModelDescription`"
        )
    return {name: found for name, found in made.items() if name in signature and name != "input_ids"}


class _Reached(Exception):
    """Ends a run at the features function."""


def _passed(function: Callable[..., Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that the model's forward pass has for a features function; none without a call."""
    function = inspect.unwrap(function)
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    signature, seen = inspect.signature(function), dict[str, Any]()

    def record(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind_partial(*args, **kwargs).arguments
        seen.update({key: found for key, found in bound.items() if found is not None and key != "kwargs"})
        raise _Reached

    if owner is None:
        return seen
    vars(owner)[name] = record
    try:
        # A model may raise anything; whether the function was reached is seen.
        with contextlib.suppress(Exception), shapes_only(), torch.no_grad():
            owner(**inputs)
    finally:
        del vars(owner)[name]
    return seen


def _part_defaults(processor: Any, name: str) -> dict[str, Any]:
    """Returns the arguments that a processor calls a part of it with by default, such as InternVL to cut images."""
    of_kind = getattr(getattr(processor, "valid_processor_kwargs", None), "_defaults", {})
    return {**(getattr(processor, name, None) or {}), **of_kind.get(name, {})}


def _arguments(processor: Any, medium: str, value: Any) -> list[dict[str, Any]]:
    if medium == "audio":
        rate = sample_rate_hz(processor)
        return [{"audio": [value], "sampling_rate": rate}, {"audio": [value]}, {"audios": [value]}]
    if medium == "video":
        sampled = {"do_sample_frames": False, "video_metadata": [video_metadata(len(value))]}
        return [{"videos": [value]} | sampled, {"videos": [value]}]
    return [{"images": [[value]]}, {"images": [value]}]
