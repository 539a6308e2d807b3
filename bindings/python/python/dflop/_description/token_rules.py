"""Counts LLM tokens by the checkpoint's own processor, and proves a rule for them where it can."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import dflop
from dflop._description import encoder, media
from dflop._measured_tokens import sample_rate_hz
from dflop.errors import Error, ModelError

# Sides of the images in the table, in pixels: all pairs if the processor counts by size, else the pairs of
# some, whose images are made.
SIDES = (32, 56, 100, 140, 224, 300, 336, 384, 448, 512, 640, 720, 896, 1000, 1280, 1536, 2048, 2480, 3508)
MADE_SIDES = (56, 224, 448, 640, 1000)
# Frames, width and height of the videos in the table, which are made.
VIDEOS = [(frames, *size) for frames in (2, 4, 8) for size in ((112, 112), (224, 336), (448, 252))]
CLIP_SECONDS = (0.5, 1, 2, 3.3, 5, 8, 10, 15, 20, 25, 29.9, 30, 31, 45, 60)
# Columns of a table after those of the size.
_COUNTS = ("tokens", "items", "encoder_tokens", "pairs", "window_pairs")
# Rules that count what is around an image themselves, if anything is.
_WITHOUT_MARKERS = ("any_res", "fitted_tiles", "listed_grids", "longest_edge", "scaled_tiles")
_LLM = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "intermediate_size": 8}
Row = tuple[int, int, int | None]


def image_rule(processor: Any, sizes: Mapping[str, Any], work: encoder.Work) -> dict[str, Any]:
    """Returns the token rule of images.

    Args:
        processor: of the checkpoint.
        sizes: of the vision configuration: ``patch_size``, ``image_size``.
        work: counts the work of images in the encoder.

    Raises:
        ModelError: the processor counts no image.
    """
    rows, source = _image_table(processor)
    counts = {tokens for _, _, tokens in rows if tokens is not None}
    if not counts:
        raise ModelError(f"{type(processor).__name__} counts no tokens of any image")
    markers = marker_tokens(processor, "image")
    rule: dict[str, Any] = {"medium": "image", "source": source, "marker_tokens": markers}
    seen = {size: work.row(work.units(size)) for size in encoder.IMAGES}
    is_uniform = len({tuple(row) for row in seen.values()}) == 1
    if len(counts) == 1 and is_uniform and all(tokens is not None for _, _, tokens in rows):
        return rule | {"kind": "fixed", "tokens": counts.pop(), "checked": len(rows)}
    part = getattr(processor, "image_processor", None)
    # A rule counts no padding to chunks.
    for candidate in _candidates(processor, sizes, part) if work.chunk_tokens is None else ():
        if markers and candidate["rule"] in _WITHOUT_MARKERS:
            continue
        if _agrees(candidate, rows, seen, work):
            return rule | {"kind": "rule", "rule": candidate, "checked": len(rows)}
    columns = ["width_pixels", "height_pixels", *_COUNTS]
    return rule | {
        "kind": "measured",
        "table": {"columns": columns, "rows": _with_work(processor, rows, seen, work)},
    }


def _with_work(
    processor: Any, rows: Sequence[Row], seen: Mapping[tuple[int, int], list[int]], work: encoder.Work
) -> list[list[int | None]]:
    """Adds the encoder's work to rows: by the processor's patches if equal, else by images of some sizes."""
    patches = {size: _patches(processor, *size) for size in seen}
    place = 0 if work.is_fixed else 1
    by_patches = None not in patches.values() and all(
        patches[size] == row[place] and (work.is_fixed or row[0] == 1) for size, row in seen.items()
    )
    made: list[list[int | None]] = []
    for width, height, tokens in rows:
        if tokens is None:
            made.append([width, height, *[None] * len(_COUNTS)])
            continue
        count = (
            _patches(processor, width, height)
            if by_patches and work.windows is None and work.chunk_tokens is None
            else None
        )
        if count is not None:
            each = next(iter(seen.values()))
            length = each[1] // each[0] if work.is_fixed else count
            items = count if work.is_fixed else 1
            pairs = items * length**2
            made.append([width, height, tokens, items, items * length, pairs, pairs])
        elif width in MADE_SIDES and height in MADE_SIDES:
            units = work.units((width, height))
            if work.is_known(units):
                made.append([width, height, tokens, *work.row(units)])
    return made


def _patches(processor: Any, width: int, height: int) -> int | None:
    """Returns what the processor counts as patches of an image."""
    try:
        found = processor._get_num_multimodal_tokens(image_sizes=[(height, width)])
        return int(found["num_image_patches"][0])
    except Exception:  # noqa: BLE001  A processor without the count, or that rejects the size.
        return None


def audio_rule(
    processor: Any, clip_tokens: Callable[[Any], int], source: str, work: encoder.Work
) -> dict[str, Any]:
    """Returns the token rule of audio clips.

    Args:
        processor: of the checkpoint.
        clip_tokens: counts the LLM tokens of a clip.
        source: what is counted.
        work: counts the work of clips in the encoder.
    """
    rate = sample_rate_hz(processor)
    rows = []
    for seconds in CLIP_SECONDS:
        samples = int(seconds * rate)
        rows.append((samples, clip_tokens(media.clip(samples))))
    rule: dict[str, Any] = {
        "medium": "audio",
        "source": source,
        "sample_rate_hz": rate,
        "marker_tokens": marker_tokens(processor, "audio"),
    }
    counts = {tokens for _, tokens in rows}
    seen = [[samples, tokens, *work.clip_row(samples)] for samples, tokens in rows]
    if len(counts) == 1 and len({tuple(row[2:]) for row in seen}) == 1:
        return rule | {"kind": "fixed", "tokens": counts.pop(), "checked": len(rows)}
    for windows in (1, 2**16) if work.chunk_tokens is None else ():
        candidate = {"rule": "mel_windows", "max_windows": windows}
        if work.is_fixed and _audio_agrees(candidate, rate, seen):
            return rule | {"kind": "rule", "rule": candidate, "checked": len(rows)}
    return rule | {"kind": "measured", "table": {"columns": ["samples", *_COUNTS], "rows": seen}}


def video_rule(processor: Any, sizes: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the token rule of videos whose frames have been sampled; nothing if the processor reads none."""
    rows: list[tuple[int, int, int, int]] = []
    try:
        for frames, width, height in VIDEOS:
            made, text = media.processed(processor, "video", media.video(frames, width, height))
            tokens = len(made["input_ids"][0]) - _text_tokens(processor, text, "video")
            rows.append((frames, width, height, tokens))
    except ModelError:
        return None
    rule: dict[str, Any] = {
        "medium": "video",
        "source": "processor",
        "marker_tokens": marker_tokens(processor, "video"),
    }
    part = getattr(processor, "video_processor", None) or getattr(processor, "image_processor", None)
    for candidate in _candidates(processor, sizes, part):
        for pair in sorted({_number(getattr(part, "temporal_patch_size", None)) or 1, 1, 2}):
            timed = candidate | {"temporal_patch_size": pair}
            if candidate["rule"] == "native" and _video_agrees(timed, rows):
                return rule | {"kind": "rule", "rule": timed, "checked": len(rows)}
    columns = ["frames", "width_pixels", "height_pixels", "tokens"]
    return rule | {"kind": "measured", "table": {"columns": columns, "rows": [list(row) for row in rows]}}


def marker_tokens(processor: Any, medium: str) -> int | None:
    """Returns the tokens that the chat template puts around a medium.

    Returns:
        int | None: nothing without a chat template that shows the medium.
    """
    tokenizer = getattr(processor, "tokenizer", None)
    with_medium, without = (media.template_text(processor, kind) for kind in (medium, None))
    if tokenizer is None or with_medium is None or without is None:
        return None
    for token in media.placeholders(processor, medium):
        if token in with_medium:
            counts = [
                len(tokenizer(text, add_special_tokens=False)["input_ids"])
                for text in (with_medium.replace(token, "", 1), without)
            ]
            return counts[0] - counts[1]
    return None


def _image_table(processor: Any) -> tuple[list[Row], str]:
    count = getattr(processor, "_get_num_multimodal_tokens", None)
    if count is not None:
        rows = [(width, height, _counted(count, width, height)) for width in SIDES for height in SIDES]
        if any(tokens is not None for _, _, tokens in rows):
            return rows, "_get_num_multimodal_tokens"
    rows = []
    for width in MADE_SIDES:
        for height in MADE_SIDES:
            made, text = media.processed(processor, "image", media.image(width, height))
            rows.append((width, height, len(made["input_ids"][0]) - _text_tokens(processor, text)))
    return rows, "processor"


def _text_tokens(processor: Any, text: str, medium: str = "image") -> int:
    """Returns the tokens of a text without the placeholder in it."""
    for token in media.placeholders(processor, medium):
        if token in text:
            return len(processor.tokenizer(text.replace(token, "", 1))["input_ids"])
    return len(processor.tokenizer(text)["input_ids"])


def _counted(count: Callable[..., Any], width: int, height: int) -> int | None:
    try:
        return int(count(image_sizes=[(height, width)])["num_image_tokens"][0])
    except Exception:  # noqa: BLE001  Sizes are rejected by any exception.
        return None


def _candidates(processor: Any, sizes: Mapping[str, Any], part: Any) -> Iterator[dict[str, Any]]:
    """Yields rules that the settings of a processor's part suggest."""
    patch = _number(getattr(part, "patch_size", None)) or _number(sizes.get("patch_size"))
    if patch is None:
        return
    merge = _number(getattr(part, "merge_size", None)) or 1
    size = _sides(part, "size")
    low = getattr(part, "min_pixels", None) or size.get("shortest_edge")
    high = getattr(part, "max_pixels", None) or size.get("longest_edge")
    if low and high:
        yield {
            "rule": "native",
            "patch_size": patch,
            "merge_size": merge,
            "min_pixels": low,
            "max_pixels": high,
        }
    own = _number(getattr(processor, "spatial_merge_size", None))
    if size.get("longest_edge") and not low:
        for merged in sorted({merge, own or merge}):
            edge = size["longest_edge"]
            yield {"rule": "longest_edge", "patch_size": patch, "merge_size": merged, "longest_edge": edge}
    tile = (
        _number(size.get("height")) or _number(size.get("shortest_edge")) or _number(sizes.get("image_size"))
    )
    if tile is None or tile < patch:
        return
    side = max(
        1, round(1 / float(getattr(processor, "downsample_ratio", 0) or sizes.get("downsample_ratio") or 1))
    )
    square = {"tile_size": tile, "patch_size": patch}
    yield from _scaled_tiles(processor, part, square)
    for merged in sorted({merge, side, 2}):
        yield from _tiles(part, square | {"merge_size": merged})
    yield from _grids(part, square)


def _scaled_tiles(processor: Any, part: Any, square: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Yields the rule of images whose longer side is scaled to a length, then cut."""
    edge, tile = (_sides(part, name).get("longest_edge") for name in ("size", "max_image_size"))
    tokens = getattr(processor, "image_seq_len", None)
    if not (edge and tile and tokens):
        return
    merged = (tile // square["patch_size"]) / tokens**0.5
    if merged >= 1 and merged == int(merged):
        cut = bool(getattr(part, "do_image_splitting", True))
        own = {"tile_size": tile, "merge_size": int(merged), "longest_edge": edge, "cut": cut}
        yield {"rule": "scaled_tiles", **square, **own}


def _tiles(part: Any, square: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Yields the rules of images that are cut into a number of tiles."""
    most = getattr(part, "max_patches", None)
    enlarge = getattr(part, "resize_to_max_canvas", None)
    if most and enlarge is not None:
        yield {"rule": "fitted_tiles", **square, "max_tiles": most, "enlarge": bool(enlarge)}
    for tiles in sorted({one for one in (most, 12) if one}):
        for markers in (0, 2):
            yield {"rule": "tiles", **square, "max_tiles": tiles, "marker_tokens": markers}


def _grids(part: Any, square: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Yields the rules of images on a grid that is listed."""
    pinpoints = getattr(part, "image_grid_pinpoints", None)
    if not pinpoints:
        return
    tile = square["tile_size"]
    grids = [[side // tile for side in pair] for pair in pinpoints]
    yield {"rule": "listed_grids", **square, "grids": grids}
    for features in (9, 16, 4):
        sides = {"max_grid_side": max(map(max, grids)), "max_feature_tiles": features}
        yield {"rule": "any_res", **square, **sides}


def _agrees(
    candidate: Mapping[str, Any],
    rows: Sequence[Row],
    seen: Mapping[tuple[int, int], list[int]],
    work: encoder.Work,
) -> bool:
    """Whether dflop's own rule counts all images like the processor and the encoder, and rejects the same."""
    try:
        sizes = _LLM | {"tokens": dict(candidate)}
        costs = dflop.CostModel(dflop.ModelDescription(vision=sizes, llm=_LLM | {"vocab_size": 8}))
    except Error:
        return False

    def tokens(width: int, height: int) -> int | None:
        try:
            return int(costs.cost(images=[(width, height)])["tokens"])
        except Error:
            return None

    if any(tokens(width, height) != expected for width, height, expected in rows):
        return False
    name, place = ("encoder_items", 0) if work.is_fixed else ("encoder_tokens", 1)
    return all(costs.cost(images=[size])[name] == row[place] for size, row in seen.items())


def _video_agrees(candidate: Mapping[str, Any], rows: Sequence[tuple[int, int, int, int]]) -> bool:
    try:
        sizes = _LLM | {"tokens": dict(candidate)}
        costs = dflop.CostModel(dflop.ModelDescription(vision=sizes, llm=_LLM | {"vocab_size": 8}))
        counted = [int(costs.cost(videos=[(t, w, h)])["tokens"]) for t, w, h, _ in rows]
    except Error:
        return False
    return counted == [tokens for *_, tokens in rows]


def _audio_agrees(candidate: Mapping[str, Any], rate: int, rows: Sequence[Sequence[int]]) -> bool:
    sizes = _LLM | {"tokens": dict(candidate)}
    costs = dflop.CostModel(dflop.ModelDescription(audio=sizes, llm=_LLM | {"vocab_size": 8}))
    for samples, tokens, items, *_ in rows:
        cost = costs.cost(audio=[(samples, rate)])
        if (cost["tokens"], cost["encoder_items"]) != (tokens, items):
            return False
    return True


def _sides(part: Any, name: str) -> dict[str, Any]:
    """Returns a setting with sides by name; nothing if it is a number or missing."""
    value = getattr(part, name, None)
    return dict(value) if hasattr(value, "get") else {}


def _number(value: Any) -> int | None:
    """Returns a side: a number, or that of a square."""
    if hasattr(value, "get"):
        value = value.get("height")
    if isinstance(value, list | tuple):
        value = value[0] if value else None
    return value if isinstance(value, int) and value > 0 else None
