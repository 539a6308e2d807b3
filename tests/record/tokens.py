"""Records the items, encoder tokens and LLM tokens that Hugging Face processors make of media of given sizes.

Run by hand, `make record-tokens`; `costmodel/tests/tokens.rs` compares the cost model with `tests/golden/tokens/`. Needs no
network and no weights, in its own environment:

    python3 -m venv venv && venv/bin/pip install transformers==4.57.1 torch torchvision numpy 'pillow<12.2' safetensors
    make record-tokens PYTHON=venv/bin/python

- `families.json` has, for every family, the files of a checkpoint as its processor was made from them.
- `FAMILY.csv.gz` has a line per sample: `images WxH …`, `video FRAMES WxH` or `audio SAMPLES`, then `items,encoder
  tokens,tokens`, or the word `refused`. Tokens are LLM positions: features, newlines, and the markers around a medium.
- Names of families on the command line record only those.
- Samples of few pixels go through the whole processor, tokenizer included, and their tokens are counted in
  `input_ids`. The others are counted by the function that the processor resizes or tiles by; on the samples that went
  through, that function is compared with the results, and a difference ends the script.
- Images of 1 or 3 rows are only counted: the processors take their rows for channels and fail.
- Clips are silence at 16 kHz; a family `NAME` of audio keeps the first 30 seconds, as its feature extractor does.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
import transformers
from common import GOLDEN, packed
from PIL import Image
from transformers import (
    CLIPImageProcessor,
    GotOcr2ImageProcessor,
    InternVLProcessor,
    InternVLVideoProcessor,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    Qwen2AudioProcessor,
    Qwen2TokenizerFast,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    SiglipImageProcessor,
    WhisperFeatureExtractor,
)
from transformers.image_processing_utils import select_best_resolution
from transformers.image_utils import ChannelDimension
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

LAST = {"input_data_format": ChannelDimension.LAST}
PIXELS_RUN = 1 << 20
RUNS = 120
QWEN2 = {"model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4}


def tokenizer(**extra):
    folder = GOLDEN / "model_inputs" / "chatml"
    return Qwen2TokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), extra_special_tokens=extra, eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )


def sizes(random, units):
    """Draws widths and heights: random, near the places where a rule's result changes, and extreme."""
    found = [(1, 1), (1, 2), (2, 1), (1, 200), (200, 1), (1, 201), (201, 1), (3, 600), (3, 601), (601, 3)]
    found += [(1, 100000), (100000, 1), (20000, 20000), (20000, 100), (100, 20000), (65500, 65500), (65500, 7)]
    found += [(1000, 34800), (2480, 3508), (4961, 7016), (640, 480), (1920, 1080), (384, 384), (448, 448)]
    for _ in range(600):
        found.append(tuple(int(side) for side in random.integers(1, 3000, 2)))
    for _ in range(600):
        found.append(tuple(int(side) for side in np.exp(random.uniform(0, math.log(20000), 2))))
    for _ in range(150):
        short, ratio = int(random.integers(1, 200)), random.uniform(20, 240)
        strip = (short, max(int(short * ratio), 1))
        found.append(strip if random.random() < 0.5 else strip[::-1])
    for _ in range(60):
        short = int(random.integers(1, 300))
        found += [(short, 200 * short), (short, 200 * short + 1), (200 * short - 1, short)]
    for unit in units:
        for _ in range(100):
            columns, rows = random.integers(1, 13, 2)
            found.append(tuple(int(max(unit * n + random.integers(-1, 2), 1)) for n in (columns, rows)))
        for _ in range(70):
            columns, rows = random.integers(1, 10, 2)
            scale = int(random.integers(1, 700))
            found.append((int(scale * columns), int(scale * rows)))
    return found


def picture(size):
    return Image.fromarray(np.zeros((size[1], size[0], 3), np.uint8))


class Family:
    """Counts of a sample of images, by the processor's own function and by the whole processor."""

    units = [384]
    files = {}

    def image(self, width, height):
        raise NotImplementedError

    def images(self, sizes_of_sample):
        works = [self.image(*size) for size in sizes_of_sample]
        return tuple(sum(column) for column in zip(*works))

    def run(self, sizes_of_sample):
        raise NotImplementedError

    def video(self, frames, width, height):
        return None

    def run_video(self, frames, width, height):
        return None

    def cost(self, sizes_of_sample):
        """Returns the pixels that the processor makes."""
        return sum(min(max(w * h, 200_000), 4 << 20) for w, h in sizes_of_sample)


class Qwen(Family):
    units = [28, 14]

    def __init__(self, name, config, image, video=None, image_first=True):
        self.name, self.files = name, {"config": config, "preprocessor": image, "video_preprocessor": video}
        self.files = {key: value for key, value in self.files.items() if value is not None}
        video_settings = image if video is None else video
        self.images_of = Qwen2VLImageProcessor(**image)
        self.videos_of = Qwen2VLVideoProcessor(**json.loads(json.dumps(video_settings)))
        self.processor = Qwen2VLProcessor(self.images_of, tokenizer(), self.videos_of)

    def image(self, width, height):
        patches = self.images_of.get_number_of_image_patches(height, width, {})
        return patches, patches, patches // self.images_of.merge_size**2 + 2

    def run(self, of):
        text = "<|vision_start|><|image_pad|><|vision_end|>" * len(of)
        out = self.processor(text=[text], images=[picture(size) for size in of], images_kwargs=LAST)
        patches = sum(int(np.prod(grid)) for grid in np.asarray(out["image_grid_thw"]))
        assert patches == len(out["pixel_values"])
        return patches, patches, len(np.asarray(out["input_ids"]).reshape(-1))

    def video(self, frames, width, height):
        size = self.videos_of.size
        side = self.videos_of.patch_size * self.videos_of.merge_size
        high, wide = smart_resize(height, width, side, size["shortest_edge"], size["longest_edge"])
        layers = -(-frames // self.videos_of.temporal_patch_size)
        patches = layers * (high // self.videos_of.patch_size) * (wide // self.videos_of.patch_size)
        return patches, patches, patches // self.videos_of.merge_size**2 + 2

    def run_video(self, frames, width, height):
        video = torch.zeros((frames, 3, height, width), dtype=torch.uint8)
        text = "<|vision_start|><|video_pad|><|vision_end|>"
        out = self.processor(text=[text], videos=[video])
        patches = int(np.prod(np.asarray(out["video_grid_thw"])))
        return patches, patches, len(np.asarray(out["input_ids"]).reshape(-1))


class Llava(Family):
    def __init__(self, name, tile, patch, side, tiles_max, vision=None):
        self.name, self.tile, self.patches = name, tile, (tile // patch) ** 2
        self.units = [tile, tile // 2]
        grid = [[tile * rows, tile * columns] for rows in range(1, side + 1) for columns in range(1, side + 1)]
        tower = {"image_size": tile, "patch_size": patch, "hidden_size": 1152, "num_attention_heads": 16}
        aspect = f"anyres_max_{tiles_max}"
        image = {"image_grid_pinpoints": grid, "size": {"height": tile, "width": tile}}
        self.files = {
            "config": {
                "model_type": "llava_onevision", "text_config": QWEN2, "image_grid_pinpoints": grid,
                "vision_config": tower | {"model_type": "siglip_vision_model"}, "vision_aspect_ratio": aspect,
            },
            "preprocessor": image,
            "processor": {"num_image_tokens": self.patches, "vision_aspect_ratio": aspect},
        }

        class Images(LlavaOnevisionImageProcessor):
            """Passes the layout, which the original would guess."""

            def pad(self, image, padding, **kwargs):
                kwargs["input_data_format"] = kwargs.get("input_data_format") or ChannelDimension.LAST
                return super().pad(image, padding, **kwargs)

        self.processor = LlavaOnevisionProcessor(
            Images(**image), tokenizer(), LlavaOnevisionVideoProcessor(size={"height": tile, "width": tile}),
            num_image_tokens=self.patches, vision_feature_select_strategy="full", vision_aspect_ratio=aspect,
        )

    def image(self, width, height):
        high, wide = select_best_resolution((height, width), self.processor.image_processor.image_grid_pinpoints)
        tiles = 1 + high // self.tile * (wide // self.tile)
        data = self.processor._get_num_multimodal_tokens(image_sizes=[(height, width)])
        return tiles, tiles * self.patches, data["num_image_tokens"][0]

    def images(self, of):
        if len(of) == 1:
            return self.image(*of[0])
        return len(of), len(of) * self.patches, len(of) * (self.patches + 1)

    def run(self, of):
        out = self.processor(text=["<image>" * len(of)], images=[[picture(size) for size in of]], images_kwargs=LAST)
        tiles = sum(len(picture) for picture in out["pixel_values"])
        return tiles, tiles * self.patches, len(np.asarray(out["input_ids"]).reshape(-1))

    def video(self, frames, width, height):
        pooled = math.ceil(math.isqrt(self.patches) / 2)
        return frames, frames * self.patches, frames * pooled**2 + 1

    def run_video(self, frames, width, height):
        video = torch.zeros((frames, 3, height, width), dtype=torch.uint8)
        out = self.processor(text=["<video>"], videos=[video])
        taken = np.asarray(out["pixel_values_videos"]).shape[1]
        return taken, taken * self.patches, len(np.asarray(out["input_ids"]).reshape(-1))


class Intern(Family):
    units = [448, 224]

    def __init__(self, name, tiles_max, config=None, **more):
        self.name = name
        special = dict(start_image_token="<img>", end_image_token="</img>", context_image_token="<IMG_CONTEXT>",
                       video_token="<video>")
        # The published file disables cutting into tiles, but the processor does it all the same.
        image = {"size": {"height": 448, "width": 448}, "crop_to_patches": False, "min_patches": 1,
                 "max_patches": tiles_max}
        video = {"size": {"height": 448, "width": 448}}
        self.files = {"config": {"model_type": "internvl", "text_config": QWEN2}, "preprocessor": image,
                      "video_preprocessor": video}
        self.images_of = GotOcr2ImageProcessor(**image)
        self.processor = InternVLProcessor(self.images_of, tokenizer(**special), InternVLVideoProcessor(**video))

    def image(self, width, height):
        # The helper changes shared defaults, so all settings are passed.
        data = self.processor._get_num_multimodal_tokens(image_sizes=[(height, width)], crop_to_patches=True)
        tiles = data["num_image_patches"][0]
        return tiles, tiles * 1024, data["num_image_tokens"][0]

    def run(self, of):
        out = self.processor(text=["<IMG_CONTEXT>" * len(of)], images=[picture(size) for size in of], images_kwargs=LAST)
        tiles = len(out["pixel_values"])
        return tiles, tiles * 1024, len(np.asarray(out["input_ids"]).reshape(-1))

    def video(self, frames, width, height):
        return frames, frames * 1024, frames * 258

    def run_video(self, frames, width, height):
        video = torch.zeros((frames, 3, height, width), dtype=torch.uint8)
        # Without a tensor type, the video processor returns lists, which it cannot count itself.
        out = self.processor(text=["<video>"], videos=[video], return_tensors="pt")
        kinds = [self.processor.tokenizer.convert_tokens_to_ids(t) for t in ("<img>", "<IMG_CONTEXT>", "</img>")]
        ids = np.asarray(out["input_ids"]).reshape(-1)
        tiles = len(out["pixel_values"])
        return tiles, tiles * 1024, int(np.isin(ids, kinds).sum())


class Square(Family):
    """Counts for CLIP and SigLIP alone: every image is one square."""

    units = [336, 384]

    def __init__(self, name, processor, config, settings, patches):
        self.name, self.patches, self.images_of = name, patches, processor(**settings)
        self.files = {"config": config, "preprocessor": settings}

    def image(self, width, height):
        return 1, self.patches, self.patches

    def cost(self, of):
        """Scales the shorter side to the square's; the other may be of any length."""
        return sum(max(w, h) / min(w, h) for w, h in of) * 336**2

    def run(self, of):
        values = np.asarray(self.images_of([picture(size) for size in of], **LAST)["pixel_values"])
        side = values.shape[-1] // 14
        return len(values), len(values) * side**2, len(values) * side**2


def recorded(family, random):
    lines, runs, differences = [], 0, 0

    def add(kind, count, run, cheap):
        nonlocal runs
        try:
            work = count()
        except ValueError:
            work = "refused"
        if cheap and runs < RUNS:
            runs += 1
            try:
                made = run()
            except ValueError as error:
                made = "refused"
                assert work == "refused", (family.name, kind, work, error)
            assert made is None or made == work, (family.name, kind, work, made)
        lines.append(kind + "," + (work if work == "refused" else ",".join(map(str, work))))

    all_sizes = sizes(random, family.units)
    samples = [[size] for size in all_sizes]
    for _ in range(200):
        samples.append([all_sizes[i] for i in random.integers(0, len(all_sizes), random.integers(2, 9))])
    for of in random.permutation(len(samples)):
        sample = samples[of]
        kind = "images " + " ".join(f"{w}x{h}" for w, h in sample)
        cheap = family.cost(sample) <= PIXELS_RUN and all(w * h <= PIXELS_RUN and h not in (1, 3) for w, h in sample)
        add(kind, lambda: family.images(sample), lambda: family.run(sample), cheap)
    images = runs
    if family.video(1, 28, 28):
        runs = RUNS - 30
        for _ in range(300):
            frames = int(random.integers(1, 33))
            width, height = all_sizes[random.integers(0, len(all_sizes))]
            cheap = height not in (1, 3) and frames * max(width * height, 100_000) <= 2 * PIXELS_RUN
            add(f"video {frames} {width}x{height}", lambda: family.video(frames, width, height),
                lambda: family.run_video(frames, width, height), cheap)
    print(f"{family.name}: {len(lines)} samples, {images} of pictures through the processor, "
          f"{sum(line.endswith('refused') for line in lines)} refused", flush=True)
    return lines


def audio_lines(random):
    """Runs lengths around every place where the count changes through the whole processor; long ones are cut off."""
    extractor = WhisperFeatureExtractor(feature_size=128, return_attention_mask=True)
    extractor._torch_extract_fbank_features = lambda waves, device: np.zeros((len(waves), 1, 1), np.float32)
    processor = Qwen2AudioProcessor(extractor, tokenizer(), chat_template="none")
    lengths = {1, 2, 159, 160, 161, 319, 320, 321, 479840, 480000, 480160, 9_600_000}
    lengths |= {int(n) for n in random.integers(1, 480001, 1200)} | {160 * int(n) for n in random.integers(1, 3001, 400)}
    lengths |= {160 * int(n) + 1 for n in random.integers(1, 3000, 400)} | {int(n) for n in random.integers(480001, 960001, 60)}
    lines = []
    text = "<|audio_bos|><|AUDIO|><|audio_eos|>"
    for samples in sorted(lengths):
        out = processor(text=[text], audio=[np.zeros(samples, np.float32)], sampling_rate=16000)
        tokens = len(np.asarray(out["input_ids"]).reshape(-1))
        lines.append(f"audio {samples},1,1500,{tokens}")
    print(f"qwen2_audio: {len(lines)} clips, all through the processor", flush=True)
    return lines


def families():
    vision = {"depth": 32, "embed_dim": 1280, "hidden_size": 3584}
    qwen2 = QWEN2 | {"model_type": "qwen2_vl", "vision_config": vision}
    qwen2_5 = QWEN2 | {"model_type": "qwen2_5_vl", "vision_config": {"hidden_size": 1280}}
    released = {"min_pixels": 3136, "max_pixels": 12845056}
    frames = {"min_pixels": 100352, "max_pixels": 602112}
    wide = qwen2 | {"vision_config": vision | {"patch_size": 16}}
    yield Qwen("qwen2_vl", qwen2, released, frames)
    yield Qwen("qwen2_5_vl_default", qwen2_5, {})
    yield Qwen("qwen2_vl_patch16", wide, {"patch_size": 16, "min_pixels": 50176, "max_pixels": 802816})
    yield Llava("llava_onevision", 384, 14, 6, 9)
    yield Llava("llava_onevision_small", 224, 16, 3, 2)
    yield Intern("internvl", 12)
    yield Intern("internvl_4", 4)
    clip = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}
    side = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
    yield Square("clip", CLIPImageProcessor, clip, side, 576)
    siglip = {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14}
    yield Square("siglip", SiglipImageProcessor, siglip, {"size": {"height": 384, "width": 384}}, 729)


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("names", nargs="*", help="families to record, all by default")
    arguments.add_argument("--golden", type=Path, default=GOLDEN, help="directory to write below")
    options = arguments.parse_args()
    transformers.logging.set_verbosity_error()
    folder, wanted, files = options.golden / "tokens", options.names, {}
    folder.mkdir(parents=True, exist_ok=True)
    for family in families():
        files[family.name] = family.files
        if not wanted or family.name in wanted:
            lines = recorded(family, np.random.default_rng(11))
            (folder / f"{family.name}.csv.gz").write_bytes(packed(lines))
    files["qwen2_audio"] = {"config": {"model_type": "qwen2_audio"}, "preprocessor": {"feature_size": 128}}
    if not wanted or "qwen2_audio" in wanted:
        (folder / "qwen2_audio.csv.gz").write_bytes(packed(audio_lines(np.random.default_rng(11))))
    (folder / "families.json").write_text(json.dumps(files, indent=1) + "\n")


if __name__ == "__main__":
    main()
