"""HTML of samples, batches and microbatches: what is in them, as it looks and sounds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from dflop._html import media
from dflop._html.charts import Part, bars
from dflop._html.page import COLORS, FAINT, block, facts, legend, note, side_by_side, size, table, time
from dflop.batches import Batch, Microbatch, Sample

# Cards of a batch, the side of their images in pixels, and the characters of their texts.
CARDS_MAX, CARD_SIDE, CARD_TEXT_MAX = 12, 160, 160
TURNS_MAX = 20
_BUBBLE = "border-radius:10px;padding:6px 10px;margin:4px 0;max-width:85%;width:fit-content"


def sample(of: Sample) -> str:
    """Returns the HTML of a sample: its conversation with the media in place, and all other fields."""
    rows = [("shard", f"{getattr(of, 'shard', '')} at byte {getattr(of, 'offset', 0):,}")]
    if getattr(of, "bytes", 0):
        rows.append(("payload", size(of.bytes)))
    parts, used = _conversation(of)
    for name, value in of.items():
        if name not in used:
            parts.append(f'<div style="margin-top:6px;{FAINT}">{escape(name)}</div>{_field(value)}')
    return block(f"Sample {getattr(of, 'key', '')}", facts(rows), *parts)


def batch(of: Batch) -> str:
    """Returns the HTML of a batch: a grid of its samples."""
    samples = getattr(of, "samples", [])
    cards = [_card(of, place) for place in range(min(len(samples), CARDS_MAX))]
    more = len(samples) - len(cards)
    fields = [(name, _described(value)) for name, value in of.items()]
    grid = side_by_side(cards, gap=8)
    return block(
        f"Batch of {len(samples):,} samples", facts(fields), grid, note(f"and {more:,} more") if more else ""
    )


def microbatch(of: Microbatch) -> str:
    """Returns the HTML of a microbatch: its costs by module, and its tensors."""
    tensors = table(
        ("input", "value"), [(name, _described(value)) for name, value in of.items()], numbers=False
    )
    # Libraries that rebuild a mapping by its class keep the tensors only.
    if not hasattr(of, "samples"):
        return block("Microbatch", tensors)
    keys = ", ".join(of.sample_keys[:8]) + (", …" if len(of.sample_keys) > 8 else "")
    rows = [
        ("samples", f"{len(of.samples):,}: {keys}" if keys else "0"),
        (
            "tokens",
            f"{of.tokens:,}, of which {of.target_tokens:,} are targets; padding {of.padding_tokens:,}",
        ),
        ("predicted time", time(of.cost_seconds)),
    ]
    seconds = of.module_seconds
    drawn: list[Part] = [
        (length, color, f"{module}: {time(length)}")
        for (module, length), color in zip(seconds.items(), COLORS, strict=False)
    ]
    total = sum(seconds.values())
    chart = bars([("cost", drawn, time(total))], total, "predicted time by module") if total > 0 else ""
    names = [f"{module} {time(length)}" for module, length in seconds.items()]
    return block("Microbatch", facts(rows), chart, legend(names) if chart else "", tensors)


def _conversation(of: Sample) -> tuple[list[str], set[str]]:
    """Returns the turns of a sample, and the names of the fields that they show."""
    from dflop.hugging_face import media_of, messages_of

    try:
        messages, kinds = messages_of(of), media_of(of)
        # Parts name the kind of a medium only: they are in the order of the fields.
        remaining = {kind: iter(found) for kind, found in kinds.items()}
        turns = [_turn(message, remaining) for message in messages[:TURNS_MAX]]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        # Other documents are shown as they are.
        return [], set()
    if len(messages) > TURNS_MAX:
        turns.append(note(f"and {len(messages) - TURNS_MAX:,} more turns"))
    document = of.get("json")
    is_document = isinstance(document, Mapping) and not {"conversations", "messages"}.isdisjoint(document)
    left = [medium for found in remaining.values() for medium in found]
    used = {"json" if is_document else "txt"}
    for name, value in of.items():
        is_medium = any(value is medium for found in kinds.values() for medium in found)
        if is_medium and not any(value is medium for medium in left):
            used.add(name)
    return ['<div style="max-width:640px">' + "".join(turns) + "</div>"], used


def _turn(message: Mapping[str, Any], remaining: Mapping[str, Iterator[Any]]) -> str:
    shown = []
    for part in message["content"]:
        if part["type"] == "text":
            shown.append(media.text(part["text"]))
        else:
            medium = media.element(next(remaining.get(part["type"], iter(())), None))
            shown.append(medium or f"[{escape(part['type'])}]")
    shown += [f"<code>{media.text(_call(call))}</code>" for call in message.get("tool_calls") or ()]
    is_target = message["role"] == "assistant"
    side = "margin-left:auto" if is_target else ""
    color = "rgba(76,120,168,.25)" if is_target else "rgba(127,127,127,.18)"
    name = f'<div style="{FAINT}">{escape(str(message["role"]))}</div>'
    return f'<div style="{_BUBBLE};background:{color};{side}">{name}{"".join(shown)}</div>' if shown else ""


def _call(call: Mapping[str, Any]) -> str:
    """Returns a tool call as it is written in code."""
    function = call.get("function", call)
    arguments = function.get("arguments", "")
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f"{function['name']}({written})"


def _field(value: Any) -> str:
    if (shown := media.element(value)) is not None:
        return shown
    if isinstance(value, str):
        return media.text(value)
    if isinstance(value, Mapping | list):
        return media.text(json.dumps(value, indent=1, ensure_ascii=False, default=str))
    return f"<code>{escape(_described(value))}</code>"


def _card(of: Batch, place: int) -> str:
    """Returns a small image of a sample with its key and label."""
    one = of.samples[place]
    images = [value for value in one.values() if media.is_image(value)]
    if not images and of.get("image") is not None and place < len(of.image_rows):
        start, end = of.image_rows[place]
        images = [_displayed(of["image"][row]) for row in range(start, min(end, start + 1))]
    elements = [media.element(image, CARD_SIDE) for image in images[:1]]
    if not elements:
        elements = [shown for value in one.values() if (shown := media.element(value, CARD_SIDE)) is not None]
    if not elements and (said := _said(one)):
        cut = "…" if len(said) > CARD_TEXT_MAX else ""
        elements = [f'<div style="font-size:12px">{media.text(said[:CARD_TEXT_MAX] + cut)}</div>']
    numbers = [f"{name} {value}" for name, value in one.items() if isinstance(value, int)]
    label = ", ".join([one.key, *numbers])
    more = note(f"{len(images)} images") if len(images) > 1 else ""
    style = f"width:{CARD_SIDE}px;padding:6px;border:1px solid rgba(127,127,127,.35);border-radius:6px"
    title = f'<div style="overflow-wrap:anywhere;font-size:12px">{escape(label)}</div>'
    return f'<div style="{style}">{title}{elements[0] if elements else ""}{more}</div>'


def _said(of: Sample) -> str:
    """Returns the texts of a sample: those of its conversation, or its first text."""
    from dflop.hugging_face import messages_of

    try:
        said = []
        for message in messages_of(of):
            said += [part["text"] for part in message["content"] if part["type"] == "text"]
            said += map(_call, message.get("tool_calls") or ())
        return "\n".join(filter(None, said))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return next((value for value in of.values() if isinstance(value, str)), "")


def _displayed(pixels: Any) -> Any:
    """Returns normalized pixels of one image, in either layout, as bytes: darkest to brightest."""
    import numpy as np

    values = np.asarray(pixels.float() if hasattr(pixels, "float") else pixels)
    if values.shape[0] == 3 and values.shape[-1] != 3:
        values = np.moveaxis(values, 0, -1)
    if values.dtype == np.uint8:
        return values
    low, high = float(values.min()), float(values.max())
    return ((values - low) * (255 / (high - low) if high > low else 0)).astype(np.uint8)


def _described(value: Any) -> str:
    """Returns the type of a value and its shape, or the value itself if it is short."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"{str(value.dtype).removeprefix('torch.')} {list(shape)}"
    if isinstance(value, list | tuple):
        found = [one for one in value if one is not None]
        missing = f" of {len(value):,}" if len(found) < len(value) else ""
        return f"{len(found):,}{missing} values: {_kinds(found)}"
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:80] + "…"


def _kinds(values: Sequence[Any]) -> str:
    return ", ".join(sorted({type(value).__name__ for value in values})) or "none"
