"""Records tiny models of Hugging Face transformers, with logits, loss and gradients, as truth for `executor/`.

    python3 tests/record/executor_parity.py [NAME…]        # needs torch, transformers, safetensors

writes `tests/golden/executor/NAME/` for each model: `config.json` and `model.safetensors` as `save_pretrained` writes them
(bf16, so that every weight is a number of bf16), and `expected.safetensors` with inputs and truth in f32.

Samples run **one by one** through transformers, with full attention of each: packing has to give the same. Inputs
are recorded packed, one sample after the other; logits too. The loss is the sum over target tokens of all samples, divided
by their number; gradients are of that loss, under the names of the saved file. All parameters are random, norms and
biases too, so that a parameter can be identified by its values.

`trained.safetensors` of the models in `TRAINED` has the weights after three steps of AdamW with clipping, warm-up and a
cosine on these inputs, with the norm of the gradients and the learning rate of every step; `--trained` makes it alone.
"""

import argparse
import json
from pathlib import Path

import common
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

GOLDEN = common.GOLDEN / "executor"
IMAGE, VIDEO, START, AUDIO, IGNORED = 47, 46, 45, 47, -100
TEXT = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=48, max_position_embeddings=128, bos_token_id=None, eos_token_id=None,
)
TOWER = dict(hidden_size=12, intermediate_size=20, num_hidden_layers=2, num_attention_heads=3)
MROPE = dict(rope_type="default", mrope_section=[1, 1, 0], rope_theta=10000.0)


def randomize(model, generator):
    """Gives every parameter random values of bf16."""
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                fan_in = parameter[0].numel()
                parameter.copy_(noise * (1.0 / fan_in**0.5))
            else:
                parameter.copy_(noise * 0.2 + (1.0 if parameter.numel() and float(parameter.mean()) > 0.5 else 0.0))
    return model.to(torch.bfloat16)


def names_of(model, directory):
    """Returns the saved name of every parameter, found by its values."""
    saved = load_file(directory / "model.safetensors")
    names = {}
    for own, parameter in model.named_parameters():
        same = [name for name, value in saved.items() if value.shape == parameter.shape and torch.equal(value.float(), parameter.detach())]
        assert len(same) == 1, (own, same)
        names[own] = same[0]
    unused = set(saved) - set(names.values())
    assert not unused, unused
    return names


def record(name, model, samples, extra, generator, outputs=None):
    """Saves a model, runs its samples one by one, saves the results.

    A sample is `(input_ids, positions [axes, tokens], keyword arguments)`; `extra` are inputs as they are recorded.
    """
    directory = GOLDEN / name
    directory.mkdir(parents=True, exist_ok=True)
    model = randomize(model, generator).eval()
    model.save_pretrained(directory)
    for surplus in ("generation_config.json",):
        (directory / surplus).unlink(missing_ok=True)
    # Read again: the frequencies of rotary embeddings were rounded to bf16 as well, and are not in the file.
    is_trained = {own: parameter.requires_grad for own, parameter in model.named_parameters()}
    model = type(model).from_pretrained(directory, dtype=torch.float32).eval()
    for own, parameter in model.named_parameters():
        parameter.requires_grad_(is_trained[own])
    tensors = dict(extra)
    if outputs is None:
        tensors |= run_language_model(model, samples, generator)
    else:
        tensors |= outputs(model, generator)
    names = names_of(model, directory)
    for own, parameter in model.named_parameters():
        if parameter.grad is not None:
            tensors[f"grad.{names[own]}"] = parameter.grad
    save_file({key: value.detach().contiguous().clone() for key, value in tensors.items()}, directory / "expected.safetensors")
    size = sum(path.stat().st_size for path in directory.iterdir())
    print(f"{name}: loss {tensors['loss'].item():.6f}, {len(names)} parameters, {size} bytes")


def run_language_model(model, samples, generator):
    labels = []
    for input_ids, _, _ in samples:
        row = input_ids.clone()
        row[torch.rand(row.shape, generator=generator) < 0.3] = IGNORED
        for special in (IMAGE, VIDEO, START):
            row[input_ids == special] = IGNORED
        row[0] = IGNORED
        labels.append(row)
    targets = sum(int((row != IGNORED).sum()) for row in labels)
    logits, total = [], 0.0
    for (input_ids, positions, arguments), row in zip(samples, labels):
        position_ids = positions if positions.shape[0] == 1 else positions[:, None]
        output = model(input_ids=input_ids[None], position_ids=position_ids, use_cache=False, **arguments).logits[0]
        loss = F.cross_entropy(output[:-1], row[1:], ignore_index=IGNORED, reduction="sum") / targets
        loss.backward()
        logits.append(output)
        total += loss.detach()
    lengths = torch.tensor([0] + [len(input_ids) for input_ids, _, _ in samples], dtype=torch.int64)
    return dict(
        input_ids=torch.cat([input_ids for input_ids, _, _ in samples]),
        labels=torch.cat(labels),
        positions=torch.cat([positions for _, positions, _ in samples], dim=1),
        cu_seqlens=torch.cumsum(lengths, 0),
        logits=torch.cat(logits),
        loss=total.reshape(1),
    )


def words(generator, count):
    return torch.randint(0, 44, (count,), generator=generator)


def counted(input_ids):
    return torch.arange(len(input_ids))[None]


def text_samples(generator, lengths):
    samples = [words(generator, length) for length in lengths]
    return [(input_ids, counted(input_ids), {}) for input_ids in samples]


def llama(generator):
    rope = dict(
        rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=64,
    )
    config = transformers.LlamaConfig(
        **(TEXT | dict(num_hidden_layers=2, head_dim=8, hidden_size=24)), rope_parameters=rope, tie_word_embeddings=False
    )
    record("llama", transformers.LlamaForCausalLM(config), text_samples(generator, [17, 1, 70, 5]), {}, generator)


def qwen2(generator):
    config = transformers.Qwen2Config(**(TEXT | dict(num_hidden_layers=2)), tie_word_embeddings=True)
    record("qwen2", transformers.Qwen2ForCausalLM(config), text_samples(generator, [9, 2, 66]), {}, generator)


def with_media(generator, before, runs, after):
    """Makes words, then runs of a placeholder with two words between."""
    parts = [words(generator, before)]
    for token, count in runs:
        parts += [torch.full((count,), token), words(generator, 2)]
    return torch.cat(parts + [words(generator, after)])


def llava_onevision(generator):
    config = transformers.LlavaOnevisionConfig(
        vision_config=dict(
            model_type="siglip_vision_model", image_size=12, patch_size=4, vision_use_head=False, **TOWER
        ),
        text_config=dict(model_type="qwen2", **TEXT),
        image_token_index=IMAGE, video_token_index=VIDEO, vision_aspect_ratio="anyres_max_2",
        image_grid_pinpoints=[[12, 12], [12, 24], [24, 12], [24, 24]],
    )
    model = transformers.LlavaOnevisionForConditionalGeneration(config)
    # Height and width of images by sample: unpadded, with newlines, one shrunk, one not; and a sample without any.
    samples, pixels, sizes = [], [], []
    for pictures in ([(10, 21)], [], [(24, 20), (13, 9)]):
        tiles = [transformers.models.llava_onevision.modeling_llava_onevision.image_size_to_num_patches(
            list(size), config.image_grid_pinpoints, 12) for size in pictures]
        values = [torch.randn(count, 3, 12, 12, generator=generator) for count in tiles]
        runs = []
        if pictures:
            packed, lengths = model.model.pack_image_features(
                [torch.zeros(count, 9, 16) for count in tiles], torch.tensor(pictures), model.model.image_newline,
                config.vision_aspect_ratio,
            )
            runs = [(IMAGE, int(length)) for length in lengths]
        input_ids = with_media(generator, 3, runs, 4)
        arguments = {}
        if pictures:
            most = max(tiles)
            padded = torch.stack([F.pad(value, (0, 0, 0, 0, 0, 0, 0, most - len(value))) for value in values])
            arguments = dict(pixel_values=padded, image_sizes=torch.tensor(pictures))
        samples.append((input_ids, counted(input_ids), arguments))
        pixels += values
        sizes += [[height, width, count] for (height, width), count in zip(pictures, tiles)]
    # A video: every frame a tile, at half its size, one newline after all. Its height and width are recorded as 0.
    frames = torch.randn(2, 3, 12, 12, generator=generator)
    input_ids = with_media(generator, 2, [(VIDEO, 2 * 4 + 1)], 3)
    samples.append((input_ids, counted(input_ids), dict(pixel_values_videos=frames[None])))
    pixels.append(frames)
    sizes.append([0, 0, 2])
    extra = dict(pixel_values=torch.cat(pixels), image_sizes=torch.tensor(sizes))
    record("llava_onevision", model, samples, extra, generator)


def internvl(generator):
    config = transformers.InternVLConfig(
        vision_config=dict(image_size=[16, 16], patch_size=[4, 4], attention_bias=True, **TOWER),
        text_config=dict(model_type="qwen2", **TEXT),
        image_token_id=IMAGE, image_seq_length=4, downsample_ratio=0.5, tie_word_embeddings=False,
    )
    samples, pixels = [], []
    for tiles in (2, 0, 1):
        input_ids = with_media(generator, 3, [(IMAGE, 4)] * tiles, 5)
        values = torch.randn(tiles, 3, 16, 16, generator=generator)
        samples.append((input_ids, counted(input_ids), dict(pixel_values=values) if tiles else {}))
        pixels.append(values)
    extra = dict(pixel_values=torch.cat(pixels))
    record("internvl", transformers.InternVLForConditionalGeneration(config), samples, extra, generator)


def qwen_vl(generator, name, model, patch_inputs):
    """Makes images and a video of native resolution; grids are layers, rows and columns of patches."""
    samples, patches, grids = [], [], []
    for media in ([(IMAGE, (1, 6, 4))], [], [(VIDEO, (2, 4, 6)), (IMAGE, (1, 10, 8))]):
        runs = [(token, grid[0] * grid[1] * grid[2] // 4) for token, grid in media]
        input_ids = with_media(generator, 3, runs, 4)
        arguments, types = {}, torch.zeros_like(input_ids)
        for kind, (token, values_key, grid_key) in enumerate(
            [(IMAGE, "pixel_values", "image_grid_thw"), (VIDEO, "pixel_values_videos", "video_grid_thw")]
        ):
            types[input_ids == token] = kind + 1
            of_kind = [grid for medium, grid in media if medium == token]
            if of_kind:
                rows = sum(grid[0] * grid[1] * grid[2] for grid in of_kind)
                values = torch.randn(rows, patch_inputs, generator=generator)
                arguments |= {values_key: values, grid_key: torch.tensor(of_kind)}
        # Recorded in the order of the sample.
        for token, grid in media:
            patches.append(arguments["pixel_values" if token == IMAGE else "pixel_values_videos"])
            grids.append(list(grid))
        index = dict(image_grid_thw=arguments.get("image_grid_thw"), video_grid_thw=arguments.get("video_grid_thw"))
        positions, _ = model.model.get_rope_index(input_ids[None], mm_token_type_ids=types[None], **index)
        samples.append((input_ids, positions[:, 0], arguments | dict(mm_token_type_ids=types[None])))
    extra = dict(patches=torch.cat(patches), grids=torch.tensor(grids))
    record(name, model, samples, extra, generator)


def qwen2_5_vl(generator):
    vision = dict(
        hidden_size=16, intermediate_size=20, depth=3, num_heads=2, patch_size=2, window_size=8, out_hidden_size=16,
        fullatt_block_indexes=[1],
    )
    text = dict(rope_parameters=dict(MROPE, mrope_section=[2, 1, 1]), **(TEXT | dict(num_attention_heads=2, num_key_value_heads=1)))
    config = transformers.Qwen2_5_VLConfig(
        vision_config=vision, text_config=text, image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START,
        tie_word_embeddings=False,
    )
    qwen_vl(generator, "qwen2_5_vl", transformers.Qwen2_5_VLForConditionalGeneration(config), 3 * 2 * 4)


def qwen2_vl(generator):
    vision = dict(embed_dim=16, depth=2, num_heads=2, patch_size=2, hidden_size=16, mlp_ratio=2)
    text = dict(rope_parameters=dict(MROPE, mrope_section=[2, 1, 1]), **(TEXT | dict(num_attention_heads=2, num_key_value_heads=1)))
    config = transformers.Qwen2VLConfig(
        vision_config=vision, text_config=text, image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START,
        tie_word_embeddings=True,
    )
    qwen_vl(generator, "qwen2_vl", transformers.Qwen2VLForConditionalGeneration(config), 3 * 2 * 4)


def qwen2_audio(generator):
    config = transformers.Qwen2AudioConfig(
        audio_config=dict(
            d_model=12, encoder_ffn_dim=20, encoder_layers=2, encoder_attention_heads=3, num_mel_bins=8,
            max_source_positions=20,
        ),
        text_config=dict(model_type="qwen2", **TEXT),
        audio_token_index=AUDIO,
    )
    samples, features, lengths = [], [], []
    for clips in ([40], [], [23, 5]):
        tokens = [((frames - 1) // 2 + 1 - 2) // 2 + 1 for frames in clips]
        input_ids = with_media(generator, 3, [(AUDIO, count) for count in tokens], 4)
        arguments = {}
        if clips:
            values = torch.randn(len(clips), 8, 40, generator=generator)
            mask = (torch.arange(40)[None] < torch.tensor(clips)[:, None]).long()
            arguments = dict(input_features=values, feature_attention_mask=mask)
            features.append(values)
            lengths += clips
        samples.append((input_ids, counted(input_ids), arguments | dict(attention_mask=torch.ones(1, len(input_ids), dtype=torch.long))))
    extra = dict(input_features=torch.cat(features), frames=torch.tensor(lengths))
    record("qwen2_audio", transformers.Qwen2AudioForConditionalGeneration(config), samples, extra, generator)


def tower(name, model, generator):
    """Records an encoder alone: the loss is a random projection of its last hidden state."""
    pixels = torch.randn(3, 3, 12, 12, generator=generator)

    def outputs(model, generator):
        hidden = model(pixel_values=pixels).last_hidden_state
        gradient = torch.randn(hidden.shape, generator=generator)
        loss = (hidden * gradient).sum()
        loss.backward()
        return dict(hidden=hidden, gradient=gradient, loss=loss.reshape(1))

    record(name, model, [], dict(pixel_values=pixels), generator, outputs)


def clip(generator):
    config = transformers.CLIPVisionConfig(image_size=12, patch_size=4, **TOWER)
    tower("clip", transformers.CLIPVisionModel(config), generator)


def siglip(generator):
    config = transformers.SiglipVisionConfig(image_size=12, patch_size=4, vision_use_head=False, **TOWER)
    tower("siglip", transformers.SiglipVisionModel(config), generator)


TRAINED = ["qwen2"]


def train(name):
    """Takes three steps from a recorded model on its recorded inputs; biases and norms do not decay."""
    directory = GOLDEN / name
    expected = load_file(directory / "expected.safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).train()
    names = names_of(model, directory)
    groups = [
        dict(params=[p for p in model.parameters() if p.dim() > 1], weight_decay=0.1),
        dict(params=[p for p in model.parameters() if p.dim() <= 1], weight_decay=0.0),
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 2, 6)
    targets = int((expected["labels"] != IGNORED).sum())
    bounds = expected["cu_seqlens"].tolist()
    norms, rates, losses = [], [], []
    for _ in range(3):
        optimizer.zero_grad()
        total = 0.0
        for start, end in zip(bounds, bounds[1:]):
            output = model(
                input_ids=expected["input_ids"][None, start:end], position_ids=expected["positions"][:, start:end],
                use_cache=False,
            ).logits[0]
            labels = expected["labels"][start:end]
            loss = F.cross_entropy(output[:-1], labels[1:], ignore_index=IGNORED, reduction="sum") / targets
            loss.backward()
            total += loss.detach()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        rates.append(schedule.get_last_lr()[0])
        losses.append(total)
        optimizer.step()
        schedule.step()
    tensors = {f"weight.{names[own]}": parameter.detach() for own, parameter in model.named_parameters()}
    tensors |= dict(norms=torch.stack(norms), rates=torch.tensor(rates), losses=torch.stack(losses))
    save_file({key: value.contiguous().clone() for key, value in tensors.items()}, directory / "trained.safetensors")
    print(f"{name}: losses {[round(float(loss), 6) for loss in losses]}, norms {[round(float(norm), 6) for norm in norms]}")


MODELS = [llama, qwen2, clip, siglip, llava_onevision, internvl, qwen2_vl, qwen2_5_vl, qwen2_audio]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="models to record, all by default")
    parser.add_argument("--trained", action="store_true", help="only `trained.safetensors`")
    parser.add_argument("--golden", type=Path, default=common.GOLDEN, help="directory to write below")
    arguments = parser.parse_args()
    names = arguments.names
    global GOLDEN
    GOLDEN = arguments.golden / "executor"
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for index, make in enumerate(MODELS):
        if not arguments.trained and (not names or make.__name__ in names):
            generator = torch.Generator().manual_seed(index)
            torch.manual_seed(index)
            make(generator)
    for name in TRAINED:
        if not names or name in names:
            train(name)
    versions = dict(torch=torch.__version__.split("+")[0], transformers=transformers.__version__)
    (GOLDEN / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    main()
