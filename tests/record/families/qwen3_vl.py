"""Records Qwen3-VL, dense and with experts: tokens, parameters and FLOPs, model inputs.

    python3 tests/record/families/qwen3_vl.py        # needs transformers==5.24.0, torch, torchvision and pillow<12.2

- `tokens/qwen3_vl.json` has the files of checkpoints by name, `NAME.csv.gz` a line per sample as `tests/record/tokens.py` describes.
  Frames of videos come at a thousand per second, so that their times have one digit; samples of few pixels go through the whole processor, tokenizer included, the
  others are counted by its helpers, compared with it on the former.
- `flops/qwen3_vl.json` has cases as `tests/record/flops.py` describes; `vision.projector` is the merger with those of earlier layers.
- `executor/qwen3_vl` and `executor/qwen3_vl_moe` have tiny models as `tests/record/executor_parity.py` describes.
- `model_inputs/qwen3_vl.json` has conversations with images and videos; `pixels` is the checksum of all values of the images,
  resized with Pillow, `video_samples` are evenly spread values of the videos, which torch resizes.
"""

import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, Qwen2TokenizerFast, Qwen3VLProcessor, Qwen3VLVideoProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.video_utils import VideoMetadata

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import executor_parity as parity  # noqa: E402
from common import GOLDEN, checksum, packed, run, runs  # noqa: E402

HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
IMAGE = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, "size": {"shortest_edge": 65536, "longest_edge": 16777216}, **HALF}
VIDEO = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, "size": {"shortest_edge": 4096, "longest_edge": 25165824}, **HALF}
PIXELS_RUN = 1 << 20
# Tokens of `<0.0 seconds>` by the published tokenizer, of which the small one here has more.
LABEL = 6


def tokenizer():
    config = json.loads((GOLDEN / "model_inputs" / "chatml" / "tokenizer_config.json").read_text())
    return Qwen2TokenizerFast(tokenizer_file=str(GOLDEN / "model_inputs" / "chatml" / "tokenizer.json"), padding_side="right", **config)


def processor(image=IMAGE, video=VIDEO):
    return Qwen3VLProcessor(Qwen2VLImageProcessorPil(**image), tokenizer(), Qwen3VLVideoProcessor(**video))


def picture(width, height):
    return Image.fromarray(np.zeros((height, width, 3), np.uint8))


def sizes(random):
    found = [(1, 1), (1, 2), (2, 1), (1, 200), (200, 1), (1, 201), (201, 1), (5, 1000), (5, 1001), (20000, 20000), (65500, 7)]
    found += [(2480, 3508), (4961, 7016), (640, 480), (1920, 1080), (384, 384), (448, 448), (4096, 4096), (4097, 4096)]
    found += [tuple(int(side) for side in random.integers(1, 3000, 2)) for _ in range(700)]
    found += [tuple(int(side) for side in np.exp(random.uniform(0, math.log(20000), 2))) for _ in range(700)]
    for _ in range(150):
        short, ratio = int(random.integers(1, 200)), random.uniform(20, 240)
        strip = (short, max(int(short * ratio), 1))
        found.append(strip if random.random() < 0.5 else strip[::-1])
    for unit in (32, 16):
        for _ in range(150):
            columns, rows = random.integers(1, 30, 2)
            found.append(tuple(int(max(unit * n + random.integers(-1, 2), 1)) for n in (columns, rows)))
    return found


def metadata(frames, rate=1000.0):
    """Describes frames of a rate."""
    return VideoMetadata(total_num_frames=frames, fps=rate, frames_indices=list(range(frames)))


class Tokens:
    def __init__(self, name, image, video, video_settings=None):
        config = {"model_type": "qwen3_vl", "text_config": {"hidden_size": 4096}, "vision_config": {"out_hidden_size": 4096}}
        self.name, self.files = name, {"config": config, "preprocessor": image, "video_preprocessor": video}
        self.processor = processor(image, video)
        self.surplus = len(tokenizer()("<0.0 seconds>")["input_ids"]) - LABEL

    def images(self, of):
        patches = [self.processor.image_processor.get_number_of_image_patches(high, wide, {}) for wide, high in of]
        return sum(patches), sum(patches), sum(patches) // 4 + 2 * len(of)

    def run_images(self, of):
        text = "<|vision_start|><|image_pad|><|vision_end|>" * len(of)
        out = self.processor(text=[text], images=[picture(*size) for size in of])
        patches = len(out["pixel_values"])
        return patches, patches, len(np.asarray(out["input_ids"]).reshape(-1))

    def video(self, frames, width, height):
        patches = self.processor.video_processor.get_num_of_video_patches(frames, height, width)
        layers = (frames + 1) // 2
        return patches, patches, patches // 4 + (2 + LABEL) * layers + 2

    def run_video(self, frames, width, height):
        video = torch.zeros((frames, 3, height, width), dtype=torch.uint8)
        text = "<|vision_start|><|video_pad|><|vision_end|>"
        out = self.processor(text=[text], videos=[video], video_metadata=[metadata(frames)], do_sample_frames=False)
        patches = int(np.prod(np.asarray(out["video_grid_thw"])))
        surplus = self.surplus * int(np.asarray(out["video_grid_thw"])[0, 0])
        return patches, patches, len(np.asarray(out["input_ids"]).reshape(-1)) - surplus

    def recorded(self):
        random, lines = np.random.default_rng(11), []

        def add(kind, count, run, is_cheap):
            try:
                work = count()
            except ValueError:
                work = "refused"
            if is_cheap:
                try:
                    made = run()
                except ValueError as error:
                    made = "refused"
                    assert work == "refused", (self.name, kind, work, error)
                assert made == work, (self.name, kind, work, made)
            lines.append(kind + "," + (work if work == "refused" else ",".join(map(str, work))))
            return is_cheap

        all_sizes, runs = sizes(random), [0, 0]
        samples = [[size] for size in all_sizes]
        samples += [[all_sizes[i] for i in random.integers(0, len(all_sizes), random.integers(2, 9))] for _ in range(200)]
        for at in random.permutation(len(samples)):
            of = samples[at]
            is_cheap = runs[0] < 150 and all(w * h <= PIXELS_RUN and min(w, h) > 4 for w, h in of)
            runs[0] += add("images " + " ".join(f"{w}x{h}" for w, h in of), lambda: self.images(of), lambda: self.run_images(of), is_cheap)
        for number in range(500):
            frames = int(random.integers(2, 33) if number < 400 else np.exp(random.uniform(math.log(33), math.log(768))))
            width, height = all_sizes[random.integers(0, len(all_sizes))]
            is_cheap = runs[1] < 60 and frames * width * height <= 2 * PIXELS_RUN and min(width, height) > 4
            kind = f"video {frames} {width}x{height}"
            runs[1] += add(kind, lambda: self.video(frames, width, height), lambda: self.run_video(frames, width, height), is_cheap)
        print(f"{self.name}: {len(lines)} samples, {runs} through the processor", flush=True)
        return lines


def record_tokens(golden):
    small = IMAGE | {"size": {"shortest_edge": 4096, "longest_edge": 1048576}}
    capped = VIDEO | {"size": {"shortest_edge": 131072, "longest_edge": 4194304}, "cap_pixels_per_frame": True, "max_video_tokens": 256}
    cases = [Tokens("qwen3_vl", IMAGE, VIDEO), Tokens("qwen3_vl_capped", small, capped)]
    for case in cases:
        (golden / "tokens" / f"{case.name}.csv.gz").write_bytes(packed(case.recorded()))
    (golden / "tokens" / "qwen3_vl.json").write_text(json.dumps({case.name: case.files for case in cases}, indent=1) + "\n")


def count(function, inputs):
    """Counts FLOPs of a forward pass, and of the backward pass from the sum of its output."""
    with FlopCounterMode(display=False) as forward:
        output = function(*inputs)
    with FlopCounterMode(display=False) as backward:
        output.float().sum().backward()
    return {"forward": forward.get_total_flops(), "backward": backward.get_total_flops()}


def parameters(module):
    return sum(parameter.numel() for parameter in module.parameters())


def record_model(name, config, device, media, lengths):
    """Records the parts of a model; on the meta device nothing is computed."""
    settings = json.loads(json.dumps(config))
    parsed = CONFIG_MAPPING[settings.pop("model_type")].from_dict(settings)
    parsed._attn_implementation = "eager"
    # The counter does not know the fused product of all experts.
    parsed.text_config._experts_implementation = parsed._experts_implementation = "eager"
    with torch.device(device):
        model = transformers.AutoModelForImageTextToText.from_config(parsed, attn_implementation="eager")
    model.train()
    model.tie_weights()
    visual, vision, text = model.model.visual, parsed.vision_config, model.model.language_model
    mergers = [visual.merger, *visual.deepstack_merger_list]
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    empty = lambda *shape, grad=False: torch.zeros(shape, device=device, requires_grad=grad)  # noqa: E731
    flops = []

    def merge(rows):
        return torch.cat([merger(rows) for merger in mergers])

    for images, videos in media:
        grids = [(1, high // 16, wide // 16) for wide, high in images]
        grids += [(frames // 2, high // 16, wide // 16) for frames, wide, high in videos]
        patches, grid = sum(t * h * w for t, h, w in grids), torch.tensor(grids)
        tower = Tower(visual, grid, device)
        of = {"images": images, "videos": videos}
        flops.append({"part": "vision.tower"} | of | count(tower, [empty(patches, values)]))
        flops.append({"part": "vision.projector"} | of | count(merge, [empty(patches, vision.hidden_size, grad=True)]))
    head = model.lm_head
    for tokens in lengths:
        ids = torch.zeros((1, tokens), dtype=torch.long, device=device)
        # Positions of three axes, because those of the text are looked at, which the meta device has no values of.
        places = torch.zeros((3, 1, tokens), dtype=torch.long, device=device)
        decode = lambda ids, places=places: head(text(input_ids=ids, position_ids=places, use_cache=False).last_hidden_state)  # noqa: E731
        flops.append({"part": "llm", "tokens": tokens} | count(decode, [ids]))
    projector = sum(parameters(merger) for merger in mergers)
    tied = head.weight is text.get_input_embeddings().weight
    counted = {
        "vision.tower": parameters(visual) - projector, "vision.projector": projector,
        "llm": parameters(text) + (0 if tied else head.weight.numel()),
    }
    assert sum(counted.values()) == parameters(model), (name, counted)
    print(name, counted, flush=True)
    documents = {"config": config, "preprocessor": IMAGE | {"size": {"shortest_edge": 1024, "longest_edge": 16777216}}, "video_preprocessor": VIDEO}
    return {"name": name, "documents": documents, "parameters": counted, "flops": flops}


class Tower:
    """The encoder without its mergers; indices and lengths are computed on the CPU, values on its device."""

    def __init__(self, visual, grid, device):
        self.visual, self.grid, self.device = visual, grid, device

    def __call__(self, pixels):
        import transformers.models.qwen3_vl.modeling_qwen3_vl as dense

        visual, grid, config = self.visual, self.grid, self.visual.config
        indices, weights = dense.get_vision_interpolation_indices_and_weights(
            grid, num_grid_per_side=visual.num_grid_per_side, mode=visual.interpolation_mode,
            align_corners=visual.interpolation_align_corners, spatial_merge_size=config.spatial_merge_size, kwargs={},
        )
        places = dense.get_vision_position_ids(grid, config.spatial_merge_size, kwargs={})
        lengths, longest = dense.get_vision_attention_seqlens(grid, config, kwargs={})
        rows = visual.patch_embed(pixels)
        learned = visual.pos_embed(indices.to(self.device)) * weights.to(self.device)[:, :, None]
        rows = rows + learned.sum(1)
        rotation = visual.rotary_pos_emb(rows, places.to(self.device))
        for block in visual.blocks:
            rows = block(rows, cu_seqlens=lengths, max_seqlen=longest, position_embeddings=rotation)
        return rows


def text(layers, hidden, heads, kv_heads, ffn, **more):
    return {"vocab_size": 151936, "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "head_dim": 128,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000000, "mrope_section": [24, 20, 20], "mrope_interleaved": True}} | more


def record_flops(golden):
    small = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
    experts = {"num_experts": 128, "num_experts_per_tok": 8}
    sizes_of = [
        ("2b", "qwen3_vl", small, text(28, 2048, 16, 8, 6144), True),
        ("4b", "qwen3_vl", small, text(36, 2560, 32, 8, 9728), True),
        ("8b", "qwen3_vl", {}, text(36, 4096, 32, 8, 12288), False),
        ("32b", "qwen3_vl", {}, text(64, 5120, 64, 8, 25600), False),
        ("30b-a3b", "qwen3_vl_moe", {}, text(48, 2048, 32, 4, 6144, moe_intermediate_size=768, **experts), False),
        ("235b-a22b", "qwen3_vl_moe", {}, text(94, 4096, 64, 4, 12288, moe_intermediate_size=1536, **experts), False),
    ]
    media = [([[640, 480]], []), ([[128, 1024], [448, 448]], [[6, 320, 256]])]
    cases = []
    for size, model_type, vision, language, tied in sizes_of:
        vision = vision | {"out_hidden_size": language["hidden_size"]}
        config = {"model_type": model_type, "text_config": language, "vision_config": vision, "tie_word_embeddings": tied}
        # Experts select their tokens by value, of which the meta device has none.
        lengths = [] if model_type == "qwen3_vl_moe" else [1000, 4096]
        cases.append(record_model(f"qwen3-vl-{size}", config, "meta", media, lengths))
    language = text(4, 64, 4, 2, 96, vocab_size=1200, head_dim=32)
    language["rope_parameters"]["mrope_section"] = [6, 5, 5]
    vision = {"depth": 4, "hidden_size": 64, "num_heads": 4, "intermediate_size": 100, "out_hidden_size": 64,
              "deepstack_visual_indexes": [0, 2], "num_position_embeddings": 100}
    dense = {"model_type": "qwen3_vl", "text_config": language, "vision_config": vision, "tie_word_embeddings": True}
    cases.append(record_model("qwen3-vl-small", dense, "cpu", media[1:], [96]))
    sparse = dense | {"model_type": "qwen3_vl_moe", "tie_word_embeddings": False, "text_config": language | {
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "mlp_only_layers": [1]}}
    cases.append(record_model("qwen3-vl-moe-small", sparse, "cpu", media[1:], [96]))
    (golden / "flops" / "qwen3_vl.json").write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")


def record_executor(golden):
    """Records a tiny model for the executor, as `tests/record/executor_parity.py` describes."""
    parity.GOLDEN = golden / "executor"
    torch.set_num_threads(1)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    language = parity.TEXT | {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "rope_parameters": rope}
    vision = {"depth": 3, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "patch_size": 2, "out_hidden_size": 16,
              "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "mlp_only_layers": [2]}
    for at, (name, more) in enumerate([("qwen3_vl", {}), ("qwen3_vl_moe", experts)]):
        generator = torch.Generator().manual_seed(100 + at)
        torch.manual_seed(100 + at)
        settings = {"vision_config": vision, "text_config": language | more, "image_token_id": parity.IMAGE,
                    "video_token_id": parity.VIDEO, "vision_start_token_id": parity.START, "tie_word_embeddings": False}
        model = transformers.AutoModelForImageTextToText.from_config(CONFIG_MAPPING[name](**settings))
        record_parity(name, model, 3 * 2 * 4, generator)
    turn_experts(parity.GOLDEN / "qwen3_vl_moe")


def turn_experts(directory):
    """Lays the matrices of experts out as in the published files, `[experts, inputs, outputs]`; transformers reads both."""
    for file in [directory / "model.safetensors", directory / "expected.safetensors"]:
        tensors = load_file(file)
        for name in tensors:
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                tensors[name] = tensors[name].transpose(1, 2).contiguous()
        save_file(tensors, file, metadata={"format": "pt"} if file.stem == "model" else None)


def record_parity(name, model, patch_inputs, generator):
    """Makes images and videos of native resolution; the layers of a video stand apart in the text."""
    samples, patches, grids = [], [], []
    image, video = parity.IMAGE, parity.VIDEO
    for media in ([(image, (1, 6, 4))], [], [(video, (2, 4, 6)), (image, (1, 10, 8))]):
        runs = [(token, grid[1] * grid[2] // 4) for token, grid in media for _ in range(grid[0])]
        input_ids = parity.with_media(generator, 3, runs, 4)
        types = (input_ids == image).long() + 2 * (input_ids == video).long()
        arguments = {"mm_token_type_ids": types[None]}
        for token, key in [(image, ("pixel_values", "image_grid_thw")), (video, ("pixel_values_videos", "video_grid_thw"))]:
            of_kind = [grid for medium, grid in media if medium == token]
            if of_kind:
                rows = sum(t * h * w for t, h, w in of_kind)
                arguments |= {key[0]: torch.randn(rows, patch_inputs, generator=generator), key[1]: torch.tensor(of_kind)}
        # Recorded in the order of the sample.
        patches += [arguments["pixel_values" if token == image else "pixel_values_videos"] for token, _ in media]
        grids += [list(grid) for _, grid in media]
        index = {key: arguments.get(key) for key in ("image_grid_thw", "video_grid_thw")}
        positions, _ = model.model.get_rope_index(input_ids[None], mm_token_type_ids=types[None], **index)
        samples.append((input_ids, positions[:, 0], arguments))
    parity.record(name, model, samples, {"patches": torch.cat(patches), "grids": torch.tensor(grids)}, generator)


TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif message['role'] == 'assistant' %}{% generation %}{{ part['text'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% if message['role'] != 'assistant' %}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
)
ANSWER = "A red kite over the sea, and 12 boats below it."
# Parts of the first turn, `I` for an image and `V` for a video, and what follows.
SAID = [
    (["I", "What is shown here?"], [ANSWER]),
    (["What is shown here?", "I"], [ANSWER, "And the sky?", "Blue."]),
    (["I", "I", "Compare."], ["Zwei Wörter – 日本語, émoji 🪁🪁!\n\n\tx ** 2"]),
    (["Nothing to see."], [ANSWER]),
    (["V", "What happens?"], [ANSWER]),
    (["I", "\n", "V", "What happens?"], [ANSWER, "More?", "assistant"]),
    (["Before ", "V", " and after ", "V"], [ANSWER]),
]
SIZES = [(640, 480), (300, 500), (96, 64), (1024, 20)]
# Frames, width, height, frames per second.
VIDEOS = [(4, 320, 240, 2.0), (5, 64, 48, 0.3), (12, 160, 120, 0.8), (2, 48, 80, 29.97)]


def pattern(width, height, seed):
    values = np.arange(width * height * 3, dtype=np.uint32) + np.uint32(7919 * seed)
    return (values * np.uint32(2654435761) >> np.uint32(13)).astype(np.uint8).reshape(height, width, 3)


def conversation(first, rest):
    """Returns the field of a sample, and the same as messages."""
    field = [{"role": "user", "content": []}]
    for item in first:
        field[0]["content"].append({"I": {"type": "image"}, "V": {"type": "video"}}.get(item) or {"type": "text", "text": item})
    said = field + [{"role": ["assistant", "user"][at % 2], "content": [{"type": "text", "text": words}]} for at, words in enumerate(rest)]
    return {"messages": said}, said


def labels_of(own, said, ids):
    """Returns labels: the targets follow all media, so that expanding them changes nothing."""
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, marks = render_jinja_template(conversations=[said], chat_template=TEMPLATE, return_assistant_tokens_mask=True)
    encoded = own.tokenizer(rendered[0], add_special_tokens=False, return_offsets_mapping=True)
    learned = [any(s < stop and start < e for start, stop in marks[0]) for s, e in encoded["offset_mapping"]]
    behind = len(learned) - learned.index(True)
    assert encoded["input_ids"][-behind:] == ids[-behind:]
    return [-100] * (len(ids) - behind) + [id_ if is_ else -100 for id_, is_ in zip(ids[-behind:], learned[-behind:])]


def positions_of(own, out):
    model = transformers.Qwen3VLModel.__new__(transformers.Qwen3VLModel)
    torch.nn.Module.__init__(model)
    model.config = transformers.Qwen3VLConfig()
    grids = {key: torch.as_tensor(out[key]) for key in ("image_grid_thw", "video_grid_thw") if key in out}
    positions, _ = model.get_rope_index(torch.as_tensor(out["input_ids"]), torch.as_tensor(out["mm_token_type_ids"]), **grids)
    return positions[:, 0].tolist()


def record_inputs(golden):
    own, cases = processor(), []
    for number, (first, rest) in enumerate(SAID):
        field, said = conversation(first, rest)
        case, seed, media = {"json": field, "images": [], "videos": []}, 100 * number, {}
        for item in first:
            if item == "I":
                width, height = SIZES[(number + len(case["images"])) % len(SIZES)]
                case["images"].append({"width": width, "height": height, "seed": seed})
            elif item == "V":
                frames, width, height, fps = VIDEOS[(number + len(case["videos"])) % len(VIDEOS)]
                case["videos"].append({"frames": frames, "width": width, "height": height, "seed": seed, "fps": fps})
            seed += 20
        text = own.apply_chat_template(said, chat_template=TEMPLATE)
        if case["images"]:
            media["images"] = [Image.fromarray(pattern(of["width"], of["height"], of["seed"])) for of in case["images"]]
        if case["videos"]:
            frames = lambda of: np.stack([pattern(of["width"], of["height"], of["seed"] + at) for at in range(of["frames"])])  # noqa: E731
            media["videos"] = [torch.from_numpy(frames(of)).permute(0, 3, 1, 2) for of in case["videos"]]
            media |= {"video_metadata": [metadata(of["frames"], of["fps"]) for of in case["videos"]], "do_sample_frames": False}
        out = own(text=[text], return_tensors="pt", **media)
        ids = out["input_ids"][0].tolist()
        case |= {"input_ids": runs(ids), "labels": runs(labels_of(own, said, ids)), "mm_token_type_ids": runs(out["mm_token_type_ids"][0])}
        case |= {key: out[key].tolist() for key in ("image_grid_thw", "video_grid_thw") if key in out}
        axes = positions_of(own, out)
        case["position_sums"] = [[sum(axis), max(axis), axis[-1]] for axis in axes]
        if len(ids) < 320:
            case["positions"] = axes
        if case["images"]:
            case["pixels"] = checksum(out["pixel_values"].numpy())
        if case["videos"]:
            flat = out["pixel_values_videos"].numpy().reshape(-1)
            case["video_values"] = flat.size
            case["video_samples"] = [float(f"{flat[at * (flat.size - 1) // 63]:.9g}") for at in range(64)]
        cases.append(case)
    lines = ",\n".join(json.dumps(case, ensure_ascii=False, separators=(",", ":")) for case in cases)
    (golden / "model_inputs" / "qwen3_vl.json").write_text(f"[\n{lines}\n]\n")


def main(golden):
    transformers.logging.set_verbosity_error()
    record_tokens(golden)
    record_flops(golden)
    record_executor(golden)
    record_inputs(golden)


if __name__ == "__main__":
    run(main, "qwen3_vl", "qwen3_vl_moe")
