"""Records Qwen2.5-Omni: tokens, parameters and FLOPs, model inputs, and a tiny model with its gradients.

Run by hand, `python tests/record/families/qwen2_5_omni.py`, or by `make record-models`, with transformers==5.24.0, torch,
torchvision and pillow<12.2; no network, no weights. Tests compare with `tests/golden/families/qwen2_5_omni/`.

- `tokens.json` has the files of a checkpoint, `tokens.csv.gz` a line per medium: `image WxH`, `video FRAMES WxH` or `audio
  SAMPLES`, then `encoder tokens,tokens` or `refused`. Some go through the whole processor, tokenizer included; the others are
  counted by its helpers, which are compared with it on the former.
- `flops.json` has cases as `tests/record/flops.py` describes. transformers pads chunks to the longest in a batch before
  the convolutions; recorded batches have a clip of a chunk or longer.
- `inputs.json` has conversations as `tests/record/videos.py` describes, of media that `picture` and `clip` make; of spectrograms
  the mean of every mel bin is recorded, and some values.
- `tests/golden/executor/qwen2_5_omni/` has a thinker as `tests/record/executor_parity.py` describes.
"""

import gzip
import io
import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    Qwen2_5OmniProcessor,
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2TokenizerFast,
    Qwen2VLVideoProcessor,
    WhisperFeatureExtractor,
)
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as modeling
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import executor_parity  # noqa: E402
from common import GOLDEN, run  # noqa: E402

OWN = GOLDEN / "families" / "qwen2_5_omni"
# One file of the released checkpoints has the settings of images and of audio.
FILE = {
    "chunk_length": 300, "dither": 0.0, "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128, "hop_length": 160,
    "image_processor_type": "Qwen2VLImageProcessor", "max_pixels": 12845056, "merge_size": 2, "min_pixels": 3136, "n_fft": 400,
    "n_samples": 4800000, "nb_max_frames": 30000, "padding_value": 0.0, "patch_size": 14, "processor_class": "Qwen2_5OmniProcessor",
    "return_attention_mask": True, "sampling_rate": 16000, "temporal_patch_size": 2,
}
RENAMED = {"image_pad": "IMAGE", "video_pad": "VIDEO", "vision_start": "vision_bos", "vision_end": "vision_eos"}
SPECIAL = {
    "image_token": "<|IMAGE|>", "audio_token": "<|AUDIO|>", "video_token": "<|VIDEO|>", "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>",
}
IMAGE, VIDEO, AUDIO = "<|vision_bos|><|IMAGE|><|vision_eos|>", "<|vision_bos|><|VIDEO|><|vision_eos|>", "<|audio_bos|><|AUDIO|><|audio_eos|>"
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant."
    "<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'][0]['text'] }}<|im_end|>{% endgeneration %}{{ '\\n' }}{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}" + IMAGE + "{% elif content['type'] == 'audio' %}" + AUDIO
    + "{% elif content['type'] == 'video' %}" + VIDEO + "{% else %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
)


def tokenizer():
    """Returns the ChatML tokenizer with the names that this family has for its special tokens."""
    text = (GOLDEN / "model_inputs" / "chatml" / "tokenizer.json").read_text()
    for old, new in RENAMED.items():
        text = text.replace(f"<|{old}|>", f"<|{new}|>")
    file = Path("/tmp") / "qwen2_5_omni_tokenizer.json"
    file.write_text(text)
    config = json.loads((GOLDEN / "model_inputs" / "chatml" / "tokenizer_config.json").read_text())
    return Qwen2TokenizerFast(tokenizer_file=str(file), padding_side="right", extra_special_tokens=SPECIAL, **config)


def processor():
    audio = {key: FILE[key] for key in ("feature_size", "sampling_rate", "hop_length", "chunk_length", "n_fft", "padding_value", "dither")}
    image = {key: FILE[key] for key in ("min_pixels", "max_pixels", "patch_size", "merge_size", "temporal_patch_size")}
    return Qwen2_5OmniProcessor(
        Qwen2VLImageProcessorPil(**image), Qwen2VLVideoProcessor(**image),
        WhisperFeatureExtractor(return_attention_mask=True, **audio), tokenizer(), chat_template=TEMPLATE,
    )


def spectrogram_by_numpy(extractor):
    """Lets the feature extractor compute in double precision, as it does without PyTorch."""
    extractor._torch_extract_fbank_features = lambda waveform, device="cpu": extractor._np_extract_fbank_features(waveform, "cpu")


def mix(value):
    value = np.asarray(value, np.uint32)
    value = (value ^ (value >> 15)) * np.uint32(0x2C1B3C6D)
    value = (value ^ (value >> 12)) * np.uint32(0x297A2D39)
    return value ^ (value >> 15)


def noise(count, seed):
    """Makes bytes from a multiplicative hash."""
    at = (np.arange(count, dtype=np.uint64) + np.uint64(7919 * seed)) * np.uint64(2654435761) & np.uint64(0xFFFFFFFF)
    return (at >> np.uint64(13)).astype(np.uint8)


def picture(width, height, seed):
    return noise(3 * width * height, seed).reshape(height, width, 3)


def clip(samples, seed):
    """Makes a saw tooth of 219 Hz with noise."""
    tooth = np.arange(samples) % 73 * 3 - 108
    return ((tooth + (noise(samples, seed) >> 2).astype(np.int64) - 32) / 256).astype(np.float32)


def sizes(random):
    found = [(1, 1), (1, 2), (2, 1), (1, 200), (200, 1), (1, 201), (201, 1), (5, 1000), (5, 1001), (20000, 20000), (65500, 7)]
    found += [(2480, 3508), (4961, 7016), (640, 480), (1920, 1080), (384, 384), (448, 448), (56, 56), (3584, 3584), (3612, 3584)]
    found += [tuple(int(side) for side in random.integers(1, 3000, 2)) for _ in range(500)]
    found += [tuple(int(side) for side in np.exp(random.uniform(0, math.log(20000), 2))) for _ in range(500)]
    return found


def record_tokens():
    """Counts media; those of few pixels or samples also in the output of the whole processor."""
    random, made, lines, runs = np.random.default_rng(7), processor(), [], {"image": 0, "video": 0, "audio": 0}
    merge = made.image_processor.merge_size**2

    def run(text, **media):
        out = made(text=[text], return_tensors="pt", **media)
        return out, out["input_ids"].shape[1]

    def add(medium, count, through=None):
        try:
            counted = count()
        except ValueError:
            counted = None
        if through is not None and runs[medium.split()[0]] < 90:
            runs[medium.split()[0]] += 1
            assert counted == through(), (medium, counted, through())
        lines.append(medium + "," + ("refused" if counted is None else ",".join(map(str, counted))))

    def image(width, height):
        patches = made.image_processor.get_number_of_image_patches(height, width, {})
        return patches, patches // merge + 2

    def run_image(width, height):
        out, tokens = run(IMAGE, images=[Image.fromarray(np.zeros((height, width, 3), np.uint8))])
        return len(out["pixel_values"]), tokens

    def video(frames, width, height):
        # Sizes of frames are the processor's own, not those of the video processor.
        patches = made.video_processor.get_num_of_video_patches(frames, height, width, {"size": Qwen2_5OmniProcessor.videos_kwargs["size"]})
        return patches, patches // merge + 2

    def run_video(frames, width, height):
        out, tokens = run(VIDEO, videos=[torch.zeros((frames, 3, height, width), dtype=torch.uint8)])
        return len(out["pixel_values_videos"]), tokens

    def audio(samples):
        frames = math.ceil(samples / 160)
        return (frames - 1) // 2 + 1, made._get_num_audio_tokens(samples) + 2

    def run_audio(samples):
        out, tokens = run(AUDIO, audio=[np.zeros(samples, np.float32)])
        return (int(out["feature_attention_mask"].sum()) - 1) // 2 + 1, tokens

    for width, height in sizes(random):
        cheap = width * height <= 1 << 20 and 3 < height and max(width, height) <= 200 * min(width, height)
        add(f"image {width}x{height}", lambda: image(width, height), (lambda: run_image(width, height)) if cheap else None)
    for _ in range(300):
        frames, (width, height) = int(random.integers(1, 33)), tuple(int(side) for side in random.integers(4, 900, 2))
        cheap = frames * width * height <= 1 << 20
        add(f"video {frames} {width}x{height}", lambda: video(frames, width, height), (lambda: run_video(frames, width, height)) if cheap else None)
    lengths = [1, 160, 161, 320, 321, 480, 481, 16000, 31999, 32000, 32001, 32160, 32161, 480000, 480001, 4799999, 4800000]
    lengths += [int(length) for length in random.integers(1, 200_000, 600)]
    lengths += [int(length) for length in np.exp(random.uniform(0, math.log(4_800_000), 600))]
    for samples in lengths:
        add(f"audio {samples}", lambda: audio(samples), (lambda: run_audio(samples)) if samples > 320 else None)
    print(f"{len(lines)} media, through the processor {runs}, {sum(line.endswith('refused') for line in lines)} refused", flush=True)
    config = {"model_type": "qwen2_5_omni", "thinker_config": {"vision_config": {"hidden_size": 1280}}}
    (OWN / "tokens.json").write_text(json.dumps({"config": config, "preprocessor": FILE}) + "\n")
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as file:
        file.write(("\n".join(lines) + "\n").encode())
    (OWN / "tokens.csv.gz").write_bytes(packed.getvalue())


def count(run, inputs):
    with FlopCounterMode(display=False) as forward:
        output = run(*inputs)
    with FlopCounterMode(display=False) as backward:
        output.float().sum().backward()
    return {"forward": forward.get_total_flops(), "backward": backward.get_total_flops()}


def parameters(module):
    return sum(parameter.numel() for parameter in module.parameters())


class Vision:
    """The image encoder without its merger; indices and lengths are computed on the CPU, values on its device."""

    def __init__(self, visual, grid, device):
        self.visual, self.grid, self.device = visual, grid, device

    def __call__(self, pixels):
        visual, config = self.visual, self.visual.config
        places = modeling.get_vision_position_ids(self.grid, config.spatial_merge_size, kwargs={})
        lengths, longest = modeling.get_vision_attention_seqlens(self.grid, config, kwargs={})
        _, window_lengths = modeling.get_vision_window_index(
            self.grid, spatial_merge_size=config.spatial_merge_size, window_size=config.window_size, patch_size=config.patch_size, kwargs={})
        rows = visual.patch_embed(pixels)
        rotation = visual.rotary_pos_emb(rows, places.to(self.device))
        for at, block in enumerate(visual.blocks):
            own = lengths if at in config.fullatt_block_indexes else window_lengths
            rows = block(rows, cu_seqlens=own, max_seqlen=longest, position_embeddings=rotation)
        return rows


class Audio:
    """The audio encoder up to its average of pairs; chunks are padded for the convolutions, as with a clip of a chunk or longer."""

    def __init__(self, tower, frames):
        self.tower = tower
        chunk = 2 * tower.n_window
        self.lengths = [min(chunk, length - start) for length in frames for start in range(0, length, chunk)]

    def __call__(self, features):
        tower, functional = self.tower, torch.nn.functional
        chunks = [functional.pad(part.T, (0, 2 * tower.n_window - len(part))) for part in features.T.split(self.lengths)]
        rows = functional.gelu(tower.conv2(functional.gelu(tower.conv1(torch.stack(chunks))))).transpose(1, 2)
        rows = rows + tower.positional_embedding.positional_embedding[: rows.shape[1]]
        lengths = [(length - 1) // 2 + 1 for length in self.lengths]
        rows = torch.cat([chunk[:length] for chunk, length in zip(rows, lengths, strict=True)])
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        for layer in tower.layers:
            rows = layer(rows, cu_seqlens=ends, max_seqlen=None)[0]
        return rows


def record_model(name, config, device, lengths):
    """Records the parts of a thinker; on the meta device nothing is computed."""
    parsed = Qwen2_5OmniThinkerConfig.from_dict(json.loads(json.dumps(config["thinker_config"])))
    with torch.device(device):
        model = Qwen2_5OmniThinkerForConditionalGeneration._from_config(parsed, attn_implementation="eager")
    model.train()
    model.tie_weights()
    visual, tower, text = model.model.visual, model.model.audio_tower, model.model.language_model
    empty = lambda *shape, grad=False: torch.zeros(shape, device=device, requires_grad=grad)  # noqa: E731
    flops, patch = [], parsed.vision_config.patch_size
    # Multiples of 28 in the range of pixels, so that nothing is resized.
    media = [([[644, 476]], []), ([[112, 1008], [448, 448]], [[6, 448, 280]])]
    for images, videos in media:
        grids = [(1, high // patch, wide // patch) for wide, high in images]
        grids += [(frames // 2, high // patch, wide // patch) for frames, wide, high in videos]
        patches = sum(t * h * w for t, h, w in grids)
        of = {"images": images, "videos": videos}
        encode = Vision(visual, torch.tensor(grids), device)
        flops.append({"part": "vision.tower"} | of | count(encode, [empty(patches, 3 * 2 * patch**2)]))
        flops.append({"part": "vision.projector"} | of | count(visual.merger, [empty(patches, visual.config.hidden_size, grad=True)]))
    chunk = 2 * parsed.audio_config.n_window
    for frames in ([12 * chunk // 5, 2 * chunk // 5], [5 * chunk, 3 * chunk]):
        of = {"audio": [160 * length for length in frames]}
        encode = Audio(tower, frames)
        flops.append({"part": "audio.tower"} | of | count(encode, [empty(tower.num_mel_bins, sum(frames))]))
        pooled = empty(sum(length // 4 for length in frames), tower.config.d_model, grad=True)
        flops.append({"part": "audio.projector"} | of | count(lambda rows: tower.proj(tower.ln_post(rows)), [pooled]))
    for tokens in lengths:
        ids = torch.zeros((1, tokens), dtype=torch.long, device=device)
        places = torch.zeros((3, 1, tokens), dtype=torch.long, device=device)
        decode = lambda ids, places=places: model.lm_head(text(input_ids=ids, position_ids=places, use_cache=False).last_hidden_state)  # noqa: E731
        flops.append({"part": "llm", "tokens": tokens} | count(decode, [ids]))
    counted = {
        "vision.tower": parameters(visual) - parameters(visual.merger), "vision.projector": parameters(visual.merger),
        # The norm after the pairs is the tower's here.
        "audio.tower": parameters(tower) - parameters(tower.proj), "audio.projector": parameters(tower.proj),
        "llm": parameters(text) + (0 if model.lm_head.weight is text.embed_tokens.weight else model.lm_head.weight.numel()),
    }
    assert sum(counted.values()) == parameters(model), (name, counted)
    print(name, counted, flush=True)
    documents = {"config": config, "preprocessor": FILE | {"feature_size": parsed.audio_config.num_mel_bins, "patch_size": patch}}
    return {"name": name, "documents": documents, "parameters": counted, "flops": flops}


def record_flops():
    rope = {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]}
    seven = {"model_type": "qwen2_5_omni", "thinker_config": {
        "model_type": "qwen2_5_omni_thinker", "text_config": {"rope_parameters": rope}, "vision_config": {"hidden_size": 1280}, "audio_config": {}}}
    small = {"model_type": "qwen2_5_omni", "thinker_config": small_thinker() | {"model_type": "qwen2_5_omni_thinker", "tie_word_embeddings": True}}
    cases = [record_model("qwen2.5-omni-7b", seven, "meta", [1000, 4096]), record_model("qwen2.5-omni-small", small, "cpu", [96])]
    (OWN / "flops.json").write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")


def small_thinker():
    return {
        "text_config": {
            "vocab_size": 1200, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        },
        "vision_config": {
            "depth": 3, "hidden_size": 64, "num_heads": 4, "out_hidden_size": 64, "intermediate_size": 100, "patch_size": 14,
            "fullatt_block_indexes": [1, 9], "window_size": 140,
        },
        "audio_config": {
            "d_model": 48, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 100, "num_mel_bins": 20, "n_window": 50,
            "output_dim": 64,
        },
    }


def runs(values):
    """Encodes equal values in a row as `[value, count]`."""
    packed = []
    for value in map(int, values):
        if packed and packed[-1][0] == value:
            packed[-1][1] += 1
        else:
            packed.append([value, 1])
    return [value if count == 1 else [value, count] for value, count in packed]


QUESTION, ANSWER = "What is shown here?", "A red kite over the sea, and 12 boats below it."
# Conversation as it is in a sample, with media where they are named; images, clips and videos come from the lists below, in order.
SAID = [
    [f"<image>\n{QUESTION}", ANSWER],
    [f"<audio>\n{QUESTION}", ANSWER, "More?", "Blue."],
    [QUESTION, ANSWER],
    [f"<video>\n{QUESTION}", ANSWER],
    [f"<audio>\n<image>\n{QUESTION}", ANSWER],
    ["<image>\n<audio>\n<video>\nAnd <audio> then <image>?", ANSWER],
    ["<video>\n<video>\nBefore <audio>", ANSWER],
]
PICTURES = [(96, 64), (300, 200), (640, 480), (57, 199)]
CLIPS = [16000, 6401, 99999, 481, 52000]
# Frames, width, height, frames per second; transformers takes one rate for all videos of a sample.
VIDEOS = [[(4, 320, 240)], [(5, 64, 48)], [(6, 160, 120), (1, 96, 64)], [(3, 48, 80)]]
RATES = [2.0, 1.3, 24.0, 0.7]


def rope(out, made):
    """Computes the positions of the thinker."""
    ids = dict(zip(SPECIAL, made.tokenizer.convert_tokens_to_ids(list(SPECIAL.values()))))
    config = Qwen2_5OmniThinkerConfig(
        image_token_index=ids["image_token"], video_token_index=ids["video_token"], audio_token_index=ids["audio_token"],
        vision_start_token_id=ids["vision_bos_token"], audio_start_token_id=ids["audio_bos_token"], vision_config={"hidden_size": 1280},
    )
    model = Qwen2_5OmniThinkerForConditionalGeneration.__new__(Qwen2_5OmniThinkerForConditionalGeneration)
    torch.nn.Module.__init__(model)
    model.config, model.spatial_merge_size = config, 2
    seconds = out.get("video_second_per_grid")
    mask = out.get("feature_attention_mask")
    positions, _ = model.get_rope_index(
        out["input_ids"], out.get("image_grid_thw"), out.get("video_grid_thw"), torch.ones_like(out["input_ids"]), False,
        None if mask is None else mask.sum(-1), None if seconds is None else torch.as_tensor(seconds),
    )
    return positions[:, 0].tolist()


def sampled(values, count=64):
    flat = values.reshape(-1)
    places = mix(np.arange(count)).astype(np.int64) % flat.size
    return {"shape": list(values.shape), "samples": [float(f"{flat[place]:.9g}") for place in places]}


def labels_of(made, messages, ids):
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, marks = render_jinja_template(
        conversations=[messages], chat_template=TEMPLATE, return_assistant_tokens_mask=True, **made.tokenizer.special_tokens_map)
    encoded = made.tokenizer(rendered[0], add_special_tokens=False, return_offsets_mapping=True)
    learned = [any(s < stop and start < e for start, stop in marks[0]) for s, e in encoded["offset_mapping"]]
    # Target tokens follow all media, so expanding them changes nothing.
    behind = len(learned) - learned.index(True)
    assert encoded["input_ids"][-behind:] == ids[-behind:]
    return [-100] * (len(ids) - behind) + [id_ if is_ else -100 for id_, is_ in zip(ids[-behind:], learned[-behind:])]


def record_inputs():
    made, cases, at = processor(), [], {"image": 0, "audio": 0, "video": 0}
    spectrogram_by_numpy(made.feature_extractor)
    for number, said in enumerate(SAID):
        case = {"json": {"conversations": [{"from": ["human", "gpt"][turn % 2], "value": value} for turn, value in enumerate(said)]}}
        case |= {"images": [], "clips": [], "videos": []}
        messages, media = [], {}
        rate = RATES[number % len(RATES)]
        for turn, value in enumerate(said):
            content = []
            for word in value.replace("<", "\0<").replace(">", ">\0").split("\0"):
                kind = word[1:-1] if word in ("<image>", "<audio>", "<video>") else None
                if kind == "image":
                    width, height = PICTURES[at[kind] % len(PICTURES)]
                    case["images"].append({"width": width, "height": height, "seed": 10 * number + at[kind]})
                elif kind == "audio":
                    case["clips"].append({"samples": CLIPS[at[kind] % len(CLIPS)], "seed": 10 * number + at[kind]})
                elif kind == "video":
                    frames, width, height = VIDEOS[at[kind] % len(VIDEOS)][0]
                    case["videos"].append({"frames": frames, "width": width, "height": height, "seed": 100 * number + 20 * at[kind], "fps": rate})
                if kind:
                    at[kind] += 1
                    content.append({"type": kind})
                elif word:
                    # A line break after a medium at the start of a line belongs to the mark.
                    word = word[1:] if content and "text" not in content[-1] and word.startswith("\n") else word
                    content += [{"type": "text", "text": word}] if word else []
            messages.append({"role": ["user", "assistant"][turn % 2], "content": content})
        if case["images"]:
            media["images"] = [Image.fromarray(picture(**image)) for image in case["images"]]
        if case["clips"]:
            media["audio"] = [clip(**of) for of in case["clips"]]
        if case["videos"]:
            media["fps"] = rate
            media["videos"] = [
                torch.from_numpy(np.stack([picture(video["width"], video["height"], video["seed"] + frame) for frame in range(video["frames"])])).permute(0, 3, 1, 2)
                for video in case["videos"]
            ]
        text = made.apply_chat_template(messages, chat_template=TEMPLATE)
        out = made(text=[text], return_tensors="pt", **media)
        ids = out["input_ids"][0].tolist()
        case |= {"input_ids": runs(ids), "labels": runs(labels_of(made, messages, ids))}
        for key in ["image_grid_thw", "video_grid_thw", "video_second_per_grid"]:
            if key in out:
                case[key] = torch.as_tensor(out[key]).tolist()
        axes = rope(out, made)
        case["position_sums"] = [[sum(axis), max(axis), axis[-1]] for axis in axes]
        if len(ids) < 400:
            case["positions"] = [runs(axis) for axis in axes]
        for key in ["pixel_values", "pixel_values_videos"]:
            if key in out:
                case[key] = sampled(out[key].numpy())
        if "input_features" in out:
            mask = out["feature_attention_mask"].bool()
            case["features"] = [
                {"frames": int(own.sum()), "means": [float(f"{mean:.9g}") for mean in values[:, own].double().mean(1)]} | sampled(values[:, own].numpy())
                for values, own in zip(out["input_features"], mask)
            ]
        print(number, len(ids), {key: list(value.shape) for key, value in out.items() if hasattr(value, "shape")}, flush=True)
        cases.append(case)
    versions = {name: module.__version__ for name, module in [("transformers", transformers), ("torch", torch)]}
    lines = ",\n".join(json.dumps(case, ensure_ascii=False, separators=(",", ":")) for case in cases)
    (OWN / "inputs.json").write_text(f'{{"versions": {json.dumps(versions)}, "template": {json.dumps(TEMPLATE)}, "cases": [\n{lines}\n]}}\n')


def record_parity():
    """Records a tiny thinker with images, a video and clips of several chunks."""
    generator = torch.Generator().manual_seed(17)
    torch.manual_seed(17)
    pictures, words, clips = 47, 46, 44
    config = Qwen2_5OmniThinkerConfig(
        audio_config=dict(d_model=12, encoder_ffn_dim=20, encoder_layers=2, encoder_attention_heads=3, num_mel_bins=8, n_window=5, output_dim=16),
        vision_config=dict(
            hidden_size=16, intermediate_size=20, depth=3, num_heads=2, patch_size=2, window_size=8, out_hidden_size=16, fullatt_block_indexes=[1]),
        text_config=dict(
            hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=48,
            rope_parameters=dict(rope_type="default", mrope_section=[2, 1, 1], rope_theta=10000.0)),
        image_token_index=pictures, video_token_index=words, audio_token_index=clips, vision_start_token_id=45, audio_start_token_id=43,
    )
    samples, patches, grids, features, lengths = [], [], [], [], []
    for media in ([(pictures, (1, 6, 4)), (clips, 23)], [], [(clips, 7), (words, (2, 4, 6)), (clips, 40), (pictures, (1, 4, 8))]):
        arguments = {"attention_mask": None}
        tokens = lambda kind, size: ((size - 1) // 2 + 1) // 2 if kind == clips else size[0] * size[1] * size[2] // 4  # noqa: E731
        input_ids = [torch.randint(0, 43, (3,), generator=generator)]
        for kind, size in media:
            start, end = (43, 42) if kind == clips else (45, 41)
            input_ids += [torch.tensor([start]), torch.full((tokens(kind, size),), kind), torch.tensor([end])]
        input_ids = torch.cat([*input_ids, torch.randint(0, 43, (4,), generator=generator)])
        heard = [size for kind, size in media if kind == clips]
        if heard:
            values = [torch.randn(8, frames, generator=generator) for frames in heard]
            longest = max(heard)
            arguments["input_features"] = torch.stack([torch.nn.functional.pad(value, (0, longest - value.shape[1])) for value in values])
            arguments["feature_attention_mask"] = (torch.arange(longest)[None] < torch.tensor(heard)[:, None]).long()
            features += [value.reshape(-1) for value in values]
            lengths += heard
        # Images come before videos, as in the inputs of an encoder.
        for kind, values_key, grid_key in [(pictures, "pixel_values", "image_grid_thw"), (words, "pixel_values_videos", "video_grid_thw")]:
            seen = [size for own, size in media if own == kind]
            if seen:
                arguments |= {values_key: torch.randn(sum(t * h * w for t, h, w in seen), 24, generator=generator), grid_key: torch.tensor(seen)}
                patches.append(arguments[values_key])
                grids += [list(size) for size in seen]
        arguments["attention_mask"] = torch.ones(1, len(input_ids), dtype=torch.long)
        samples.append((input_ids, arguments))
    model = Qwen2_5OmniThinkerForConditionalGeneration(config)
    placed = []
    for input_ids, arguments in samples:
        mask = arguments.get("feature_attention_mask")
        positions, _ = model.get_rope_index(
            input_ids[None], arguments.get("image_grid_thw"), arguments.get("video_grid_thw"), arguments["attention_mask"], False,
            None if mask is None else mask.sum(-1), torch.tensor([0.1]))
        placed.append((input_ids, positions[:, 0], arguments | {"attention_mask": None}))
    extra = dict(patches=torch.cat(patches), grids=torch.tensor(grids), input_features=torch.cat(features), frames=torch.tensor(lengths))
    executor_parity.START = 45
    # The begin of images is no target, as in the other families; marks of clips are in the tower, but not used.
    executor_parity.names_of = names_of
    executor_parity.record("qwen2_5_omni", model, placed, extra, generator)


def names_of(model, directory):
    """Returns the saved name of every parameter: the parts of the model have no prefix in the file."""
    def saved(own):
        own = own.removeprefix("model.")
        return own.replace("language_model.", "model.", 1) if own.startswith("language_model.") else own

    found = executor_parity.load_file(directory / "model.safetensors")
    names = {own: saved(own) for own, _ in model.named_parameters()}
    for own, parameter in model.named_parameters():
        assert torch.equal(found[names[own]].float(), parameter.detach()), own
    assert set(found) == set(names.values())
    return names


def main(golden):
    """Records the truth of Qwen2.5-Omni."""
    global OWN
    OWN = golden / "families" / "qwen2_5_omni"
    OWN.mkdir(parents=True, exist_ok=True)
    executor_parity.GOLDEN = golden / "executor"
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for record in [record_tokens, record_flops, record_inputs, record_parity]:
        record()


if __name__ == "__main__":
    run(main, "qwen2_5_omni")
