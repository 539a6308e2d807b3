#!/usr/bin/env python3
"""Measures modules of published widths through `dflop.torch.profile`, on the device that PyTorch finds.

A module has random weights and three layers; it runs with one and with three of them, so that `dflop` tells the
time of a layer from the rest. The classes are those of Hugging Face transformers.

    python3 benches/gpu/profile_torch.py --out profiles/h100       # all models, one file each
    python3 benches/gpu/profile_torch.py --miniature --out tiny    # the preset `tiny`, minutes on one CPU core

Tensor-parallel degree 1 only; `dflop.torch.profile` measures a sharded module with `tp_group`. Needs the package
`dflop`, PyTorch and transformers 4.57 or newer.
"""

import argparse
import sys
from functools import partial

import dflop.torch
import torch
from transformers import (
    AutoModelForCausalLM,
    InternVLVisionConfig,
    InternVLVisionModel,
    LlamaConfig,
    Qwen2Config,
    SiglipVisionConfig,
    SiglipVisionModel,
    WhisperConfig,
)
from transformers.models.whisper.modeling_whisper import WhisperEncoder

LAYERS = (1, 3)


def siglip(hidden, heads, ffn, side):
    config = SiglipVisionConfig(hidden_size=hidden, num_attention_heads=heads, intermediate_size=ffn, image_size=side,
                                patch_size=14, num_hidden_layers=max(LAYERS), vision_use_head=False)
    return SiglipVisionModel(config)


def internvit(hidden, heads, ffn, **rest):
    config = InternVLVisionConfig(hidden_size=hidden, num_attention_heads=heads, intermediate_size=ffn,
                                  image_size=[448, 448], patch_size=[14, 14], num_hidden_layers=max(LAYERS), **rest)
    return InternVLVisionModel(config)


def whisper(hidden, heads, ffn, mel_bins):
    config = WhisperConfig(d_model=hidden, encoder_attention_heads=heads, encoder_ffn_dim=ffn, num_mel_bins=mel_bins,
                           encoder_layers=max(LAYERS))
    return WhisperEncoder(config)


def llm(config, hidden, heads, kv_heads, ffn, vocabulary):
    config = config(hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=ffn,
                    vocab_size=vocabulary, num_hidden_layers=max(LAYERS), max_position_embeddings=32768)
    return AutoModelForCausalLM.from_config(config)


# Name, module, and the widths of its published configuration.
MODELS = [
    ("siglip-so400m", "encoder", partial(siglip, 1152, 16, 4304, 378)),
    ("internvit-300m", "encoder", partial(internvit, 1024, 16, 4096)),
    ("internvit-6b", "encoder", partial(internvit, 3200, 25, 12800, use_qk_norm=True, norm_type="rms_norm")),
    ("whisper-large", "audio", partial(whisper, 1280, 20, 5120, 128)),
    ("qwen2.5-7b", "llm", partial(llm, Qwen2Config, 3584, 28, 4, 18944, 152064)),
    ("llama3-8b", "llm", partial(llm, LlamaConfig, 4096, 32, 8, 14336, 128256)),
]
# The preset `tiny` of dflop.
MINIATURES = [
    ("tiny", "encoder", partial(siglip, 256, 4, 1024, 224)),
    ("tiny", "audio", partial(whisper, 256, 4, 1024, 80)),
    ("tiny", "llm", partial(llm, Qwen2Config, 256, 4, 2, 1024, 4096)),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", metavar="DIR", required=True, help="directory for the files, one per model")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="only these: " + ", ".join(m[0] for m in MODELS))
    parser.add_argument("--miniature", action="store_true", help="tiny models in float32 on one CPU core")
    parser.add_argument("--tokens-max", type=int, help="largest microbatch [default: 16384, miniatures 1024]")
    parser.add_argument("--seconds", type=float, default=300.0, help="time for each model [default: 300]")
    arguments = parser.parse_args()
    known = MINIATURES if arguments.miniature else MODELS
    if unknown := set(arguments.models or []) - {name for name, *_ in known}:
        parser.error(f"unknown models {sorted(unknown)}")
    if arguments.miniature:
        torch.set_num_threads(1)
    is_cuda = torch.cuda.is_available() and not arguments.miniature
    torch.set_default_dtype(torch.bfloat16 if is_cuda else torch.float32)
    for name, module, build in known:
        if arguments.models and name not in arguments.models:
            continue
        profile = dflop.torch.profile(
            **{module: build()},
            model=name,
            device="cuda" if is_cuda else "cpu",
            tokens_max=arguments.tokens_max or (1024 if arguments.miniature else 16384),
            seconds_max=arguments.seconds,
            cut_layers=LAYERS,
            optimizer=partial(torch.optim.AdamW, fused=is_cuda),
            progress=lambda line: print(line, file=sys.stderr),
        )
        print(*profile.write(arguments.out), sep="\n")


if __name__ == "__main__":
    main()
