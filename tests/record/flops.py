"""Records parameters and FLOPs of models as PyTorch counts them, as truth for `costmodel`.

Run by hand, `make record-flops`; `costmodel/tests/flops.rs` compares the cost model with `tests/golden/flops.json`. Needs no
network and no weights, in the environment that `tests/record/tokens.py` describes.

- A case is a configuration and media, or tokens; of every part (`vision.tower`, `vision.projector`, `audio.tower`,
  `audio.projector`, `llm`) it records what `torch.utils.flop_counter.FlopCounterMode` counts forward and backward.
  Attention is eager, so that the backward pass is two products for each of the forward pass; a fused kernel
  recomputes scores, which the counter would count too.
- Published sizes run on the meta device: nothing is computed. Small ones run on the CPU as a check of that.
- Every part is run alone, its input with a gradient unless it is pixels or a spectrogram, so that backward passes
  are separate. All parameters are trained but the positions of Whisper, which transformers freezes.
- `gradients` names the gradients of a part that is frozen (`inputs`) or has frozen parts before it (`weights`).
- `parameters` are counts of all parameters by part, tied ones once.
"""

import argparse
import contextlib
import json
from pathlib import Path

import torch
import transformers
from common import GOLDEN
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING
from transformers.image_processing_utils import select_best_resolution
from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas

# Rotary embeddings disable automatic casting, which the meta device does not support.
torch.autocast = lambda *_, **__: contextlib.nullcontext()
IMAGES = [[[640, 480]], [[2480, 3508]]]
# Multiples of 28, so that nothing is resized: width, height.
NATIVE = [([[644, 476]], []), ([[112, 1008], [448, 448]], [[6, 336, 252]])]
TOKENS = [1000, 4096]


def count(run, inputs):
    """Counts FLOPs of a forward pass, and of the backward pass from the sum of its output."""
    with FlopCounterMode(display=False) as forward:
        output = run(*inputs)
    with FlopCounterMode(display=False) as backward:
        output.float().sum().backward()
    return {"forward": forward.get_total_flops(), "backward": backward.get_total_flops()}


@contextlib.contextmanager
def on_cpu():
    """Turns lists into tensors on the CPU: window lengths are read as numbers, which the meta device has none of."""
    made = torch.tensor
    torch.tensor = lambda data, dtype=None, device=None: made(data, dtype=dtype)
    try:
        yield
    finally:
        torch.tensor = made


def parameters(module):
    return sum(parameter.numel() for parameter in module.parameters())


class Case:
    def __init__(self, name, config, device="meta", build=None, **documents):
        self.name, self.config, self.device = name, config, device
        self.documents = {"config": config} | documents
        settings = json.loads(json.dumps(build or config))
        model_type = settings.pop("model_type")
        parsed = CONFIG_MAPPING[model_type].from_dict(settings)
        parsed._attn_implementation = "eager"
        with torch.device(device):
            self.model = self.make(parsed)
        self.model.train()
        self.model.tie_weights()
        self.flops = []

    def make(self, config):
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")

    def empty(self, *shape, grad=False):
        return torch.zeros(shape, device=self.device, requires_grad=grad)

    def add(self, part, media, run, *inputs):
        self.flops.append({"part": part} | media | count(run, inputs))

    def text(self, run=None, hidden=None):
        def whole(ids):
            return self.model(input_ids=ids, use_cache=False).logits

        for tokens in TOKENS if self.device == "meta" else [96]:
            ids = torch.zeros((1, tokens), dtype=torch.long, device=self.device)
            self.add("llm", {"tokens": tokens}, run or whole, ids)

    def measure(self):
        self.text()
        return {"llm": parameters(self.model)}

    def recorded(self):
        counted = self.measure()
        assert sum(counted.values()) == parameters(self.model), (self.name, counted, parameters(self.model))
        print(self.name, counted, flush=True)
        return {"name": self.name, "documents": self.documents, "parameters": counted, "flops": self.flops}


class Multimodal(Case):
    def make(self, config):
        return transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager")

    def decoder(self, ids):
        return self.model.lm_head(self.model.model.language_model(input_ids=ids, use_cache=False).last_hidden_state)

    def llm_parameters(self):
        embedding = self.model.model.language_model.get_input_embeddings().weight
        head = self.model.lm_head.weight
        return parameters(self.model.model.language_model) + (0 if head is embedding else head.numel())


class Llava(Multimodal):
    def tiles(self, of):
        if len(of) > 1:
            return len(of)
        (width, height), side = of[0], self.model.config.vision_config.image_size
        high, wide = select_best_resolution((height, width), self.model.config.image_grid_pinpoints)
        return 1 + high // side * (wide // side)

    def measure(self):
        config, model = self.model.config, self.model.model
        vision, layer = config.vision_config, config.vision_feature_layer

        def tower(pixels):
            states = model.vision_tower(pixels, output_hidden_states=True).hidden_states
            states = states[layer] if isinstance(layer, int) else torch.cat([states[at] for at in layer], -1)
            return states[:, 1:] if config.vision_feature_select_strategy == "default" else states

        for of in IMAGES if self.device == "meta" else IMAGES[:1]:
            tiles, side = self.tiles(of), vision.image_size
            self.add("vision.tower", {"images": of}, tower, self.empty(tiles, 3, side, side))
            features = self.empty(tiles, (side // vision.patch_size) ** 2, model.multi_modal_projector.linear_1.in_features, grad=True)
            self.add("vision.projector", {"images": of}, model.multi_modal_projector, features)
        self.text(self.decoder)
        projector = parameters(model.multi_modal_projector) + model.image_newline.numel()
        if self.device == "cpu":
            self.frozen(vision)
        return {"vision.tower": parameters(model.vision_tower), "vision.projector": projector, "llm": self.llm_parameters()}


    def frozen(self, vision):
        """Records the projector after a frozen tower, a frozen projector, and a frozen LLM after something trained."""
        projector, of = self.model.model.multi_modal_projector, IMAGES[0]
        shape = self.tiles(of), (vision.image_size // vision.patch_size) ** 2, projector.linear_1.in_features
        self.add("vision.projector", {"images": of, "gradients": "weights"}, projector, self.empty(*shape))
        projector.requires_grad_(False)
        media = {"images": of, "gradients": "inputs"}
        self.add("vision.projector", media, projector, self.empty(*shape, grad=True))
        decoder, head = self.model.model.language_model, self.model.lm_head
        decoder.requires_grad_(False)
        head.requires_grad_(False)

        def whole(embeddings):
            return head(decoder(inputs_embeds=embeddings, use_cache=False).last_hidden_state)

        embeddings = self.empty(1, 96, decoder.config.hidden_size, grad=True)
        self.add("llm", {"tokens": 96, "gradients": "inputs"}, whole, embeddings)


class Intern(Multimodal):
    def tiles(self, of):
        total = 0
        for width, height in of:
            columns, rows = get_optimal_tiled_canvas((height, width), (448, 448), 1, 12)
            total += columns * rows + (columns * rows > 1)
        return total

    def measure(self):
        config, model = self.model.config, self.model.model
        side, patch = config.vision_config.image_size[0], config.vision_config.patch_size[0]

        def tower(pixels):
            return model.vision_tower(pixels).last_hidden_state[:, 1:]

        def project(states):
            patches = side // patch
            shuffled = model.pixel_shuffle(states.reshape(len(states), patches, patches, -1), config.downsample_ratio)
            return model.multi_modal_projector(shuffled.reshape(len(states), -1, shuffled.shape[-1]))

        for of in IMAGES if self.device == "meta" else IMAGES[:1]:
            tiles = self.tiles(of)
            self.add("vision.tower", {"images": of}, tower, self.empty(tiles, 3, side, side))
            states = self.empty(tiles, (side // patch) ** 2, config.vision_config.hidden_size, grad=True)
            self.add("vision.projector", {"images": of}, project, states)
        self.text(self.decoder)
        return {
            "vision.tower": parameters(model.vision_tower),
            "vision.projector": parameters(model.multi_modal_projector),
            "llm": self.llm_parameters(),
        }


class Qwen(Multimodal):
    def measure(self):
        visual, vision = self.model.model.visual, self.model.config.vision_config
        merger = visual.merger
        patch = vision.patch_size
        width = getattr(vision, "embed_dim", vision.hidden_size)
        values = vision.in_channels * vision.temporal_patch_size * patch**2
        for images, videos in NATIVE:
            media = {"images": images, "videos": videos}
            grids = [(1, high // patch, wide // patch) for wide, high in images]
            grids += [(frames // 2, high // patch, wide // patch) for frames, wide, high in videos]
            patches = sum(t * h * w for t, h, w in grids)
            grid = torch.tensor(grids)
            visual.merger = torch.nn.Identity()
            with on_cpu():
                self.add("vision.tower", media, lambda pixels: visual(pixels, grid), self.empty(patches, values))
            visual.merger = merger
            self.add("vision.projector", media, merger, self.empty(patches, width, grad=True))
        self.text(self.decoder)
        return {
            "vision.tower": parameters(visual) - parameters(merger),
            "vision.projector": parameters(merger),
            "llm": self.llm_parameters(),
        }


class Audio(Case):
    def make(self, config):
        return transformers.Qwen2AudioForConditionalGeneration(config)

    def measure(self):
        model, audio = self.model, self.model.config.audio_config
        for samples in [[16000], [480000, 560000]]:
            windows = sum(-(-count // 480000) for count in samples)
            features = self.empty(windows, audio.num_mel_bins, 2 * audio.max_source_positions)
            media = {"audio": samples}
            self.add("audio.tower", media, lambda x: model.audio_tower(x).last_hidden_state, features)
            states = self.empty(windows, audio.max_source_positions // 2, audio.d_model, grad=True)
            self.add("audio.projector", media, model.multi_modal_projector, states)
        self.text(lambda ids: model.language_model(input_ids=ids, use_cache=False).logits)
        return {
            "audio.tower": parameters(model.audio_tower),
            "audio.projector": parameters(model.multi_modal_projector),
            "llm": parameters(model.language_model),
        }


class Tower(Case):
    """Records an encoder alone; what follows its pooled output is not measured."""

    def make(self, config):
        classes = {"siglip_vision_model": "SiglipVisionModel", "clip_vision_model": "CLIPVisionModel"}
        return getattr(transformers, classes[config.model_type])(config)

    def measure(self):
        side = self.model.config.image_size
        for tiles in [1, 2]:
            media = {"images": [[640, 480]] * tiles}
            run = lambda pixels: self.model(pixels).last_hidden_state  # noqa: E731
            self.add("vision.tower", media, run, self.empty(tiles, 3, side, side))
        return {"vision.tower": parameters(self.model)}


class Whisper(Case):
    def make(self, config):
        return transformers.models.whisper.modeling_whisper.WhisperEncoder(config)

    def measure(self):
        config = self.model.config
        features = self.empty(1, config.num_mel_bins, 2 * config.max_source_positions)
        self.add("audio.tower", {"audio": [99999]}, lambda x: self.model(x).last_hidden_state, features)
        return {"audio.tower": parameters(self.model)}


LLAMA3_8B = {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
             "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
QWEN2_5_7B = {"model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
              "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
QWEN2_5_05B = {"model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
               "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True}
QWEN3_06B = {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128,
             "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True}
QWEN3_8B = {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128,
            "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8}
SMALL = {"vocab_size": 1200, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2}
SIGLIP = {"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "image_size": 384,
          "patch_size": 14, "num_hidden_layers": 27, "num_attention_heads": 16}
CLIP = {"model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "image_size": 336,
        "patch_size": 14, "num_hidden_layers": 24, "num_attention_heads": 16}
PIXELS = {"min_pixels": 784, "max_pixels": 12845056}
QWEN2_VISION = {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "hidden_size": 3584}
QWEN2_5_VISION = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16}
# Sections of rotary positions are halves of a head.
MROPE = {"type": "mrope", "mrope_section": [16, 24, 24]}
MROPE_SMALL = {"type": "mrope", "mrope_section": [2, 3, 3]}


def without_type(config):
    return {key: value for key, value in config.items() if key != "model_type"}


def language_models():
    yield Case("llama3-8b", LLAMA3_8B)
    yield Case("qwen2.5-7b", QWEN2_5_7B)
    yield Case("qwen2.5-0.5b", QWEN2_5_05B)
    yield Case("qwen3-0.6b", QWEN3_06B)
    yield Case("qwen3-8b", QWEN3_8B)
    yield Case("llama-biased", {"model_type": "llama", **SMALL, "attention_bias": True, "mlp_bias": True}, "cpu")
    yield Case("qwen3-wide-heads", {"model_type": "qwen3", **SMALL, "head_dim": 32, "attention_bias": True}, "cpu")


def llava():
    siglip = SIGLIP | {"vision_use_head": False, "num_hidden_layers": 26}
    config = {"model_type": "llava_onevision", "text_config": QWEN2_5_7B, "vision_config": siglip}
    yield Llava("llava-onevision-7b", config)
    # The whole tower with its head, of which the state before the last layer is taken.
    config = config | {"text_config": LLAMA3_8B, "vision_config": SIGLIP, "vision_feature_layer": -2}
    yield Llava("llava-onevision-llama3-8b", config)
    grid = [[336 * rows, 336 * columns] for rows in range(1, 7) for columns in range(1, 7)]
    config = {"model_type": "llava_onevision", "text_config": QWEN2_5_05B, "vision_config": CLIP, "image_grid_pinpoints": grid,
              "vision_feature_layer": [-2, 12], "vision_feature_select_strategy": "default", "multimodal_projector_bias": False}
    yield Llava("llava-clip-0.5b", config)
    small = SIGLIP | {"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 100, "num_hidden_layers": 2, "image_size": 112}
    grid = [[112 * rows, 112 * columns] for rows in range(1, 3) for columns in range(1, 3)]
    config = {"model_type": "llava_onevision", "text_config": {"model_type": "qwen2", **SMALL}, "vision_config": small,
              "image_grid_pinpoints": grid}
    yield Llava("llava-onevision-small", config, "cpu")


def intern_vl():
    vision = {"attention_bias": True}
    config = {"model_type": "internvl", "text_config": QWEN2_5_7B, "vision_config": vision}
    yield Intern("internvl3-8b", config)
    large = {"hidden_size": 3200, "num_hidden_layers": 45, "num_attention_heads": 25, "intermediate_size": 12800,
             "norm_type": "rms_norm", "use_qk_norm": True}
    config = {"model_type": "internvl", "text_config": LLAMA3_8B, "vision_config": large}
    chat = {"model_type": "internvl_chat", "llm_config": LLAMA3_8B, "dynamic_image_size": True, "use_thumbnail": True,
            "force_image_size": 448, "max_dynamic_patch": 12, "downsample_ratio": 0.5, "select_layer": -1,
            "vision_config": {"hidden_size": 3200, "num_hidden_layers": 45, "num_attention_heads": 25, "image_size": 448,
                              "intermediate_size": 12800, "norm_type": "rms_norm", "qk_normalization": True, "qkv_bias": False}}
    yield Intern("internvl2.5-6b-llama3-8b", chat, build=config)
    small = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "image_size": [56, 56],
             "use_mean_pooling": False, "use_mask_token": True}
    config = {"model_type": "internvl", "text_config": {"model_type": "qwen2", **SMALL}, "vision_config": small}
    yield Intern("internvl-small", config | {"image_seq_length": 4}, "cpu", preprocessor={"size": {"height": 56, "width": 56}})


def qwen_vl():
    flat = without_type(QWEN2_5_7B) | {"rope_scaling": MROPE}
    yield Qwen("qwen2-vl-7b", {"model_type": "qwen2_vl", **flat, "vision_config": QWEN2_VISION}, preprocessor=PIXELS)
    yield Qwen("qwen2.5-vl-7b", {"model_type": "qwen2_5_vl", "text_config": {"model_type": "qwen2_5_vl_text", **flat},
                                 "vision_config": QWEN2_5_VISION}, preprocessor=PIXELS)
    tied = {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
            "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True, "rope_scaling": MROPE}
    vision = QWEN2_5_VISION | {"out_hidden_size": 2048}
    yield Qwen("qwen2.5-vl-3b", {"model_type": "qwen2_5_vl", **tied, "vision_config": vision}, preprocessor=PIXELS)
    small = SMALL | {"rope_scaling": MROPE_SMALL}
    vision = {"depth": 2, "embed_dim": 64, "num_heads": 4, "hidden_size": 64}
    yield Qwen("qwen2-vl-small", {"model_type": "qwen2_vl", **small, "vision_config": vision}, "cpu", preprocessor=PIXELS)
    vision = {"depth": 3, "hidden_size": 64, "num_heads": 4, "out_hidden_size": 64, "intermediate_size": 100,
              "fullatt_block_indexes": [1, 1, 9], "window_size": 140}
    yield Qwen("qwen2.5-vl-small", {"model_type": "qwen2_5_vl", **small, "vision_config": vision}, "cpu", preprocessor=PIXELS)


def audio():
    text = {"model_type": "qwen2", "vocab_size": 156032, "intermediate_size": 11008}
    yield Audio("qwen2-audio-7b", {"model_type": "qwen2_audio", "text_config": text})
    small = {"model_type": "qwen2_audio_encoder", "d_model": 48, "encoder_layers": 2, "encoder_attention_heads": 4,
             "encoder_ffn_dim": 100, "num_mel_bins": 20}
    yield Audio("qwen2-audio-small", {"model_type": "qwen2_audio", "audio_config": small,
                                      "text_config": {"model_type": "qwen2", **SMALL}}, "cpu")
    large = {"d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120, "num_mel_bins": 128}
    yield Whisper("whisper-large-v3", {"model_type": "whisper", **large})
    yield Whisper("whisper-tiny", {"model_type": "whisper"}, "cpu")


def towers():
    yield Tower("siglip-so400m", SIGLIP)
    yield Tower("clip-vit-l-336", CLIP)
    yield Tower("siglip-small", {"model_type": "siglip_vision_model", "num_hidden_layers": 2}, "cpu")


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("names", nargs="*", help="functions of cases to record and print, all by default, which are written")
    arguments.add_argument("--golden", type=Path, default=GOLDEN, help="directory to write below")
    options = arguments.parse_args()
    cases = []
    for make in [language_models, llava, intern_vl, qwen_vl, audio, towers]:
        if not options.names or make.__name__ in options.names:
            cases += [case.recorded() for case in make()]
    text = ",\n".join(json.dumps(case) for case in cases)
    if options.names:
        print(text)
    else:
        (options.golden / "flops.json").write_text(f"[\n{text}\n]\n")


if __name__ == "__main__":
    main()
