"""Describes models of many types by themselves and prints a table: what agrees with dflop, and why a type is refused.

    make describe-models                              # all types
    python3 tests/python/describe_models.py qwen3_vl  # these types; needs dflop, transformers, torch, pillow

A type is the default configuration of its class, with few layers, and the default processor of the type, with a small tokenizer.
Types that dflop reads by hand are compared with its own numbers: parameters exactly, FLOPs forward and backward to 0.1 %, tokens on
all sizes. A type of `BY_HAND` that is refused or differs ends the script with status 1.
"""

import copy
import json
import os
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import dflop
import transformers as hf
from dflop._description import checkpoint, document, fits, media, token_rules
from dflop.errors import Error, ModelError
from transformers.models.auto import image_processing_auto, modeling_auto, processing_auto
from type_settings import CONFIG, IMAGE_PROCESSOR, PROCESSOR

TOKENIZER = Path(__file__).resolve().parents[2] / "tests" / "golden" / "model_inputs" / "chatml"
BY_HAND = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "llava", "llava_next", "llava_onevision", "internvl", "gemma3",
           "idefics3", "smolvlm", "mistral3", "glm4v", "glm4v_moe", "llama4", "qwen2_audio", "qwen2_5_omni_thinker",
           "qwen3_omni_moe_thinker")
TEXT = ("qwen2", "qwen3", "qwen3_moe", "llama", "gemma3_text", "gemma2", "mistral", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe",
        "olmo3", "smollm3", "phi3")
TOKENS = ("<image>", "<|image|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<image_soft_token>",
          "<start_of_image>", "<end_of_image>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<video>", "<|video|>", "<|AUDIO|>", "<|audio|>",
          "<|audio_bos|>", "<|audio_eos|>", "<|begin_of_image|>", "<|end_of_image|>", "<fake_token_around_image>", "<global-img>",
          "<end_of_utterance>", "<IMG_CONTEXT>", "<img>", "</img>", "<|patch|>", "<|image_start|>", "<|image_end|>",
          "<|tile_x_separator|>", "<|tile_y_separator|>", *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)))
# Names by which tokenizers of published checkpoints tell processors their placeholders.
ROLES = {
    "internvl": dict(start_image_token="<img>", end_image_token="</img>", context_image_token="<IMG_CONTEXT>", video_token="<video>"),
    "gemma3": dict(boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>"),
    "qwen2_5_omni_thinker": dict(image_token="<|image_pad|>", audio_token="<|AUDIO|>", video_token="<|video_pad|>",
                         vision_bos_token="<|vision_start|>", vision_eos_token="<|vision_end|>", audio_bos_token="<|audio_bos|>",
                         audio_eos_token="<|audio_eos|>"),
}
ROLES["qwen3_omni_moe_thinker"] = ROLES["qwen2_5_omni_thinker"]
LAYERS = ("num_hidden_layers", "depth", "encoder_layers", "num_layers")
CPU_FLOPS_PER_SECOND = 40_000 * 1e6
SECONDS_MAX = int(os.environ.get("SECONDS_MAX", "150"))


def shrunk(values, layers=3):
    """Returns configuration values with few layers."""
    values = copy.deepcopy(values)
    for part in [values, *(one for one in values.values() if isinstance(one, dict))]:
        before = [part[name] for name in LAYERS if isinstance(part.get(name), int)]
        for name in LAYERS:
            if isinstance(part.get(name), int):
                part[name] = min(part[name], layers)
        for name, found in part.items():
            if isinstance(found, list) and before and len(found) == before[0]:
                part[name] = found[:layers]
        for name in ("deepstack_visual_indexes", "fullatt_block_indexes"):
            if name in part:
                part[name] = [1]
        if isinstance(part.get("num_experts"), int) and part["num_experts"] > 8:
            part["num_experts"] = 8
    return values


def merged(values, more):
    """Returns nested values with some replaced."""
    return values | {key: merged(values.get(key) or {}, one) if isinstance(one, dict) else one for key, one in more.items()}


def relatives(model_type):
    """Returns the type and those whose processor it shares."""
    parent = model_type.removesuffix("_thinker")
    return model_type, parent, parent.removesuffix("_moe"), "qwen3_vl" if parent.startswith("qwen3") else parent


def make_processor(model_type, config):
    """Returns the default processor of a type, with the small tokenizer, for images as the configuration has them."""
    names = processing_auto.PROCESSOR_MAPPING_NAMES
    name = next((names[key] for key in relatives(model_type) if key in names), None)
    if name is None:
        raise ModelError("transformers has no processor for it")
    tokenizer = hf.AutoTokenizer.from_pretrained(TOKENIZER, local_files_only=True)
    tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS)})
    for role, token in ROLES.get(model_type, dict(image_token="<image>", boi_token="<img>", eoi_token="</img>", video_token="<video>", audio_token="<|audio|>")).items():
        setattr(tokenizer, role, token)
        setattr(tokenizer, f"{role}_id", tokenizer.convert_tokens_to_ids(token))
    kind = getattr(hf, name)
    arguments = dict(PROCESSOR.get(model_type, {}))
    for attribute in kind.get_attributes():
        if "tokenizer" in attribute:
            arguments[attribute] = tokenizer
        elif "feature_extractor" in attribute or "audio_processor" in attribute:
            arguments[attribute] = part(kind, attribute, model_type, "FEATURE_EXTRACTOR_MAPPING_NAMES", config)
        elif "video" in attribute:
            arguments[attribute] = part(kind, attribute, model_type, "VIDEO_PROCESSOR_MAPPING_NAMES")
        else:
            arguments[attribute] = part(kind, attribute, model_type, "IMAGE_PROCESSOR_MAPPING_NAMES", config)
    return kind(**arguments)


def image_settings(found, config):
    """Returns patch and image size of the configuration for an image processor whose defaults are others."""
    vision, defaults = getattr(config, "vision_config", None), found()
    bins = getattr(getattr(config, "audio_config", None), "num_mel_bins", None)
    settings = {"feature_size": bins} if bins and hasattr(defaults, "feature_size") else {}
    patch, side = (getattr(vision, name, None) for name in ("patch_size", "image_size"))
    if isinstance(patch, int) and isinstance(getattr(defaults, "patch_size", None), int):
        settings["patch_size"] = patch
    side = side[0] if isinstance(side, list | tuple) else side
    size = dict(getattr(defaults, "size", None) or {})
    if isinstance(side, int) and set(size) == {"height", "width"}:
        settings["size"] = {"height": side, "width": side}
    elif isinstance(side, int) and getattr(defaults, "max_image_size", None):
        settings["max_image_size"] = {"longest_edge": side}
    elif isinstance(side, int) and set(size) == {"shortest_edge"} and getattr(defaults, "crop_size", None):
        settings |= {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
    return settings


def part(kind, attribute, model_type, mapping, config=None):
    """Returns a processor's part from its class defaults."""
    from transformers.models.auto import feature_extraction_auto, video_processing_auto

    for module in (image_processing_auto, feature_extraction_auto, video_processing_auto):
        names = getattr(module, mapping, {})
        for key in relatives(model_type):
            found = names.get(key)
            if isinstance(found, dict):
                found = found.get("torchvision") or found.get("pil")
            if isinstance(found, tuple | list):
                found = next((one for one in reversed(found) if one), None)
            if isinstance(found, str) and hasattr(hf, found):
                found = getattr(hf, found)
                settings = {} if config is None else image_settings(found, config) | IMAGE_PROCESSOR.get(model_type, {})
                return found(**settings)
    raise ModelError(f"no default class for `{attribute}` of {kind.__name__}")


def make_checkpoint(model_type, directory):
    """Writes `config.json` and returns the opened checkpoint."""
    config = hf.CONFIG_MAPPING[model_type]
    made = config.from_dict(merged(shrunk(config().to_dict()), CONFIG.get(model_type, {})))
    names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    made.architectures = [names[model_type]]
    made.save_pretrained(directory)
    model = checkpoint.build(made)
    processor = make_processor(model_type, made) if checkpoint.feature_functions(model) else None
    settings = {}
    for name in ("feature_extractor", "image_processor"):
        if hasattr(processor, name):
            settings |= json.loads(getattr(processor, name).to_json_string())
    if settings:
        (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    return checkpoint.Checkpoint(directory, made, model, processor)


def polynomial(entry, units, squares):
    """Returns the FLOPs forward and backward of a module by its description, with these pairs by attention pattern."""
    total = 0
    parts = [(1, one) for one in [entry["outside_layers"], *entry.get("connectors", ())]]
    for count, one in parts + [(run["count"], run) for run in entry["layer_runs"]]:
        attention = one.get("attention", {"pattern": "full", "window": None})
        for way in ("forward", "backward"):
            terms = one[f"flops_{way}"]
            total += count * (terms.get("per_item", 0) * units.items + terms.get("per_token", 0) * units.tokens
                              + terms.get("per_pair", 0) * squares(attention)
                              + terms.get("per_chunk", 0) * units.chunks(one.get("chunk_tokens", 1)))
    return total


def causal_pairs(tokens):
    """Returns the pairs that dflop counts as executed: half of those without a mask."""

    def squares(attention):
        window = min(attention["window"] or tokens, tokens)
        if attention["pattern"] == "full":
            return tokens * tokens
        if attention["pattern"] == "chunk":
            return (tokens // window * window**2 + (tokens % window) ** 2) // 2
        return (tokens**2 - (tokens - window) ** 2) // 2

    return squares


def differences(opened, description):
    """Returns what differs from dflop's own numbers, as texts."""
    costs = dflop.CostModel(str(opened.directory), device="cpu")
    own = {one["module"]: one["parameters"] for one in dflop.models(str(opened.directory))["modules"]}
    described = {one["module"]: one for one in description["modules"]}
    counted = {name: one["parameters"] for name, one in described.items()}
    found = [f"{name}: {counted.get(name)} parameters, dflop has {own.get(name)}"
             for name in sorted({*own, *counted}) if own.get(name) != counted.get(name)]
    for tokens in (1000, 4096):
        llm = described["llm"]
        flops = polynomial(llm, fits.Units(1, tokens), causal_pairs(tokens))
        flops += tokens * sum(llm["head"][f"flops_{way}"]["per_token"] for way in ("forward", "backward"))
        expected = costs.cost(text_tokens=tokens, target_tokens=tokens)["seconds"]["llm"] * CPU_FLOPS_PER_SECOND
        found += differs(f"llm, {tokens} tokens", flops, expected)
    if "vision" in described:
        found += vision_differences(opened, described["vision"], costs)
    if "audio" in described:
        found += audio_differences(described["audio"], costs)
    return found


def audio_differences(audio, costs):
    """Compares FLOPs of a window of 30 seconds; dflop cuts longer clips, where processors drop the rest."""
    cost = costs.cost(audio=[(480_000, 16_000)])
    items, tokens = cost["encoder_items"], cost["encoder_tokens"]
    units = fits.Units(items, 0) if audio["unit"] == "items" else fits.Units(1, tokens)

    def squares(attention):
        return units.chunk_pairs(attention["window"]) if attention["window"] else units.full_pairs

    flops = polynomial(audio, units, squares)
    return differs("audio, 30 s", flops, cost["seconds"]["audio"] * CPU_FLOPS_PER_SECOND)


def vision_differences(opened, vision, costs):
    found, wrong = [], []
    for width, height in ((448, 448), (896, 700), (640, 480)):
        cost = costs.cost(images=[(width, height)])
        inputs = media.features_inputs(opened.processor, "image", media.image(width, height),
                                       checkpoint.feature_functions(opened.model)["image"])
        grids = tuple(map(tuple, inputs["image_grid_thw"].tolist())) if "image_grid_thw" in inputs else ()
        items, tokens = cost["encoder_items"], cost["encoder_tokens"]
        units = fits.Units(items, 0) if vision["unit"] == "items" else fits.Units(1, tokens, grids)

        def squares(attention, units=units):
            side = attention["window"]
            return units.square_pairs(side) if side else units.full_pairs

        flops = polynomial(vision, units, squares)
        found += differs(f"vision, {width} x {height}", flops, cost["seconds"]["vision"] * CPU_FLOPS_PER_SECOND)
    rule = vision["token_rule"]
    for width, height, counted in token_rules._image_table(opened.processor)[0]:
        if counted is None:
            continue
        try:
            expected = costs.cost(images=[(width, height)])["tokens"]
        except Error:
            continue
        wrong.append(expected - counted)
    # What chat templates put around an image is no part of the processor's count.
    if len(set(wrong)) > 1:
        off = sum(one != min(wrong, key=abs) for one in wrong)
        found.append(f"tokens differ on {off} of {len(wrong)} sizes ({rule['kind']})")
    return found


def differs(name, flops, expected):
    return [] if abs(flops - expected) <= expected * 1e-3 else [f"{name}: {flops:,} FLOPs, dflop has {expected:,.0f}"]


def row(model_type):
    """Returns the outcome of a type: whether it is described, and the reason or what was found."""
    with tempfile.TemporaryDirectory() as scratch:
        opened = make_checkpoint(model_type, Path(scratch))
        description = document.from_parts(opened, "")
        json.dumps(description)
        rules = [one["token_rule"] for one in description["modules"] if "token_rule" in one]
        text = ", ".join(f"{one['medium']} {one['rule']['rule'] if 'rule' in one else one['kind']}" for one in rules)
        if model_type not in BY_HAND + TEXT:
            return "described", text
        try:
            found = differences(opened, description)
        except ModelError as error:
            return "described", f"{text}; dflop does not read this configuration: {error}"
        return ("differs", "; ".join(found)) if found else ("equal", text)


def too_long(*_):
    raise ModelError(f"takes more than {SECONDS_MAX} s of processor time")


def main():
    warnings.simplefilter("ignore")
    hf.logging.set_verbosity_error()
    others = [name for name in modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES if name not in BY_HAND]
    types = sys.argv[1:] or [*BY_HAND, *TEXT, *others]
    signal.signal(signal.SIGPROF, too_long)
    failed = []
    print("| type | outcome | seconds | token rules, or reason |\n| --- | --- | --- | --- |")
    for model_type in types:
        began = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, SECONDS_MAX)
        try:
            outcome, text = row(model_type)
        except ModelError as error:
            outcome, text = "refused", str(error)
        except Exception as error:
            outcome, text = "failed", f"{type(error).__name__}: {error}"
        signal.setitimer(signal.ITIMER_PROF, 0)
        text = " ".join(text.split())[:300].replace("|", "\\|")
        print(f"| `{model_type}` | {outcome} | {time.process_time() - began:.0f} | {text} |", flush=True)
        if model_type in BY_HAND + TEXT and outcome not in ("equal", "described"):
            failed.append(model_type)
    if failed:
        sys.exit(f"refused or different: {', '.join(failed)}")


if __name__ == "__main__":
    main()
