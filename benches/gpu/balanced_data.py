"""Data and models of `balanced.py`: shapes of samples, shards of random images and words, directories of models.

Shapes are drawn from sizes that are published: photos as in COCO (longest side 640), receipts on paper of 80 mm, pages in
A4 (ISO 216) at 100 to 150 dots per inch, and texts whose lengths are log-normal. Contents are random.
"""

import csv
import json
import math
import os
import random
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor

import dflop

WORDS = 2000
SPECIAL = (
    "<unk>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)
IDS = {token: WORDS + place for place, token in enumerate(SPECIAL)}
TEMPLATE_WORDS = ("system", "user", "assistant", "You", "are", "a", "helpful", "assistant.")
# Widths and heights of photos, the most frequent ones of COCO first.
PHOTOS = (
    (640, 480), (640, 427), (480, 640), (427, 640), (640, 425), (640, 426), (500, 375), (375, 500), (640, 640), (612, 612),
    (640, 360), (640, 512),
)
# Most tokens of the LLM that an image becomes, of 28 x 28 pixels each.
IMAGE_TOKENS_MAX = 768
TEXT_TOKENS_MAX = 4000
BLOCK = 16
# Sizes of the checkpoints Qwen/Qwen2.5-VL-3B-Instruct and 7B-Instruct; `tiny` runs on a CPU.
MODELS = {
    "qwen2.5-vl-7b": {
        "llm": (3584, 18944, 28, 28, 4, 152064), "vision": (1280, 3420, 32, 16, (7, 15, 23, 31)),
        "sections": (16, 24, 24), "tied": False,
    },
    "qwen2.5-vl-3b": {
        "llm": (2048, 11008, 36, 16, 2, 151936), "vision": (1280, 3420, 32, 16, (7, 15, 23, 31)),
        "sections": (16, 24, 24), "tied": True,
    },
    "tiny": {
        "llm": (128, 352, 2, 4, 2, 2048), "vision": (64, 172, 3, 4, (2,)), "sections": (4, 6, 6), "tied": True,
    },
}


def drawn_shapes(count, scale, seed):
    """Draws shapes of samples: sizes of images, and words of question and answer.

    - `scale`: factor of sides and lengths, for models that run on a CPU
    """
    rng = random.Random(seed)
    return [_scaled(_shape(rng), scale) for _ in range(count)]


def _shape(rng):
    kind = rng.random()
    if kind < 0.30:  # a text
        words = min(round(220 * math.exp(1.1 * rng.gauss(0, 1))), TEXT_TOKENS_MAX)
        return [], words
    answer = min(round(40 * math.exp(1.0 * rng.gauss(0, 1))), 600)
    if kind < 0.68:  # a photo and a short answer
        return [rng.choice(PHOTOS)], answer
    if kind < 0.83:  # a receipt that is read out
        width = rng.randint(400, 620)
        return [(width, round(width * rng.uniform(1.6, 3.0)))], rng.randint(60, 400)
    if kind < 0.92:  # a page
        width = round(8.27 * rng.randint(100, 150))
        return [(width, round(width * math.sqrt(2)))], rng.randint(30, 600)
    return [rng.choice(PHOTOS) for _ in range(rng.randint(2, 4))], answer


def _scaled(shape, scale):
    images, words = shape
    sides = [(max(round(width * scale), 28), max(round(height * scale), 28)) for width, height in images]
    return sides, max(round(words * scale), 4)


def read_shapes(path, count, scale, seed):
    """Draws shapes from the rows of a CSV file: `images`, such as `640x480;500x375`, and `words`."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows or not {"images", "words"} <= rows[0].keys():
        raise SystemExit(f"balanced.py: `{path}` has no rows with the columns `images` and `words`")
    shapes = []
    for number, row in enumerate(rows, 2):
        try:
            sides = [tuple(map(int, size.split("x"))) for size in row["images"].split(";") if size]
            if any(len(size) != 2 or min(size) < 1 for size in sides):
                raise ValueError(f"`{row['images']}` is no list of sizes such as `640x480;500x375`")
            shapes.append((sides, int(row["words"])))
        except ValueError as error:
            raise SystemExit(f"balanced.py: line {number} of `{path}`: {error}") from None
    rng = random.Random(seed)
    return [_scaled(rng.choice(shapes), scale) for _ in range(count)]


def write_shards(directory, shapes, seed):
    """Writes the samples of these shapes to shards."""
    per_shard = max(len(shapes) // 8, 1)
    with ThreadPoolExecutor(os.cpu_count()) as pool, dflop.Writer(directory, shard_samples=per_shard) as writer:
        for key, fields in enumerate(pool.map(_fields, shapes, range(seed, seed + len(shapes)))):
            writer.write({"__key__": f"{key:06}", **fields})


def _fields(shape, seed):
    images, words = shape
    rng = random.Random(seed)
    question = "<image>\n" * len(images) + _words(rng, max(words // 5, 2))
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": _words(rng, max(words - words // 5, 2))}]
    fields = {f"{place}.png": _png(rng, *size) for place, size in enumerate(images)}
    return {**fields, "json": {"conversations": turns}}


def _words(rng, count):
    return " ".join(f"w{rng.randrange(WORDS)}" for _ in range(count))


def _png(rng, width, height):
    """Encodes an image of random blocks."""
    rows = []
    for top in range(0, height, BLOCK):
        colors = [rng.randbytes(3) for _ in range(0, width, BLOCK)]
        row = b"\0" + b"".join(color * BLOCK for color in colors)[: 3 * width]
        rows.append(row * min(BLOCK, height - top))

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(b"".join(rows), 1)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def write_model(directory, name):
    """Writes the files of a model without weights: sizes, preprocessor, tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    documents = {
        "config.json": _config(**MODELS[name]),
        "preprocessor_config.json": _preprocessor(),
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
            "unk_token": "<unk>",
        },
    }
    for file, document in documents.items():
        (directory / file).write_text(json.dumps(document, indent=1))


def _config(llm, vision, sections, tied):
    hidden, ffn, layers, heads, kv_heads, vocabulary = llm
    rope = {"rope_type": "default", "type": "default", "mrope_section": list(sections), "rope_theta": 1e6}
    text = {
        "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocabulary, "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "use_cache": False, "rope_scaling": rope, "rope_parameters": rope,
        "tie_word_embeddings": tied, "bos_token_id": IDS["<|endoftext|>"], "eos_token_id": IDS["<|im_end|>"],
        "pad_token_id": IDS["<|endoftext|>"],
    }
    width, vision_ffn, depth, vision_heads, full = vision
    tower = {
        "model_type": "qwen2_5_vl", "depth": depth, "hidden_size": width, "intermediate_size": vision_ffn,
        "num_heads": vision_heads, "out_hidden_size": hidden, "fullatt_block_indexes": list(full), "patch_size": 14,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112, "in_channels": 3, "in_chans": 3,
        "hidden_act": "silu", "tokens_per_second": 2,
    }
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", **text,
        "text_config": {"model_type": "qwen2_5_vl_text", **text}, "vision_config": tower,
        "image_token_id": IDS["<|image_pad|>"], "video_token_id": IDS["<|video_pad|>"],
        "vision_start_token_id": IDS["<|vision_start|>"], "vision_end_token_id": IDS["<|vision_end|>"],
    }


def _preprocessor():
    return {
        "image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 56 * 56, "max_pixels": IMAGE_TOKENS_MAX * 28 * 28,
        "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "do_resize": True, "do_rescale": True,
        "do_normalize": True, "do_convert_rgb": True, "rescale_factor": 1 / 255, "resample": 3,
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
    }


def _tokenizer():
    vocabulary = {f"w{word}": word for word in range(WORDS)} | IDS
    vocabulary |= {word: len(vocabulary) + place for place, word in enumerate(TEMPLATE_WORDS)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [{"id": number, "content": token, **flags} for token, number in IDS.items()],
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
