"""Compares what dflop reads by hand with descriptions: each type that transformers builds is described, and costs are compared.

    make describe-models                              # all types that dflop reads by hand
    python3 tests/python/describe_models.py qwen3_vl  # these types; needs dflop, transformers, torch, pillow

A type is the default configuration of its class, with few layers, and the default processor of the type, with a small tokenizer.
Parameters must be equal; tokens must be equal, and FLOPs forward and backward to 0.1 %, on 2,000 random sizes of each medium, or on
the sizes in the table of a rule that is `measured`. A type that is refused or differs ends the script with status 1.
"""

import copy
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import dflop
import transformers as hf
from dflop._description import checkpoint, document
from dflop.errors import Error, ModelError
from transformers.models.auto import image_processing_auto, modeling_auto, processing_auto
from type_settings import CONFIG, IMAGE_PROCESSOR, PROCESSOR

TOKENIZER = Path(__file__).resolve().parents[2] / "tests" / "golden" / "model_inputs" / "chatml"
# Types whose model is part of that of another type, and encoders, which no description has alone.
PARTS = ("clip", "clip_vision_model", "siglip", "siglip_vision_model", "qwen2_audio_encoder", "whisper")
SIZES = 2000
# Processors drop what is longer than a window of 30 seconds, dflop continues in a further window.
AUDIO_SAMPLES_MAX = 480_000
FLOPS_DIFFERENCE_MAX = 1e-3
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
SECONDS_MAX = int(os.environ.get("SECONDS_MAX", "150"))


def shrunk(values, layers=6):
    """Returns configuration values with few layers."""
    values = copy.deepcopy(values)
    for part in parts(values):
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


def parts(values):
    """Returns nested values, and all values inside of them."""
    inside = [found for one in values.values() if isinstance(one, dict) for found in parts(one)]
    return [values, *inside]


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
            arguments[attribute] = part(kind, attribute, model_type, "VIDEO_PROCESSOR_MAPPING_NAMES", config)
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
    made.architectures = [classes()[model_type]]
    made.save_pretrained(directory)
    made = checkpoint.writing_config(made)
    model = checkpoint.build(made)
    processor = make_processor(made.model_type, made) if checkpoint.feature_functions(model) else None
    settings = {}
    for name in ("feature_extractor", "image_processor"):
        if hasattr(processor, name):
            settings |= json.loads(getattr(processor, name).to_json_string())
    if hasattr(processor, "video_processor"):
        (directory / "video_preprocessor_config.json").write_text(processor.video_processor.to_json_string())
    if settings:
        (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    return checkpoint.Checkpoint(directory, made, model, processor)


class Comparison:
    """A checkpoint as dflop reads it by hand, and by its description."""

    def __init__(self, opened, description):
        path = opened.directory / "described.json"
        document.write(description, path)
        self.names = [str(opened.directory), str(path)]
        self.costs = [dflop.CostModel(name, device="cpu") for name in self.names]
        self.modules = {one["module"]: one for one in description["modules"]}
        self.random = random.Random(20)
        self.compared, self.differences = [], []

    def run(self):
        by_hand, described = ({one["module"]: one["parameters"] for one in dflop.models(name)["modules"]} for name in self.names)
        if by_hand != described:
            self.differences.append(f"parameters: {by_hand} by hand, {described} described")
        self.samples("text", "llm", [dict(text_tokens=count, target_tokens=count) for count in self.numbers(1, 1 << 15)])
        if "vision" in self.modules:
            self.medium("image", "vision", "token_rule", [dict(images=[size]) for size in zip(self.numbers(28, 4000), self.numbers(28, 4000))])
            videos = zip(self.numbers(1, 16), self.numbers(56, 1000), self.numbers(56, 1000))
            self.medium("video", "vision", "video_token_rule", [dict(videos=[video]) for video in videos])
        if "audio" in self.modules:
            self.medium("audio", "audio", "token_rule", [dict(audio=[(count, 16_000)]) for count in self.numbers(1600, AUDIO_SAMPLES_MAX)])

    def numbers(self, least, most):
        """Returns random numbers, as many small ones as large ones."""
        return [round(math.exp(self.random.uniform(math.log(least), math.log(most)))) for _ in range(SIZES)]

    def medium(self, medium, module, field, samples):
        """Compares media at these sizes, or at those that a rule counted one by one."""
        rule = self.modules[module].get(field)
        if rule is None or (rule["kind"] == "measured" and medium == "video"):
            return  # No description counts such videos.
        if rule["kind"] == "measured":
            rows = [row for row in rule["table"]["rows"] if row[-1] is not None]
            if medium == "audio":
                samples = [dict(audio=[(row[0], rule["sample_rate_hz"])]) for row in rows if row[0] <= AUDIO_SAMPLES_MAX]
            else:
                samples = [dict(images=[tuple(row[:2])]) for row in rows]
        self.samples(f"{medium} ({rule['rule']['rule'] if 'rule' in rule else rule['kind']})", module, samples)

    def samples(self, name, module, samples):
        """Compares tokens and the FLOPs of a module; markers that a chat template puts around media may be missing in all alike."""
        pairs = [[counted(costs, sample) for costs in self.costs] for sample in samples]
        both = [pair for pair in pairs if None not in pair]
        refused = sum(pair.count(None) == 1 for pair in pairs)
        markers = sorted({by_hand["tokens"] - described["tokens"] for by_hand, described in both})
        seconds = [[cost["seconds"][module] for cost in pair] for pair in both]
        worst = max((abs(described / by_hand - 1) for by_hand, described in seconds if by_hand), default=0)
        self.compared.append(f"{len(both)} {name}")
        if refused or not both:
            self.differences.append(f"{name}: {refused} of {len(pairs)} are refused by one, {len(both)} counted by both")
        if len(markers) > 1:
            self.differences.append(f"{name}: tokens differ by {markers[:3]}")
        if worst > FLOPS_DIFFERENCE_MAX:
            self.differences.append(f"{name}: FLOPs differ by {100 * worst:.2f} %")


def counted(costs, sample):
    """Returns the cost of a sample; nothing if its sizes are refused."""
    try:
        return costs.cost(**sample)
    except Error:
        return None


def row(model_type):
    """Returns the outcome of a type, and what was compared or differs."""
    with tempfile.TemporaryDirectory() as scratch:
        opened = make_checkpoint(model_type, Path(scratch))
        comparison = Comparison(opened, document.from_parts(opened, ""))
        comparison.run()
    found = comparison.differences
    return ("differs", "; ".join(found)) if found else ("equal", ", ".join(comparison.compared))


def classes():
    """Returns the name of the model class by type."""
    return modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES


def types_by_hand():
    """Returns the types that dflop reads by hand and transformers builds, and those that it does not."""
    known = sorted({name for family in dflop.models()["families"] for name in family["model_types"]} - set(PARTS))
    return [name for name in known if name in classes()], [name for name in known if name not in classes()]


def too_long(*_):
    raise ModelError(f"takes more than {SECONDS_MAX} s of processor time")


def main():
    warnings.simplefilter("ignore")
    hf.logging.set_verbosity_error()
    types, others = types_by_hand()
    unknown = set(sys.argv[1:]) - set(types)
    if unknown:
        sys.exit(f"dflop does not read by hand, or transformers does not build: {', '.join(sorted(unknown))}")
    signal.signal(signal.SIGPROF, too_long)
    failed = []
    print("| type | outcome | seconds | compared, or what differs |\n| --- | --- | --- | --- |")
    for model_type in sys.argv[1:] or types:
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
        if outcome != "equal":
            failed.append(model_type)
    print(f"transformers builds none of: {', '.join(others)}")
    if failed:
        sys.exit(f"refused or different: {', '.join(failed)}")


if __name__ == "__main__":
    main()
