"""Records the truth of Idefics3 and SmolVLM2, images only.

    make record-models NAMES=idefics3 PYTHON=venv/bin/python       # needs transformers, torch, torchvision, Pillow below 12.2
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import transformers
from transformers.models.idefics3 import image_processing_pil_idefics3 as idefics3
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from common import run
from image_models import Shape, flops, make_tokenizer, record_flops, record_inputs, record_tokens, tokens
from llava import without_type

VISION = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16, "patch_size": 14}
LLAMA_8B = flops.LLAMA3_8B | {"vocab_size": 128259}
SMOLLM2 = {"model_type": "llama", "vocab_size": 49280, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
           "num_attention_heads": 32, "num_key_value_heads": 32}
IDEFICS3 = {"model_type": "idefics3", "text_config": LLAMA_8B, "vision_config": VISION | {"image_size": 364}, "scale_factor": 2,
            "tie_word_embeddings": False}
SMOLVLM = {"model_type": "smolvlm", "text_config": SMOLLM2, "vision_config": VISION | {"image_size": 384}, "scale_factor": 3,
           "tie_word_embeddings": False}
# The small SmolVLM2: tiles of 512 pixels, 16 pixels a patch, 64 tokens a tile.
SMALL = SMOLVLM | {"scale_factor": 4, "vision_config": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
                                                       "num_attention_heads": 12, "image_size": 512, "patch_size": 16}}


def images_of(kind, tile, side, is_cut=True):
    return {"image_processor_type": f"{kind}ImageProcessor", "size": {"longest_edge": side},
            "max_image_size": {"longest_edge": tile}, "do_image_splitting": is_cut, "resample": 1}


IDEFICS3_IMAGES, SMOLVLM_IMAGES = images_of("Idefics3", 364, 1456), images_of("SmolVLM", 384, 1536)
SMALL_IMAGES = images_of("SmolVLM", 512, 2048)
# An odd length that is no multiple of the tile, and images that are not cut.
ODD_IMAGES, WHOLE_IMAGES = images_of("Idefics3", 364, 1001), images_of("SmolVLM", 384, 1536, False)

ADDED = ["<|im_start|>", "<|im_end|>", "<end_of_utterance>", "<image>", "<fake_token_around_image>", "<global-img>"] + [
    f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
SPECIAL = {"bos_token": "<|im_start|>", "eos_token": "<end_of_utterance>", "pad_token": "<|im_end|>"}


def processor(images, seq_len):
    kind = idefics3.Idefics3ImageProcessorPil if images["image_processor_type"].startswith("Idefics3") else SmolVLMImageProcessorPil
    made = kind(**without_type(images))
    return transformers.Idefics3Processor(made, make_tokenizer(ADDED, SPECIAL), image_seq_len=seq_len)


class Idefics(tokens.Family):
    def __init__(self, name, config, images):
        self.name, self.tile, self.side = name, images["max_image_size"]["longest_edge"], images["size"]["longest_edge"]
        self.units = [self.tile, self.side // 8]
        self.is_cut = images["do_image_splitting"]
        self.patches = (self.tile // config["vision_config"]["patch_size"]) ** 2
        self.features = self.patches // config["scale_factor"] ** 2
        self.processor = processor(images, self.features)
        self.files = {"config": config, "preprocessor": images, "processor": {"image_seq_len": self.features}}

    def image(self, width, height):
        high, wide = idefics3.get_resize_output_image_size(Shape3(width, height), self.side)
        made = []

        class Canvas(idefics3.Idefics3ImageProcessorPil):
            def resize(self, image, size, **more):
                made.append((size.height, size.width))

        if not self.is_cut:
            return 1, self.patches, self.features + 3
        Canvas().resize_for_vision_encoder(Shape3(wide, high), self.tile)
        (high, wide), tile = made[0], self.tile
        rows, columns = (high // tile, wide // tile) if max(high, wide) > tile else (0, 0)
        # The blank line after the last row is one token.
        text = rows * ((self.features + 2) * columns + 1) + self.features + 3
        return 1 + rows * columns, (1 + rows * columns) * self.patches, text

    def cost(self, of):
        return sum(tiles for tiles, _, _ in map(lambda size: self.image(*size), of)) * 100_000

    def run(self, of):
        out = self.processor(text=["<image>" * len(of)], images=[[tokens.picture(size) for size in of]], add_special_tokens=False)
        tiles = sum(len(values) for values in np.asarray(out["pixel_values"]))
        return tiles, tiles * self.patches, np.asarray(out["input_ids"]).size


class Shape3:
    """Stands for an image in functions that read only its shape, channels first."""

    def __init__(self, width, height):
        self.shape = (3, height, width)


class IdeficsCase(flops.Multimodal):
    def measure(self):
        model, vision = self.model.model, self.model.config.vision_config
        side, patch = vision.image_size, vision.patch_size
        counter = Idefics("", self.documents["config"], self.documents["preprocessor"])
        mask = lambda tiles: flops.torch.ones((tiles, side // patch, side // patch), dtype=flops.torch.bool, device=self.device)  # noqa: E731
        tower = lambda pixels: model.vision_model(pixels, patch_attention_mask=mask(len(pixels))).last_hidden_state  # noqa: E731
        if self.device == "meta":
            self.without_values()
        for of in [[[640, 480]], [[640, 480], [30, 2000]]]:
            tiles = sum(counter.image(*size)[0] for size in of)
            self.add("vision.tower", {"images": of}, tower, self.empty(tiles, 3, side, side))
            states = self.empty(tiles, (side // patch) ** 2, vision.hidden_size, grad=True)
            self.add("vision.projector", {"images": of}, model.connector, states)
        self.text(self.decoder)
        return {"vision.tower": flops.parameters(model.vision_model), "vision.projector": flops.parameters(model.connector),
                "llm": self.llm_parameters()}

    def without_values(self):
        """Leaves out what reads values, which the meta device has none of; none of it is a product."""
        embeddings = self.model.model.vision_model.embeddings
        embeddings.forward = lambda pixel_values, patch_attention_mask: (
            embeddings.patch_embedding(pixel_values).flatten(2).transpose(1, 2)
        )
        # A mask of ones, as all patches of a tile are real, is no mask.
        sys.modules[type(embeddings).__module__].create_bidirectional_mask = lambda **_: None

    def decoder(self, ids):
        return self.model.lm_head(self.model.model.text_model(input_ids=ids, use_cache=False).last_hidden_state)

    def llm_parameters(self):
        head, embedding = self.model.lm_head.weight, self.model.model.text_model.get_input_embeddings().weight
        return flops.parameters(self.model.model.text_model) + (0 if head is embedding else head.numel())


def flops_cases():
    yield IdeficsCase("idefics3-8b", IDEFICS3, preprocessor=IDEFICS3_IMAGES)
    yield IdeficsCase("smolvlm2-2.2b", SMOLVLM, preprocessor=SMOLVLM_IMAGES)
    vision = {"hidden_size": 48, "intermediate_size": 100, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 112, "patch_size": 14}
    config = SMOLVLM | {"vision_config": vision, "text_config": {"model_type": "llama", **flops.SMALL}, "scale_factor": 2}
    yield IdeficsCase("smolvlm-small", config, "cpu", preprocessor=images_of("SmolVLM", 112, 224))


TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] | capitalize }}"
    "{{ ':' if message['content'][0]['type'] == 'image' else ': ' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'][0]['text'] + '<end_of_utterance>' }}{% endgeneration %}{{ '\\n' }}{% else %}"
    "{% for part in message['content'] %}{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}"
    "{{ '<end_of_utterance>\\n' }}{% endif %}{% endfor %}"
)


def one_row(made):
    """Removes padding between samples and the mask of pixels, which is all ones without it."""
    if "pixel_values" not in made:
        return made
    mask = np.asarray(made.pop("pixel_attention_mask"))
    tiles = np.asarray(made["pixel_values"])
    is_real = mask.reshape(*mask.shape[:2], -1).any(-1)
    assert mask[is_real].all()
    return made | {"pixel_values": tiles[is_real][None]}


def inputs():
    for name, config, images in [
        ("idefics3-8b", IDEFICS3, IDEFICS3_IMAGES), ("idefics3-odd", IDEFICS3, ODD_IMAGES),
        ("smolvlm2-2.2b", SMOLVLM, SMOLVLM_IMAGES), ("smolvlm2-500m", SMALL, SMALL_IMAGES), ("smolvlm2-whole", SMOLVLM, WHOLE_IMAGES),
    ]:
        counter = Idefics(name, config, images)
        yield {"name": name, "processor": counter.processor, "files": counter.files, "template": TEMPLATE, "added": ADDED,
               "special": SPECIAL, "image_token": "<image>", "is_nested": True, "change": one_row,
               "lengths": lambda case, counter=counter: [counter.image(*size)[2] for size in case["images"]]}


def main(golden):
    transformers.logging.set_verbosity_error()
    # Every run scales images to thousands of pixels.
    tokens.RUNS = 30
    record_tokens(golden, "idefics3", [
        Idefics("idefics3", IDEFICS3, IDEFICS3_IMAGES), Idefics("idefics3_odd", IDEFICS3, ODD_IMAGES),
        Idefics("smolvlm", SMOLVLM, SMOLVLM_IMAGES), Idefics("smolvlm_small", SMALL, SMALL_IMAGES),
    ])
    record_inputs(golden, "idefics3", inputs())
    record_flops(golden, "idefics3", flops_cases())


if __name__ == "__main__":
    run(main, "idefics3", "smolvlm")
