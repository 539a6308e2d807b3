"""Makes a small configuration, processor and model for any type of transformers from class defaults; nothing is downloaded.

Widths and numbers of heads are divided by one factor, which leaves the size of heads, and with it rotary sections, as they are.
The tokenizer is the small one of the recorded conversations, with a special token for every role that a processor asks it for.
"""

import inspect
import json
import re
from pathlib import Path

import transformers as hf
from dflop._description import checkpoint, media
from dflop.errors import ModelError
from transformers.models.auto import feature_extraction_auto, image_processing_auto, modeling_auto, processing_auto, video_processing_auto

TOKENIZER = Path(__file__).resolve().parents[2] / "tests" / "golden" / "model_inputs" / "chatml"
IMAGE_TYPES = {name: one for name, one in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items()}
TEXT_TYPES = {name: one for name, one in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name not in IMAGE_TYPES}
AUDIO_TYPES = {name: one for name, one in modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.items()
               if name not in IMAGE_TYPES and name not in TEXT_TYPES}
CLASSES = TEXT_TYPES | AUDIO_TYPES | IMAGE_TYPES
LAYERS, EXPERTS, VOCABULARY = 2, 16, 2048
FACTORS = (16, 8, 4, 2)
# Types whose processor is that of another type, by the checkpoints that are published for them.
RELATIVES = {"qwen3_vl_moe": "qwen3_vl", "glm4v_moe": "glm4v", "cosmos3_omni": "qwen3_vl", "glm_ocr": "glm46v", "glmga": "glm46v", "mistral4": "mistral3",
             "qwen2_5_omni_thinker": "qwen2_5_omni", "qwen3_omni_moe_thinker": "qwen3_omni_moe", "fast_vlm": "llava",
             "diffusion_gemma": "gemma4", "glmasr": "glmasr"}
_LAYER_NAMES = re.compile(r"^(num_(hidden_)?layers|(resampler_)?depth|(encoder|decoder)_layers|n_layers?|num_(encoder|decoder|text|global|local)_layers|vision_layers|layers|"
                          r"num_hidden_layers\w*|num_global_layers|hybrid_layers|num_blocks)$")
_WIDTHS = re.compile(r"(hidden_size|hidden_dim|d_model|n_embd|embed_dim|embedding_size|intermediate|ffn|d_ff|n_inner|inner_dim|input_dim|output_dim|"
                     r"projection_dim|projection_size|projector_dim|proj_dim|lru_width|d_inner|mlp_dim|text_dim|vision_dim|q_lora_rank|kv_lora_rank|d_ssm|"
                     r"adapter_(in|out)_dim|adapter_input_size|expansion_dim|embd_pdim|attention_hidden|_channels$|dim_feedforward|^width$)")
_NO_WIDTHS = re.compile(r"(^input_dim$|^audio_embed_dim$|^patch_embed_hidden_size$|_per_|ratio|multip|factor|layer|act|head_dim|num_channels|in_channels|in_chans|dropout|tokens|position|_std|scale|freq|bias|divisor)")
_HEADS = re.compile(r"^(n_heads?|num_heads|n_head|num_\w*heads?\w*|(encoder|decoder)_attention_heads|\w*attention_heads|\w*_n_heads|\w*num_heads)$")
_KEY_HEADS = re.compile(r"(kv_heads|key_value_heads|n_head_kv|num_kv|n_groups)")
_EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_routed_experts")
_TOKEN_IDS = re.compile(r"token_(id|index|ids)$|_token$")


def shrunk(values, factor):
    """Returns configuration values with few layers and experts, a small vocabulary, and widths and heads divided by a factor."""
    if "architecture" in values:
        return values  # Another package has a model of these sizes only.
    made = {}
    counts = {found for name, found in values.items() if _LAYER_NAMES.match(str(name)) and is_count(found)}
    by_layer = [found for found in values.values() if isinstance(found, list) and len(found) in counts and len(found) > LAYERS]
    kept = {len(found): chosen([repr(one) for one in zip(*(other for other in by_layer if len(other) == len(found)))]) for found in by_layer}
    for name, found in filled(values).items():
        if not isinstance(name, str):
            made[name] = found
            continue
        if isinstance(found, dict) and found and "layer" in name and all(re.fullmatch(r"\d+", str(key)) for key in found):
            places = kept.get(max(counts, default=0)) or range(LAYERS)
            found = {at: found.get(place, found.get(str(place))) for at, place in enumerate(places) if place in found or str(place) in found}
        elif isinstance(found, dict) and name not in ("rope_parameters", "rope_scaling", "id2label", "label2id"):
            found = shrunk(found, factor)
        elif _LAYER_NAMES.match(name) and is_count(found):
            found = min(found, LAYERS)
        elif isinstance(found, list) and len(found) in kept:
            found = [found[at] for at in kept[len(found)]]
        elif isinstance(found, list) and found and all(is_count(one) for one in found) and counts and re.search(r"index|layers|blocks|layer_ids", name):
            found = [one for one in found if one < min(min(counts), LAYERS)] or [1]
        elif is_count(found):
            found = smaller(name, found, factor)
        made[name] = found
    return made


def filled(values):
    """Returns values with sizes in place of those that a class has none for, although its model needs them."""
    made = dict(values)
    heads = values.get("num_attention_heads")
    if "head_dim" in values and values["head_dim"] is None and is_count(values.get("hidden_size")) and is_count(heads):
        made["head_dim"] = values["hidden_size"] // heads
    if any(name in values for name in _EXPERT_COUNTS):
        made |= {name: EXPERTS for name in _EXPERT_COUNTS if name in values and values[name] is None}
        made |= {name: 2 for name in ("num_experts_per_tok", "moe_topk", "top_k") if name in values and values[name] is None}
    return made


def smaller(name, value, factor):
    """Returns a smaller vocabulary, number of experts or heads, width or token id; other values as they are."""
    if "vocab_size" in name:
        return min(value, VOCABULARY)
    if name in _EXPERT_COUNTS:
        return min(value, EXPERTS)
    if name == "num_kv_shared_layers":
        return 0
    if name in ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"):
        return min(value, 1)
    if _TOKEN_IDS.search(name):
        return min(value, VOCABULARY - 1)
    if _KEY_HEADS.search(name):
        return max(1, value // factor) if value > 1 else value
    if _HEADS.match(name) or (value > 1 and _WIDTHS.search(name) and not _NO_WIDTHS.search(name)):
        return divided(name, value, factor)
    return value


def is_count(value):
    return isinstance(value, int) and not isinstance(value, bool)


def divided(name, value, factor):
    if value % factor:
        raise ArithmeticError(f"{name} of {value} cannot be divided by {factor}")
    return value // factor


def chosen(kinds):
    """Returns the places of some layers, one of each kind if there are not too many."""
    places = sorted(range(len(kinds)), key=lambda at: (kinds[at] in kinds[:at], at))
    return sorted(places[:LAYERS])


def merged(values, more):
    """Returns nested values with some replaced."""
    return values | {key: merged(values.get(key) or {}, one) if isinstance(one, dict) else one for key, one in more.items()}


def configurations(model_type, overrides, kept=None):
    """Yields small configurations of a type, the smallest first, and with their factor; the last is of the widths of the class.

    `overrides` replace defaults of the class; `kept` are values of the small configuration.
    """
    kind = hf.CONFIG_MAPPING[model_type]
    defaults = kind()
    values = with_parts(defaults)
    for name, part_kind in (kind.sub_configs or {}).items():
        if values.get(name) is None and part_kind is not hf.AutoConfig:
            values[name] = with_parts(part_kind())
    values = merged(joined(values), overrides)
    for factor in (*FACTORS, 1):
        try:
            made = kind.from_dict(merged(shrunk(values, factor), kept or {}))
        except Exception:
            if factor == 1:
                raise
            continue
        made.architectures = [CLASSES[model_type]]
        yield factor, made


def joined(values):
    """Returns values whose encoders end in vectors as wide as the LLM, where classes have defaults of different models."""
    width = (values.get("text_config") or {}).get("hidden_size")
    made = dict(values)
    if "thinker_config" in values:
        made["thinker_config"] = joined(values["thinker_config"])
    for name in ("vision_config", "audio_config", "adapter_config"):
        part = dict(values.get(name) or {})
        for field in ("out_hidden_size", "text_hidden_size", *(["output_dim"] if name == "audio_config" else [])):
            if is_count(part.get(field)) and is_count(width):
                part[field] = width
        if part:
            made[name] = part
    return made


def with_parts(config):
    """Returns the values of a configuration, those of its parts included where it leaves equal ones out."""
    values = config.to_dict()
    for name, part in vars(config).items():
        if hasattr(part, "to_dict") and hasattr(part, "model_type"):
            values[name] = with_parts(part)
    return values


def relatives(model_type):
    """Returns the type and those whose processor it shares."""
    return [one for one in (model_type, RELATIVES.get(model_type)) if one]


def make_tokenizer(kind):
    """Returns the small tokenizer, with the special tokens and roles that a processor's code names."""
    tokenizer = hf.AutoTokenizer.from_pretrained(TOKENIZER, local_files_only=True)
    tokenizer.unk_token = tokenizer.bos_token = "<|endoftext|>"
    source = "" if kind is None else inspect.getsource(inspect.getmodule(kind))
    marks = set(re.findall(r"[\"'](<[^<>\s\"'{}]+>|\[[A-Z_]+\]|\|[A-Z_]+\|)[\"']", source))
    marks |= {one for name, one in vars(kind or object).items() if name.endswith("_TOKEN") and isinstance(one, str)}
    roles = {name.removesuffix("_id") for name in re.findall(r"tokenizer(?:\.|, [\"'])(\w+_token(?:_id)?)\b", source)}
    # Without these, processors use a token of their own, which is among the marks.
    roles -= set(re.findall(r"hasattr\(tokenizer, [\"'](\w+_token)[\"']", source))
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(marks)})
    for role in sorted(roles):
        if not isinstance(getattr(tokenizer, role, None), str):
            token = default_of(source, role) or f"<|{role.removesuffix('_token')}|>"
            tokenizer.add_special_tokens({"additional_special_tokens": [token]}, replace_extra_special_tokens=False)
            setattr(tokenizer, role, token)
        if getattr(tokenizer, f"{role}_id", None) is None:
            setattr(tokenizer, f"{role}_id", tokenizer.convert_tokens_to_ids(getattr(tokenizer, role)))
    return tokenizer


def default_of(source, role):
    """Returns the token that a processor uses if its tokenizer has none for a role."""
    found = re.search(rf"\b{role}(?:: \S+)? ?= ?[\"']([^\"']+)[\"']", source)
    return found and found[1]


def make_processor(model_type, config, settings):
    """Returns the default processor of a type, with the small tokenizer, for media as the configuration has them.

    `settings` are those of the processor and, under `parts`, those of its parts.
    """
    names = processing_auto.PROCESSOR_MAPPING_NAMES
    name = next((names[key] for key in relatives(model_type) if key in names), None)
    own = re.sub(r"For[A-Z]\w*$", "Processor", CLASSES[model_type])
    if name is None and hasattr(hf, own):
        name = own
    if name is None:
        raise ModelError("transformers has no processor for it")
    kind = getattr(hf, name)
    tokenizer = make_tokenizer(kind)
    arguments = dict(settings)
    more = arguments.pop("parts", {})
    for attribute in kind.get_attributes():
        if "tokenizer" in attribute:
            arguments[attribute] = tokenizer
        elif "feature_extractor" in attribute or "audio_processor" in attribute:
            arguments[attribute] = part(kind, attribute, model_type, "FEATURE_EXTRACTOR_MAPPING_NAMES", config, more)
        elif "video" in attribute:
            arguments[attribute] = part(kind, attribute, model_type, "VIDEO_PROCESSOR_MAPPING_NAMES", None, more)
        else:
            arguments[attribute] = part(kind, attribute, model_type, "IMAGE_PROCESSOR_MAPPING_NAMES", config, more)
    arguments = required(kind, config) | arguments
    return kind(**arguments)


def required(kind, config):
    """Returns arguments of a processor that it has no value for, as the configuration has them."""
    vision = getattr(config, "vision_config", None)
    found = {}
    for name, one in inspect.signature(kind.__init__).parameters.items():
        if one.default not in (None, inspect.Parameter.empty) or one.kind is inspect.Parameter.VAR_KEYWORD:
            continue
        for owner in (config, vision):
            value = getattr(owner, name, None)
            if value is not None and name not in ("self", "chat_template"):
                found[name] = value
                break
    return found


def part(kind, attribute, model_type, mapping, config, more):
    """Returns a processor's part from its class defaults."""
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
                settings = {} if config is None else media_settings(found, config)
                return found(**(settings | more.get(attribute, {})))
    raise ModelError(f"no default class for `{attribute}` of {kind.__name__}")


def media_settings(found, config):
    """Returns patch, image size and mel bins of the configuration for a part whose defaults are others."""
    vision, defaults = getattr(config, "vision_config", None), found()
    bins = getattr(getattr(config, "audio_config", None), "num_mel_bins", None)
    settings = {"feature_size": bins} if bins and hasattr(defaults, "feature_size") else {}
    patch, side = (getattr(vision, name, None) for name in ("patch_size", "image_size"))
    if isinstance(patch, int) and isinstance(getattr(defaults, "patch_size", None), int):
        settings["patch_size"] = patch
    for own, other in (("merge_size", "spatial_merge_size"), ("temporal_patch_size", "temporal_patch_size")):
        if isinstance(getattr(defaults, own, None), int) and isinstance(getattr(vision, other, None), int):
            settings[own] = getattr(vision, other)
    side = side[0] if isinstance(side, list | tuple) else side
    size = dict(getattr(defaults, "size", None) or {})
    if isinstance(side, int) and set(size) == {"height", "width"}:
        settings["size"] = {"height": side, "width": side}
    elif isinstance(side, int) and isinstance(getattr(defaults, "max_image_size", None), dict):
        settings["max_image_size"] = {"longest_edge": side}
    elif isinstance(side, int) and set(size) == {"shortest_edge"} and getattr(defaults, "crop_size", None):
        settings |= {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
    return settings


def with_token_ids(config, processor, tokens):
    """Sets the ids of placeholders in a configuration, and in its parts, to those of the processor; some by their tokens."""
    tokenizer = getattr(processor, "tokenizer", processor)
    for owner in [config, *checkpoint.sub_configs(config)]:
        for name in list(vars(owner)):
            role = name.removesuffix("_id").removesuffix("_index")
            if not (name.endswith(("_token_id", "_token_index"))):
                continue
            several = getattr(processor, f"{role}_ids", None) or [None]
            found = next((one for one in (several[0], getattr(processor, f"{role}_id", None), getattr(tokenizer, f"{role}_id", None)) if is_count(one)), None)
            token = str(getattr(processor, role, None) or "")
            if found is None and token:
                found = tokenizer.convert_tokens_to_ids(token)
            if is_count(found):
                setattr(owner, name, found)
    known = tokenizer.get_vocab()
    for token in getattr(config, "vocabulary_map", None) or {}:
        config.vocabulary_map[token] = known.get(token, config.vocabulary_map[token])
    for name, token in tokens.items():
        setattr(config, name, tokenizer.convert_tokens_to_ids(token))
    return config
