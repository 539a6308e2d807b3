"""Compares predictions of profiles with whole models of `transformers` on microbatches that no profile contains.

    python3 benches/torch_held_out.py [--seconds 60] [--microbatches 200] [--models qwen2.5-vl qwen2-audio] [--masked]

Needs the Python package, PyTorch and transformers. For a small Qwen2.5-VL and a small Qwen2-Audio with random weights, on one
thread of the CPU: measures a profile, then runs microbatches of the whole model, packed as loaders deliver them, forward and
backward. Attention stays within each sequence of a row, as FlashAttention does it on a GPU; with `--masked` it is that of
transformers, which computes all pairs of the row and masks the rest. Prints the errors of the sum of the modules' predictions,
and the share of microbatches within the 90 % interval that the held-out microbatches of the profile give. Times are CPU time of
the thread, the median of three runs.

CPU time does not show other load, but it depends on what else uses the caches and the clock of the processor. So held-out
microbatches of the profile run again between the others: the median ratio of their times to those in the profile is the speed
of the machine. Errors are printed as measured, and at the speed of the profile.
"""

import argparse
import itertools
import math
import random
import statistics
import time

import dflop.torch
import torch
import transformers
import transformers.masking_utils

TOKENS_MAX = 2048
RUNS = 3
CHUNK = 10
"""Microbatches between two measurements of the machine's speed."""
REFERENCES = 3
"""Held-out microbatches of each module that measure it."""
TEXT = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
}
MEDIUM = 1000
"""Placeholder of media in texts."""


def qwen_vl():
    """Returns a small Qwen2.5-VL."""
    vision = {"hidden_size": 128, "intermediate_size": 512, "depth": 4, "num_heads": 4, "out_hidden_size": 128}
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": rope},
        vision_config={**vision, "fullatt_block_indexes": [3]},
        image_token_id=MEDIUM,
        video_token_id=MEDIUM + 1,
        vision_start_token_id=MEDIUM + 2,
        vision_end_token_id=MEDIUM + 3,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def qwen_audio():
    """Returns a small Qwen2-Audio, whose windows have 200 frames."""
    audio = {"d_model": 128, "encoder_layers": 3, "encoder_attention_heads": 4, "encoder_ffn_dim": 512}
    config = transformers.Qwen2AudioConfig(
        text_config={"model_type": "qwen2", **TEXT},
        audio_config={"model_type": "qwen2_audio_encoder", **audio, "max_source_positions": 100, "num_mel_bins": 80},
        audio_token_index=MEDIUM,
    )
    return transformers.Qwen2AudioForConditionalGeneration(config)


def text_ids(rng, count):
    """Returns ids of text."""
    return [rng.randrange(MEDIUM) for _ in range(count)]


def text_length(rng):
    """Returns the tokens of a text."""
    return max(8, min(round(120 * math.exp(0.9 * rng.gauss(0, 1))), TOKENS_MAX // 2))


def vision_samples(rng):
    """Yields ids of samples, and the grids of their images, in patches."""
    while True:
        grids = []
        if rng.random() < 0.7:
            grids = [(2 * rng.randint(3, 16), 2 * rng.randint(3, 16)) for _ in range(rng.choice([1, 1, 1, 2]))]
        ids = text_ids(rng, text_length(rng))
        for height, width in grids:
            ids = [*ids[:4], *[MEDIUM] * (height * width // 4), *ids[4:]]
        yield ids, grids


def audio_samples(rng):
    """Yields ids of samples, and the frames of their clips."""
    while True:
        clips = [rng.randint(60, 200)] if rng.random() < 0.7 else []
        ids = text_ids(rng, text_length(rng))
        for frames in clips:
            ids = [*ids[:4], *[MEDIUM] * (((frames - 1) // 2 + 1 - 2) // 2 + 1), *ids[4:]]
        yield ids, clips


def packed(samples, rng):
    """Returns samples of a microbatch, within a number of tokens that differs between microbatches."""
    tokens_max = TOKENS_MAX / 6 * 6 ** rng.random()
    taken, tokens = [], 0
    for sample in samples:
        if len(sample[0]) > tokens_max:
            continue
        if tokens + len(sample[0]) > tokens_max:
            return taken
        taken.append(sample)
        tokens += len(sample[0])


def row(taken, position_rows):
    """Returns the packed row of a microbatch, with the loss over a third of the tokens."""
    ids = torch.tensor([[one for sample, _ in taken for one in sample]])
    positions = torch.cat([torch.arange(len(sample)) for sample, _ in taken])[None]
    is_target = (torch.arange(ids.shape[1])[None] % 3 == 0) & (ids < MEDIUM)
    labels = torch.where(is_target, ids, -100)
    if position_rows > 1:
        positions = positions.repeat(position_rows, 1, 1)
    return {"input_ids": ids, "labels": labels, "position_ids": positions, "use_cache": False}


def vision_inputs(taken):
    """Returns the arguments of Qwen2.5-VL, and the tokens of items by module."""
    inputs = row(taken, 4)
    grids = [grid for _, found in taken for grid in found]
    patches = [height * width for height, width in grids]
    if grids:
        inputs["pixel_values"] = torch.randn(sum(patches), 3 * 2 * 14 * 14)
        inputs["image_grid_thw"] = torch.tensor([(1, *grid) for grid in grids])
    return inputs, {"vision": patches, "llm": [len(sample) for sample, _ in taken]}


def audio_inputs(taken):
    """Returns the arguments of Qwen2-Audio, and the tokens of items by module."""
    inputs = row(taken, 1)
    clips = [frames for _, found in taken for frames in found]
    if clips:
        inputs["input_features"] = torch.randn(len(clips), 80, 200)
        inputs["feature_attention_mask"] = (torch.arange(200) < torch.tensor(clips)[:, None]).long()
    return inputs, {"audio": [100] * len(clips), "llm": [len(sample) for sample, _ in taken]}


def attend_within_boundaries(model):
    """Lets every part of a model attend within sequences, by a name that transformers takes for FlashAttention."""

    def attention(module, query, key, value, attention_mask, scaling=None, is_causal=None, cu_seq_lens_q=None, position_ids=None, **__):
        tokens = query.shape[2]
        bounds = [0, tokens]
        if cu_seq_lens_q is not None:
            bounds = cu_seq_lens_q.tolist()
        elif position_ids is not None:
            bounds = [*(position_ids.reshape(-1, tokens)[0] == 0).nonzero().flatten().tolist(), tokens]
        groups = query.shape[1] // key.shape[1]
        key, value = (one.repeat_interleave(groups, dim=1) for one in (key, value))
        causal = module.is_causal if is_causal is None else is_causal
        rows = [
            torch.nn.functional.scaled_dot_product_attention(
                *(one[:, :, start:end] for one in (query, key, value)), is_causal=causal, scale=scaling
            )
            for start, end in itertools.pairwise(bounds)
        ]
        return torch.cat(rows, dim=2).transpose(1, 2), None

    name = "flash_by_boundaries"
    transformers.AttentionInterface.register(name, attention)
    transformers.masking_utils.AttentionMaskInterface.register(name, lambda *_, **__: None)
    for module in model.modules():
        config = getattr(module, "config", None)
        for part in (config, *(getattr(config, field, None) for field in ("text_config", "vision_config"))):
            if part is not None:
                part._attn_implementation_internal = name


def microseconds(model, inputs):
    """Returns the CPU time of a forward and backward pass."""
    start = time.thread_time_ns()
    model(**inputs).loss.backward()
    return (time.thread_time_ns() - start) / 1000


def half_width(profile):
    """Returns the half width of the 90 % interval as a fraction of a prediction, as the cost model has it.

    It is the quantile of the errors over held-out microbatches, corrected for their number; modules of one index are added.
    """
    sums = {}
    for one in profile.held_out:
        predicted, measured = sums.get(one.microbatch, (0, 0))
        predicted += profile.predict_microseconds(one.module, one.lengths)
        sums[one.microbatch] = predicted, measured + one.microseconds
    errors = sorted(abs(measured / predicted - 1) for predicted, measured in sums.values())
    return errors[min(math.ceil(0.9 * (len(errors) + 1)), len(errors)) - 1]


def check(name, build, samples, inputs_of, arguments):
    """Profiles a model, runs microbatches, and prints the errors."""
    torch.manual_seed(0)
    model = build().train()
    if not arguments.masked:
        attend_within_boundaries(model)
    started = time.perf_counter()
    profile = dflop.torch.profile(model, model=name, tokens_max=TOKENS_MAX, seconds_max=arguments.seconds, progress=print)
    print(f"{name}: profile of {arguments.seconds:g} s took {time.perf_counter() - started:.1f} s")
    width = half_width(profile)
    print(f"{name}: half width of the 90 % interval {width:.1%}")
    if arguments.write:
        profile.write(arguments.write)
    rng = random.Random(7)
    source = samples(rng)
    drawn = [inputs_of(packed(source, rng)) for _ in range(arguments.microbatches)]
    times = [[] for _ in drawn]
    at_speed = [[] for _ in drawn]
    microseconds(model, drawn[0][0])
    slowness_of(profile)
    slowest = []
    for _ in range(RUNS):
        # Gradients add up over microbatches, as in a step.
        for start in range(0, len(drawn), CHUNK):
            chunk = range(start, min(start + CHUNK, len(drawn)))
            before = slowness_of(profile)
            found = [microseconds(model, drawn[index][0]) for index in chunk]
            slowness = (before + slowness_of(profile)) / 2
            slowest.append(slowness)
            for index, one in zip(chunk, found, strict=True):
                times[index].append(one)
                at_speed[index].append(one / slowness)
    predicted = [
        sum(profile.predict_microseconds(module, lengths) for module, lengths in tokens.items()) for _, tokens in drawn
    ]
    print(f"{name}: the machine took {min(slowest):.3f} to {max(slowest):.3f} times as long as in the profile, median {statistics.median(slowest):.3f}")
    for label, taken in (("as measured", times), ("at the speed of the profile", at_speed)):
        measured = [statistics.median(one) for one in taken]
        report(f"{name}, {label}", predicted, measured, width)
    if arguments.verbose:
        for (_, tokens), one, other in zip(drawn, predicted, at_speed, strict=True):
            print(tokens, round(one), round(statistics.median(other)))


def slowness_of(profile):
    """Returns the median ratio of the times of held-out microbatches now to those in the profile."""
    ratios = []
    for subject in profile.subjects:
        held_out = sorted((one for one in profile.held_out if one.module == subject.name), key=lambda one: one.microseconds)
        middle = held_out[len(held_out) // 3 :][:REFERENCES]
        runs = subject.runs([one.lengths for one in middle])
        ratios += [run.total / one.microseconds for run, one in zip(runs, middle, strict=True)]
    return statistics.median(ratios)


def report(label, predicted, measured, width):
    """Prints the errors of predictions."""
    errors = [one / other - 1 for one, other in zip(predicted, measured, strict=True)]
    within = sum(abs(one - other) <= width * one for one, other in zip(predicted, measured, strict=True))
    absolute = sorted(map(abs, errors))
    p95 = absolute[math.ceil(0.95 * len(absolute)) - 1]
    print(
        f"{label}: {len(errors)} microbatches: error {statistics.median(absolute):.1%} (median), {p95:.1%} (p95), "
        f"{statistics.mean(errors):+.1%} (mean, signed); {within / len(errors):.1%} within the 90 % interval"
    )


MODELS = {
    "qwen2.5-vl": (qwen_vl, vision_samples, vision_inputs),
    "qwen2-audio": (qwen_audio, audio_samples, audio_inputs),
}


def main():
    """Reads the arguments and checks the models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="time for each profile [default: 60]")
    parser.add_argument("--microbatches", type=int, default=200, help="microbatches of each model [default: 200]")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, help="only these models")
    parser.add_argument("--masked", action="store_true", help="attention of transformers, over the whole row")
    parser.add_argument("--write", metavar="DIR", help="directory for the profiles")
    parser.add_argument("--verbose", action="store_true", help="print every microbatch")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.models:
        check(name, *MODELS[name], arguments)


if __name__ == "__main__":
    main()
