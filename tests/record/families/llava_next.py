"""Records the truth of LLaVA-NeXT.

    make record-models NAMES=llava_next PYTHON=venv/bin/python       # needs transformers, torch, torchvision, Pillow below 12.2
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import transformers
from transformers.image_processing_utils import select_best_resolution
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

from common import run
from image_models import flops, make_tokenizer, record_flops, record_inputs, record_tokens, tokens
from llava import CLIP_VISION, LLAVA_PROCESSOR, LLAVA_SPECIAL, LLAVA_TEMPLATE, LLAVA_TOKENS, LlavaCase, VICUNA_7B, without_type

GRIDS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
MISTRAL_7B = {"model_type": "mistral", "vocab_size": 32064, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
              "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": None}
NEXT = {"model_type": "llava_next", "text_config": MISTRAL_7B, "vision_config": CLIP_VISION, "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default", "image_grid_pinpoints": GRIDS, "tie_word_embeddings": False}
IMAGES = {"image_processor_type": "LlavaNextImageProcessor", "size": {"shortest_edge": 336},
          "crop_size": {"height": 336, "width": 336}, "image_grid_pinpoints": GRIDS}
# Tiles of 224 pixels in patches of 16 without a class token, and grids in an order in which ties matter.
SMALL_GRIDS = [[448, 224], [224, 448], [224, 224], [448, 448], [224, 896], [672, 448], [448, 672]]
SIGLIP = {"model_type": "siglip_vision_model", "image_size": 224, "patch_size": 16, "vision_use_head": False}
SMALL = NEXT | {"vision_config": SIGLIP, "image_grid_pinpoints": SMALL_GRIDS, "vision_feature_layer": [-1, 3],
                "vision_feature_select_strategy": "full"}
SMALL_IMAGES = IMAGES | {"size": {"height": 224, "width": 224}, "crop_size": {"height": 224, "width": 224},
                         "image_grid_pinpoints": SMALL_GRIDS}
SMALL_PROCESSOR = {"patch_size": 16, "vision_feature_select_strategy": "full", "num_additional_image_tokens": 0}


def processor(images, settings):
    made = LlavaNextImageProcessorPil(**without_type(images))
    return transformers.LlavaNextProcessor(made, make_tokenizer(LLAVA_TOKENS, LLAVA_SPECIAL, "<s>"), **settings)


class LlavaNext(tokens.Family):
    def __init__(self, name, config, images, settings):
        self.name, self.processor = name, processor(images, settings)
        self.files = {"config": config, "preprocessor": images, "processor": settings}
        self.tile = config["vision_config"]["image_size"]
        self.units = [self.tile, self.tile // 2]
        self.patches = (self.tile // settings["patch_size"]) ** 2

    def image(self, width, height):
        high, wide = select_best_resolution((height, width), self.processor.image_processor.image_grid_pinpoints)
        tiles = 1 + high // self.tile * (wide // self.tile)
        counted = self.processor._get_number_of_features(height, width, self.tile, self.tile)
        return tiles, tiles * self.patches, counted - (self.processor.vision_feature_select_strategy == "default")

    def run(self, of):
        out = self.processor(text=["<image>" * len(of)], images=[tokens.picture(size) for size in of], add_special_tokens=False)
        tiles = sum(self.image(*size)[0] for size in of)
        assert max(self.image(*size)[0] for size in of) == len(out["pixel_values"][0])
        return tiles, tiles * self.patches, np.asarray(out["input_ids"]).size


class NextCase(LlavaCase):
    """Counts towers and projectors on tiles, and the newline embedding with the projector."""

    def measure(self):
        config, model = self.model.config, self.model.model
        vision = config.vision_config
        for of in [[[640, 480]], [[640, 480], [30, 2000]]]:
            best = [select_best_resolution((height, width), config.image_grid_pinpoints) for width, height in of]
            tiles = sum(1 + (high // vision.image_size) * (wide // vision.image_size) for high, wide in best)
            self.add("vision.tower", {"images": of}, self.tower, self.empty(tiles, 3, vision.image_size, vision.image_size))
            states = (tiles, (vision.image_size // vision.patch_size) ** 2, model.multi_modal_projector.linear_1.in_features)
            self.add("vision.projector", {"images": of}, model.multi_modal_projector, self.empty(*states, grad=True))
        self.text(self.decoder)
        projector = flops.parameters(model.multi_modal_projector) + model.image_newline.numel()
        return {"vision.tower": flops.parameters(model.vision_tower), "vision.projector": projector, "llm": self.llm_parameters()}


def flops_cases():
    yield NextCase("llava-next-mistral-7b", NEXT, preprocessor=IMAGES)
    yield NextCase("llava-next-vicuna-7b", NEXT | {"text_config": VICUNA_7B}, preprocessor=IMAGES)
    vision = SIGLIP | {"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 100, "num_hidden_layers": 4}
    text = {"model_type": "llama", **flops.SMALL}
    yield NextCase("llava-next-small", SMALL | {"text_config": text, "vision_config": vision}, "cpu", preprocessor=SMALL_IMAGES)


def inputs():
    for name, config, images, settings in [("llava-next", NEXT, IMAGES, LLAVA_PROCESSOR), ("small", SMALL, SMALL_IMAGES, SMALL_PROCESSOR)]:
        files = {"config": config, "preprocessor": images, "processor": settings}
        yield {"name": name, "processor": processor(images, settings), "files": files, "template": LLAVA_TEMPLATE, "bos": "<s>",
               "added": LLAVA_TOKENS, "special": LLAVA_SPECIAL, "image_token": "<image>"}


def main(golden):
    transformers.logging.set_verbosity_error()
    record_tokens(golden, "llava_next", [
        LlavaNext("llava_next", NEXT, IMAGES, LLAVA_PROCESSOR), LlavaNext("llava_next_small", SMALL, SMALL_IMAGES, SMALL_PROCESSOR),
    ])
    record_inputs(golden, "llava_next", inputs())
    record_flops(golden, "llava_next", flops_cases())


if __name__ == "__main__":
    run(main, "llava_next")
