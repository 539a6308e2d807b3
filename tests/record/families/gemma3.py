"""Records the truth of Gemma 3: tokens, FLOPs, model inputs, and tiny models with and without images.

Crops of images, pan and scan, are recorded besides: the processor cuts only if a call asks for it.

    make record-models NAMES=gemma3 PYTHON=venv/bin/python       # needs transformers, torch, torchvision, Pillow below 12.2

Windows of the tiny models are shorter than samples, and images longer than windows; samples run one by one, with
`token_type_ids` as the processor makes them.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import transformers
from transformers.models.gemma3.image_processing_gemma3 import Gemma3ImageProcessor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

import executor_parity as parity
import image_models
from common import run
from executor_parity import IMAGE, TEXT, TOWER, counted, record, text_samples, with_media
from image_models import flops, make_tokenizer, record_flops, record_inputs, record_tokens, tokens

VISION = {"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
          "num_attention_heads": 16, "image_size": 896, "patch_size": 14, "vision_use_head": False}


def text(layers, hidden, ffn, heads, kv_heads, head_dim, scalar):
    return {"model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim, "query_pre_attn_scalar": scalar,
            "sliding_window": 1024}


def model(*sizes):
    return {"model_type": "gemma3", "text_config": text(*sizes), "vision_config": VISION, "mm_tokens_per_image": 256}


GEMMA_4B = model(34, 2560, 10240, 8, 4, 256, 256)
GEMMA_27B = model(62, 5376, 21504, 32, 16, 128, 168)
IMAGES = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 896, "width": 896}, "resample": 2,
          "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "do_pan_and_scan": None}
ADDED = ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"]
SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
# The published format, with marks around what the assistant says.
TEMPLATE = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'][0]['text'] + '\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set first = '' %}{% set turns = messages %}{% endif %}{% for message in turns %}"
    "<start_of_turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n{{ first if loop.first else '' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'][0]['text'] | trim }}<end_of_turn>{% endgeneration %}{{ '\n' }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<start_of_image>{% else %}{{ part['text'] | trim }}"
    "{% endif %}{% endfor %}<end_of_turn>\n{% endif %}{% endfor %}"
)


# Word of an image in a template, and the text that the processor writes for it, with one of its soft tokens.
WORD = "<start_of_image>"
WRITTEN = "\n\n<start_of_image><image_soft_token><end_of_image>\n\n"
# Words around an image that is cut.
CUT = "Here is the original image {} and here are some crops to help you see better {}"
CUT_TEXT = re.compile(CUT.format(re.escape(WRITTEN), f"{re.escape(WRITTEN)}(?: {re.escape(WRITTEN)})*"))
# Settings of crops: the defaults, and others that cut small images into more crops.
DEFAULT_CROPS = {"do_pan_and_scan": True}
SMALL_CROPS = DEFAULT_CROPS | {
    "pan_and_scan_min_crop_size": 64, "pan_and_scan_max_num_crops": 7, "pan_and_scan_min_ratio_to_activate": 1.3,
}


def written(crops):
    return CUT.format(WRITTEN, " ".join([WRITTEN] * crops)) if crops else WRITTEN


class Processor:
    """The processor for texts in which images are written already, as they are tokenized."""

    def __init__(self, crops=None):
        self.inner, self.crops = processor(), crops or {}
        self.tokenizer = self.inner.tokenizer

    def __call__(self, text, **media):
        text = [CUT_TEXT.sub(WORD, part).replace(WRITTEN, WORD) for part in text]
        return self.inner(text=text, images_kwargs=self.crops, **media)

    def number_of_crops(self, width, height):
        return number_of_crops(self.inner, self.crops, width, height)


def number_of_crops(processor, crops, width, height):
    """Cuts an image by the functions of both processors, on Pillow and on torchvision."""
    settings = processor.images_kwargs | crops
    if not settings["do_pan_and_scan"]:
        return 0
    settings = {key: value for key, value in settings.items() if key.startswith("pan_and_scan")}
    made = processor.image_processor.pan_and_scan(np.broadcast_to(np.uint8(0), (3, height, width)), **settings)
    images = torch.zeros(1, dtype=torch.uint8).expand(3, height, width)
    batched = Gemma3ImageProcessor.pan_and_scan_batched(None, images, **settings)
    assert [crop.shape for crop in made] == [tuple(crop.shape) for crop in batched]
    return len(made)


def rendered(entry, case, render=image_models.rendered):
    """Renders the template and writes the images, before labels are found in the tokens."""
    text, learned = render(entry, case)
    pieces = text.split(WORD)
    crops = [entry["processor"].number_of_crops(*size) for size in case["images"]]
    assert len(pieces) == len(crops) + 1

    def place(at):
        before = text[:at].count(WORD)
        return at + sum(len(written(crop)) - len(WORD) for crop in crops[:before])

    joined = pieces[0] + "".join(written(crop) + piece for crop, piece in zip(crops, pieces[1:]))
    return joined, [(place(start), place(end)) for start, end in learned]


image_models.rendered = rendered


def processor():
    settings = {key: value for key, value in IMAGES.items() if key != "image_processor_type"}
    tokenizer = make_tokenizer(ADDED, SPECIAL, "<bos>")
    for name, token in [("boi", "<start_of_image>"), ("eoi", "<end_of_image>"), ("image", "<image_soft_token>")]:
        setattr(tokenizer, f"{name}_token", token)
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
    return transformers.Gemma3Processor(Gemma3ImageProcessorPil(**settings), tokenizer, image_seq_length=256)


class Gemma(tokens.Family):
    units = [896, 256]

    def __init__(self, name="gemma3", crops=None):
        self.name, self.crops, self.processor = name, crops or {}, processor()
        self.files = {"config": GEMMA_4B, "preprocessor": IMAGES | self.crops, "processor": {"image_seq_length": 256}}

    def image(self, width, height):
        tiles = 1 + number_of_crops(self.processor, self.crops, width, height)
        return tiles, tiles * 4096, tiles * 258

    def cost(self, of):
        return sum(self.image(width, height)[0] * 896 * 896 + width * height for width, height in of)

    def run(self, of):
        made = self.processor(
            images=[tokens.picture(size) for size in of], text=WORD * len(of), add_special_tokens=False, images_kwargs=self.crops
        )
        ids = made["input_ids"][0]
        known = [self.processor.tokenizer.convert_tokens_to_ids(token) for token in ADDED[5:]]
        items = len(made["pixel_values"])
        return items, items * 4096, sum(ids.count(token) for token in known)


class Sizes(flops.Multimodal):
    def measure(self):
        config, model = self.model.config, self.model.model
        side, patches = config.vision_config.image_size, 4096
        for count in (1, 3):
            media = {"images": [[640, 480]] * count}
            self.add("vision.tower", media, lambda pixels: model.vision_tower(pixels).last_hidden_state, self.empty(count, 3, side, side))
            states = self.empty(count, patches, config.vision_config.hidden_size, grad=True)
            self.add("vision.projector", media, model.multi_modal_projector, states)
        return {
            "vision.tower": flops.parameters(model.vision_tower),
            "vision.projector": flops.parameters(model.multi_modal_projector),
            "llm": self.llm_parameters(),
        }


ROPE = dict(
    full_attention=dict(rope_type="linear", rope_theta=1000.0, factor=8.0),
    sliding_attention=dict(rope_type="default", rope_theta=100.0),
)
GEMMA = TEXT | dict(
    head_dim=8, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], sliding_window=9, query_pre_attn_scalar=5,
    rope_parameters=ROPE, pad_token_id=None,
)


def gemma3_text(generator):
    config = transformers.Gemma3TextConfig(**GEMMA, attn_implementation="eager")
    model = transformers.Gemma3ForCausalLM(config)
    record("gemma3_text", model, text_samples(generator, [17, 1, 70, 9]), {}, generator)


def gemma3(generator):
    config = transformers.Gemma3Config(
        text_config=GEMMA, vision_config=dict(
            model_type="siglip_vision_model", image_size=24, patch_size=4, vision_use_head=False, **TOWER
        ),
        mm_tokens_per_image=9, image_token_index=IMAGE, boi_token_index=45, eoi_token_index=46,
        attn_implementation="eager",
    )
    samples, pixels = [], []
    for images in (2, 0, 1):
        input_ids = with_media(generator, 5, [(IMAGE, 9)] * images, 12)
        values = torch.randn(images, 3, 24, 24, generator=generator)
        arguments = dict(token_type_ids=(input_ids == IMAGE).long()[None])
        samples.append((input_ids, counted(input_ids), arguments | (dict(pixel_values=values) if images else {})))
        pixels.append(values)
    model = transformers.Gemma3ForConditionalGeneration(config)
    record("gemma3", model, samples, dict(pixel_values=torch.cat(pixels)), generator)


# Cut across and upright, the last crop smaller, and not cut.
CUT_SIZES = [[700, 300], [640, 480], [1000, 90], [200, 1001], [64, 64], [1, 1], [300, 390]]


def entry(name, crops=None, **more):
    files = {"config": GEMMA_4B, "preprocessor": IMAGES | (crops or {}), "processor": {"image_seq_length": 256}}
    made = Processor(crops)

    def lengths(case):
        return [256] * sum(1 + made.number_of_crops(*size) for size in case["images"])

    return {"name": name, "processor": made, "files": files, "template": TEMPLATE, "added": ADDED, "special": SPECIAL,
            "bos": "<bos>", "image_token": "<image_soft_token>", "is_nested": True, "lengths": lengths} | more


def main(golden):
    """Records tokens, FLOPs, model inputs, logits, loss and gradients."""
    parity.GOLDEN = golden / "executor"
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for index, make in enumerate([gemma3_text, gemma3]):
        torch.manual_seed(index)
        make(torch.Generator().manual_seed(index))
    record_tokens(golden, "gemma3", [Gemma(), Gemma("gemma3_crops", DEFAULT_CROPS), Gemma("gemma3_small_crops", SMALL_CROPS)])
    record_flops(golden, "gemma3", [Sizes("gemma3-4b", GEMMA_4B), Sizes("gemma3-27b", GEMMA_27B)])
    record_inputs(golden, "gemma3", [entry("gemma3-4b"), entry("gemma3-4b-crops", SMALL_CROPS, sizes=CUT_SIZES)])


if __name__ == "__main__":
    run(main, "gemma3", "gemma3_text")
