"""Records the truth of a family of models that take images: tokens, FLOPs and model inputs.

A script `families/FAMILY.py` describes its family by the classes here and writes

- `tokens/FAMILY.json` with the files of checkpoints by name, and `tokens/NAME.csv.gz`, as `tokens.py` does;
- `flops/FAMILY.json` with cases as those of `flops.py`;
- `model_inputs/FAMILY.json` with conversations, see `record_inputs`.

Images are resized by the processors' Pillow backends. Pillow must be older than 12.2, from which on the order of the two
passes of `Image.resize` depends on the size.
"""

import json

import numpy as np
import PIL
import transformers
from PIL import Image
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

import flops
import tokens
from common import GOLDEN, checksum, json_lines, packed, runs
from processors import mix, picture

assert tuple(map(int, PIL.__version__.split(".")[:2])) < (12, 2), "Pillow must be older than 12.2"
SAMPLES = 20
# Packed sequences are found by the values of positions, which the meta device has none of.
transformers.masking_utils.find_packed_sequence_indices = lambda positions: None


def make_tokenizer(added, special, bos=None):
    """Makes a tokenizer of the words of `model_inputs/chatml` with other added tokens, `bos` before every text."""
    text = (GOLDEN / "model_inputs" / "chatml" / "tokenizer.json").read_text()
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(tokenizer_json(json.loads(text), added, bos))), padding_side="right", **special
    )


def tokenizer_json(made, added, bos):
    first = len(made["model"]["vocab"])
    made["added_tokens"] = [
        {"id": first + at, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for at, token in enumerate(added)
    ]
    if bos is not None:
        own = {"id": bos, "ids": [first + added.index(bos)], "tokens": [bos]}
        made["post_processor"] = {
            "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}], "special_tokens": {bos: own},
        }
    return made


# --- tokens ---


def record_tokens(golden, family, counted):
    """Records the items, encoder tokens and LLM tokens of images by each of `counted`, objects like `tokens.Family`."""
    files = {}
    for made in counted:
        files[made.name] = made.files
        lines = tokens.recorded(made, np.random.default_rng(11))
        (golden / "tokens" / f"{made.name}.csv.gz").write_bytes(packed(lines))
    (golden / "tokens" / f"{family}.json").write_text(json.dumps(files, indent=1) + "\n")


class Shape:
    """Stands for an image in functions that read only its shape, channels last."""

    def __init__(self, width, height):
        self.shape = (height, width, 3)
        self.ndim = 3


# --- FLOPs ---


def record_flops(golden, family, cases):
    text = ",\n".join(json.dumps(case.recorded()) for case in cases)
    (golden / "flops" / f"{family}.json").write_text(f"[\n{text}\n]\n")


# --- model inputs ---


def llava(*values):
    names = ["human", "gpt"]
    return {"conversations": [{"from": names[at % 2], "value": value} for at, value in enumerate(values)]}


def parts(*items):
    """Makes content parts: `I` is an image, anything else words."""
    return [{"type": "image"} if item == "I" else {"type": "text", "text": item} for item in items]


def turns(*said):
    """Makes alternating turns of user and assistant, after a system turn if one is marked."""
    roles = ["system"] * (said[0][:1] == ["S"]) + ["user", "assistant"] * len(said)
    return [{"role": role, "content": parts(*[item for item in items if item != "S"])} for role, items in zip(roles, said)]


QUESTION, ANSWER = "What is shown here?", "A red kite over the sea, and 12 boats below it."
UNUSUAL = "Zwei Wörter – 日本語, émoji 🪁🪁!\n\n\tdef f(x):\n        return x ** 2  # 1234567"
# Conversations: the field of the sample, the equivalent messages, and the number of images.
SAID = [
    (llava(f"<image>\n{QUESTION}", ANSWER), turns(["I", QUESTION], [ANSWER]), 1),
    (llava(f"<image>\n<image>\n{QUESTION}", UNUSUAL, "More?", "assistant"),
     turns(["I", "I", QUESTION], [UNUSUAL], ["More?"], ["assistant"]), 2),
    (llava(QUESTION, ANSWER), turns([QUESTION], [ANSWER]), 0),
    ({"messages": [{"role": "system", "content": "Answer briefly."},
                   {"role": "user", "content": parts("I", QUESTION)}, {"role": "assistant", "content": ANSWER},
                   {"role": "user", "content": parts("I", "And this?")}, {"role": "assistant", "content": "im_end"}]},
     turns(["S", "Answer briefly."], ["I", QUESTION], [ANSWER], ["I", "And this?"], ["im_end"]), 2),
]
SIZES = [[640, 480], [300, 500], [1000, 90], [96, 64], [33, 400], [1600, 901], [1, 1]]


def record_inputs(golden, family, entries):
    """Records conversations with images, one by one and as padded batches.

    An entry has `name`, `processor`, `files` of the checkpoint, the `template` with `{% generation %}` marks, and the
    `added` and `special` tokens of its tokenizer, with `bos` if that is before every text. A case has the sample as in a
    shard, and every tensor of the processor's output: integers with runs of equal values, and of floating point values
    the checksum and samples. Labels are the assistant masks that `transformers` makes of the template. An entry may
    `change` the output, have other `sizes` of images, and give the `lengths` of the images of a case if they are not those of
    the images alone.
    """
    found = []
    for entry in entries:
        cases = [input_case(entry, number, *said) for number, said in enumerate(SAID)]
        found.append({key: entry[key] for key in ["name", "files", "template", "added", "special"]} | {
            "bos": entry.get("bos"), "cases": cases, "batches": [batch(entry, cases, side) for side in ["right", "left"]],
        })
        for case in cases:
            del case["messages"]
    (golden / "model_inputs" / f"{family}.json").write_text(json_lines(found) + "\n")


def input_case(entry, number, field, messages, count):
    case = {"json": field, "messages": messages, "seed": 100 * number}
    sizes = entry.get("sizes", SIZES)
    case["images"] = [sizes[(2 * number + at) % len(sizes)] for at in range(count)]
    text, learned = rendered(entry, case)
    made = processed(entry, [text], [case])
    ids = np.asarray(made["input_ids"]).reshape(-1)
    case["labels"] = runs(labels_of(entry, case, text, learned, ids))
    case["tensors"] = {key: tensor(value) for key, value in made.items() if key != "attention_mask"}
    return case


def rendered(entry, case):
    special = entry["processor"].tokenizer.special_tokens_map
    text, marks = render_jinja_template(
        conversations=[case["messages"]], chat_template=entry["template"], return_assistant_tokens_mask=True, **special
    )
    return text[0], marks[0]


def processed(entry, texts, cases, **more):
    """Runs the processor. Tokens of the tokenizer are added unless the template wrote its first token."""
    bos = entry["special"].get("bos_token")
    images = [[Image.fromarray(picture(*size, case["seed"] + at)) for at, size in enumerate(case["images"])] for case in cases]
    media = {"images": images if entry.get("is_nested") else sum(images, [])} if any(images) else {}
    has_bos = bos is not None and texts[0].startswith(bos)
    made = dict(entry["processor"](text=texts, add_special_tokens=not has_bos, return_tensors="np", **media, **more))
    return entry["change"](made) if "change" in entry else made


def labels_of(entry, case, text, learned, ids):
    """Returns labels for `ids`, from the marks in the text before media were expanded."""
    tokenizer = entry["processor"].tokenizer
    bos = entry["special"].get("bos_token")
    encoded = tokenizer(text, add_special_tokens=not (bos and text.startswith(bos)), return_offsets_mapping=True)
    image = tokenizer.convert_tokens_to_ids(entry["image_token"])
    lengths = iter(entry["lengths"](case) if "lengths" in entry else lengths_alone(entry, case))
    labels, at = [], 0
    for id_, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"]):
        count = next(lengths) if id_ == image else 1
        is_learned = id_ != image and any(start < stop and first < end for first, stop in learned)
        labels += [int(id_) if is_learned else -100] * count
        at += count
    assert at == len(ids), (entry["name"], at, len(ids))
    assert all(label in (-100, id_) for label, id_ in zip(labels, ids))
    labels[0] = -100
    return labels


def lengths_alone(entry, case):
    """Returns the tokens of every image, from a text of nothing else."""
    for at, size in enumerate(case["images"]):
        alone = {"images": [size], "seed": case["seed"] + at}
        bare = {**entry, "special": {"bos_token": entry["image_token"]}}
        yield np.asarray(processed(bare, [entry["image_token"]], [alone])["input_ids"]).size


def batch(entry, cases, side):
    of = [at for at, case in enumerate(cases) if case["images"]]
    texts = [rendered(entry, cases[at])[0] for at in of]
    entry["processor"].tokenizer.padding_side = side
    made = processed(entry, texts, [cases[at] for at in of], padding=True)
    return {"cases": of, "side": side, "tensors": {key: tensor(value) for key, value in made.items()}}


def tensor(value):
    value = np.asarray(value)
    if value.dtype.kind == "f":
        flat = value.astype(np.float32).reshape(-1)
        places = mix(np.arange(SAMPLES)).astype(np.int64) % flat.size
        return {"shape": list(value.shape), "checksum": checksum(flat), "samples": [float(f"{flat[at]:.9g}") for at in places]}
    return {"shape": list(value.shape), "ints": runs(value.reshape(-1))}


__all__ = ["Shape", "flops", "make_tokenizer", "record_flops", "record_inputs", "record_tokens", "tokens"]
