"""Runs small random models of every family on the output of `dflop batches --out`, as `model(**tensors)`.

    DFLOP=target/release/dflop python3 tests/python/model_runs.py      # needs transformers, torch, safetensors, pillow

Makes samples with images, several images, clips and text only, and writes every family's batches twice:
packed into one row and padded. Packed and padded logits of every sample must agree, and so must the losses: then
position ids, boundaries, placeholders, pixels and mel values are where the model expects them.
"""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
import wave
from pathlib import Path

import numpy as np
import torch
import transformers as hf
from PIL import Image
from safetensors import safe_open

import image_families

ROOT = Path(__file__).resolve().parents[2]
DFLOP = os.environ.get("DFLOP", ROOT / "target" / "release" / "dflop")
TOKENIZERS = ROOT / "tests" / "golden" / "model_inputs"
LARGEST_DIFFERENCE = 2e-4
ID = {token["content"]: token["id"] for token in json.loads((TOKENIZERS / "chatml" / "tokenizer.json").read_text())["added_tokens"]}


def text(**more):
    """Returns the settings of a small language model."""
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    return dict(vocab_size=1300, max_position_embeddings=65536, attention_dropout=0.0) | sizes | more


def qwen_vl(config, model, **vision):
    """Builds a small Qwen2-VL or Qwen2.5-VL."""
    rope = {"rope_type": "default", "type": "mrope", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    ids = dict(image_token_id=ID["<|image_pad|>"], video_token_id=ID["<|video_pad|>"])
    marks = dict(vision_start_token_id=ID["<|vision_start|>"], vision_end_token_id=ID["<|vision_end|>"])
    tower = dict(depth=2, num_heads=2, patch_size=14, **vision)
    return model(config(text_config=text(rope_scaling=rope, rope_parameters=rope), vision_config=tower, **ids, **marks))


def qwen3_vl(config, model, **experts):
    """Builds a small Qwen3-VL, dense or with experts."""
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True, "rope_theta": 10000.0}
    ids = dict(image_token_id=ID["<|image_pad|>"], video_token_id=ID["<|video_pad|>"])
    marks = dict(vision_start_token_id=ID["<|vision_start|>"], vision_end_token_id=ID["<|vision_end|>"])
    tower = dict(depth=3, hidden_size=32, num_heads=2, intermediate_size=32, patch_size=16, out_hidden_size=32,
                 num_position_embeddings=64, deepstack_visual_indexes=[0, 1])
    language = text(rope_scaling=rope, rope_parameters=rope, head_dim=8, **experts)
    return model(config(text_config=language, vision_config=tower, **ids, **marks))


def llava_onevision():
    tower = dict(model_type="siglip_vision_model", hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                 num_attention_heads=2, patch_size=14, image_size=384, vision_use_head=False)
    grid = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]
    ids = dict(image_token_index=ID["<image>"], video_token_index=ID["<video>"], image_token_id=ID["<image>"], video_token_id=ID["<video>"])
    return hf.LlavaOnevisionForConditionalGeneration(hf.LlavaOnevisionConfig(
        text_config=text(model_type="qwen2"), vision_config=tower, image_grid_pinpoints=grid, vision_feature_layer=-1,
        vision_feature_select_strategy="full", **ids))


def intern_vl(side=448, **llm):
    tower = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=[side, side],
                 patch_size=[14, 14])
    return hf.InternVLForConditionalGeneration(hf.InternVLConfig(
        text_config=text(**(dict(model_type="qwen2") | llm)), vision_config=tower, image_token_id=ID["<IMG_CONTEXT>"],
        image_seq_length=(side // 28) ** 2, vision_feature_layer=-1))


def qwen2_audio():
    tower = dict(model_type="qwen2_audio_encoder", d_model=32, encoder_layers=2, encoder_attention_heads=2,
                 encoder_ffn_dim=32, num_mel_bins=128, max_source_positions=1500)
    return hf.Qwen2AudioForConditionalGeneration(hf.Qwen2AudioConfig(
        audio_config=tower, text_config=text(model_type="qwen2"), audio_token_index=ID["<|AUDIO|>"],
        audio_token_id=ID["<|AUDIO|>"]))


FAMILIES = {
    "qwen2-vl-7b": lambda: qwen_vl(hf.Qwen2VLConfig, hf.Qwen2VLForConditionalGeneration, embed_dim=32, hidden_size=32, mlp_ratio=2),
    "qwen2.5-vl-7b": lambda: qwen_vl(
        hf.Qwen2_5_VLConfig, hf.Qwen2_5_VLForConditionalGeneration, hidden_size=32, out_hidden_size=32, intermediate_size=32,
        window_size=112, fullatt_block_indexes=[1]),
    "qwen3-vl-8b": lambda: qwen3_vl(hf.Qwen3VLConfig, hf.Qwen3VLForConditionalGeneration),
    "qwen3-vl-30b-a3b": lambda: qwen3_vl(
        hf.Qwen3VLMoeConfig, hf.Qwen3VLMoeForConditionalGeneration, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
    "llava-ov-qwen2.5-7b": llava_onevision,
    "internvl3-8b": intern_vl,
    "internvl3.5-30b-a3b": lambda: intern_vl(
        model_type="qwen3_moe", head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24,
        norm_topk_prob=True),
    "qwen2-audio-7b": qwen2_audio,
}
WORDS = TOKENIZERS / "chatml" / "tokenizer.json"
FIRST = len(json.loads(WORDS.read_text())["model"]["vocab"])
FAMILIES |= {name: lambda make=make: make(text, FIRST) for name, (make, _, _) in image_families.FAMILIES.items()}


def tokenizer_of(family, scratch):
    """Returns the directory of a family's tokenizer."""
    if family not in image_families.FAMILIES:
        return TOKENIZERS / "chatml"
    _, added, special = image_families.FAMILIES[family]
    folder = scratch / f"tokenizer-{family}"
    folder.mkdir(exist_ok=True)
    for name, content in image_families.tokenizer(WORDS, added, special).items():
        (folder / name).write_text(content)
    return folder


def write_samples(folder, has_clips):
    """Writes files of samples, whose contents depend on their numbers."""
    random = np.random.default_rng(3)
    turns = lambda media: json.dumps({"conversations": [  # noqa: E731
        {"from": "human", "value": media + "What is this?"}, {"from": "gpt", "value": "A red kite over the sea."},
        {"from": "human", "value": "And below?"}, {"from": "gpt", "value": "Twelve boats."}]})

    def picture(name, width, height):
        ramp = np.linspace(0, 255, width * height * 3).reshape(height, width, 3)
        noise = random.integers(-20, 20, ramp.shape)
        Image.fromarray(np.clip(ramp + noise, 0, 255).astype(np.uint8)).save(folder / name)

    for sample in range(8):
        kind, key = sample % 4, f"s{sample}"
        if kind == 3:
            (folder / f"{key}.json").write_text(turns(""))
        elif has_clips:
            for clip in range(1 + (kind == 2)):
                seconds = 0.7 + sample
                wave_form = np.sin(np.arange(int(16000 * seconds)) * 0.05) * 9000
                with wave.open(str(folder / f"{key}.{clip}.wav"), "wb") as file:
                    file.setparams((1, 2, 16000, 0, "NONE", ""))
                    file.writeframes(wave_form.astype("<i2").tobytes())
            (folder / f"{key}.json").write_text(turns("<audio>\n" * (1 + (kind == 2))))
        else:
            for number in range(1 + (kind == 2)):
                picture(f"{key}.{number}.png", 150 + 90 * sample, 340 - 30 * sample)
            (folder / f"{key}.json").write_text(turns("<image>\n" * (1 + (kind == 2))))


def model_of(family, scratch):
    """Returns a preset, or the directory of a model whose image processor has settings of its own."""
    if family not in image_families.PREPROCESSORS:
        return family
    folder = scratch / f"model-{family}"
    if not folder.exists():
        FAMILIES[family]().config.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(image_families.PREPROCESSORS[family]))
    return folder


def batches(shards, family, layout, folder, steps=1):
    """Writes batches with `dflop batches`; returns tensors and metadata of each."""
    tokenizer, model = tokenizer_of(family, folder.parent), model_of(family, folder.parent)
    command = [DFLOP, "batches", shards, "--model", model, "--tokenizer", tokenizer, "--global-batch-size", "8",
               "--dp-size", "1", "--microbatches", "2", "--steps", str(steps), "--set", f"processor.layout={layout}", "--out", folder, "--json"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            yield {name: file.get_tensor(name) for name in file.keys()}, file.metadata()


def compare(family, model, shards, scratch):
    """Runs packed and padded batches; returns the largest difference of logits and the number of samples compared."""
    packed, padded = (list(batches(shards, family, layout, scratch / f"{family}-{layout}")) for layout in ("packed", "padded"))
    assert len(packed) == len(padded) == 2
    worst, samples = 0.0, 0
    for (row, about), (rows, about_rows) in zip(packed, padded):
        assert about["sample_keys"] == about_rows["sample_keys"]
        with torch.no_grad():
            one, many = model(**row, use_cache=False), model(**rows, use_cache=False)
        bounds = json.loads(about["cu_seqlens"])
        for at, (start, end) in enumerate(zip(bounds, bounds[1:])):
            difference = one.logits[0, start:end] - many.logits[at, : end - start]
            worst, samples = max(worst, float(difference.abs().max())), samples + 1
        assert abs(float(one.loss - many.loss)) < LARGEST_DIFFERENCE, (family, one.loss, many.loss)
        learned = int((row["labels"][:, 1:] != -100).sum())
        assert learned == int(about["target_tokens"]) > 0, family
        media = {name: list(tensor.shape) for name, tensor in row.items() if tensor.is_floating_point()}
        print(f"{family}: loss {float(one.loss):.6f}, {bounds[-1]} tokens, {media}")
    return worst, samples


def main():
    wanted = sys.argv[1:] or list(FAMILIES)
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        for has_clips in (False, True):
            source = scratch / f"source-{has_clips}"
            source.mkdir()
            write_samples(source, has_clips)
            with tarfile.open(scratch / f"shards-{has_clips}.tar", "w") as shard:
                for path in sorted(source.iterdir()):
                    shard.add(path, path.name)
        for family in wanted:
            torch.manual_seed(0)
            shards = scratch / f"shards-{'audio' in family}.tar"
            worst, samples = compare(family, FAMILIES[family]().eval(), shards, scratch)
            assert worst < LARGEST_DIFFERENCE, (family, worst)
            print(f"{family}: {samples} samples, packed and padded logits differ by {worst:.1e} at most")


if __name__ == "__main__":
    main()
