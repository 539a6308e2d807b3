"""Small random models of families that take images, with tokenizers of their own, for `model_runs.py`."""

import json

import transformers as hf

MISTRAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "<pad>"]
LLAVA = ["<unk>", "<s>", "</s>", "<image>", "<pad>"]
SMOLVLM = ["<|im_start|>", "<|im_end|>", "<end_of_utterance>", "<image>", "<fake_token_around_image>", "<global-img>"] + [
    f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
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


# Preset: the model, the added tokens of its tokenizer, and their roles.
FAMILIES = {
    "llava-1.5-7b": (llava, LLAVA, SENTENCES),
    "llava-next-mistral-7b": (llava_next, LLAVA, SENTENCES),
    "pixtral-12b": (pixtral, MISTRAL, SENTENCES),
    "mistral-small-3.1-24b": (mistral3, MISTRAL, SENTENCES),
    "idefics3-8b": (idefics3, SMOLVLM, {"bos_token": "<|im_start|>", "eos_token": "<end_of_utterance>", "pad_token": "<|im_end|>"}),
    "smolvlm2-2.2b": (smolvlm, SMOLVLM, {"bos_token": "<|im_start|>", "eos_token": "<end_of_utterance>", "pad_token": "<|im_end|>"}),
}
