"""Records Qwen3-Omni: tokens, parameters and FLOPs, and model inputs of its thinker.

Run by hand, `python tests/record/families/qwen3_omni.py`, or by `make record-models`, with transformers==5.24.0, torch,
torchvision and pillow<12.2; no network, no weights. Tests compare with `tests/golden/families/qwen3_omni_moe/`, whose files
`qwen2_5_omni.py` describes.

The processor pads the clips of a sample to the longest, so that the last frame of a shorter clip depends on others. Here, as in
dflop, every clip is the only one. transformers pads the chunks of clips to the longest before the convolutions, of which a batch
has at least one whole chunk here.
"""

import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import (
    Qwen2TokenizerFast,
    Qwen2VLVideoProcessor,
    Qwen3OmniMoeProcessor,
    Qwen3OmniMoeThinkerConfig,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    WhisperFeatureExtractor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import qwen2_5_omni as older  # noqa: E402
from common import GOLDEN, packed, run  # noqa: E402
from qwen2_5_omni import count, parameters  # noqa: E402
from qwen3_vl import Tower  # noqa: E402

NAME = "qwen3_omni_moe"
# One file of the released checkpoints has the settings of images and of audio.
FILE = {
    "chunk_length": 30, "dither": 0.0, "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128, "hop_length": 160,
    "image_mean": [0.5] * 3, "image_processor_type": "Qwen2VLImageProcessor", "image_std": [0.5] * 3, "max_pixels": 12845056,
    "merge_size": 2, "min_pixels": 3136, "n_fft": 400, "n_samples": 480000, "nb_max_frames": 3000, "padding_value": 0.0,
    "patch_size": 16, "processor_class": "Qwen3OmniMoeProcessor", "return_attention_mask": True, "sampling_rate": 16000,
    "temporal_patch_size": 2,
}
SPECIAL = {
    "image_token": "<|image_pad|>", "audio_token": "<|audio_pad|>", "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>", "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
# The small tokenizer has the audio tokens of Qwen2-Audio.
RENAMED = {"AUDIO": "audio_pad", "audio_bos": "audio_start", "audio_eos": "audio_end"}
IMAGE, VIDEO, AUDIO = (
    f"<|{kind}_start|><|{token}_pad|><|{kind}_end|>" for kind, token in [("vision", "image"), ("vision", "video"), ("audio", "audio")])
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'][0]['text'] }}<|im_end|>{% endgeneration %}{{ '\\n' }}{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}" + IMAGE + "{% elif content['type'] == 'audio' %}" + AUDIO
    + "{% elif content['type'] == 'video' %}" + VIDEO + "{% else %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
)
# Positions per second of the released checkpoints; the class has another default.
POSITIONS = 13


class Alone(WhisperFeatureExtractor):
    """Makes the features of every clip as if it were the only one."""

    def __call__(self, clips, **settings):
        tensors, made = settings.pop("return_tensors", None), [super(Alone, self).__call__([clip], **settings) for clip in clips]
        longest = max(of["attention_mask"].shape[1] for of in made)
        pad = lambda values: np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, longest - values.shape[-1])])  # noqa: E731
        joined = {key: np.concatenate([pad(np.asarray(of[key])) for of in made]) for key in ("input_features", "attention_mask")}
        return transformers.BatchFeature(joined, tensor_type=tensors)


def tokenizer():
    """Returns the ChatML tokenizer with the names that this family has for its special tokens."""
    text = (GOLDEN / "model_inputs" / "chatml" / "tokenizer.json").read_text()
    for old, new in RENAMED.items():
        text = text.replace(f"<|{old}|>", f"<|{new}|>")
    file = Path("/tmp") / "qwen3_omni_tokenizer.json"
    file.write_text(text)
    config = json.loads((GOLDEN / "model_inputs" / "chatml" / "tokenizer_config.json").read_text())
    return Qwen2TokenizerFast(tokenizer_file=str(file), padding_side="right", extra_special_tokens=SPECIAL, **config)


def processor():
    audio = {key: FILE[key] for key in ("feature_size", "sampling_rate", "hop_length", "chunk_length", "n_fft", "padding_value", "dither")}
    image = {key: FILE[key] for key in ("patch_size", "merge_size", "temporal_patch_size", "image_mean", "image_std")}
    pixels = {key: FILE[key] for key in ("min_pixels", "max_pixels")}
    return Qwen3OmniMoeProcessor(
        Qwen2VLImageProcessorPil(**image, **pixels), Qwen2VLVideoProcessor(**image, **pixels), Alone(return_attention_mask=True, **audio),
        tokenizer(), chat_template=TEMPLATE,
    )


def record_tokens(own):
    """Counts media; those of few pixels or samples also in the output of the whole processor."""
    random, made, lines, through = np.random.default_rng(9), processor(), [], {"image": 0, "video": 0, "audio": 0}
    merge = made.image_processor.merge_size**2

    def run(text, **media):
        out = made(text=[text], return_tensors="pt", **media)
        return out, out["input_ids"].shape[1]

    def add(medium, count, check=None):
        try:
            counted = count()
        except ValueError:
            counted = None
        kind = medium.split()[0]
        if check is not None and through[kind] < 150:
            through[kind] += 1
            assert counted == check(), (medium, counted, check())
        lines.append(medium + "," + ("refused" if counted is None else ",".join(map(str, counted))))

    def image(width, height):
        patches = made.image_processor.get_number_of_image_patches(height, width, {})
        return patches, patches // merge + 2

    def run_image(width, height):
        out, tokens = run(IMAGE, images=[Image.fromarray(np.zeros((height, width, 3), np.uint8))])
        return len(out["pixel_values"]), tokens

    def video(frames, width, height):
        # Sizes of frames are the processor's own, not those of the video processor.
        size = {"size": Qwen3OmniMoeProcessor.videos_kwargs["size"]}
        patches = made.video_processor.get_num_of_video_patches(frames, height, width, size)
        return patches, patches // merge + 2

    def run_video(frames, width, height):
        out, tokens = run(VIDEO, videos=[torch.zeros((frames, 3, height, width), dtype=torch.uint8)])
        return len(out["pixel_values_videos"]), tokens

    def audio(samples):
        tokens = made._get_num_audio_tokens(samples)
        return tokens, tokens + 2

    def run_audio(samples):
        out, tokens = run(AUDIO, audio=[np.zeros(samples, np.float32)])
        assert int(out["feature_attention_mask"].sum()) == samples // 160
        return tokens - 2, tokens

    for width, height in older.sizes(random):
        cheap = width * height <= 1 << 20 and 3 < height and max(width, height) <= 200 * min(width, height)
        add(f"image {width}x{height}", lambda: image(width, height), (lambda: run_image(width, height)) if cheap else None)
    for _ in range(400):
        frames, (width, height) = int(random.integers(1, 33)), tuple(int(side) for side in random.integers(4, 900, 2))
        cheap = frames * width * height <= 1 << 20
        add(f"video {frames} {width}x{height}", lambda: video(frames, width, height), (lambda: run_video(frames, width, height)) if cheap else None)
    lengths = [201, 319, 320, 1439, 1440, 2719, 2720, 15999, 16000, 16001, 16160, 17439, 127999, 128000, 128160, 480000, 4800000]
    lengths += [int(length) for length in random.integers(201, 200_000, 700)]
    lengths += [int(length) for length in np.exp(random.uniform(math.log(201), math.log(4_800_000), 700))]
    for samples in lengths:
        add(f"audio {samples}", lambda: audio(samples), (lambda: run_audio(samples)) if samples < 500_000 else None)
    print(f"{len(lines)} media, through the processor {through}, {sum(line.endswith('refused') for line in lines)} refused", flush=True)
    (own / "tokens.json").write_text(json.dumps({"config": published(), "preprocessor": FILE}) + "\n")
    (own / "tokens.csv.gz").write_bytes(packed(lines))


def published():
    """Returns the configuration of Qwen3-Omni-30B-A3B."""
    rope = {"rope_type": "default", "rope_theta": 1000000, "mrope_section": [24, 20, 20], "interleaved": True, "mrope_interleaved": True}
    text = {
        "model_type": "qwen3_omni_moe_text", "vocab_size": 152064, "hidden_size": 2048, "intermediate_size": 768, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "rope_parameters": rope,
    }
    thinker = {
        "model_type": "qwen3_omni_moe_thinker", "text_config": text, "vision_config": {"out_hidden_size": 2048},
        "audio_config": {"output_dim": 2048}, "position_id_per_seconds": POSITIONS,
    }
    return {"model_type": "qwen3_omni_moe", "thinker_config": thinker}


def small():
    """Returns a small configuration with other numbers of everything that may differ."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2], "mrope_interleaved": True}
    text = {
        "vocab_size": 1200, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 48, "num_experts": 6, "num_experts_per_tok": 2,
        "mlp_only_layers": [1], "rope_parameters": rope,
    }
    vision = {"depth": 4, "hidden_size": 64, "num_heads": 4, "intermediate_size": 100, "out_hidden_size": 64,
              "deepstack_visual_indexes": [0, 2], "num_position_embeddings": 100}
    audio = {"d_model": 48, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 100,
             "n_window": 51, "n_window_infer": 306, "downsample_hidden_size": 24, "output_dim": 64}
    thinker = {"model_type": "qwen3_omni_moe_thinker", "text_config": text, "vision_config": vision, "audio_config": audio,
               "position_id_per_seconds": POSITIONS, "tie_word_embeddings": True}
    return {"model_type": "qwen3_omni_moe", "thinker_config": thinker}


def record_model(name, config, device, lengths):
    """Records the parts of a thinker; on the meta device nothing is computed."""
    parsed = Qwen3OmniMoeThinkerConfig.from_dict(json.loads(json.dumps(config["thinker_config"])))
    parsed.text_config._experts_implementation = parsed._experts_implementation = "eager"
    with torch.device(device):
        model = Qwen3OmniMoeThinkerForConditionalGeneration._from_config(parsed, attn_implementation="eager")
    model.train()
    model.tie_weights()
    inner = model.model if hasattr(model, "model") and hasattr(model.model, "visual") else model
    visual, tower = inner.visual, inner.audio_tower
    text = getattr(inner, "language_model", None) or inner.model
    mergers, flops = [visual.merger, *visual.deepstack_merger_list], []
    empty = lambda *shape, grad=False: torch.zeros(shape, device=device, requires_grad=grad)  # noqa: E731
    # Multiples of 32 in the range of pixels, so that nothing is resized.
    for images, videos in [([[640, 480]], []), ([[128, 1024], [448, 448]], [[6, 512, 256]])]:
        grids = [(1, high // 16, wide // 16) for wide, high in images]
        grids += [(frames // 2, high // 16, wide // 16) for frames, wide, high in videos]
        patches, of = sum(t * h * w for t, h, w in grids), {"images": images, "videos": videos}
        flops.append({"part": "vision.tower"} | of | count(Tower(visual, torch.tensor(grids), device), [empty(patches, 3 * 2 * 16 * 16)]))
        merge = lambda rows: torch.cat([merger(rows) for merger in mergers])  # noqa: E731
        flops.append({"part": "vision.projector"} | of | count(merge, [empty(patches, visual.config.hidden_size, grad=True)]))
    chunk = 2 * parsed.audio_config.n_window
    for frames in ([5 * chunk + 37], [5 * chunk, 13 * chunk, 11]):
        of = {"audio": [160 * length for length in frames]}
        flops.append({"part": "audio.tower"} | of | count(Audio(tower, frames), [empty(tower.num_mel_bins, sum(frames))]))
        rows = sum(int(transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe._get_feat_extract_output_lengths(
            torch.tensor(length), parsed.audio_config.n_window)) for length in frames)
        project = lambda rows: tower.proj2(tower.act(tower.proj1(rows)))  # noqa: E731
        flops.append({"part": "audio.projector"} | of | count(project, [empty(rows, tower.config.d_model, grad=True)]))
    for tokens in lengths:
        ids = torch.zeros((1, tokens), dtype=torch.long, device=device)
        places = torch.zeros((3, 1, tokens), dtype=torch.long, device=device)
        decode = lambda ids, places=places: model.lm_head(text(input_ids=ids, position_ids=places, use_cache=False).last_hidden_state)  # noqa: E731
        flops.append({"part": "llm", "tokens": tokens} | count(decode, [ids]))
    projectors = [parameters(tower.proj1) + parameters(tower.proj2), sum(parameters(merger) for merger in mergers)]
    counted = {
        "vision.tower": parameters(visual) - projectors[1], "vision.projector": projectors[1],
        "audio.tower": parameters(tower) - projectors[0], "audio.projector": projectors[0],
        "llm": parameters(text) + (0 if model.lm_head.weight is text.embed_tokens.weight else model.lm_head.weight.numel()),
    }
    assert sum(counted.values()) == parameters(model), (name, counted, parameters(model))
    print(name, counted, flush=True)
    documents = {"config": config, "preprocessor": FILE | {"feature_size": parsed.audio_config.num_mel_bins}}
    return {"name": name, "documents": documents, "parameters": counted, "flops": flops}


class Audio:
    """The audio encoder up to its last layer; indices and lengths are computed on the CPU, values on its device."""

    def __init__(self, tower, frames):
        self.tower, self.frames = tower, torch.tensor(frames)

    def __call__(self, features):
        import transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe as modeling

        tower, gelu, half = self.tower, torch.nn.functional.gelu, self.tower.n_window
        host = torch.zeros(tower.num_mel_bins, int(self.frames.sum()))
        _, lengths = modeling.chunk_and_pad_features(host, self.frames, half)
        valid = modeling.get_valid_indices(lengths, half)
        starts = modeling.get_audio_cu_seqlens(lengths, self.frames, tower.n_window_infer, half)
        # The last chunk of a clip is padded.
        own = torch.nn.utils.rnn.pad_sequence(features.T.split(lengths.tolist()), batch_first=True)
        chunks = own.transpose(1, 2).unsqueeze(1)
        rows = gelu(tower.conv2d3(gelu(tower.conv2d2(gelu(tower.conv2d1(chunks))))))
        number, channels, bins, tokens = rows.shape
        rows = tower.conv_out(rows.permute(0, 3, 1, 2).reshape(number, tokens, channels * bins))
        rows = rows + tower.positional_embedding.positional_embedding[:tokens].to(rows.device)
        rows = rows.reshape(-1, rows.shape[-1])[valid.to(rows.device)]
        for layer in tower.layers:
            rows = layer(rows, starts, max_seqlen=None)[0]
        return tower.ln_post(rows)


def record_flops(own):
    # Experts select their tokens by value, of which the meta device has none.
    cases = [record_model("qwen3-omni-30b-a3b", published(), "meta", []), record_model("qwen3-omni-small", small(), "cpu", [96])]
    (own / "flops.json").write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")


def rope(out, made):
    """Computes the positions of the thinker."""
    ids = dict(zip(SPECIAL, made.tokenizer.convert_tokens_to_ids(list(SPECIAL.values()))))
    config = Qwen3OmniMoeThinkerConfig(
        image_token_id=ids["image_token"], video_token_id=ids["video_token"], audio_token_id=ids["audio_token"],
        audio_start_token_id=ids["audio_bos_token"], position_id_per_seconds=POSITIONS,
    )
    # The field is in the released files, but not in the class.
    config.vision_start_token_id = ids["vision_bos_token"]
    model = Qwen3OmniMoeThinkerForConditionalGeneration.__new__(Qwen3OmniMoeThinkerForConditionalGeneration)
    torch.nn.Module.__init__(model)
    model.config, model.spatial_merge_size = config, 2
    seconds, mask = out.get("video_second_per_grid"), out.get("feature_attention_mask")
    positions, _ = model.get_rope_index(
        out["input_ids"], out.get("image_grid_thw"), out.get("video_grid_thw"), torch.ones_like(out["input_ids"]), False,
        None if mask is None else mask.sum(-1), None if seconds is None else torch.as_tensor(seconds),
    )
    assert torch.equal(positions, positions.floor()), "layers of the recorded videos are at whole positions"
    return positions[:, 0].long().tolist()


def record_inputs(own):
    """Records conversations as Qwen2.5-Omni's, with videos whose layers are at whole positions."""
    older.OWN, older.TEMPLATE, older.processor, older.rope = own, TEMPLATE, processor, rope
    older.RATES = [2.0, 1.0, 0.5, 2.0]
    older.record_inputs()


def main(golden):
    """Records the truth of Qwen3-Omni."""
    own = golden / "families" / NAME
    own.mkdir(parents=True, exist_ok=True)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for record in [record_tokens, record_flops, record_inputs]:
        record(own)


if __name__ == "__main__":
    run(main, NAME)
