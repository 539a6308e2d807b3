"""Records the truth of LLaVA 1.5, Pixtral 12B and Mistral Small 3.

    make record-models NAMES=llava PYTHON=venv/bin/python       # needs transformers, torch, torchvision, Pillow below 12.2
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import transformers
from transformers.image_utils import ChannelDimension
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.pixtral import image_processing_pil_pixtral as pixtral
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from common import run
from image_models import Shape, flops, make_tokenizer, record_flops, record_inputs, record_tokens, tokens

LAST = {"input_data_format": ChannelDimension.LAST}
VICUNA_7B = {"model_type": "llama", "vocab_size": 32064, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
             "num_attention_heads": 32, "num_key_value_heads": 32}
NEMO_12B = {"model_type": "mistral", "vocab_size": 131072, "hidden_size": 5120, "intermediate_size": 14336, "num_hidden_layers": 40,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "sliding_window": None}
SMALL_24B = NEMO_12B | {"intermediate_size": 32768}
CLIP_VISION = flops.CLIP
PIXTRAL_VISION = {"model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
                  "num_attention_heads": 16, "image_size": 1024, "patch_size": 16}
MISTRAL3_VISION = PIXTRAL_VISION | {"image_size": 1540, "patch_size": 14}
LLAVA = {"model_type": "llava", "text_config": VICUNA_7B, "vision_config": CLIP_VISION, "vision_feature_layer": -2,
         "vision_feature_select_strategy": "default", "tie_word_embeddings": False}
PIXTRAL = {"model_type": "llava", "text_config": NEMO_12B, "vision_config": PIXTRAL_VISION, "vision_feature_layer": -1,
           "vision_feature_select_strategy": "full", "tie_word_embeddings": False}
MISTRAL3 = {"model_type": "mistral3", "text_config": SMALL_24B, "vision_config": MISTRAL3_VISION, "spatial_merge_size": 2,
            "vision_feature_layer": -1, "tie_word_embeddings": False}
CLIP_IMAGES = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
PADDED_IMAGES = CLIP_IMAGES | {"image_processor_type": "LlavaImageProcessor", "do_pad": True}
PIXTRAL_IMAGES = {"image_processor_type": "PixtralImageProcessor", "patch_size": {"height": 16, "width": 16},
                  "size": {"longest_edge": 1024}}
MISTRAL3_IMAGES = PIXTRAL_IMAGES | {"patch_size": {"height": 14, "width": 14}, "size": {"longest_edge": 1540}}
LLAVA_PROCESSOR = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
PIXTRAL_PROCESSOR = {"patch_size": 16}
MISTRAL3_PROCESSOR = {"patch_size": 14, "spatial_merge_size": 2}

LLAVA_TOKENS = ["<unk>", "<s>", "</s>", "<image>", "<pad>"]
LLAVA_SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
MISTRAL_TOKENS = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "[SYSTEM_PROMPT]",
                  "[/SYSTEM_PROMPT]", "<pad>"]


def without_type(settings):
    return {key: value for key, value in settings.items() if key != "image_processor_type"}


def llava_processor(images):
    """Returns LLaVA's processor with the image processor that the settings name."""
    classes = {"CLIPImageProcessor": CLIPImageProcessorPil, "LlavaImageProcessor": LlavaImageProcessorPil,
               "SiglipImageProcessor": SiglipImageProcessorPil}
    made = classes[images["image_processor_type"]](**without_type(images))
    return transformers.LlavaProcessor(made, make_tokenizer(LLAVA_TOKENS, LLAVA_SPECIAL, "<s>"), **LLAVA_PROCESSOR)


def pixtral_processor(images, settings):
    made = pixtral.PixtralImageProcessorPil(**without_type(images))
    return transformers.PixtralProcessor(made, make_tokenizer(MISTRAL_TOKENS, LLAVA_SPECIAL, "<s>"), **settings)


class Llava(tokens.Family):
    units = [336, 168]

    def __init__(self, name, config, images):
        self.name, self.processor = name, llava_processor(images)
        self.files = {"config": config, "preprocessor": images, "processor": LLAVA_PROCESSOR}

    def image(self, width, height):
        return 1, 576, 576

    def cost(self, of):
        return sum(max(w, h) / min(w, h) for w, h in of) * 336**2

    def run(self, of):
        out = self.processor(text=["<image>" * len(of)], images=[tokens.picture(size) for size in of], add_special_tokens=False)
        return len(out["pixel_values"]), 576 * len(out["pixel_values"]), np.asarray(out["input_ids"]).size


class Pixtral(tokens.Family):
    units = [16, 28]

    def __init__(self, name, config, images, settings):
        self.name, self.processor = name, pixtral_processor(images, settings)
        self.files = {"config": config, "preprocessor": images, "processor": settings}
        self.merge = settings.get("spatial_merge_size", 1)
        self.patch = settings["patch_size"]
        self.side = images["size"]["longest_edge"]

    def image(self, width, height):
        unit = self.patch * self.merge
        high, wide = pixtral.get_resize_output_image_size(
            Shape(width, height), size=self.side, patch_size=unit, input_data_format=ChannelDimension.LAST
        )
        if min(high, wide) == 0:
            raise ValueError("nothing is left of a side")
        patches = high * wide // self.patch**2
        return patches, patches, (wide // unit + 1) * (high // unit)

    def run(self, of):
        out = self.processor(text=["[IMG]" * len(of)], images=[tokens.picture(size) for size in of], add_special_tokens=False)
        patches = sum(int(h) * int(w) for h, w in out["image_sizes"]) // self.patch**2
        return patches, patches, np.asarray(out["input_ids"]).size


class LlavaCase(flops.Multimodal):
    def tower(self, pixels):
        config = self.model.config
        layer = config.vision_feature_layer
        states = self.model.model.vision_tower(pixels, output_hidden_states=True).hidden_states
        states = states[layer] if isinstance(layer, int) else flops.torch.cat([states[at] for at in layer], -1)
        return states[:, 1:] if config.vision_feature_select_strategy == "default" else states

    def measure(self):
        model, vision = self.model.model, self.model.config.vision_config
        side, patch = vision.image_size, vision.patch_size
        for of in [[[640, 480]], [[640, 480], [30, 40]]]:
            self.add("vision.tower", {"images": of}, self.tower, self.empty(len(of), 3, side, side))
            width = model.multi_modal_projector.linear_1.in_features
            states = self.empty(len(of), (side // patch) ** 2, width, grad=True)
            self.add("vision.projector", {"images": of}, model.multi_modal_projector, states)
        self.text(self.decoder)
        return {"vision.tower": flops.parameters(model.vision_tower), "vision.projector": flops.parameters(model.multi_modal_projector),
                "llm": self.llm_parameters()}


class PixtralCase(flops.Multimodal):
    """One image at a time: with several, eager attention computes the pairs between images and masks them."""

    def measure(self):
        config, model = self.model.config, self.model.model
        patch, layer = config.vision_config.patch_size, config.vision_feature_layer
        merge = getattr(config, "spatial_merge_size", 1)
        # Multiples of the square that becomes a token, so that nothing is resized: width, height.
        for columns, rows in [(20, 15), (3, 31)]:
            wide, high = columns * merge * patch, rows * merge * patch

            def tower(pixels):
                states = model.vision_tower(pixels, image_sizes=[(high, wide)], output_hidden_states=True).hidden_states
                return states[layer]

            def project(states):
                sizes = [flops.torch.tensor([high, wide])] if merge > 1 else []
                return model.multi_modal_projector(states, *([sizes] if sizes else []))

            media = {"images": [[wide, high]]}
            self.add("vision.tower", media, tower, self.empty(1, 3, high, wide))
            states = self.empty(columns * rows * merge**2, config.vision_config.hidden_size, grad=True)
            self.add("vision.projector", media, project, states)
        self.text(self.decoder)
        return {"vision.tower": flops.parameters(model.vision_tower), "vision.projector": flops.parameters(model.multi_modal_projector),
                "llm": self.llm_parameters()}


def flops_cases():
    yield LlavaCase("llava-1.5-7b", LLAVA, preprocessor=CLIP_IMAGES)
    small = flops.CLIP | {"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 100, "num_hidden_layers": 3, "image_size": 112}
    text = {"model_type": "llama", **flops.SMALL}
    yield LlavaCase("llava-small", LLAVA | {"text_config": text, "vision_config": small, "vision_feature_layer": [-2, 1],
                                            "multimodal_projector_bias": False}, "cpu")
    siglip = flops.SIGLIP | {"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 100, "num_hidden_layers": 2,
                             "image_size": 112, "vision_use_head": False}
    yield LlavaCase("llava-siglip-small", LLAVA | {"text_config": text, "vision_config": siglip, "vision_feature_layer": -1,
                                                   "vision_feature_select_strategy": "full"}, "cpu")
    yield PixtralCase("pixtral-12b", PIXTRAL)
    yield PixtralCase("mistral-small-3.1-24b", MISTRAL3)
    small = {"model_type": "pixtral", "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 100, "num_hidden_layers": 2,
             "image_size": 1540, "patch_size": 14}
    text = {"model_type": "mistral", **flops.SMALL, "sliding_window": None}
    yield PixtralCase("mistral3-small", MISTRAL3 | {"text_config": text, "vision_config": small, "spatial_merge_size": 3,
                                                    "multimodal_projector_bias": True}, "cpu")


# In the manner of the first LLaVA's training: words for turns, the end of the text after an answer.
LLAVA_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '<image>\\n' }}{% endif %}{% endfor %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ part['text'] + eos_token }}{% endgeneration %}{% else %}{{ part['text'] + ' ' }}{% endif %}"
    "{% endif %}{% endfor %}{% endfor %}"
)
PART = "{% for part in message['content'] %}{{ '[IMG]' if part['type'] == 'image' else part['text'] }}{% endfor %}"
ANSWER = "{% generation %}{{ message['content'][0]['text'] + eos_token }}{% endgeneration %}"
PIXTRAL_TEMPLATE = (
    "{{ bos_token }}{% set system = messages[0]['content'][0]['text'] + '\\n\\n' if messages[0]['role'] == 'system' else '' %}"
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST]' }}"
    "{{ system if loop.index0 == messages | length - 2 }}" + PART + "{{ '[/INST]' }}"
    "{% elif message['role'] == 'assistant' %}" + ANSWER + "{% endif %}{% endfor %}"
)
MISTRAL3_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST]' }}" + PART + "{{ '[/INST]' }}"
    "{% elif message['role'] == 'system' %}{{ '[SYSTEM_PROMPT]' }}" + PART + "{{ '[/SYSTEM_PROMPT]' }}"
    "{% else %}" + ANSWER + "{% endif %}{% endfor %}"
)


def inputs():
    for name, images in [("llava-1.5", CLIP_IMAGES), ("llava-1.5-padded", PADDED_IMAGES)]:
        files = {"config": LLAVA, "preprocessor": images, "processor": LLAVA_PROCESSOR}
        yield {"name": name, "processor": llava_processor(images), "files": files, "template": LLAVA_TEMPLATE, "bos": "<s>",
               "added": LLAVA_TOKENS, "special": LLAVA_SPECIAL, "image_token": "<image>"}
    for name, config, images, settings, template in [
        ("pixtral-12b", PIXTRAL, PIXTRAL_IMAGES, PIXTRAL_PROCESSOR, PIXTRAL_TEMPLATE),
        ("mistral-small-3.1", MISTRAL3, MISTRAL3_IMAGES, MISTRAL3_PROCESSOR, MISTRAL3_TEMPLATE),
    ]:
        files = {"config": config, "preprocessor": images, "processor": settings}
        yield {"name": name, "processor": pixtral_processor(images, settings), "files": files, "template": template, "bos": "<s>",
               "added": MISTRAL_TOKENS, "special": LLAVA_SPECIAL, "image_token": "[IMG]"}


def main(golden):
    transformers.logging.set_verbosity_error()
    record_tokens(golden, "llava", [
        Llava("llava", LLAVA, CLIP_IMAGES), Llava("llava_padded", LLAVA, PADDED_IMAGES),
        Pixtral("pixtral", PIXTRAL, PIXTRAL_IMAGES, PIXTRAL_PROCESSOR),
        Pixtral("mistral3", MISTRAL3, MISTRAL3_IMAGES, MISTRAL3_PROCESSOR),
    ])
    record_inputs(golden, "llava", inputs())
    record_flops(golden, "llava", flops_cases())


if __name__ == "__main__":
    run(main, "llava", "pixtral", "mistral3")
