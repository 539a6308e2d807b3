"""Records the truth of Llama 4: tokens and FLOPs. Its processor has no Pillow backend, so there are no model inputs.

    make record-models NAMES=llama4 PYTHON=venv/bin/python       # needs transformers, torch, torchvision, Pillow below 12.2
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import transformers
from transformers.models.llama4 import image_processing_llama4 as llama4

from common import run
from image_models import flops, make_tokenizer, record_flops, record_tokens, tokens
from llava import without_type

VISION = {"hidden_size": 1408, "intermediate_size": 5632, "num_hidden_layers": 34, "num_attention_heads": 16, "image_size": 336,
          "patch_size": 14, "vision_output_dim": 4096, "projector_input_dim": 4096, "projector_output_dim": 4096}
# Few layers: experts are counted elsewhere.
TEXT = {"model_type": "llama4_text", "vocab_size": 1200, "hidden_size": 64, "intermediate_size": 96, "intermediate_size_mlp": 160,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4,
        "interleave_moe_layer_step": 2, "tie_word_embeddings": False}
LLAMA4 = {"model_type": "llama4", "text_config": TEXT, "vision_config": VISION, "tie_word_embeddings": False}
IMAGES = {"image_processor_type": "Llama4ImageProcessor", "size": {"height": 336, "width": 336}, "max_patches": 16}
LARGEST_IMAGES = IMAGES | {"max_patches": 9, "resize_to_max_canvas": True}
ADDED = ["<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>", "<|eot|>"]


class Llama4(tokens.Family):
    def __init__(self, name, config, images):
        self.name, self.units = name, [336, 168]
        made = llama4.Llama4ImageProcessor(**without_type(images))
        tokenizer = make_tokenizer(ADDED, {"eos_token": "<|eot|>", "pad_token": "<|eot|>"})
        self.processor = transformers.Llama4Processor(made, tokenizer, chat_template="none")
        self.files = {"config": config, "preprocessor": images}
        self.grids = transformers.models.llama4.image_processing_llama4.torch.tensor(
            llama4.find_supported_resolutions.__wrapped__(images["max_patches"], made.size))
        self.is_enlarged = images.get("resize_to_max_canvas", False)

    def image(self, width, height):
        high, wide = (int(side) // 336 for side in llama4.get_best_fit((height, width), self.grids, self.is_enlarged))
        tiles = high * wide
        text = self.processor._prompt_split_image((high, wide), 144)
        return tiles + (tiles > 1), (tiles + (tiles > 1)) * 576, text.count("<|")

    def run(self, of):
        out = self.processor(text=["<|image|>" * len(of)], images=[tokens.picture(size) for size in of], add_special_tokens=False)
        tiles = sum(len(values) for values in out["pixel_values"])
        return tiles, tiles * 576, np.asarray(out["input_ids"]).size


class Llama4Case(flops.Multimodal):
    def make(self, config):
        return transformers.Llama4ForConditionalGeneration(config)

    def measure(self):
        vision, model = self.model.config.vision_config, self.model
        adapter, side, patch = model.vision_model.vision_adapter, vision.image_size, vision.patch_size
        for tiles, of in [(5, [[640, 480]]), (6, [[640, 480], [30, 40]])]:
            model.vision_model.vision_adapter = flops.torch.nn.Identity()
            self.add("vision.tower", {"images": of}, lambda pixels: model.vision_model(pixels).last_hidden_state, self.empty(tiles, 3, side, side))
            model.vision_model.vision_adapter = adapter
            states = self.empty(tiles, (side // patch) ** 2, vision.hidden_size, grad=True)
            self.add("vision.projector", {"images": of}, lambda states: model.multi_modal_projector(adapter(states)), states)
        projector = flops.parameters(adapter) + flops.parameters(model.multi_modal_projector)
        tower = flops.parameters(model.vision_model) - flops.parameters(adapter)
        return {"vision.tower": tower, "vision.projector": projector, "llm": flops.parameters(model.language_model)}


def flops_cases():
    yield Llama4Case("llama4-vision", LLAMA4, preprocessor=IMAGES)


def main(golden):
    transformers.logging.set_verbosity_error()
    record_tokens(golden, "llama4", [Llama4("llama4", LLAMA4, IMAGES), Llama4("llama4_largest", LLAMA4, LARGEST_IMAGES)])
    record_flops(golden, "llama4", flops_cases())


if __name__ == "__main__":
    run(main, "llama4")
