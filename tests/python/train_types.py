"""Trains the small model of a type for two steps on balanced microbatches, and on the same samples one by one.

Shards are indexed, balanced and prepared by `dflop.hugging_face.Inputs`. The losses of both must be equal, and the tokens that the
processor delivers those that were planned, sample by sample.
"""

import copy
import io
import json
import random
import tarfile
import wave

import dflop
import numpy as np
import torch
from dflop._description import checkpoint, media
from dflop._measured_tokens import sample_rate_hz
from dflop.errors import ModelError
from dflop.hugging_face import Inputs
from PIL import Image

SAMPLES, STEPS, GLOBAL_BATCH, MICROBATCHES = 16, 2, 4, 2
SIDES = ((56, 84), (112, 112), (140, 98), (224, 168), (196, 224))
SECONDS = (1.0, 2.5, 4.0, 6.0)
WORDS = "the a kite over hills far red light and of water stone quick bird river night".split()
TOLERANCE = 2e-4
LEARNING_RATE = 1e-2


def write_shards(directory, medium, every, rate_hz):
    """Writes a shard of conversations with a medium, in all samples or in three of four; clips have a sample rate."""
    directory.mkdir(parents=True)
    rng = random.Random(0)
    with tarfile.open(directory / "0.tar", "w") as tar:
        for number in range(SAMPLES):
            entries = {}
            has = medium is not None and (every or number % 4 != 3)
            if has and medium == "image":
                width, height = SIDES[number % len(SIDES)]
                noise = np.random.default_rng(number).integers(0, 255, (height, width, 3), dtype=np.uint8)
                Image.fromarray(noise).save(file := io.BytesIO(), "png")
                entries["png"] = file.getvalue()
            elif has:
                entries["wav"] = clip(number, rate_hz)
            words = lambda most: " ".join(rng.choices(WORDS, k=rng.randint(4, most)))
            mark = f"<{medium}>\n" if has else ""
            turns = [{"from": "human", "value": mark + words(20)}, {"from": "gpt", "value": words(60)}]
            entries["json"] = json.dumps({"conversations": turns}).encode()
            for extension, content in entries.items():
                member = tarfile.TarInfo(f"{number:04}.{extension}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def clip(number, rate_hz):
    """Returns a clip of noise as a WAV file."""
    samples = np.random.default_rng(number).integers(-3000, 3000, int(SECONDS[number % len(SECONDS)] * rate_hz), dtype=np.int16)
    with wave.open(file := io.BytesIO(), "wb") as out:
        out.setnchannels(1), out.setsampwidth(2), out.setframerate(rate_hz)
        out.writeframes(samples.tobytes())
    return file.getvalue()


def template(processor, medium, mark=None):
    """Returns a chat template with the text that the processor replaces by a medium, if none is given."""
    if mark is None and medium is None:
        mark = ""
    elif mark is None:
        value = media.image(112, 112) if medium == "image" else media.clip(sample_rate_hz(processor))
        mark = media.processed(processor, medium, value)[1]
    return (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% for part in m['content'] %}{% if part['type'] == 'text' %}"
        "{{ part['text'] }}{% else %}" + mark.replace("{", "{{ '{' }}") + "{% endif %}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )


def trained(description, config, processor, directory, medium, mark, arguments):
    """Returns how a type was trained: whether packed, and whether samples without a medium were among the others.

    `mark` is the text of a medium in the chat template, if it is known; `arguments` are further ones of `Inputs`.

    Raises ModelError with what is missing.
    """
    model = random_model(config)
    limit_tiles(processor)
    problems = []
    for every in ((True,) if medium is None else (False, True)):
        shards = directory / f"shards-{every}"
        write_shards(shards, medium, every, sample_rate_hz(processor))
        for is_packed in (True, False):
            try:
                run(description, copy.deepcopy(model), processor, shards, template(processor, medium, mark), is_packed, arguments)
                return {"is_packed": is_packed, "is_mixed": medium is None or not every}
            except Exception as error:
                problems.append(f"{'packed' if is_packed else 'padded'}{', all with media' if every and medium else ''}: {type(error).__name__}: {error}"[:400])
    raise ModelError(" | ".join(problems))


def limit_tiles(processor):
    """Cuts images into two tiles at most."""
    part = getattr(processor, "image_processor", None)
    for name in ("max_patches", "max_image_tiles", "max_crops", "max_slice_nums", "max_tiles", "max_dynamic_patch"):
        value = getattr(part, name, None)
        if isinstance(value, int) and value > 2:
            setattr(part, name, 2)


def random_model(config):
    torch.manual_seed(0)
    checkpoint_class = checkpoint.find_class(config, False)
    config = copy.deepcopy(config)
    for one in (config, *checkpoint.sub_configs(config)):
        one._experts_implementation = "eager"  # Others gather the weights of each token's experts.
    for attention in ("sdpa", "eager", None):
        try:
            made = checkpoint_class._from_config(copy.deepcopy(config), **({} if attention is None else {"attn_implementation": attention}))
            break
        except Exception as error:
            problem = error
    else:
        raise problem
    if made.num_parameters() > 4e8:
        raise ModelError(f"the smallest model has {made.num_parameters():,} parameters")
    return made_wide(made.float()).eval()


def made_wide(model):
    """Gives matrices weights so large that each token depends on the tokens before it, also in a model that has learned nothing."""
    with torch.no_grad():
        for parameter in model.parameters():
            spread = float(parameter.std()) if parameter.dim() >= 2 else 0.0
            if spread > 0:
                parameter.mul_(1 / spread / parameter.shape[-1] ** 0.5)
    return model


def run(description, model, processor, shards, chat_template, is_packed, arguments):
    """Trains on balanced microbatches, and a copy of the model on single samples; both must lose the same."""
    tokenizer = getattr(processor, "tokenizer", processor)
    inputs = Inputs(processor, chat_template=chat_template, packed=is_packed, **arguments)
    single = Inputs(processor, chat_template=chat_template, **arguments)
    dataset = dflop.Dataset(shards).count_tokens(tokenizer)
    counts = single.token_counts()
    parameters = {module["module"]: module["parameters"] for module in description["modules"]}
    loader = dflop.BalancedLoader(
        dataset, model=dflop.Custom(modules=parameters, tokens=counts), global_batch_size=GLOBAL_BATCH, microbatches=MICROBATCHES,
        steps=STEPS, processor=dflop.CustomProcessor(batch=lambda samples: as_float(inputs(samples))), read=dflop.Read(python_threads=1),
    )
    reference = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=LEARNING_RATE) for one in (model, reference)]
    for step in loader:
        step = dflop.torch.count_targets(step)
        losses = []
        for one in step.microbatches:
            losses.append(dflop.torch.loss(model, one, step, use_cache=False))
            losses[-1].backward()
        balanced = sum(float(loss.detach()) for loss in losses)
        samples = [sample for one in step.microbatches for sample in one.samples]
        alone = sum(one_by_one(reference, single, sample, step.target_tokens) for sample in samples)
        for optimizer in optimizers:
            optimizer.step(), optimizer.zero_grad()
        if not abs(balanced - alone) <= TOLERANCE * max(1.0, abs(alone)):
            raise ModelError(f"losses differ: {balanced:.6f} balanced, {alone:.6f} one by one")
    if loader.skipped:
        raise ModelError(f"samples are skipped: {next(iter(loader.skipped))['reason']}")
    report = loader.prepare_report()
    if report["microbatches"] != STEPS * MICROBATCHES or report["differing"]:
        raise ModelError(f"{report['tokens']} tokens delivered, {report['planned_tokens']} planned, first {report['differing'][:1]}")


def as_float(made):
    """Returns inputs in the precision of the model: some processors make pixels of another."""
    return {name: value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value for name, value in made.items()}


def one_by_one(model, inputs, sample, targets):
    """Returns the share of a sample in the loss of the unbalanced loop, and adds its gradients."""
    made = as_float(inputs([sample]))
    labels = made.pop("labels")
    logits = model(**made, use_cache=False).logits
    aligned = logits[:, -labels.shape[1]:] if logits.shape[1] > labels.shape[1] else logits
    loss = torch.nn.functional.cross_entropy(aligned[0, :-1].float(), labels[0, 1:], ignore_index=-100, reduction="sum") / targets
    loss.backward()
    return float(loss.detach())
