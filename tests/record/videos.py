"""Records the Hugging Face processors' inputs for conversations with videos, as truth for the loader's preparation.

    python3 tests/record/videos.py      # needs transformers>=5.24, torch, torchvision, jinja2 and pillow<12.2

writes `tests/golden/model_inputs/videos.json` in the form of `model_inputs.py`, with its tokenizer. Frames are
`image(width, height, seed + frame)` of `processors.py`, `fps` of them per second, which determines how long a layer of frames
lasts for Qwen2.5-VL. Of the pixels, which the video processors make with torch and
not with Pillow, `samples` are some, spread over the whole. All media of a case are in its first turn.
"""

import argparse
import json
from pathlib import Path

import common
import numpy as np
import torch
import transformers
from model_inputs import ANSWER, GOLDEN, QUESTION, TEMPLATES, char_labels, llava, runs
from processors import mix, picture
from transformers import (
    GotOcr2ImageProcessor,
    InternVLProcessor,
    InternVLVideoProcessor,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    Qwen2_5_VLConfig,
    Qwen2_5_VLModel,
    Qwen2_5_VLProcessor,
    Qwen2TokenizerFast,
    Qwen2VLConfig,
    Qwen2VLImageProcessor,
    Qwen2VLModel,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

SAMPLES = 64
PUBLISHED = dict(TEMPLATES)
QWEN = "<|vision_start|><|{}_pad|><|vision_end|>"
PARTS = {"I": {"type": "image"}, "V": {"type": "video"}}
# Placeholders of an image and of a video in the text of a family.
PLACES = {
    "qwen2-vl-7b": (QWEN.format("image"), QWEN.format("video")),
    "qwen2.5-vl-7b": (QWEN.format("image"), QWEN.format("video")),
    "llava-ov-qwen2.5-7b": ("<image>", "<video>"),
    "internvl3-8b": ("{{ '<IMG_CONTEXT>\\n' }}", "{{ '<video>\\n' }}"),
}
# Field of the sample, parts of the first turn, and the answer.
SAID = [
    (llava(f"<video>\n{QUESTION}", ANSWER), ["V", QUESTION], [ANSWER]),
    (llava(f"{QUESTION}\n<video>", ANSWER, "More?", "Blue."), [QUESTION, "V"], [ANSWER, "More?", "Blue."]),
    (llava(f"<image>\n<video>\n{QUESTION}", ANSWER), ["I", "V", QUESTION], [ANSWER]),
    (llava("Before <video> and after <video>", ANSWER), ["Before ", "V", " and after ", "V"], [ANSWER]),
    (llava(QUESTION, ANSWER), ["V", QUESTION], [ANSWER]),
]
# Frames, width, height, frames per second.
VIDEOS = [(4, 320, 240, 2.0), (5, 64, 48, 1.0), (1, 96, 64, 24.0), (12, 160, 120, 0.8), (2, 48, 80, 29.97)]
IMAGES = [(96, 64), (300, 200)]


def tokenizer(**extra):
    config = json.loads((GOLDEN / "chatml" / "tokenizer_config.json").read_text())
    file = str(GOLDEN / "chatml" / "tokenizer.json")
    return Qwen2TokenizerFast(tokenizer_file=file, padding_side="right", extra_special_tokens=extra, **config)


def processors():
    """Returns the processors with the settings of the released checkpoints."""
    special = dict(
        start_image_token="<img>", end_image_token="</img>", context_image_token="<IMG_CONTEXT>", video_token="<video>"
    )
    half, imagenet = dict(image_mean=[0.5] * 3, image_std=[0.5] * 3), dict(
        image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225]
    )
    grid = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]
    tile = {"height": 448, "width": 448}
    qwen = lambda: (Qwen2VLImageProcessor(min_pixels=3136, max_pixels=12845056), tokenizer(), Qwen2VLVideoProcessor())
    return {
        "qwen2-vl-7b": Qwen2VLProcessor(*qwen()),
        "qwen2.5-vl-7b": Qwen2_5_VLProcessor(*qwen()),
        "llava-ov-qwen2.5-7b": LlavaOnevisionProcessor(
            LlavaOnevisionImageProcessor(image_grid_pinpoints=grid, **half), tokenizer(),
            LlavaOnevisionVideoProcessor(**half), num_image_tokens=729, vision_feature_select_strategy="full",
        ),
        "internvl3-8b": InternVLProcessor(
            GotOcr2ImageProcessor(size=tile, min_patches=1, max_patches=12, crop_to_patches=True, **imagenet),
            tokenizer(**special), InternVLVideoProcessor(size=tile, **imagenet),
        ),
    }


def template(name):
    """Returns the template of `model_inputs.py` with a placeholder for videos."""
    image, video = PLACES[name]
    source = PUBLISHED["qwen2-vl-7b" if name.startswith("qwen") else name]
    assert image + "{% elif" in source
    return source.replace(image + "{% elif", image + "{% elif part['type'] == 'video' %}" + video + "{% elif", 1)


def messages(first, rest):
    said = [[PARTS.get(item) or {"type": "text", "text": item} for item in first]]
    said += [[{"type": "text", "text": words}] for words in rest]
    return [{"role": ["user", "assistant"][at % 2], "content": content} for at, content in enumerate(said)]


def frames_of(video):
    return np.stack([picture(video["width"], video["height"], video["seed"] + at) for at in range(video["frames"])])


def rates(videos):
    """Returns the frame rates of the videos as arguments."""
    counts = [(video["fps"], video["frames"]) for video in videos]
    metadata = [{"fps": fps, "total_num_frames": n, "frames_indices": list(range(n)), "duration": n / fps} for fps, n in counts]
    return {"video_metadata": metadata}


def labels_of(name, processor, case, ids, said):
    """Returns labels: target tokens follow all media, so expanding them changes nothing."""
    TEMPLATES[name] = template(name)
    text, marks = char_labels(processor, name, said)
    encoded = processor.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    learned = [any(s < stop and start < e for start, stop in marks) for s, e in encoded["offset_mapping"]]
    behind = len(learned) - learned.index(True)
    assert encoded["input_ids"][-behind:] == ids[-behind:]
    return [-100] * (len(ids) - behind) + [id_ if is_ else -100 for id_, is_ in zip(ids[-behind:], learned[-behind:])]


def positions_of(name, processor, out):
    """Computes the positions of Qwen2-VL and Qwen2.5-VL."""
    kind, config = (Qwen2VLModel, Qwen2VLConfig()) if name == "qwen2-vl-7b" else (Qwen2_5_VLModel, Qwen2_5_VLConfig())
    ids = processor.tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|video_pad|>", "<|vision_start|>"])
    config.image_token_id, config.video_token_id, config.vision_start_token_id = ids
    if name == "qwen2.5-vl-7b":
        config.vision_config.tokens_per_second = 2
    model = kind.__new__(kind)
    torch.nn.Module.__init__(model)
    model.config = config
    grids = {key: out[key] for key in ["image_grid_thw", "video_grid_thw", "second_per_grid_ts"] if key in out}
    row = out["input_ids"]
    grids["mm_token_type_ids"] = (row == ids[0]).int() + 2 * (row == ids[1]).int()
    positions, _ = model.get_rope_index(row, **grids)
    return continued(positions[:, 0], row[0] == ids[1]).tolist()


def continued(positions, is_video):
    """Lets what is behind a video continue after the largest of its positions, as the papers and transformers before 5.3 do.

    5.24.0 continues after the larger side of a video, so that a long one shares positions in time with what is behind it.
    """
    ends = [at for at in range(1, len(is_video)) if is_video[at - 1] and not is_video[at]]
    for end in ends:
        begin = end
        while begin > 0 and is_video[begin - 1]:
            begin -= 1
        positions[:, end:] += positions[:, begin:end].max() + 1 - positions[:, end].min()
    return positions


def sampled(values):
    flat = values.reshape(-1)
    places = mix(np.arange(SAMPLES)).astype(np.int64) % flat.size
    return {"shape": list(values.shape), "samples": [float(f"{flat[place]:.9g}") for place in places]}


def record(name, processor, number, field, first, rest):
    kinds = ["V" if item == "V" else "I" for item in first if item in PARTS]
    next_video, next_image, seed = number, 0, 100 * number
    case = {"family": name, "json": field, "images": [], "videos": []}
    for kind in kinds:
        if kind == "I":
            width, height = IMAGES[next_image]
            case["images"].append({"width": width, "height": height, "seed": seed})
            next_image += 1
        else:
            # Only Qwen takes videos of several lengths in one call.
            place = next_video if name.startswith("qwen") else number
            frames, width, height, fps = VIDEOS[place % len(VIDEOS)]
            case["videos"].append({"frames": frames, "width": width, "height": height, "seed": seed, "fps": fps})
            next_video += 1
        seed += 20
    said = messages(first, rest)
    text = processor.apply_chat_template(said, chat_template=template(name))
    media = {"videos": [torch.from_numpy(frames_of(video)).permute(0, 3, 1, 2) for video in case["videos"]]}
    if case["images"]:
        media["images"] = [[picture(image["width"], image["height"], image["seed"]) for image in case["images"]]]
    if name == "qwen2.5-vl-7b":
        media |= rates(case["videos"])
    out = processor(text=[text], **media, do_sample_frames=False, return_tensors="pt")
    ids = out["input_ids"][0].tolist()
    case["input_ids"] = runs(ids)
    case["labels"] = runs(labels_of(name, processor, case, ids, said))
    for key in ["image_grid_thw", "video_grid_thw", "second_per_grid_ts"]:
        if key in out:
            case[key] = torch.as_tensor(out[key]).tolist()
    if name.startswith("qwen"):
        axes = positions_of(name, processor, out)
        case["position_sums"] = [[sum(axis), max(axis), axis[-1]] for axis in axes]
        if len(ids) < 320:
            case["positions"] = axes
    key = "pixel_values" if name.startswith("internvl") else "pixel_values_videos"
    case[key] = sampled(out[key].numpy())
    return case


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--golden", type=Path, default=common.GOLDEN, help="directory to write below")
    golden, cases = arguments.parse_args().golden, []
    for name, processor in processors().items():
        for number, (field, first, rest) in enumerate(SAID):
            cases.append(record(name, processor, number, field, first, rest))
    versions = {name: module.__version__ for name, module in [("transformers", transformers), ("torch", torch)]}
    lines = ",\n".join(json.dumps(case, ensure_ascii=False, separators=(",", ":")) for case in cases)
    (golden / "model_inputs" / "videos.json").write_text(f'{{"versions": {json.dumps(versions)}, "cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
