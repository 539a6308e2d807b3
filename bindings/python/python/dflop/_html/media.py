"""Media as elements of a page: images, players and texts, each of bounded size."""

from __future__ import annotations

import base64
import io
import struct
import wave
import zlib
from html import escape
from typing import Any

from dflop._html.page import FAINT, size
from dflop.batches import Audio, Video

# Longer side of an image and of a frame, in pixels; seconds of a clip; frames of a video.
IMAGE_SIDE_MAX, FRAME_SIDE_MAX, CLIP_SECONDS_MAX, FRAMES_MAX = 320, 140, 10, 6
# Bytes of a stored image that are put on the page as they are.
STORED_BYTES_MAX = 1 << 20
TEXT_MAX = 1_500
_STORED = (
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"GIF8", "image/gif"),
)


def is_image(value: Any) -> bool:
    """Returns whether a value is a decoded image: bytes ``[height, width, 3]``."""
    shape = getattr(value, "shape", ())
    return len(shape) == 3 and shape[-1] == 3 and str(value.dtype).endswith("uint8")


def element(value: Any, side: int = IMAGE_SIDE_MAX) -> str | None:
    """Returns the element of a medium; ``None`` for anything else.

    - `side`: largest width and height of an image, in pixels; below the default a video is its first frame
    """
    if isinstance(value, Audio):
        return _clip(value)
    if isinstance(value, Video):
        return _frames(value, min(side, FRAME_SIDE_MAX), FRAMES_MAX if side >= IMAGE_SIDE_MAX else 1)
    if is_image(value):
        height, width = value.shape[:2]
        return _picture(value, f"{width} x {height}", side)
    return _stored(value, side)


def text(value: str) -> str:
    """Returns a text as it is, cut after some characters."""
    cut = f' <span style="{FAINT}">… {len(value) - TEXT_MAX:,} more characters</span>'
    shown = escape(value[:TEXT_MAX]) + (cut if len(value) > TEXT_MAX else "")
    return f'<div style="white-space:pre-wrap;overflow-wrap:anywhere">{shown}</div>'


def png(pixels: Any) -> bytes:
    """Encodes uint8 pixels ``[height, width, 3]`` as PNG."""
    height, width = pixels.shape[:2]
    content = pixels.tobytes()
    rows = b"".join(b"\0" + content[3 * width * row : 3 * width * (row + 1)] for row in range(height))

    def chunk(kind: bytes, content: bytes) -> bytes:
        head, check = struct.pack(">I", len(content)), struct.pack(">I", zlib.crc32(kind + content))
        return head + kind + content + check

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _address(pixels: Any, side: int) -> str:
    """Returns the address of an image, reduced by means over squares to at most `side` pixels."""
    import numpy as np

    pixels = np.ascontiguousarray(np.asarray(pixels))
    height, width = pixels.shape[:2]
    factor = -(-max(height, width) // side)
    if factor > 1:
        rows, columns = max(height // factor, 1), max(width // factor, 1)
        # An image that is thinner than a square has squares of its own width.
        tall, wide = min(factor, height), min(factor, width)
        cut = pixels[: rows * tall, : columns * wide].reshape(rows, tall, columns, wide, 3)
        pixels = np.ascontiguousarray(cut.mean((1, 3)).astype(np.uint8))
    return "data:image/png;base64," + base64.b64encode(png(pixels)).decode()


def _picture(pixels: Any, caption: str, side: int) -> str:
    """Returns an image whose longer side is at most `side`, whatever the squares of its means."""
    height, width = pixels.shape[:2]
    shown = max(round(width * min(side / max(height, width), 1)), 1)
    return _figure(_address(pixels, side), caption, f"width:{shown}px;max-width:100%;height:auto")


def _figure(address: str, caption: str, fitted: str) -> str:
    style = f"{fitted};display:block;margin:0"
    image = f'<img alt="{escape(caption)}" style="{style}" src="{address}">'
    return f'<div style="margin:2px 0;min-width:0">{image}<div style="{FAINT}">{escape(caption)}</div></div>'


def _stored(value: Any, side: int) -> str | None:
    """Returns the image of a field that was not decoded, if its first bytes are those of an image."""
    try:
        content = bytes(memoryview(value)) if len(value) <= STORED_BYTES_MAX else b""
    except TypeError:
        return None
    kind = next((kind for magic, kind in _STORED if content.startswith(magic)), None)
    if kind is None:
        return None
    address = f"data:{kind};base64,{base64.b64encode(content).decode()}"
    fitted = f"max-width:min(100%,{side}px);max-height:{side}px;object-fit:contain"
    return _figure(address, f"as stored, {size(len(content))}", fitted)


def _clip(audio: Audio) -> str:
    import numpy as np

    samples, rate = np.asarray(audio.samples), audio.sample_rate_hz
    seconds = len(samples) / rate
    mono = samples[: CLIP_SECONDS_MAX * rate].mean(axis=1) if samples.ndim == 2 else samples
    file = io.BytesIO()
    with wave.open(file, "wb") as clip:
        clip.setparams((1, 2, rate, 0, "NONE", ""))
        clip.writeframes((np.clip(mono, -1, 1) * 32767).astype("<i2").tobytes())
    address = "data:audio/wav;base64," + base64.b64encode(file.getvalue()).decode()
    cut = f", the first {CLIP_SECONDS_MAX} s" if seconds > CLIP_SECONDS_MAX else ""
    caption = f"{seconds:.1f} s at {rate:,} Hz{cut}" + (", truncated" if audio.is_truncated else "")
    player = f'<audio controls style="max-width:100%;height:36px" src="{address}"></audio>'
    return f'<div style="margin:2px 0">{player}<div style="{FAINT}">{caption}</div></div>'


def _frames(video: Video, side: int, most: int) -> str:
    count = len(video.frames)
    chosen = sorted({round(place * (count - 1) / max(most - 1, 1)) for place in range(min(most, count))})
    shown = [
        _picture(video.frames[place], f"{float(video.times_seconds[place]):.2f} s", side) for place in chosen
    ]
    caption = f"video: {len(chosen)} of {count} sampled frames"
    return (
        f'<div style="margin:2px 0"><div style="display:flex;flex-wrap:wrap;gap:4px">{"".join(shown)}</div>'
        f'<div style="{FAINT}">{caption}</div></div>'
    )
