"""Processors of ``transformers`` in the loader: any model that has one, whether dflop knows it or not.

    >>> import transformers
    >>> processor = transformers.AutoProcessor.from_pretrained("org/model")  # doctest: +SKIP
    >>> tokens = dflop.hugging_face.TokenCounts(processor)  # doctest: +SKIP
    >>> model = dflop.Custom(modules={"vision": 4e8, "llm": 4e9}, tokens=tokens)  # doctest: +SKIP
    >>> inputs = dflop.hugging_face.Inputs(processor)  # doctest: +SKIP
    >>> own = dflop.CustomProcessor(batch=inputs)  # doctest: +SKIP

`Inputs` calls the processor with all samples of a microbatch and makes labels of the assistant's turns;
`TokenCounts` asks it for the tokens of images by their size. `describe` counts the parameters, FLOPs and
tokens of any model that ``transformers`` builds. Nothing is imported from ``transformers`` here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from dflop._measured_tokens import MeasuredTokens, sample_rate_hz
from dflop.batches import Audio, Video

if TYPE_CHECKING:
    from dflop.batches import Sample

IGNORED = -100
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
PLACEHOLDERS = {"<image>": "image", "<video>": "video", "<audio>": "audio"}
# Arguments of processors that their tokenizers take as well.
_TEXT_ARGUMENTS = ("return_tensors", "padding", "padding_side", "add_special_tokens")
Message = dict[str, Any]


def messages_of(sample: Sample) -> list[Message]:
    """Returns the conversation of a sample as messages of roles and content parts.

    A ``json`` field has ``conversations`` as LLaVA writes them, with ``<image>``, ``<video>``, ``<audio>``
    where a medium belongs, or ``messages``, whose other keys (``tool_calls``, ``name``) are kept; media that no
    text refers to come first. Without it, the ``txt`` field is a caption that the assistant says after the
    media.

    Raises:
        ValueError: the sample has neither.

    Examples:
        >>> messages = dflop.hugging_face.messages_of(dflop.Dataset("shards/")[3])
        >>> [(message["role"], [part["type"] for part in message["content"]]) for message in messages]
        [('user', ['image', 'text']), ('assistant', ['text'])]
    """
    document = sample.get("json")
    if isinstance(document, Mapping) and "conversations" in document:
        turns = [(ROLES.get(turn["from"], turn["from"]), turn["value"]) for turn in document["conversations"]]
        messages = [{"role": role, "content": list(_parts(text))} for role, text in turns]
    elif isinstance(document, Mapping) and "messages" in document:
        messages = [
            {"role": message["role"], **message, "content": _content(message)}
            for message in document["messages"]
        ]
    elif isinstance(sample.get("txt"), str):
        caption = {"role": "assistant", "content": [{"type": "text", "text": sample["txt"]}]}
        messages = [{"role": "user", "content": []}, caption]
    else:
        raise ValueError(
            "expected a `json` field with `conversations` or `messages`, or a `txt` field: give `messages`"
        )
    return _with_media(messages, media_of(sample))


def media_of(sample: Sample) -> dict[str, list[Any]]:
    """Returns the media of a sample by kind: ``image``, ``video``, ``audio``, in the order of its fields.

    Examples:
        >>> media = dflop.hugging_face.media_of(dflop.Dataset("shards/")[1])
        >>> [len(media[kind]) for kind in ("image", "video", "audio")]
        [2, 0, 0]
    """
    media: dict[str, list[Any]] = {"image": [], "video": [], "audio": []}
    for value in sample.values():
        if isinstance(value, Video):
            media["video"].append(value)
        elif isinstance(value, Audio):
            media["audio"].append(value)
        elif (
            getattr(value, "ndim", None) == 3 and value.shape[-1] == 3 and str(value.dtype).endswith("uint8")
        ):
            media["image"].append(value)
    return media


def describe(
    checkpoint_directory: str | os.PathLike[str],
    trust_remote_code: bool = False,
    *,
    path: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Describes a checkpoint by itself: parameters, FLOPs, widths and token rules, as in ``model.json``.

    The model is built from ``config.json`` without weights, its parts are found by structure and counted;
    every count is checked at sizes that it was not fitted on. Nothing is downloaded. Requires ``torch`` and
    ``transformers``. ``docs/reference/formats.md`` defines the format.

    Args:
        checkpoint_directory: ``config.json``, and the files of the processor if the model has encoders.
        trust_remote_code: runs Python code in the checkpoint, if its model or processor is such code.
        path: file to write the description to, such as ``model.json``. Default: none.

    Returns:
        dict: the description.

    Raises:
        ModelError: the checkpoint cannot be described; the message tells what to do, and nothing is written.
        OSError: the file cannot be written.

    Examples:
        >>> import torch, transformers
        >>> description = dflop.hugging_face.describe("model/", path="model.json")
        >>> [module["module"] for module in description["modules"]]
        ['vision', 'llm']
    """
    from dflop._description import checkpoint

    checkpoint.check_packages()
    from dflop._description import document

    if path is not None:
        document.check_target(path)
    description = document.describe(checkpoint_directory, trust_remote_code)
    if path is not None:
        document.write(description, path)
    return description


class Inputs:
    """Makes model inputs of a microbatch by one call of a processor of ``transformers``.

    For ``CustomProcessor(batch=…)``. Texts are padded on the right to the longest; labels are the ids of the
    assistant's turns, and -100 elsewhere.

    Args:
        processor: a processor, or a tokenizer for texts alone.
        messages: returns the messages of a sample, whose parts of type ``image``, ``video``, ``audio`` stand
            for its media in order.
        targets: ``assistant`` takes the loss over the assistant's turns, ``all`` over all tokens that are not
            of media; or a function of messages, their text and ids, which returns the labels of a sample.
        chat_template: Jinja source in place of the processor's, or of the tokenizer's where it has none.
        packed: joins the samples in one row without padding, whose ``position_ids`` begin anew with each, for
            models that separate samples by positions and take ``use_cache=False``. Positions in several
            dimensions, as of Qwen-VL, need padding.
        arguments: further arguments of the processor, such as ``max_pixels`` or ``images_kwargs``.

    Raises:
        TypeError: ``processor`` is no function.
        ValueError: ``targets`` is neither a function nor one of the names.

    Examples:
        A tokenizer alone, for texts; a processor of a checkpoint takes the media as well:

        >>> import transformers
        >>> tokenizer = transformers.AutoTokenizer.from_pretrained("model/")
        >>> tokenizer.chat_template = "{% for turn in messages %}{{ turn.content[0].text }} {% endfor %}"
        >>> inputs = dflop.hugging_face.Inputs(tokenizer, targets="all")
        >>> talks = [sample for sample in dflop.Dataset("shards/")[:9] if "0.png" not in sample]
        >>> made = inputs(talks)
        >>> sorted(made), made["input_ids"].shape == made["labels"].shape
        (['attention_mask', 'input_ids', 'labels'], True)
        >>> processor = dflop.CustomProcessor(batch=inputs)
    """

    def __init__(
        self,
        processor: Any,
        *,
        messages: Callable[[Sample], list[Message]] = messages_of,
        targets: str | Callable[[list[Message], str, Sequence[int]], Sequence[int]] = "assistant",
        chat_template: str | None = None,
        packed: bool = False,
        **arguments: Any,
    ) -> None:
        if not callable(processor):
            raise TypeError(f"expected a processor, found {type(processor).__name__}")
        if not callable(targets) and targets not in ("assistant", "all"):
            raise ValueError(f"expected `targets` to be assistant, all or a function, found {targets!r}")
        self._processor, self._messages, self._targets = processor, messages, targets
        self._tokenizer = getattr(processor, "tokenizer", processor)
        if chat_template is None and getattr(processor, "chat_template", None) is None:
            chat_template = getattr(self._tokenizer, "chat_template", None)
        self._template = {"chat_template": chat_template} if isinstance(chat_template, str) else {}
        self._is_packed, self._is_flat, self._is_apart = packed, False, False
        self._arguments = {"return_tensors": "pt", "padding": True, "padding_side": "right"} | arguments

    def __call__(self, samples: list[Sample]) -> dict[str, Any]:
        made = self._padded(samples)
        return _packed(made) if self._is_packed else made

    def token_counts(self, *, encoder_tokens: float = 1.0) -> TokenCounts:
        """Returns the function for ``Custom(tokens=…)`` that counts what these inputs deliver.

        The processor processes a conversation of two turns, and one medium of each size, which is remembered;
        images are counted by their size where its class does that and differs by a constant. Texts have the
        tokens in the index: ``Dataset.count_tokens`` counts them by the same tokenizer.

        Args:
            encoder_tokens: tokens inside the encoder for each token in the LLM.

        Examples:
            >>> import transformers
            >>> tokenizer = transformers.AutoTokenizer.from_pretrained("model/")
            >>> tokenizer.chat_template = "{% for turn in messages %}{{ turn.content[0].text }} {% endfor %}"
            >>> tokens = dflop.hugging_face.Inputs(tokenizer, targets="all").token_counts()
            >>> tokens([{"text_tokens": 100, "images": [], "audio": [], "videos": []}])
            [{'llm': 100}]
        """
        has_counts = hasattr(self._processor, "_get_num_multimodal_tokens")
        count = _ImageCounts(self._processor) if has_counts else None
        measured = MeasuredTokens(self._padded, _TextCounts(self._tokenizer), count)
        return TokenCounts(
            self._processor,
            encoder_tokens=encoder_tokens,
            sample_tokens=measured.sample_tokens,
            image_tokens=measured.image,
            video_tokens=measured.video,
            audio_tokens=measured.audio,
        )

    def _padded(self, samples: list[Any]) -> dict[str, Any]:
        conversations = [self._messages(sample) for sample in samples]
        texts = [self._render(messages) for messages in conversations]
        arguments = dict(self._arguments)
        bos = getattr(self._tokenizer, "bos_token", None)
        if bos and texts[0].startswith(bos):
            arguments["add_special_tokens"] = False
        made = self._mixed(texts, [media_of(sample) for sample in samples], arguments)
        made["labels"] = self._labels(made, conversations, texts)
        return made

    def _mixed(
        self, texts: list[str], media: list[dict[str, list[Any]]], arguments: dict[str, Any]
    ) -> dict[str, Any]:
        """Calls the processor for all samples, or the tokenizer for those without media.

        The latter if the processor refuses such samples among others, or gives them places of media.
        """
        without = [at for at, own in enumerate(media) if not any(own.values())]
        refused: Exception | None = None
        if not (self._is_apart and without):
            try:
                made = self._processed(texts, arguments | self._media(media))
                if not any(self._has_media(made["input_ids"][at]) for at in without):
                    return made
            except Exception as error:
                if not without or self._tokenizer is self._processor:
                    raise
                refused = error
        try:
            made = self._apart(texts, media, without, arguments)
        except Exception as error:  # noqa: BLE001  A processor may raise anything.
            raise refused or error from None
        self._is_apart = True
        return made

    def _has_media(self, ids: Any) -> bool:
        media = set(_media_ids(self._processor, self._tokenizer))
        return any(int(one) in media for one in ids)

    def _apart(
        self,
        texts: list[str],
        media: list[dict[str, list[Any]]],
        without: Sequence[int],
        arguments: dict[str, Any],
    ) -> dict[str, Any]:
        kept = [at for at in range(len(texts)) if at not in without]
        of_text = {name: arguments[name] for name in _TEXT_ARGUMENTS if name in arguments}
        parts = [(without, dict(self._tokenizer([texts[at] for at in without], **of_text)))]
        if kept:
            own = arguments | self._media([media[at] for at in kept])
            parts.insert(0, (kept, self._processed([texts[at] for at in kept], own)))
        return _joined(parts, getattr(self._tokenizer, "pad_token_id", None) or 0)

    def _processed(self, texts: list[str], arguments: dict[str, Any]) -> dict[str, Any]:
        """Calls the processor, which may not accept lists of images by sample."""
        images = arguments.get("images")
        if images is None:
            return dict(self._processor(text=texts, **arguments))
        refused: Exception | None = None
        if not self._is_flat:
            try:
                return dict(self._processor(text=texts, **arguments))
            except Exception as error:  # noqa: BLE001  A processor may raise anything.
                refused = error
        flat = [image for own in images for image in own]
        try:
            made = dict(self._processor(text=texts, **arguments | {"images": flat}))
        except Exception as error:  # noqa: BLE001
            raise refused or error from None
        self._is_flat = True
        return made

    def _render(self, messages: list[Message], **more: Any) -> str:
        rendered: str = self._processor.apply_chat_template(
            messages, tokenize=False, **self._template, **more
        )
        return rendered

    def _media(self, of_samples: list[dict[str, list[Any]]]) -> dict[str, Any]:
        """Returns the media as arguments: images by sample, as processors take them, others in one list."""
        arguments: dict[str, Any] = {}
        if any(media["image"] for media in of_samples):
            arguments["images"] = [[_picture(image) for image in media["image"]] for media in of_samples]
        videos = [video for media in of_samples for video in media["video"]]
        if videos:
            # Frames are sampled by the loader.
            arguments |= {"videos": [video.frames for video in videos], "do_sample_frames": False}
            arguments["video_metadata"] = [_metadata(video) for video in videos]
        clips = [clip for media in of_samples for clip in media["audio"]]
        if clips:
            rate = sample_rate_hz(self._processor)
            arguments |= {"audio": [_waveform(clip, rate) for clip in clips], "sampling_rate": rate}
        return arguments

    def _labels(self, made: Mapping[str, Any], conversations: list[list[Message]], texts: list[str]) -> Any:
        ids = made["input_ids"]
        labels = ids.clone() if hasattr(ids, "clone") else ids.copy()
        labels[...] = IGNORED
        mask = made.get("attention_mask")
        for row, (messages, text) in enumerate(zip(conversations, texts, strict=True)):
            kept = [at for at in range(ids.shape[1]) if mask is None or mask[row][at]]
            own = [int(ids[row][at]) for at in kept]
            for at, label in zip(kept, self._row_labels(messages, text, own), strict=True):
                labels[row][at] = label
        return labels

    def _row_labels(self, messages: list[Message], text: str, ids: list[int]) -> Sequence[int]:
        if callable(self._targets):
            return self._targets(messages, text, ids)
        spans = [(0, len(text))] if self._targets == "all" else list(self._assistant_spans(messages, text))
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        media = set(_media_ids(self._processor, self._tokenizer))
        plain = [
            (id_, id_ not in media and any(start < end_ and begin < end for start, end in spans))
            for id_, (begin, end_) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        ]
        return aligned(plain, ids, self._tokenizer.decode)

    def _assistant_spans(self, messages: list[Message], text: str) -> Iterator[tuple[int, int]]:
        """Yields where the assistant's turns are in the text, the token that ends a turn included."""
        for at, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:at], add_generation_prompt=True)
            through = self._render(messages[: at + 1])
            if not (text.startswith(through) and through.startswith(before)):
                raise ValueError(
                    "the chat template changes earlier turns: give `targets` a function that makes the labels"
                )
            yield len(before), len(through)


def aligned(
    plain: Sequence[tuple[int, bool]], ids: Sequence[int], decode: Callable[[list[int]], str] | None = None
) -> list[int]:
    """Returns labels of ids that a processor made of a text, where it has expanded media.

    Targets that merged with text of the processor's own after them, such as a line break, are the ids that
    both became.

    Args:
        plain: ids of the text before, and whether each is a target.
        ids: ids that the processor made.
        decode: returns the text of ids, to see what has merged. Default: such targets are missing.

    Returns:
        list[int]: for each of the ids itself if it is a target, else -100.

    Raises:
        ValueError: not every target is among the ids.

    Examples:
        >>> dflop.hugging_face.aligned([(5, False), (9, False), (6, True)], [5, 9, 9, 9, 6])
        [-100, -100, -100, -100, 6]
    """
    labels, at = [IGNORED] * len(ids), 0
    for place, id_ in enumerate(ids):
        if at < len(plain) and plain[at][0] == id_:
            if plain[at][1]:
                labels[place] = id_
            at += 1
    if at == len(plain):
        return labels
    # Tokens beside a medium merged with what it was expanded to.
    labels, found = [IGNORED] * len(ids), 0
    matcher = SequenceMatcher(None, [id_ for id_, _ in plain], list(ids), autojunk=False)
    for kind, start, end, place, place_end in matcher.get_opcodes():
        if kind == "equal":
            for offset in range(end - start):
                if plain[start + offset][1]:
                    labels[place + offset] = ids[place + offset]
                    found += 1
        elif kind == "replace" and decode is not None and all(is_target for _, is_target in plain[start:end]):
            merged = list(ids[place:place_end])
            if decode(merged).startswith(decode([id_ for id_, _ in plain[start:end]])):
                labels[place:place_end] = merged
                found += end - start
    targets = sum(is_target for _, is_target in plain)
    if found != targets:
        raise ValueError(f"{targets - found} of {targets} target tokens are not among the processor's ids")
    return labels


class TokenCounts:
    """Counts tokens by asking a processor of ``transformers``, for ``Custom(tokens=…)``.

    Args:
        processor: its class counts the tokens of images by their size, as those of ``transformers`` 4.55 and
            later do.
        encoder_tokens: tokens inside the encoder for each token in the LLM, such as 4 where 2 x 2 patches are
            merged.
        sample_tokens: tokens that the chat template adds to a sample.
        image_tokens: returns the tokens of an image by its width and height. Default: the processor's class.
        video_tokens: returns the tokens of a video by its frames, width and height. Default: videos are
            refused.
        audio_tokens: returns the tokens of a clip by its frames and sample rate. Default: clips are refused.

    Raises:
        TypeError: the processor does not count tokens.

    Examples:
        >>> class Processor:  # one of ``transformers`` in its place
        ...     def _get_num_multimodal_tokens(self, image_sizes):
        ...         tokens = [height // 28 * (width // 28) for height, width in image_sizes]
        ...         return {"num_image_tokens": tokens}
        >>> tokens = dflop.hugging_face.TokenCounts(Processor(), encoder_tokens=4, sample_tokens=12)
        >>> tokens([{"text_tokens": 100, "images": [(640, 480)], "audio": [], "videos": []}])
        [{'llm': 486, 'vision': [1496]}]
        >>> model = dflop.Custom(modules={"vision": 4e8, "llm": 4e9}, tokens=tokens)
    """

    def __init__(
        self,
        processor: Any,
        *,
        encoder_tokens: float = 1.0,
        sample_tokens: int = 0,
        image_tokens: Callable[[int, int], int] | None = None,
        video_tokens: Callable[[int, int, int], int] | None = None,
        audio_tokens: Callable[[int, int], int] | None = None,
    ) -> None:
        if image_tokens is None and not hasattr(processor, "_get_num_multimodal_tokens"):
            kind = type(processor).__name__
            raise TypeError(f"{kind} does not count tokens by size: give `Custom` a function of yours")
        self._processor = processor
        self._encoder_tokens, self._sample_tokens = encoder_tokens, sample_tokens
        self._given = image_tokens, video_tokens, audio_tokens
        self._image_tokens = lru_cache(maxsize=1 << 16)(image_tokens or _ImageCounts(processor))

    def __call__(self, samples: list[dict[str, Any]]) -> list[dict[str, int | list[int]]]:
        return [self._count(sample) for sample in samples]

    def __reduce__(self) -> tuple[Any, ...]:
        return _token_counts, (self._processor, self._encoder_tokens, self._sample_tokens, *self._given)

    def _count(self, sample: dict[str, Any]) -> dict[str, int | list[int]]:
        _, video_tokens, audio_tokens = self._given
        seen = [self._image_tokens(width, height) for width, height in sample["images"]]
        seen += [_asked("video_tokens", video_tokens, *video) for video in sample["videos"]]
        heard = [_asked("audio_tokens", audio_tokens, *clip) for clip in sample["audio"]]
        row: dict[str, int | list[int]] = {
            "llm": sample["text_tokens"] + self._sample_tokens + sum(seen) + sum(heard)
        }
        for module, tokens in (("vision", seen), ("audio", heard)):
            if tokens:
                row[module] = [round(count * self._encoder_tokens) for count in tokens]
        return row


def _token_counts(processor: Any, encoder_tokens: float, sample_tokens: int, *given: Any) -> TokenCounts:
    image_tokens, video_tokens, audio_tokens = given
    return TokenCounts(
        processor,
        encoder_tokens=encoder_tokens,
        sample_tokens=sample_tokens,
        image_tokens=image_tokens,
        video_tokens=video_tokens,
        audio_tokens=audio_tokens,
    )


class _ImageCounts:
    """Counts the tokens of an image by its width and height, as a processor's class does."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def __call__(self, width: int, height: int) -> int:
        counts = self._processor._get_num_multimodal_tokens(image_sizes=[(height, width)])
        return int(counts["num_image_tokens"][0])


class _TextCounts:
    """Counts the tokens of a text as the index does."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> int:
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _joined(parts: Sequence[tuple[Sequence[int], dict[str, Any]]], pad: int) -> dict[str, Any]:
    """Returns the inputs of all samples from those of some, with their places; the first have all names."""
    import torch

    rows = sum(len(places) for places, _ in parts)
    longest = max(made["input_ids"].shape[1] for _, made in parts)
    joined = dict(parts[0][1])
    for name, first in joined.items():
        if getattr(first, "shape", None) != parts[0][1]["input_ids"].shape:
            continue
        joined[name] = torch.full((rows, longest), pad if name == "input_ids" else 0, dtype=first.dtype)
        for places, made in parts:
            for place, row in zip(places, made.get(name, ()), strict=False):
                joined[name][place, : len(row)] = row
    return joined


def _packed(made: dict[str, Any]) -> dict[str, Any]:
    """Returns padded inputs in one row without padding, and with positions that begin anew with each sample."""
    import torch

    mask = made.pop("attention_mask").bool()
    lengths = mask.sum(1).tolist()
    rows = {name for name, value in made.items() if getattr(value, "shape", None) == mask.shape}
    packed = {name: value[mask][None] if name in rows else value for name, value in made.items()}
    packed["position_ids"] = torch.cat([torch.arange(length) for length in lengths])[None]
    # No sample predicts the first token of the next one.
    packed["labels"][packed["position_ids"] == 0] = IGNORED
    return packed


def _asked(name: str, function: Callable[..., int] | None, *shape: int) -> int:
    if function is None:
        raise ValueError(f"the data has such media: give `{name}` a function")
    return function(*shape)


def _parts(text: str) -> Iterator[Message]:
    """Yields the parts of a text with placeholders of LLaVA; a line break after one belongs to it."""
    while text:
        found = [(text.find(mark), mark) for mark in PLACEHOLDERS if mark in text]
        if not found:
            yield {"type": "text", "text": text}
            return
        at, mark = min(found)
        if text[:at].strip("\n"):
            yield {"type": "text", "text": text[:at]}
        yield {"type": PLACEHOLDERS[mark]}
        text = text[at + len(mark) :].removeprefix("\n")


def _content(message: Message) -> list[Message]:
    # A turn of tool calls alone has none.
    content = (message.get("content") or ()) if message.get("tool_calls") else message["content"]
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [dict(part) for part in content]


def _with_media(messages: list[Message], media: dict[str, list[Any]]) -> list[Message]:
    """Puts media without a placeholder before the first turn of the user, and counts the placeholders."""
    first = next((message for message in messages if message["role"] == "user"), messages[0])
    for kind, found in media.items():
        places = sum(part["type"] == kind for message in messages for part in message["content"])
        if places > len(found):
            raise ValueError(f"the text has {places} places of type {kind}, the sample {len(found)}")
        first["content"] = [{"type": kind}] * (len(found) - places) + first["content"]
    return messages


def _picture(image: Any) -> Any:
    """Returns an image of Pillow, whose channels no processor has to guess."""
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.asarray(image))


def _metadata(video: Video) -> dict[str, Any]:
    times, count = video.times_seconds, len(video.frames)
    seconds = float(times[-1] - times[0]) if count > 1 else 0.0
    rate = (count - 1) / seconds if seconds > 0 else video.frames_per_second or 1.0
    return {
        "fps": rate,
        "total_num_frames": count,
        "duration": count / rate,
        "frames_indices": list(range(count)),
    }


def _waveform(clip: Audio, rate: int) -> Any:
    import numpy as np

    if clip.sample_rate_hz != rate:
        message = f"expected clips of {rate} Hz, found {clip.sample_rate_hz} Hz: resample them in a transform"
        raise ValueError(message)
    return np.asarray(clip.samples, np.float32).mean(axis=1)


def _media_ids(processor: Any, tokenizer: Any) -> Iterator[int]:
    """Yields the ids of placeholders, which are never targets."""
    for name in ("image_token", "video_token", "audio_token"):
        token = getattr(processor, name, None)
        token = getattr(token, "content", token)
        if isinstance(token, str):
            yield tokenizer.convert_tokens_to_ids(token)
