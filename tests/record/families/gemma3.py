"""Records the truth of Gemma 3: tokens, FLOPs, model inputs, and tiny models with and without images.

    make record-models NAMES=gemma3 PYTHON=venv/bin/python       # needs transformers, torch, torchvision, Pillow below 12.2

Windows of the tiny models are shorter than samples, and images longer than windows; samples run one by one, with
`token_type_ids` as the processor makes them.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
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


# Text that the processor writes for an image, with one of its soft tokens.
WRITTEN = "\n\n<start_of_image><image_soft_token><end_of_image>\n\n"


class Processor:
    """The processor for texts in which images are written already, as they are tokenized."""

    def __init__(self):
        self.inner = processor()
        self.tokenizer = self.inner.tokenizer

    def __call__(self, text, **media):
        return self.inner(text=[part.replace(WRITTEN, "<start_of_image>") for part in text], **media)


def rendered(entry, messages, render=image_models.rendered):
    """Renders the template and writes the images, before labels are found in the tokens."""
    text, learned = render(entry, messages)
    word = "<start_of_image>"

    def place(at):
        return at + (len(WRITTEN) - len(word)) * text[:at].count(word)

    return text.replace(word, WRITTEN), [(place(start), place(end)) for start, end in learned]


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
    name = "gemma3"
    files = {"config": GEMMA_4B, "preprocessor": IMAGES, "processor": {"image_seq_length": 256}}

    def __init__(self):
        self.processor = processor()

    def image(self, width, height):
        return 1, 4096, 258

    def cost(self, of):
        return sum(896 * 896 + width * height for width, height in of)

    def run(self, of):
        made = self.processor(images=[tokens.picture(size) for size in of], text="<start_of_image>" * len(of), add_special_tokens=False)
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


def main(golden):
    """Records tokens, FLOPs, model inputs, logits, loss and gradients."""
    parity.GOLDEN = golden / "executor"
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for index, make in enumerate([gemma3_text, gemma3]):
        torch.manual_seed(index)
        make(torch.Generator().manual_seed(index))
    record_tokens(golden, "gemma3", [Gemma()])
    record_flops(golden, "gemma3", [Sizes("gemma3-4b", GEMMA_4B), Sizes("gemma3-27b", GEMMA_27B)])
    files = {"config": GEMMA_4B, "preprocessor": IMAGES, "processor": {"image_seq_length": 256}}
    entry = {"name": "gemma3-4b", "processor": Processor(), "files": files, "template": TEMPLATE, "added": ADDED, "special": SPECIAL,
             "bos": "<bos>", "image_token": "<image_soft_token>",
             "is_nested": True, "lengths": lambda case: [256] * len(case["images"])}
    record_inputs(golden, "gemma3", [entry])


if __name__ == "__main__":
    run(main, "gemma3", "gemma3_text")
