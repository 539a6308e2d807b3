"""A small multimodal dataset and a small model for experiments, generated in a moment, without a download.

    >>> directory = dflop.example.directory()  # shards/ and model/, deleted with the process
    >>> loader = dflop.BalancedLoader(directory / "shards", model=directory / "model", global_batch_size=16)

The model is a Qwen2-VL of 64 dimensions with a tokenizer of whole words; ``transformers`` reads its
directory.
"""

from __future__ import annotations

import atexit
import io
import json
import math
import os
import random
import shutil
import struct
import sys
import tarfile
import tempfile
import zlib
from pathlib import Path
from typing import Any

WORDS = 512
SPECIAL = [
    "<unk>",
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
TEMPLATE_WORDS = ["system", "user", "assistant", "You", "are", "a", "helpful", "assistant."]


def directory(*, samples: int = 256, shards: int = 4, seed: int = 0) -> Path:
    """Generates shards and a model in a temporary directory, which is deleted when the process ends.

    Args:
        samples: number of samples in all shards; one in four has no image, lengths differ by a factor of
            about thirty.
        shards: number of shards.
        seed: seed of all random choices.

    Returns:
        Path: the directory, with ``shards/`` and ``model/`` inside.

    Examples:
        >>> directory = dflop.example.directory(samples=32, shards=2)
        >>> sorted(path.name for path in directory.iterdir())
        ['model', 'shards']
        >>> len(dflop.Dataset(directory / "shards"))
        32
    """
    made = Path(tempfile.mkdtemp(prefix="dflop-example-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    write_shards(made / "shards", samples=samples, shards=shards, seed=seed)
    write_model(made / "model")
    return made


def on_ranks(ranks: int) -> None:
    """Replaces the running program by this many processes of it under ``torchrun``, unless it is one of them.

    Each has one compute thread unless ``OMP_NUM_THREADS`` is set.

    Examples:
        In a script, before anything else:

        >>> if __name__ == "__main__":
        ...     dflop.example.on_ranks(2)  # doctest: +SKIP
    """
    if "RANK" in os.environ:
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *torchrun, *sys.argv])


def write_shards(directory: Path, *, samples: int = 256, shards: int = 4, seed: int = 0) -> None:
    """Writes shards of images (PNG), conversations (JSON) and classes (``cls``) to ``directory``.

    Args:
        directory: directory of the shards, which is created if needed.
        samples: number of samples in all shards.
        shards: number of shards.
        seed: seed of all random choices.

    Examples:
        >>> import pathlib
        >>> dflop.example.write_shards(pathlib.Path("few"), samples=10, shards=2)
        >>> [len(batch.samples) for batch in dflop.Loader("few/", batch_size=4)]
        [4, 4, 2]
    """
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    made = [_sample(rng, number) for number in range(samples)]
    for shard in range(shards):
        with tarfile.open(directory / f"{shard:03}.tar", "w") as tar:
            for number in range(shard * samples // shards, (shard + 1) * samples // shards):
                for extension, content in made[number].items():
                    member = tarfile.TarInfo(f"{number:06}.{extension}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


def write_model(directory: Path) -> None:
    """Writes the files of a small Qwen2-VL without weights to ``directory``.

    Args:
        directory: directory of the model, which is created if needed.

    Examples:
        >>> import pathlib
        >>> dflop.example.write_model(pathlib.Path("small"))
        >>> dflop.CostModel("small/").modules
        ['vision', 'llm']
    """
    directory.mkdir(parents=True, exist_ok=True)
    documents = {"config.json": _config(), "preprocessor_config.json": _preprocessor()}
    documents |= {"tokenizer.json": _tokenizer(), "tokenizer_config.json": _tokenizer_config()}
    for name, document in documents.items():
        (directory / name).write_text(json.dumps(document, indent=1))


def _sample(rng: random.Random, number: int) -> dict[str, bytes]:
    label = rng.randrange(8)
    sides = [
        28 * rng.randint(2, 4 + 4 * (number % 3)) for _ in range(2 * (number % 4 > 0) + 2 * (number % 9 == 1))
    ]
    images = list(zip(sides[::2], sides[1::2], strict=True))
    fields = {f"{place}.png": _png(width, height, label) for place, (width, height) in enumerate(images)}
    words = (
        round(16 * math.exp(0.9 * rng.gauss(0, 1))) if images else round(60 * math.exp(0.7 * rng.gauss(0, 1)))
    )
    question, answer = _words(rng, 4), _words(rng, min(max(words, 3), 400))
    turns = [
        {"from": "human", "value": "<image>\n" * len(images) + question},
        {"from": "gpt", "value": answer},
    ]
    fields["json"] = json.dumps({"conversations": turns}).encode()
    fields["cls"] = str(label).encode()
    return fields


def _words(rng: random.Random, count: int) -> str:
    """Returns words that mostly follow from each other, so that a model can learn them."""
    word, words = rng.randrange(WORDS), []
    for _ in range(count):
        words.append(f"w{word}")
        word = (5 * word + 7) % WORDS if rng.random() < 0.9 else rng.randrange(WORDS)
    return " ".join(words)


def _png(width: int, height: int, label: int) -> bytes:
    """Encodes a striped image in the color of its class."""
    color = [64 + 190 * (label >> bit & 1) for bit in range(3)]
    light, dark = bytes(color) * width, bytes(value // 2 for value in color) * width
    rows = b"".join(b"\0" + (dark if row // 7 % 2 else light) for row in range(height))

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _ids() -> dict[str, int]:
    return {token: WORDS + place for place, token in enumerate(SPECIAL)}


def _config() -> dict[str, Any]:
    ids = _ids()
    rope = {"rope_type": "default", "type": "mrope", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    text = {
        "model_type": "qwen2_vl_text",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 640,
        "max_position_embeddings": 8192,
        # With a cache, the attention of transformers crosses packed samples.
        "use_cache": False,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "rope_scaling": rope,
        "rope_parameters": rope,
    }
    vision = {
        "model_type": "qwen2_vl",
        "depth": 2,
        "embed_dim": 64,
        "hidden_size": 64,
        "num_heads": 2,
        "mlp_ratio": 2,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    return {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        **{name: value for name, value in text.items() if name != "model_type"},
        "text_config": text,
        "vision_config": vision,
        "tie_word_embeddings": False,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


def _preprocessor() -> dict[str, Any]:
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 56 * 56,
        "max_pixels": 448 * 448,
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
        "rescale_factor": 1 / 255,
        "resample": 3,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }


def _tokenizer() -> dict[str, Any]:
    vocabulary = {f"w{word}": word for word in range(WORDS)} | _ids()
    vocabulary |= {word: len(vocabulary) + place for place, word in enumerate(TEMPLATE_WORDS)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": number, "content": token, **flags} for token, number in _ids().items()]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": "<unk>",
    }
