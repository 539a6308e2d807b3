"""Records the tokens of Llama 4, the truth of the token rule `fitted_tiles`, which descriptions name.

    make record-models NAMES=llama4 PYTHON=venv/bin/python       # needs transformers, torch, torchvision, Pillow below 12.2
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import transformers
from transformers.models.llama4 import image_processing_llama4 as llama4

from common import run
from image_models import make_tokenizer, record_tokens, tokens
from llava import without_type

ENCODER = {"num_hidden_layers": 34, "hidden_size": 1408, "num_attention_heads": 16, "intermediate_size": 5632}
LLM = {"model_type": "llama4_text", "vocab_size": 1200}
IMAGES = {"image_processor_type": "Llama4ImageProcessor", "size": {"height": 336, "width": 336}, "max_patches": 16}
LARGEST_IMAGES = IMAGES | {"max_patches": 9, "resize_to_max_canvas": True}
ADDED = ["<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>", "<|eot|>"]


class Llama4(tokens.Family):
    def __init__(self, name, images):
        self.name, self.units = name, [336, 168]
        made = llama4.Llama4ImageProcessor(**without_type(images))
        tokenizer = make_tokenizer(ADDED, {"eos_token": "<|eot|>", "pad_token": "<|eot|>"})
        self.processor = transformers.Llama4Processor(made, tokenizer, chat_template="none")
        rule = {"rule": "fitted_tiles", "tile_size": 336, "patch_size": 14, "merge_size": 2, "max_tiles": images["max_patches"],
                "enlarge": images.get("resize_to_max_canvas", False)}
        self.files = {"config": {"model_type": "described", "vision": ENCODER | {"tokens": rule}, "llm": LLM}}
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


def main(golden):
    transformers.logging.set_verbosity_error()
    record_tokens(golden, "llama4", [Llama4("llama4", IMAGES), Llama4("llama4_largest", LARGEST_IMAGES)])


if __name__ == "__main__":
    run(main)
