"""Small random models of families that take images, with tokenizers of their own, for `model_runs.py`."""

import json

import transformers as hf

MISTRAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "<pad>"]
LLAVA = ["<unk>", "<s>", "</s>", "<image>", "<pad>"]
SMOLVLM = ["<|im_start|>", "<|im_end|>", "<end_of_utterance>", "<image>", "<fake_token_around_image>", "<global-img>"] + [
    f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
GEMMA = ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"]
GLM = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|begin_of_image|>", "<|end_of_image|>",
       "<|image|>", "<|begin_of_video|>", "<|end_of_video|>", "<|video|>"]
SENTENCES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
CLIP = dict(model_type="clip_vision_model", hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
            patch_size=14, image_size=336)
SIGLIP = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, patch_size=14)
PIXTRAL = dict(model_type="pixtral", hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
GRIDS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


def tokenizer(words, added, special):
    """Makes the files of a tokenizer: the words of another one, with these added tokens."""
    made = json.loads(words.read_text())
    first = len(made["model"]["vocab"])
    plain = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    made["added_tokens"] = [{"id": first + at, "content": token, **plain} for at, token in enumerate(added)]
    return {"tokenizer.json": json.dumps(made), "tokenizer_config.json": json.dumps(special)}


def llava(text, first):
    return hf.LlavaForConditionalGeneration(hf.LlavaConfig(
        text_config=text(model_type="llama"), vision_config=CLIP, image_token_index=first + LLAVA.index("<image>")))


def llava_next(text, first):
    return hf.LlavaNextForConditionalGeneration(hf.LlavaNextConfig(
        text_config=text(model_type="mistral", sliding_window=None), vision_config=CLIP, image_grid_pinpoints=GRIDS,
        image_token_index=first + LLAVA.index("<image>")))


def pixtral(text, first):
    return hf.LlavaForConditionalGeneration(hf.LlavaConfig(
        text_config=text(model_type="mistral", sliding_window=None), vision_config=PIXTRAL | dict(image_size=1024, patch_size=16),
        vision_feature_layer=-1, vision_feature_select_strategy="full", image_token_index=first + MISTRAL.index("[IMG]")))


def mistral3(text, first):
    return hf.Mistral3ForConditionalGeneration(hf.Mistral3Config(
        text_config=text(model_type="mistral", sliding_window=None), vision_config=PIXTRAL | dict(image_size=1540, patch_size=14),
        spatial_merge_size=2, image_token_index=first + MISTRAL.index("[IMG]")))


def idefics3(text, first):
    return hf.Idefics3ForConditionalGeneration(hf.Idefics3Config(
        text_config=text(model_type="llama"), vision_config=SIGLIP | dict(image_size=364), scale_factor=2,
        image_token_id=first + SMOLVLM.index("<image>"), pad_token_id=first + 1))


def smolvlm(text, first):
    return hf.SmolVLMForConditionalGeneration(hf.SmolVLMConfig(
        text_config=text(model_type="llama"), vision_config=SIGLIP | dict(image_size=384), scale_factor=3,
        image_token_id=first + SMOLVLM.index("<image>"), pad_token_id=first + 1))


def gemma3(text, first, side=896, tokens=256):
    """Images are longer than the windows of the first layer.

    Without windows from transformers 5 on: 5.24.0 looks up in the positions of packed samples which tokens of a windowed layer are
    of one image, so that only the first sample of a row is right.
    """
    layers = ["full_attention" if hf.__version__.startswith("5.") else "sliding_attention", "full_attention"]
    rope = {"full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
    language = text(model_type="gemma3_text", head_dim=8, layer_types=layers, sliding_window=150,
                    query_pre_attn_scalar=5, rope_parameters=rope, pad_token_id=first)
    tower = SIGLIP | dict(model_type="siglip_vision_model", image_size=side, vision_use_head=False)
    ids = {key: first + GEMMA.index(token) for key, token in [
        ("boi_token_index", "<start_of_image>"), ("eoi_token_index", "<end_of_image>"), ("image_token_index", "<image_soft_token>")]}
    return hf.Gemma3ForConditionalGeneration(hf.Gemma3Config(text_config=language, vision_config=tower, mm_tokens_per_image=tokens, **ids))


def gemma3_crops(text, first):
    """Small squares, of which an image with crops has several."""
    return gemma3(text, first, side=224, tokens=16)


def glm4v(kind, text, first, **experts):
    """Heads of 16, of which half is rotated, in sections."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    language = text(hidden_size=64, rope_parameters=rope, rope_scaling=rope, partial_rotary_factor=0.5, pad_token_id=None, **experts)
    tower = dict(depth=2, hidden_size=32, num_heads=2, out_hidden_size=64, intermediate_size=48, image_size=336, patch_size=14)
    ids = {f"{key}_token_id": first + GLM.index(token) for key, token in [
        ("image", "<|image|>"), ("image_start", "<|begin_of_image|>"), ("image_end", "<|end_of_image|>"),
        ("video", "<|video|>"), ("video_start", "<|begin_of_video|>"), ("video_end", "<|end_of_video|>")]}
    config = getattr(hf, f"{kind}Config")(text_config=language, vision_config=tower, **ids)
    return getattr(hf, f"{kind}ForConditionalGeneration")(config)


def glm_4_1v(text, first):
    return glm4v("Glm4v", text, first)


def glm_4_5v(text, first):
    return glm4v("Glm4vMoe", text, first, moe_intermediate_size=24, n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=1,
                 n_group=1, topk_group=1, first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=1.0, head_dim=16)


# Models whose image processor has settings of its own: they are read from a directory, not from a preset.
PREPROCESSORS = {
    "gemma3-crops": {
        "image_processor_type": "Gemma3ImageProcessor", "size": {"height": 224, "width": 224}, "do_pan_and_scan": True,
        "pan_and_scan_min_crop_size": 64, "pan_and_scan_max_num_crops": 3, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    },
}
# Preset: the model, the added tokens of its tokenizer, and their roles.
FAMILIES = {
    "llava-1.5-7b": (llava, LLAVA, SENTENCES),
    "llava-next-mistral-7b": (llava_next, LLAVA, SENTENCES),
    "pixtral-12b": (pixtral, MISTRAL, SENTENCES),
    "mistral-small-3.1-24b": (mistral3, MISTRAL, SENTENCES),
    "idefics3-8b": (idefics3, SMOLVLM, {"bos_token": "<|im_start|>", "eos_token": "<end_of_utterance>", "pad_token": "<|im_end|>"}),
    "gemma3-4b": (gemma3, GEMMA, {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}),
    "glm-4.1v-9b": (glm_4_1v, GLM, {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}),
    "glm-4.5v": (glm_4_5v, GLM, {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}),
    "gemma3-crops": (gemma3_crops, GEMMA, {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}),
    "smolvlm2-2.2b": (smolvlm, SMOLVLM, {"bos_token": "<|im_start|>", "eos_token": "<end_of_utterance>", "pad_token": "<|im_end|>"}),
}
