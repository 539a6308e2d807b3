"""Records the Hugging Face processors' inputs for conversations, as truth for the loader's preparation.

    python3 tests/record/model_inputs.py            # needs transformers, torch, torchvision, jinja2

writes `tests/golden/model_inputs/`: one `cases.json` for all families, and a directory for each of two small
tokenizers. A tokenizer is trained only if its directory is missing, from `--corpus FILE…` (any English text); then all
cases must be recorded again, which this script does anyway. Nothing is fetched from a hub: processors are put
together from their classes with their published settings.

A case has the sample as in a shard (`json` or `txt`, sizes of images, frames of clips), the family and
the truth: `input_ids` and `labels` with runs of equal values as `[value, count]`, and the integers that go with media.
Labels are the assistant masks that `transformers` itself makes of a template with `{% generation %}` around the
assistant's text and the token that ends its turn.
"""

import argparse
import json
from pathlib import Path

import common
import numpy as np
from common import json_lines, runs
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    InternVLProcessor,
    InternVLVideoProcessor,
    PreTrainedTokenizerFast,
    Qwen2AudioProcessor,
    Qwen2VLConfig,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    WhisperFeatureExtractor,
    GotOcr2ImageProcessor,
)
from PIL import Image

GOLDEN = common.GOLDEN / "model_inputs"
ENTRIES = 1200

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_SPLIT = QWEN_SPLIT.replace(r"\p{N}| ?", r"\p{N}{1,3}| ?")

CHATML_TOKENS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>", "<image>", "<video>", "<img>", "</img>", "<IMG_CONTEXT>", "<|audio_bos|>", "<|AUDIO|>",
    "<|audio_eos|>",
]
LLAMA_TOKENS = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


def train(folder, corpus, split, tokens, config):
    """Trains a byte-level BPE in the manner of a family and writes its two files."""
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(split), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=ENTRIES, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator([Path(path).read_text(encoding="utf-8") for path in corpus], trainer)
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    bpe.post_processor = processors.ByteLevel(trim_offsets=False)
    if "bos_token" in config:
        bos = config["bos_token"]
        template = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, bpe.token_to_id(bos))])
        bpe.post_processor = processors.Sequence([bpe.post_processor, template])
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def chatml_template(head, image="", audio="", media_first=False, text="part['text']", end="'<|im_end|>\\n'", role="'\\n'"):
    """Makes ChatML with `{% generation %}` marks; families differ in the pieces."""
    system = (
        "{% if loop.first and message['role'] != 'system' %}{{ '<|im_start|>system\\nYou are a helpful assistant."
        "<|im_end|>\\n' }}{% endif %}"
    )
    first, blank = end[:-3] + "'" if end.endswith("\\n'") else end, "{{ '\\n' }}" if end.endswith("\\n'") else ""
    words = "{% if part['type'] == 'text' %}{{ " + text + " }}{% endif %}"
    media = "{% if part['type'] == 'image' %}" + image + "{% elif part['type'] == 'audio' %}" + audio + "{% endif %}"
    loop = "{% for part in message['content'] %}"
    content = loop + media + "{% endfor %}" + loop + words + "{% endfor %}" if media_first else loop + media + words + "{% endfor %}"
    return (
        "{% set clips = namespace(count=0) %}{% for message in messages %}" + (system if head else "")
        + "{{ '<|im_start|>' + message['role'] + " + role + " }}{% if message['role'] == 'assistant' %}"
        + ("{{ '\\n' }}" if media_first else "")
        + "{% generation %}{{ message['content'][0]['text'] + " + first + " }}{% endgeneration %}{% else %}"
        + content + "{{ " + first + " }}{% endif %}" + blank + "{% endfor %}"
    )


LLAMA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
)

TEMPLATES = {
    "qwen2-vl-7b": chatml_template(True, image="<|vision_start|><|image_pad|><|vision_end|>"),
    "llava-ov-qwen2.5-7b": chatml_template(
        False, image="<image>", media_first=True, text="'\\n' + part['text']", end="'<|im_end|>'", role="' '"
    ),
    "internvl3-8b": chatml_template(False, image="{{ '<IMG_CONTEXT>\\n' }}"),
    "qwen2-audio-7b": chatml_template(
        True,
        audio="{% set clips.count = clips.count + 1 %}Audio {{ clips.count }}: "
        "{{ '<|audio_bos|><|AUDIO|><|audio_eos|>\\n' }}",
    ),
    "text": LLAMA_TEMPLATE,
}


def processors_of_families():
    special = dict(
        image_token="<image>", video_token="<video>", start_image_token="<img>", end_image_token="</img>",
        context_image_token="<IMG_CONTEXT>",
    )

    def tokenizer(name, **extra):
        folder = GOLDEN / name
        config = json.loads((folder / "tokenizer_config.json").read_text())
        tokens = {key: value for key, value in config.items() if key.endswith("_token")}
        return PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), padding_side="right", extra_special_tokens=extra, **tokens
        )

    grid = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]
    tiles = dict(size={"height": 448, "width": 448}, min_patches=1, max_patches=12, crop_to_patches=True)
    return {
        "qwen2-vl-7b": Qwen2VLProcessor(
            Qwen2VLImageProcessor(min_pixels=3136, max_pixels=12845056), tokenizer("chatml"), Qwen2VLVideoProcessor()
        ),
        "llava-ov-qwen2.5-7b": LlavaOnevisionProcessor(
            LlavaOnevisionImageProcessor(image_grid_pinpoints=grid), tokenizer("chatml"), LlavaOnevisionVideoProcessor(),
            num_image_tokens=729, vision_feature_select_strategy="full",
        ),
        "internvl3-8b": InternVLProcessor(
            GotOcr2ImageProcessor(**tiles),
            tokenizer("chatml", **{key: special[key] for key in special if key != "image_token"}),
            InternVLVideoProcessor(),
        ),
        "qwen2-audio-7b": Qwen2AudioProcessor(
            WhisperFeatureExtractor(feature_size=128, return_attention_mask=True), tokenizer("chatml"), chat_template="none"
        ),
        "text": tokenizer("llama3"),
    }


def picture(size):
    width, height = size
    ramp = np.arange(width * height * 3, dtype=np.uint32).reshape(height, width, 3)
    return Image.fromarray((ramp * 2654435761 >> 13).astype(np.uint8))


def parts(*items):
    """Makes content parts: `I` is an image, `A` a clip, anything else words."""
    kinds = {"I": {"type": "image"}, "A": {"type": "audio"}}
    return [kinds.get(item) or {"type": "text", "text": item} for item in items]


def turns(*said):
    """Makes alternating turns of user and assistant, after a system turn if one is marked."""
    roles = ["system"] * (said[0][:1] == ["S"]) + ["user", "assistant"] * len(said)
    return [
        {"role": role, "content": parts(*[item for item in content if item != "S"])}
        for role, content in zip(roles, said)
    ]


def llava(*values):
    names = ["human", "gpt"]
    return {"conversations": [{"from": names[at % 2], "value": value} for at, value in enumerate(values)]}


QUESTION, ANSWER = "What is shown here?", "A red kite over the sea, and 12 boats below it."
UNUSUAL = "  Zwei Wörter – 日本語, émoji 🪁🪁!\n\n\tdef f(x):\n        return x ** 2  # 1234567 "

# Conversations: the field of the sample, the equivalent messages, images and clips.
SAID = [
    (llava(f"<image>\n{QUESTION}", ANSWER), turns(["I", QUESTION], [ANSWER]), 1),
    (llava(f"{QUESTION}\n<image>", ANSWER, "And the sky?", "Blue."), turns([QUESTION, "I"], [ANSWER], ["And the sky?"], ["Blue."]), 1),
    (llava(f"<image>\n<image>\n{QUESTION}", UNUSUAL), turns(["I", "I", QUESTION], [UNUSUAL]), 2),
    (llava("First <image> then <image> last", ANSWER), turns(["First ", "I", " then ", "I", " last"], [ANSWER]), 2),
    (llava(QUESTION, ANSWER), turns([QUESTION], [ANSWER]), 0),
    (llava(QUESTION, ANSWER, "More?", "assistant"), turns(["I", QUESTION], [ANSWER], ["More?"], ["assistant"]), 1),
    ({"instruction": UNUSUAL, "output": ANSWER}, turns([UNUSUAL], [ANSWER]), 0),
    (
        {"messages": [{"role": "system", "content": "Answer briefly."},
                      {"role": "user", "content": parts("I", QUESTION)}, {"role": "assistant", "content": ANSWER},
                      {"role": "user", "content": parts("I", "And this?")}, {"role": "assistant", "content": "im_end"}]},
        turns(["S", "Answer briefly."], ["I", QUESTION], [ANSWER], ["I", "And this?"], ["im_end"]), 2,
    ),
]
SIZES = [[640, 480], [300, 500], [1024, 768], [96, 64], [1920, 1080]]
FRAMES = [16000, 6401, 480000, 99999]


def for_audio(value):
    """Returns the same conversations with clips in place of images."""
    text = json.dumps(value).replace("<image>", "<audio>").replace('"type": "image"', '"type": "audio"')
    return json.loads(text)


def record(name, processor, case):
    """Runs the processor of a family."""
    messages, template = case["messages"], TEMPLATES[name]
    if name == "text":
        flat = [{"role": m["role"], "content": "".join(p["text"] for p in m["content"])} for m in messages]
        out = processor.apply_chat_template(
            flat, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
        )
        return dict(out)
    text = processor.apply_chat_template(messages, chat_template=template)
    media = {}
    if case.get("images"):
        media["images"] = [[picture(size) for size in case["images"]]]
    if case.get("frames"):
        sound = [np.sin(np.arange(frames) / 7).astype(np.float32) for frames in case["frames"]]
        media |= {"audio": sound, "sampling_rate": 16000}
    return {key: np.asarray(value) for key, value in processor(text=[text], **media).items()}


def char_labels(processor, name, messages):
    """Returns whether each character of the rendered text is the assistant's, by `transformers`' own marks."""
    from transformers.utils.chat_template_utils import render_jinja_template

    tokenizer = getattr(processor, "tokenizer", processor)
    if name == "text":
        messages = [{"role": m["role"], "content": "".join(p["text"] for p in m["content"])} for m in messages]
    rendered, marks = render_jinja_template(
        conversations=[messages], chat_template=TEMPLATES[name], return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    return rendered[0], marks[0]


def labels_of(processor, name, case, ids):
    """Returns labels for `ids`, from the marks in the text before media were expanded."""
    tokenizer = getattr(processor, "tokenizer", processor)
    text, marks = char_labels(processor, name, case["messages"])
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    learned = [any(s < stop and start < e for start, stop in marks) for s, e in encoded["offset_mapping"]]
    media = {tokenizer.convert_tokens_to_ids(token) for token in CHATML_TOKENS[3:]} if name != "text" else set()
    # The expansion only repeats or adds tokens of media, so all others keep their order.
    words = [(id_, is_) for id_, is_ in zip(encoded["input_ids"], learned) if id_ not in media]
    labels, at = [], 0
    for id_ in ids:
        if id_ in media:
            labels.append(-100)
            continue
        assert words[at][0] == id_
        labels.append(int(id_) if words[at][1] else -100)
        at += 1
    assert at == len(words)
    return labels


def rope(case, ids, types, grids):
    """Computes the positions of Qwen2-VL for one sample."""
    import torch
    from transformers import Qwen2VLModel

    model = Qwen2VLModel.__new__(Qwen2VLModel)
    torch.nn.Module.__init__(model)
    model.config = Qwen2VLConfig()
    grid = torch.tensor(np.asarray(grids)) if grids is not None else None
    positions, _ = model.get_rope_index(torch.tensor([list(map(int, ids))]), torch.tensor([list(map(int, types))]), grid)
    return positions[:, 0].tolist()


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--corpus", nargs="*", default=[])
    arguments.add_argument("--golden", type=Path, default=common.GOLDEN, help="directory to write below")
    options = arguments.parse_args()
    corpus = options.corpus
    chatml = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    llama = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "pad_token": "<|end_of_text|>"}
    for name, split, tokens, config in [("chatml", QWEN_SPLIT, CHATML_TOKENS, chatml), ("llama3", LLAMA_SPLIT, LLAMA_TOKENS, llama)]:
        if not (GOLDEN / name).is_dir():
            train(GOLDEN / name, corpus, split, tokens, config)
    cases = []
    for name, processor in processors_of_families().items():
        for number, (field, messages, media) in enumerate(SAID):
            if name == "text" and media:
                continue
            case = {"family": name, "json": field, "messages": messages}
            sizes = [SIZES[(number + at) % len(SIZES)] for at in range(media)]
            if name == "qwen2-audio-7b":
                case = for_audio(case)
                case["frames"] = [FRAMES[(number + at) % len(FRAMES)] for at in range(media)]
            elif media:
                case["images"] = sizes
            out = record(name, processor, case)
            ids = np.asarray(out["input_ids"]).reshape(-1)
            case["input_ids"] = runs(ids)
            case["labels"] = runs(labels_of(processor, name, case, ids))
            for key in ["image_grid_thw", "image_sizes", "batch_num_images", "mm_token_type_ids"]:
                if key in out:
                    value = np.asarray(out[key])
                    case[key] = runs(value.reshape(-1)) if key == "mm_token_type_ids" else value.tolist()
            if "pixel_values" in out:
                case["pixel_values_shape"] = list(out["pixel_values"].shape)
            if name == "qwen2-vl-7b":
                axes = rope(case, ids, out["mm_token_type_ids"].reshape(-1), out.get("image_grid_thw"))
                case["position_sums"] = [[sum(axis), max(axis), axis[-1]] for axis in axes]
                if len(ids) < 400:
                    case["positions"] = axes
            cases.append(case)
    texts = {"templates": TEMPLATES, "cases": cases, "batches": batches(cases), "encodings": encodings()}
    (options.golden / "model_inputs" / "cases.json").write_text(
        "{\n" + ",\n".join(f'"{key}": {json_lines(value)}' for key, value in texts.items()) + "\n}\n"
    )


def batches(cases):
    """Pads the cases of one family to one batch, on either side; removes the messages, which only HF needs."""
    recorded = []
    for name, processor in processors_of_families().items():
        ours = [(at, case) for at, case in enumerate(cases) if case["family"] == name]
        ours = [(at, case) for at, case in ours if name == "text" or case.get("images") or case.get("frames")][:3]
        for side in ["right", "left"]:
            texts, media = [], {}
            for _, case in ours:
                messages = case["messages"]
                if name == "text":
                    messages = [{"role": m["role"], "content": "".join(p["text"] for p in m["content"])} for m in messages]
                texts.append(processor.apply_chat_template(messages, chat_template=TEMPLATES[name], tokenize=False))
            if name == "text":
                out = processor(texts, padding=True, padding_side=side, add_special_tokens=False)
            else:
                if ours[0][1].get("images"):
                    media["images"] = [[picture(size) for size in case["images"]] for _, case in ours]
                else:
                    sound = [np.sin(np.arange(frames) / 7).astype(np.float32) for _, case in ours for frames in case["frames"]]
                    media = {"audio": sound, "sampling_rate": 16000}
                processor.tokenizer.padding_side = side
                padding = {"padding": True, "padding_side": side}
                out = processor(text=texts, **media, text_kwargs=padding)
            batch = {"cases": [at for at, _ in ours], "side": side}
            for key in ["input_ids", "attention_mask", "mm_token_type_ids"]:
                if key in out:
                    rows = [[int(value) for value in row] for row in out[key]]
                    batch[key] = {"shape": [len(rows), len(rows[0])], "values": runs(sum(rows, []))}
            for key in ["image_grid_thw", "image_sizes", "batch_num_images"]:
                if key in out:
                    batch[key] = np.asarray(out[key]).tolist()
            if "pixel_values" in out:
                batch["pixel_values_shape"] = list(np.asarray(out["pixel_values"]).shape)
            recorded.append(batch)
    for case in cases:
        del case["messages"]
    return recorded


def encodings():
    """Returns texts and their ids, without special tokens, by both tokenizers."""
    texts = [QUESTION, ANSWER, UNUSUAL, "", "\n", " ", "x" * 50, "e\u0301 \u1e9b\u0323", "<|im_start|>a<|eot_id|> b"]
    return {
        name: [
            {"text": text, "ids": Tokenizer.from_file(str(GOLDEN / name / "tokenizer.json")).encode(text, add_special_tokens=False).ids}
            for text in texts
        ]
        for name in ["chatml", "llama3"]
    }


if __name__ == "__main__":
    main()
