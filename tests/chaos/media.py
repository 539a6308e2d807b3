"""Writes shards of small images, audio clips, texts and JSON documents, some of them damaged."""

import pathlib
import random
import struct
import tempfile
import wave
import zlib
from collections.abc import Iterable

BLOCK = 512


def make_media_shards(directory: pathlib.Path, shards: int, samples: int, seed: int, *, damaged_every: int = 0) -> None:
    """Writes shards; one sample in `damaged_every` is damaged, none with 0."""
    directory.mkdir(parents=True)
    source = random.Random(seed)
    for shard in range(shards):
        entries = []
        for number in range(samples):
            key = f"{shard:02}{number:04}"
            fields = {"txt": b"a kite " * source.randint(1, 60), "json": b'{"key": "%s"}' % key.encode()}
            if number % 4:
                fields["png"] = png(source, source.randint(8, 64), 24)
            else:
                fields["wav"] = wav(source, source.randint(500, 4_000))
            if damaged_every and number % damaged_every == 0:
                extension = source.choice(list(fields))
                fields[extension] = damaged(source, fields[extension])
            entries += [(f"{key}.{extension}", content) for extension, content in fields.items()]
        write_tar(directory / f"shard-{shard:03}.tar", entries)


def damaged(source: random.Random, content: bytes) -> bytes:
    """Returns something else, or the first half with a byte that no text has."""
    return b"\xff\xfe\xfd" if source.random() < 0.5 else content[: len(content) // 2] + b"\xff"


def write_tar(path: pathlib.Path, entries: Iterable[tuple[str, bytes]]) -> None:
    """Writes a tar archive of many small files, faster than `tarfile`."""
    with path.open("wb") as out:
        for name, content in entries:
            header = bytearray(BLOCK)
            for at, part in ((0, name.encode()), (100, b"0000644\0"), (108, b"0000000\0"), (116, b"0000000\0")):
                header[at : at + len(part)] = part
            header[124:136] = b"%011o\0" % len(content)
            header[136:148] = b"%011o\0" % 0
            header[148:156] = b" " * 8
            header[156:157] = b"0"
            header[257:265] = b"ustar\x0000"
            header[148:156] = b"%06o\0 " % sum(header)
            out.write(header + content + bytes(-len(content) % BLOCK))
        out.write(bytes(2 * BLOCK))


def png(source: random.Random, width: int, height: int) -> bytes:
    """Returns an image of random gradients."""
    start, step = source.randrange(256), source.randrange(1, 9)
    rows = b"".join(b"\0" + bytes((start + step * (x // 3 + y)) % 256 for x in range(3 * width)) for y in range(height))
    chunk = lambda kind, content: (
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
    )
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def wav(source: random.Random, frames: int) -> bytes:
    with tempfile.SpooledTemporaryFile() as out:
        with wave.open(out, "wb") as sound:
            sound.setnchannels(1)
            sound.setsampwidth(2)
            sound.setframerate(16_000)
            sound.writeframes(source.randbytes(2 * frames))
        out.seek(0)
        return out.read()
