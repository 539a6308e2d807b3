"""Counts what a processor delivers for a medium of a size, by having it process one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from dflop.batches import Audio, Video

# Sizes at which a count by the processor's class is compared with what it delivers; width and height in pixels.
CHECKED = ((112, 112), (640, 200), (224, 448))
TURNS = ({"from": "human", "value": "a"}, {"from": "gpt", "value": "b"})


def sample_rate_hz(processor: Any) -> int:
    """Returns the sample rate of a processor's clips: 16 kHz unless it tells."""
    parts = (getattr(processor, name, None) for name in ("feature_extractor", "audio_processor"))
    return int(next((part.sampling_rate for part in parts if hasattr(part, "sampling_rate")), 16_000))


class MeasuredTokens:
    """Tokens that a function from samples to model inputs delivers, beside those of the texts.

    - `make`: returns ``input_ids`` and ``attention_mask`` of samples
    - `text_tokens`: counts the tokens of a text as the index does
    - `count`: counts the positions of an image of a width and height in place of ``make``, where both differ
      by a constant; nothing if the processor's class does not count
    """

    def __init__(
        self,
        make: Callable[[list[Any]], Mapping[str, Any]],
        text_tokens: Callable[[str], int],
        count: Callable[[int, int], int] | None,
    ) -> None:
        self._make, self._count = make, count
        self._texts = sum(text_tokens(turn["value"]) for turn in TURNS)
        self.sample_tokens = self._delivered({}) - self._texts
        self._differences: set[int] | None = None
        self._cached = lru_cache(maxsize=1 << 16)(self._measure)

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self._make, self._texts, self._count, self.sample_tokens)

    def image(self, width: int, height: int) -> int:
        """Returns the positions of an image, those that the chat template puts around it included."""
        if self._count is not None and self._differences is None:
            counted = [(size, self._count_or_nothing(*size)) for size in CHECKED]
            self._differences = {
                -1 if count is None else self._cached("image", *size) - count for size, count in counted
            }
        if self._count is not None and self._differences is not None and len(self._differences) == 1:
            (more,) = self._differences
            if more >= 0:
                return self._count(width, height) + more
        return self._cached("image", width, height)

    def video(self, frames: int, width: int, height: int) -> int:
        """Returns the positions of a video by its frames and their size."""
        return self._cached("video", frames, width, height)

    def audio(self, frames: int, sample_rate_hz: int) -> int:
        """Returns the positions of a clip."""
        return self._cached("audio", frames, sample_rate_hz)

    def _count_or_nothing(self, width: int, height: int) -> int | None:
        assert self._count is not None
        try:
            return self._count(width, height)
        except Exception:  # noqa: BLE001  A size that the class rejects is measured.
            return None

    def _measure(self, kind: str, *shape: int) -> int:
        return self._delivered({"medium": _medium(kind, *shape)}) - self._texts - self.sample_tokens

    def _delivered(self, media: dict[str, Any]) -> int:
        made = self._make([{"json": {"conversations": [dict(turn) for turn in TURNS]}, **media}])
        mask = made.get("attention_mask")
        ids = made["input_ids"]
        if mask is not None and tuple(mask.shape) == tuple(ids.shape):
            return int((mask != 0).sum())
        return int(ids.shape[0]) * int(ids.shape[1])


def _again(make: Any, texts: int, count: Any, sample_tokens: int) -> MeasuredTokens:
    made = MeasuredTokens.__new__(MeasuredTokens)
    made._make, made._texts, made._count, made.sample_tokens = make, texts, count, sample_tokens
    made._differences = None
    made._cached = lru_cache(maxsize=1 << 16)(made._measure)
    return made


def _medium(kind: str, *shape: int) -> Any:
    """Returns a medium of noise: some processors remove margins of one color."""
    import numpy as np

    rng = np.random.default_rng(0)
    if kind == "audio":
        frames, rate = shape
        return Audio(rng.normal(0, 0.1, (frames, 1)).astype(np.float32), rate)
    *frames, width, height = shape
    pixels = rng.integers(0, 255, (*frames, height, width, 3), dtype=np.uint8)
    if kind == "image":
        return pixels
    return Video(pixels, np.arange(frames[0]) / 2, 2.0)
