"""Records the truth of GLM-4.1V and GLM-4.5V, images only.

    make record-models NAMES=glm4v PYTHON=venv/bin/python       # needs transformers, torch, torchvision, Pillow below 12.2
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import transformers
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

from common import run
from image_models import flops, make_tokenizer, record_flops, record_inputs, record_tokens, tokens
from llava import without_type

TEXT = {"model_type": "glm4v_text", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                                                        "mrope_section": [8, 12, 12]}}
# GLM-4.5V, whose experts run as products of gathered matrices, so that the counter sees the rows that are routed.
AIR = TEXT | {"model_type": "glm4v_moe_text", "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944,
              "moe_intermediate_size": 1408, "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8,
              "head_dim": 128, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
              "attention_bias": True}
GLM_MOE = {"model_type": "glm4v_moe", "text_config": AIR, "vision_config": {"intermediate_size": 10944}, "tie_word_embeddings": False}
GLM = {"model_type": "glm4v", "text_config": TEXT, "vision_config": {}, "tie_word_embeddings": False}
IMAGES = {"image_processor_type": "Glm4vImageProcessor", "size": {"shortest_edge": 12544, "longest_edge": 9633792}, "patch_size": 14,
          "temporal_patch_size": 2, "merge_size": 2}
DEFAULT_IMAGES = {"image_processor_type": "Glm4vImageProcessor"}
ADDED = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|begin_of_image|>", "<|end_of_image|>",
         "<|image|>", "<|begin_of_video|>", "<|end_of_video|>", "<|video|>"]
SPECIAL = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
TEMPLATE = (
    "{{ '[gMASK]<sop>' }}{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'][0]['text'] }}{% endgeneration %}{% else %}{% for part in message['content'] %}"
    "{{ '<|begin_of_image|><|image|><|end_of_image|>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}{% endfor %}"
)


def processor(images):
    made = Glm4vImageProcessorPil(**without_type(images))
    return transformers.Glm4vProcessor(made, make_tokenizer(ADDED, SPECIAL), transformers.Glm4vVideoProcessor())


class Glm(tokens.Family):
    units = [28, 14]

    def __init__(self, name, config, images):
        self.name, self.processor = name, processor(images)
        self.files = {"config": config, "preprocessor": images}

    def image(self, width, height):
        patches = self.processor.image_processor.get_number_of_image_patches(height, width, {})
        return patches, patches, patches // 4 + 2

    def run(self, of):
        text = "<|begin_of_image|><|image|><|end_of_image|>" * len(of)
        out = self.processor(text=[text], images=[tokens.picture(size) for size in of])
        patches = sum(int(np.prod(grid)) for grid in np.asarray(out["image_grid_thw"]))
        assert patches == len(out["pixel_values"])
        return patches, patches, np.asarray(out["input_ids"]).size


class GlmCase(flops.Multimodal):
    """Multiples of 28, so that nothing is resized: width, height."""

    def make(self, config):
        config.text_config._experts_implementation = "batched_mm"
        return super().make(config)

    def measure(self):
        visual, vision = self.model.model.visual, self.model.config.vision_config
        patch, values = vision.patch_size, vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        downsample, merger, rotate = visual.downsample, visual.merger, visual.rotary_pos_emb.forward
        # Positions are counted on the CPU, see `on_cpu`.
        visual.rotary_pos_emb.forward = lambda x, ids: rotate(x, ids.to(x.device))
        if self.device == "meta":
            # Positions are interpolated at places that the meta device has none of; that is no product.
            visual.embeddings.forward = lambda hidden, *_: hidden
        for images in [[[644, 476]], [[112, 1008], [448, 448]]]:
            grids = flops.torch.tensor([(1, high // patch, wide // patch) for wide, high in images])
            patches = int(grids.prod(-1).sum())
            visual.downsample, visual.merger = flops.torch.nn.Identity(), flops.torch.nn.Identity()

            def tower(pixels):
                out = []
                visual.post_layernorm.register_forward_hook(lambda _, __, made: out.append(made))
                try:
                    visual(pixels, grids)
                except RuntimeError:
                    # What follows the last norm takes a convolution's output.
                    if not out:
                        raise
                return out[-1]

            with flops.on_cpu():
                self.add("vision.tower", {"images": images}, tower, self.empty(patches, values))
            visual.downsample, visual.merger = downsample, merger

            def project(states):
                merged = states.view(-1, 2, 2, states.shape[-1]).permute(0, 3, 1, 2)
                return merger(downsample(merged).view(-1, vision.out_hidden_size))

            self.add("vision.projector", {"images": images}, project, self.empty(patches, vision.hidden_size, grad=True))
        self.text(self.decoder)
        projector = flops.parameters(downsample) + flops.parameters(merger)
        return {"vision.tower": flops.parameters(visual) - projector, "vision.projector": projector, "llm": self.llm_parameters()}


def flops_cases():
    yield GlmCase("glm-4.1v-9b", GLM, preprocessor=IMAGES)
    rope = TEXT["rope_parameters"] | {"mrope_section": [2, 1, 1]}
    text = TEXT | flops.SMALL | {"rope_parameters": rope}
    vision = {"depth": 2, "hidden_size": 64, "num_heads": 4, "out_hidden_size": 64, "intermediate_size": 100, "attention_bias": True}
    yield GlmCase("glm-4.1v-small", GLM | {"text_config": text, "vision_config": vision}, "cpu", preprocessor=IMAGES)
    yield GlmCase("glm-4.5v", GLM_MOE, preprocessor=IMAGES)
    routed = {"moe_intermediate_size": 48, "n_routed_experts": 6, "num_experts_per_tok": 2, "num_hidden_layers": 3, "head_dim": 16}
    text = AIR | flops.SMALL | routed | {"rope_parameters": rope}
    yield GlmCase("glm-4.5v-small", GLM_MOE | {"text_config": text, "vision_config": vision}, "cpu", preprocessor=IMAGES)


def inputs():
    for name, config, images in [
        ("glm-4.1v-9b", GLM, IMAGES), ("glm-4.1v-default", GLM, DEFAULT_IMAGES), ("glm-4.5v", GLM_MOE, IMAGES),
    ]:
        yield {"name": name, "processor": processor(images), "files": {"config": config, "preprocessor": images}, "template": TEMPLATE,
               "added": ADDED, "special": SPECIAL, "image_token": "<|image|>"}


def main(golden):
    transformers.logging.set_verbosity_error()
    record_tokens(golden, "glm4v", [
        Glm("glm4v", GLM, IMAGES), Glm("glm4v_default", GLM, DEFAULT_IMAGES), Glm("glm4v_moe", GLM_MOE, IMAGES),
    ])
    record_inputs(golden, "glm4v", inputs())
    record_flops(golden, "glm4v", flops_cases())


if __name__ == "__main__":
    run(main, "glm4v", "glm4v_moe")
