"""Describes every type of transformers that generates from text, images or audio, and trains it for two steps.

    make describe-types                              # all types, then what differs from the recorded table
    python3 tests/python/describe_types.py qwen3_5   # these types; needs dflop, transformers, torch, torchvision

Every type runs in a process of its own, with a limit on its time; outcomes are appended to `RECORDS` as they come.
"""

import functools
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
import warnings
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent))

import dflop
import tiny_models
import torch
import torch._dynamo  # before the processes fork, as all that follows
import torchvision
import train_types
import transformers as hf
import transformers.generation
import transformers.masking_utils
import transformers.modeling_layers
from dflop._description import checkpoint, document
from dflop.errors import ModelError
from type_settings import CONFIG, IMAGE_PROCESSOR, INPUTS, KEPT, MARKS, NAMES, PROCESSOR, TOKENS

RECORDS = Path(os.environ.get("RECORDS", "described_types.jsonl"))
# Processor time of a type, after which it counts as missing.
SECONDS_MAX = int(os.environ.get("SECONDS_MAX", "120"))
# Configurations that are tried: that of the smallest widths, then that of the class.
ATTEMPTS = int(os.environ.get("ATTEMPTS", "2"))
# Highest level that is tried.
LEVEL = os.environ.get("LEVEL", "trained")


def opened(model_type, directory, config):
    """Returns a checkpoint of a type: model on the meta device and processor."""
    model = checkpoint.build(config)
    processor = None
    if checkpoint.feature_functions(model):
        processor = tiny_models.make_processor(model_type, config, settings_of(model_type))
        tokenizer = getattr(processor, "tokenizer", processor)
        named = [token for token in TOKENS.get(model_type, {}).values() if isinstance(token, str)]
        tokenizer.add_special_tokens({"additional_special_tokens": named}, replace_extra_special_tokens=False)
        tiny_models.with_token_ids(config, processor, TOKENS.get(model_type, {}))
        model = checkpoint.build(config)
    config.save_pretrained(directory)
    return checkpoint.Checkpoint(directory, config, model, processor)


def settings_of(model_type):
    return PROCESSOR.get(model_type, {}) | {"parts": {"image_processor": IMAGE_PROCESSOR.get(model_type, {})}}


def described(model_type):
    """Returns the outcome of a type: description, factor by which widths were divided, and problems of smaller ones."""
    problems = []
    for factor, config in tiny_models.configurations(model_type, CONFIG.get(model_type, {}), KEPT.get(model_type)):
        if len(problems) == ATTEMPTS:
            break
        if problems and factor > 1:
            continue  # What does not run with small widths is tried with those of the class.
        config = checkpoint.writing_config(config)
        with tempfile.TemporaryDirectory() as scratch:
            try:
                found = opened(model_type, Path(scratch), config)
                description = document.from_parts(found, "")
                document.write(description | {"config_sha256": "0"}, file := Path(scratch) / "described.json")
                dflop.CostModel(file)  # The loader reads it.
                outcome = {"level": "described", "factor": factor, "rules": rules_of(description), "problems": problems}
            except Exception as error:
                problems.append(problem_of(error) | {"factor": factor})
                continue
            if LEVEL == "described":
                return outcome
            try:
                outcome |= {"level": "trained"} | train_types.trained(
                    description, config, processor_of(found), Path(scratch), medium_of(description), MARKS.get(model_type), INPUTS.get(model_type, {})
                )
            except Exception as error:
                outcome["training"] = problem_of(error)
            return outcome
    return {"level": "missing", "problems": problems}


def problem_of(error):
    return {"error": f"{type(error).__name__}: {error}"[:1500], "trace": traceback.format_exc()[-2500:]}


def processor_of(found):
    """Returns the processor, or the small tokenizer of a model for texts."""
    return tiny_models.make_tokenizer(None) if found.processor is None else found.processor


def medium_of(description):
    return next((one["media"][0] for one in description["modules"] if "media" in one), None)


def rules_of(description):
    rules = [one[name] for one in description["modules"] for name in ("token_rule", "video_token_rule") if name in one]
    return ", ".join(f"{one['medium']} {one['rule']['rule'] if 'rule' in one else one['kind']}" for one in rules)


def named(outcome):
    """Returns an outcome with what the table shows of its type."""
    model_type = outcome["type"]
    kind = "text" if model_type in tiny_models.TEXT_TYPES else "image" if model_type in tiny_models.IMAGE_TYPES else "audio"
    media = sorted({rule.split()[0] for rule in outcome.get("rules", "").split(", ") if rule} - {kind})
    row = {"kind": ", ".join([kind, *media]), "name": name_of(model_type), "transformers": hf.__version__, "by_hand": model_type in by_hand()}
    if outcome["level"] == "trained":
        row["layout"] = "packed" if outcome["is_packed"] else "padded"
        row["lacks"] = "" if outcome["is_mixed"] else "samples without media among others"
    else:
        errors = [outcome["training"]] if "training" in outcome else outcome.get("problems", [])[-1:]
        texts = (re.sub(rf"^(ModelError|FitError|_NotRunError): |{tempfile.gettempdir()}/\S+: ", "", error["error"]) for error in errors)
        row["lacks"] = " ".join(textwrap.shorten(text, 180, placeholder=" …") for text in texts)
    return row


def name_of(model_type):
    """Returns the name that people search for: that of the table of names, or of the class."""
    known = [(length, name) for prefix, name in NAMES.items() if model_type.startswith(prefix) for length in [len(prefix)]]
    name = re.sub(r"(ForConditionalGeneration|ForCausalLM|LMHeadModel|ForVisionText2Text|ForProteinText2Text|Model)$", "", tiny_models.CLASSES[model_type])
    return max(known)[1] if known else name


@functools.cache
def by_hand():
    """Returns the types that dflop reads by hand, by a process of its own: types fork before dflop has threads."""
    listed = subprocess.run([sys.executable, "-m", "dflop", "models", "--json"], check=True, capture_output=True).stdout
    return {name for family in json.loads(listed)["families"] for name in family["model_types"]}


def run(model_type):
    """Runs a type in a process of its own and returns its outcome."""
    began = time.time()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        used = int(time.process_time())
        resource.setrlimit(resource.RLIMIT_CPU, (used + SECONDS_MAX, used + SECONDS_MAX))
        sys.stdout = sys.stderr = open(os.devnull, "w")
        try:
            outcome = described(model_type)
        except BaseException as error:
            outcome = {"level": "missing", "problems": [problem_of(error)]}
        with os.fdopen(write, "w") as pipe:
            json.dump(outcome, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    outcome = json.loads(text) if text else {"level": "missing", "problems": [{"error": f"takes more than {SECONDS_MAX} s, or ends the process"}]}
    outcome = {"type": model_type, "seconds": round(time.time() - began, 1)} | outcome
    return outcome | named(outcome)


def main():
    warnings.simplefilter("ignore")
    hf.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for model_type in sys.argv[1:] or tiny_models.CLASSES:
        outcome = run(model_type)
        with RECORDS.open("a") as file:
            file.write(json.dumps(outcome) + "\n")
        last = outcome.get("training") or (outcome.get("problems") or [{}])[-1]
        why = "" if outcome["level"] == "trained" else " ".join(last.get("error", "").split())[:300]
        packed = "packed" if outcome.get("is_packed") else ""
        print(model_type, outcome["level"], packed, outcome["seconds"], outcome.get("factor", ""), outcome.get("rules", ""), why, flush=True)


if __name__ == "__main__":
    main()
