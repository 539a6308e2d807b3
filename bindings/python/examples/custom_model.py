"""Trains Qwen3-VL as if dflop did not know it, with a processor of its own: the way for any model.

`dflop.Custom` says what a sample costs: parameters of the modules, and a function that counts tokens from
the shapes in the index. `inputs` makes tensors of one sample, on threads of the loader, and `collate` one
microbatch of several. Microbatches that lose all samples are filled, and losses stay token-true.
"""

import dflop
import torch
import transformers

DIRECTORY, PATCH, MERGE = dflop.example.directory(), 16, 2
SIDE = PATCH * MERGE  # of a token, in pixels
TOKENIZER = transformers.PreTrainedTokenizerFast(tokenizer_file=str(DIRECTORY / "model" / "tokenizer.json"))
START, END, IMAGE = TOKENIZER.convert_tokens_to_ids(["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"])


def model_of():
    text = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": len(TOKENIZER)}
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": [3, 3, 2], "rope_theta": 1e4}
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 64}
    vision |= {"patch_size": PATCH, "spatial_merge_size": MERGE, "deepstack_visual_indexes": [0]}
    tokens = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **tokens)
    return transformers.Qwen3VLForConditionalGeneration(config)


def tokens(samples):
    images = [sum(max(1, w // SIDE) * max(1, h // SIDE) for w, h in one["images"]) for one in samples]
    counts = zip(samples, images, strict=True)
    return [{"vision": MERGE**2 * n, "llm": one["text_tokens"] + n} for one, n in counts]


def patches(image):
    height, width = (max(1, length // SIDE) * SIDE for length in image.shape[:2])
    pixels = torch.as_tensor(image).permute(2, 0, 1)[None].float() / 127.5 - 1
    pixels = torch.nn.functional.interpolate(pixels, (height, width))
    grid = (3, height // SIDE, MERGE, PATCH, width // SIDE, MERGE, PATCH)
    rows = pixels.reshape(grid).permute(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]  # twice in time
    return rows.expand(-1, -1, -1, -1, -1, 2, -1, -1).reshape(-1, 6 * PATCH**2), (
        1,
        height // PATCH,
        width // PATCH,
    )


def inputs(sample):
    images = [patches(sample[name]) for name in sorted(sample) if name.endswith("png")]
    ids, labels, grids = [], [], iter(grid for _, grid in images)
    for turn in sample["json"]["conversations"]:
        for place, text in enumerate(turn["value"].split("<image>\n")):
            part = TOKENIZER.encode(text) if place == 0 else []
            if place > 0:
                _, rows, columns = next(grids)
                part = [START, *[IMAGE] * (rows * columns // MERGE**2), END, *TOKENIZER.encode(text)]
            ids, labels = ids + part, labels + (part if turn["from"] == "gpt" else [-100] * len(part))
    return torch.tensor(ids), torch.tensor(labels), images


def collate(made):
    pad = torch.nn.utils.rnn.pad_sequence
    ids, labels = pad([one for one, _, _ in made], True), pad([one for _, one, _ in made], True, -100)
    mask = pad([torch.ones_like(one) for one, _, _ in made], True)
    batch = {
        "input_ids": ids,
        "labels": labels,
        "attention_mask": mask,
        "mm_token_type_ids": (ids == IMAGE).int(),
    }
    if images := [image for _, _, images in made for image in images]:
        batch |= {"pixel_values": torch.cat([rows for rows, _ in images])}
        batch |= {"image_grid_thw": torch.tensor([grid for _, grid in images])}
    return batch


def loader_of(**settings):
    model = dflop.Custom(modules={"vision": 4e8, "llm": 4e9}, tokens=tokens)
    processor = dflop.CustomProcessor(inputs=inputs, collate=collate)
    defaults = {"global_batch_size": 16, "microbatches": 4, "steps": 6, "processor": processor}
    return dflop.BalancedLoader(DIRECTORY / "shards", model=model, **defaults | settings)


def train(model, loader):
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in loader:
        step = dflop.torch.count_targets(step)  # targets are counted when all inputs are made
        parts = [dflop.torch.loss(model, one, step, use_cache=False) for one in step.microbatches]
        (loss := sum(parts)).backward()
        optimizer.step(), optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    torch.manual_seed(0)
    print("losses", *(f"{loss:.3f}" for loss in train(model_of(), loader_of())))
