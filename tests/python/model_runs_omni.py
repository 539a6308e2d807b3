"""Runs a small random Qwen2.5-Omni on the output of `dflop batches --out`, as `model(**tensors)`.

    DFLOP=target/release/dflop python3 tests/python/model_runs_omni.py      # needs what model_runs.py needs, transformers 5

As `model_runs.py`, with images and clips in one dataset: packed and padded logits of every sample and losses must agree.
The padded model counts positions itself, from grids and lengths of clips.
"""

import json
import shutil
import tarfile
import tempfile
from pathlib import Path

import model_runs
import torch
import transformers as hf

RENAMED = {"image_pad": "IMAGE", "video_pad": "VIDEO", "vision_start": "vision_bos", "vision_end": "vision_eos"}
FAMILY = "qwen2.5-omni-7b"


def thinker():
    """Builds a small thinker with the ids of the small tokenizer."""
    ids = model_runs.ID
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    text = model_runs.text(rope_parameters=rope, rope_scaling=rope | {"type": "mrope"})
    text.pop("attention_dropout")
    vision = dict(depth=2, num_heads=2, patch_size=14, hidden_size=32, out_hidden_size=32, intermediate_size=32, window_size=112,
                  fullatt_block_indexes=[1])
    audio = dict(d_model=32, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=32, num_mel_bins=128, output_dim=32)
    return hf.Qwen2_5OmniThinkerForConditionalGeneration(hf.Qwen2_5OmniThinkerConfig(
        text_config=text, vision_config=vision, audio_config=audio, image_token_index=ids["<|image_pad|>"],
        video_token_index=ids["<|video_pad|>"], audio_token_index=ids["<|AUDIO|>"], vision_start_token_id=ids["<|vision_start|>"],
        audio_start_token_id=ids["<|audio_bos|>"], audio_end_token_id=ids["<|audio_eos|>"]))


def main():
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        shutil.copytree(model_runs.TOKENIZERS / "chatml", scratch / "chatml")
        tokenizer = scratch / "chatml" / "tokenizer.json"
        renamed = tokenizer.read_text()
        for old, new in RENAMED.items():
            renamed = renamed.replace(f"<|{old}|>", f"<|{new}|>")
        tokenizer.write_text(renamed)
        model_runs.TOKENIZERS = scratch
        with tarfile.open(scratch / "shards.tar", "w") as shard:
            for has_clips in (False, True):
                source = scratch / f"source-{has_clips}"
                source.mkdir()
                model_runs.write_samples(source, has_clips)
                for path in sorted(source.iterdir()):
                    shard.add(path, f"{'clip' if has_clips else 'image'}-{path.name}")
        model = thinker().eval()
        packed, padded = (
            list(model_runs.batches(scratch / "shards.tar", FAMILY, layout, scratch / layout, steps=2)) for layout in ("packed", "padded")
        )
        assert len(packed) == len(padded) == 4
        worst, samples, kinds = 0.0, 0, set()
        for (row, about), (rows, about_rows) in zip(packed, padded):
            assert about["sample_keys"] == about_rows["sample_keys"]
            kinds |= {name for name in row if name in ("pixel_values", "input_features")}
            with torch.no_grad():
                one, many = model(**row, use_cache=False), model(**rows, use_cache=False)
            bounds = json.loads(about["cu_seqlens"])
            for at, (start, end) in enumerate(zip(bounds, bounds[1:])):
                difference = one.logits[0, start:end] - many.logits[at, : end - start]
                worst, samples = max(worst, float(difference.abs().max())), samples + 1
            assert abs(float(one.loss - many.loss)) < model_runs.LARGEST_DIFFERENCE, (one.loss, many.loss)
        assert kinds == {"pixel_values", "input_features"}
        assert worst < model_runs.LARGEST_DIFFERENCE, worst
        print(f"{FAMILY}: {samples} samples, packed and padded logits differ by {worst:.1e} at most")


if __name__ == "__main__":
    main()
