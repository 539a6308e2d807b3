"""Tiny models of transformers with weights, and shards with the media that each encodes."""

from __future__ import annotations

import io
import json
import random
import tarfile
import wave
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from dflop import example

TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 640,
    "max_position_embeddings": 8192,
    "use_cache": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}
TILES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 4}
PATCHES = {"hidden_size": 16, "depth": 4, "num_heads": 2, "patch_size": 14, "out_hidden_size": 32}
AUDIO = {
    "d_model": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "num_mel_bins": 128,
    "max_source_positions": 1500,
}
CLIPS = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128, "sampling_rate": 16_000}
NATIVE = {"min_pixels": 28 * 28, "max_pixels": 112 * 112, "patch_size": 14, "merge_size": 2}
CHATML = ["<unk>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN = [*CHATML, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
HEARING = ["<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>"]
OMNI = [*CHATML, "<|vision_bos|>", "<|vision_eos|>", "<|IMAGE|>", "<|VIDEO|>", *HEARING]
INTERN = [*CHATML, "<img>", "</img>", "<IMG_CONTEXT>"]
LLAVA = ["<unk>", "<s>", "</s>", "<image>", "<pad>"]
GEMMA = ["<unk>", "<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"]
GEMMA += ["<start_of_image>", "<end_of_image>", "<image_soft_token>"]


@dataclass(frozen=True)
class Family:
    """A kind of model.

    - `config`: creates the configuration from the id of each special token
    - `special`: special tokens; `names` of some of them in the tokenizer's configuration
    - `media`: media of its samples
    - `preprocessor`: settings that differ from those of Qwen2-VL
    """

    config: Callable[[dict[str, int]], Any]
    special: list[str]
    media: Sequence[str] = ("image",)
    names: dict[str, str] = field(default_factory=dict)
    preprocessor: dict[str, Any] = field(default_factory=dict)


def qwen2_5_vl(ids: dict[str, int]) -> Any:
    vision = {**PATCHES, "intermediate_size": 24, "fullatt_block_indexes": [1, 3], "window_size": 56}
    return transformers.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": ROPE}, vision_config=vision, **qwen_ids(ids)
    )


def qwen3_vl(ids: dict[str, int]) -> Any:
    vision = {**PATCHES, "intermediate_size": 24, "num_position_embeddings": 64, "depth": 6}
    vision |= {"deepstack_visual_indexes": [0, 2, 3], "hidden_size": 32, "patch_size": 14}
    text = {**TEXT, "rope_parameters": ROPE | {"mrope_interleaved": True}, "head_dim": 8}
    return transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **qwen_ids(ids))


def qwen_ids(ids: dict[str, int]) -> dict[str, int]:
    names = ("image_pad", "video_pad", "vision_start", "vision_end")
    keys = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return {key: ids[f"<|{name}|>"] for key, name in zip(keys, names, strict=True)}


def intern_vl(ids: dict[str, int]) -> Any:
    return transformers.InternVLConfig(
        text_config={"model_type": "qwen2", **TEXT},
        vision_config={**TILES, "image_size": [56, 56], "patch_size": [14, 14]},
        image_token_id=ids["<IMG_CONTEXT>"],
        image_seq_length=4,
        tie_word_embeddings=False,
    )


def llava(ids: dict[str, int]) -> Any:
    vision = {"model_type": "clip_vision_model", **TILES, "image_size": 28, "patch_size": 14}
    return transformers.LlavaConfig(
        text_config={"model_type": "llama", **TEXT},
        vision_config=vision,
        image_token_index=ids["<image>"],
        image_seq_length=4,
        vision_feature_layer=-2,
        tie_word_embeddings=False,
    )


def gemma3(ids: dict[str, int]) -> Any:
    text = {**TEXT, "head_dim": 8, "sliding_window": 9, "query_pre_attn_scalar": 5}
    text |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
    return transformers.Gemma3Config(
        text_config=text,
        vision_config={**TILES, "image_size": 56, "patch_size": 14, "vision_use_head": False},
        mm_tokens_per_image=4,
        boi_token_index=ids["<start_of_image>"],
        eoi_token_index=ids["<end_of_image>"],
        image_token_index=ids["<image_soft_token>"],
    )


def qwen2_audio(ids: dict[str, int]) -> Any:
    return transformers.Qwen2AudioConfig(
        text_config={"model_type": "qwen2", **TEXT},
        audio_config={"model_type": "qwen2_audio_encoder", **AUDIO},
        audio_token_index=ids["<|AUDIO|>"],
    )


def qwen2_5_omni(ids: dict[str, int]) -> Any:
    vision = {**PATCHES, "intermediate_size": 24, "fullatt_block_indexes": [1, 3], "window_size": 56}
    return transformers.Qwen2_5OmniThinkerConfig(
        text_config={**TEXT, "rope_parameters": ROPE},
        vision_config=vision,
        audio_config={**AUDIO, "n_window": 50, "output_dim": 32},
        image_token_index=ids["<|IMAGE|>"],
        video_token_index=ids["<|VIDEO|>"],
        audio_token_index=ids["<|AUDIO|>"],
        vision_start_token_id=ids["<|vision_bos|>"],
        audio_start_token_id=ids["<|audio_bos|>"],
        audio_end_token_id=ids["<|audio_eos|>"],
    )


def qwen3_omni(ids: dict[str, int]) -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    vision = {**PATCHES, "intermediate_size": 24, "num_position_embeddings": 64, "patch_size": 16}
    return transformers.Qwen3OmniMoeThinkerConfig(
        text_config={**TEXT, **experts, "rope_parameters": ROPE | {"mrope_interleaved": True}},
        vision_config=vision | {"deepstack_visual_indexes": [0, 1, 2]},
        audio_config={**AUDIO, "n_window": 50, "output_dim": 32, "downsample_hidden_size": 8},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        audio_token_id=ids["<|audio_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        audio_start_token_id=ids["<|audio_start|>"],
        position_id_per_seconds=13,
    )


SQUARES = {"size": {"height": 56, "width": 56}}
FAMILIES = {
    "qwen2_5_vl": Family(qwen2_5_vl, QWEN, preprocessor=NATIVE),
    "qwen3_vl": Family(qwen3_vl, QWEN, preprocessor=NATIVE),
    "intern_vl": Family(intern_vl, INTERN, preprocessor=SQUARES | {"max_patches": 2}),
    "llava": Family(
        llava,
        LLAVA,
        names={"eos_token": "</s>", "pad_token": "<pad>", "bos_token": "<s>"},
        preprocessor={
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 28},
            "crop_size": {"height": 28, "width": 28},
        },
    ),
    "gemma3": Family(
        gemma3,
        GEMMA,
        names={"eos_token": "<eos>", "pad_token": "<pad>", "bos_token": "<bos>"},
        preprocessor={"image_processor_type": "Gemma3ImageProcessor", **SQUARES},
    ),
    "qwen2_audio": Family(qwen2_audio, [*CHATML, *HEARING], ("audio",), preprocessor=CLIPS),
    "qwen2_5_omni": Family(qwen2_5_omni, OMNI, ("image", "audio"), preprocessor=NATIVE | CLIPS),
    "qwen3_omni": Family(
        qwen3_omni,
        [*QWEN, "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"],
        ("image", "audio"),
        preprocessor=NATIVE | CLIPS | {"patch_size": 16},
    ),
}


def write_model(directory: Path, family: Family, *, seed: int = 0) -> torch.nn.Module:
    """Writes a checkpoint with random weights; returns the model."""
    directory.mkdir(parents=True)
    ids = {token: example.WORDS + place for place, token in enumerate(family.special)}
    config = family.config(ids)
    config.use_cache = False
    model = transformers.AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.15 if parameter.ndim > 1 else 0.1))
    model.save_pretrained(directory)
    documents = {"preprocessor_config.json": example._preprocessor() | family.preprocessor}
    documents["tokenizer.json"] = tokenizer(ids)
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"} | family.names
    documents["tokenizer_config.json"] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        **names,
    }
    for name, document in documents.items():
        (directory / name).write_text(json.dumps(document))
    return model.train()


def tokenizer(ids: dict[str, int]) -> dict[str, Any]:
    """Returns a tokenizer of whole words with other special tokens."""
    made = example._tokenizer()
    flags = {name: one for name, one in made["added_tokens"][0].items() if name not in ("id", "content")}
    words = [word for word in made["model"]["vocab"] if not word.startswith("<")]
    made["model"]["vocab"] = ids | {
        word: place if place < example.WORDS else place + len(ids) for place, word in enumerate(words)
    }
    made["added_tokens"] = [{"id": number, "content": token, **flags} for token, number in ids.items()]
    return made


def write_shards(directory: Path, media: Sequence[str], *, samples: int = 48) -> None:
    """Writes samples of none to two media and a conversation."""
    directory.mkdir(parents=True)
    rng = random.Random(0)
    with tarfile.open(directory / "000.tar", "w") as tar:
        for number in range(samples):
            kinds = [rng.choice(media) for _ in range(number % 3)]
            content = [{"type": kind} for kind in kinds] + [{"type": "text", "text": words(rng, 3, 20)}]
            answer = {"role": "assistant", "content": words(rng, 2, 30)}
            fields = {f"{place}.{EXTENSIONS[kind]}": medium(rng, kind) for place, kind in enumerate(kinds)}
            text = {"messages": [{"role": "user", "content": content}, answer]}
            for extension, value in {**fields, "json": json.dumps(text).encode()}.items():
                member = tarfile.TarInfo(f"{number:06}.{extension}")
                member.size = len(value)
                tar.addfile(member, io.BytesIO(value))


EXTENSIONS = {"image": "png", "audio": "wav"}


def words(rng: random.Random, low: int, high: int) -> str:
    return " ".join(f"w{rng.randrange(example.WORDS)}" for _ in range(rng.randint(low, high)))


def medium(rng: random.Random, kind: str) -> bytes:
    if kind == "image":
        return example._png(28 * rng.randint(1, 4), 28 * rng.randint(1, 4), rng.randrange(8))
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(rng.randbytes(2 * rng.randint(2_000, 24_000)))
    return made.getvalue()
