"""Trains small random models of transformers with `dflop train`, and runs what it saves with transformers.

Mixtures of experts, and Gemma 3 with crops of images.

    DFLOP=target/release/dflop python3 tests/python/trained_checkpoints.py      # needs what model_runs.py needs

Of every architecture: transformers writes random weights, `dflop train` starts from them, and its first loss must be the one
that transformers computes over the same batch. The checkpoint after two steps must load in transformers with no key missing,
unexpected or of another shape, and its loss over the next batch must be the one of the resumed run.
"""

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import image_families
import model_runs
import torch
import transformers as hf
from model_runs import DFLOP, text
from safetensors import safe_open

LARGEST_DIFFERENCE = 2e-5
STEPS = 2
BATCH, MICROBATCHES = 8, 2
ROUTED = dict(n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1, n_group=4, topk_group=2, first_k_dense_replace=1)
LATENT = dict(q_lora_rank=8, kv_lora_rank=12, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=5)
QWEN3 = dict(head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True)


def language_model(kind, **settings):
    """Builds a language model of these classes."""
    config = getattr(hf, f"{kind}Config")(**(text(tie_word_embeddings=False) | settings))
    return getattr(hf, f"{kind}ForCausalLM")(config)


MODELS = {
    "mixtral": lambda: language_model("Mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "qwen2_moe": lambda: language_model(
        "Qwen2Moe", num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=40,
        mlp_only_layers=[0], norm_topk_prob=False),
    "qwen3_moe": lambda: language_model("Qwen3Moe", **QWEN3),
    "qwen3_moe_tied": lambda: language_model("Qwen3Moe", **QWEN3 | dict(tie_word_embeddings=True)),
    "deepseek_v3": lambda: language_model(
        "DeepseekV3", **ROUTED, **LATENT, num_key_value_heads=4, moe_intermediate_size=24, routed_scaling_factor=2.5),
    "gpt_oss": lambda: language_model(
        "GptOss", num_local_experts=5, num_experts_per_tok=2, head_dim=16, sliding_window=8, intermediate_size=24,
        layer_types=["sliding_attention", "full_attention"], rope_parameters=dict(rope_type="default", rope_theta=10000.0)),
    "qwen3_vl_moe": model_runs.FAMILIES["qwen3-vl-30b-a3b"],
    "internvl_moe": lambda: model_runs.intern_vl(side=112, model_type="qwen3_moe", **QWEN3),
    "gemma3-crops": model_runs.FAMILIES["gemma3-crops"],
}
# Settings of image processors, of models whose tiles are smaller than the published ones.
PREPROCESSORS = image_families.PREPROCESSORS | {
    "internvl_moe": {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 112, "width": 112},
                     "crop_to_patches": True, "max_patches": 4},
}


def loss_of(model, folder, shards, step):
    """Returns the mean loss over the target tokens of a step, by transformers; `dflop batches` makes the tensors."""
    out = folder.parent / f"{folder.name}-batches-{step}"
    # Masks of gpt-oss in transformers 5.24.0 know nothing of positions, and so not where a packed sample starts.
    layout = "padded" if model.config.model_type == "gpt_oss" else "packed"
    command = [DFLOP, "batches", shards, "--model", folder, "--tokenizer", folder, "--global-batch-size", str(BATCH), "--dp-size", "1",
               "--microbatches", str(MICROBATCHES), "--from-step", str(step), "--seed", "0", "--set", f"processor.layout={layout}", "--out", out, "--json"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    total, targets = 0.0, 0
    for path in sorted(out.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            row = {name: file.get_tensor(name) for name in file.keys()}
            count = int(file.metadata()["target_tokens"])
        with torch.no_grad():
            total, targets = total + count * float(model(**row, use_cache=False).loss), targets + count
    return total / targets


def train(folder, shards, run, steps, *options):
    """Trains up to a step; returns the losses of the steps that ran."""
    config = folder.parent / f"{folder.name}.toml"
    config.write_text(
        f"steps = {steps}\nseed = 0\n[model]\ndirectory = {json.dumps(str(folder))}\npretrained = true\n"
        f"[data]\nshards = [{json.dumps(str(shards))}]\nglobal_batch_size = {BATCH}\n[parallel]\nmicrobatches = {MICROBATCHES}\n"
        f"[optimizer]\nlearning_rate = 1e-2\n[checkpoint]\ndirectory = {json.dumps(str(run))}\n")
    done = subprocess.run([DFLOP, "train", config, "--json", *options], check=True, stdout=subprocess.PIPE, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def check(name, shards, scratch):
    """Compares both ways; returns what was measured."""
    torch.manual_seed(0)
    folder, run = scratch / name, scratch / f"{name}-run"
    made = MODELS[name]().float().eval()
    made.save_pretrained(folder)
    for file in model_runs.tokenizer_of(name, scratch).iterdir():
        shutil.copy(file, folder)
    if name in PREPROCESSORS:
        (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSORS[name]))
    kind = type(made)
    random, about = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(about[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), (name, about)
    first = train(folder, shards, run, STEPS)
    before = loss_of(random.eval(), folder, shards, 0)
    assert abs(first[0] - before) < LARGEST_DIFFERENCE, (name, first[0], before)
    [saved] = run.glob(f"step-{STEPS:08}")
    trained, about = kind.from_pretrained(saved, output_loading_info=True)
    wrong = {key: sorted(about[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if about[key]}
    assert not wrong, (name, wrong)
    assert {key for key, value in trained.named_parameters()} == {key for key, value in random.named_parameters()}
    resumed = train(folder, shards, run, STEPS + 1, "--resume")
    assert set(resumed) == {STEPS}, resumed
    after = loss_of(trained.eval(), folder, shards, STEPS)
    assert abs(resumed[STEPS] - after) < LARGEST_DIFFERENCE, (name, resumed[STEPS], after)
    start = loss_of(random, folder, shards, STEPS)
    assert abs(start - after) > 100 * LARGEST_DIFFERENCE, (name, start, after)
    assert all_moved(random, trained) > 0.9, name
    print(f"{name}: first loss {first[0]:.6f}, transformers {before:.6f}; after {STEPS} steps {resumed[STEPS]:.6f}, "
          f"transformers {after:.6f}", flush=True)


def all_moved(random, trained):
    """Returns the share of parameters that training has changed."""
    pairs = list(zip(random.parameters(), trained.parameters()))
    return sum(not torch.equal(one, two) for one, two in pairs) / len(pairs)


def write_shard(scratch, kind):
    """Writes 24 samples whose answers differ; returns the shard. Language models take no images."""
    source = scratch / kind
    source.mkdir()
    model_runs.write_samples(source, False)
    with tarfile.open(scratch / f"{kind}.tar", "w") as shard:
        for number in range(24):
            at = number % 8 if kind == "images" else 3
            for path in sorted(source.glob(f"s{at}.*")):
                content, name = path.read_bytes(), f"n{number:02}.{path.name.split('.', 1)[1]}"
                if path.suffix == ".json":
                    content = content.replace(b"Twelve boats.", b" and ".join([b"a boat"] * (1 + number * 5 % 13)) + b" at %d." % number)
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                shard.addfile(entry, io.BytesIO(content))
    return scratch / f"{kind}.tar"


def main():
    wanted = sys.argv[1:] or list(MODELS)
    hf.logging.disable_progress_bar()
    print(f"transformers {hf.__version__}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        os.environ["XDG_CACHE_HOME"] = str(scratch / "cache")
        shards = {kind: write_shard(scratch, kind) for kind in ("texts", "images")}
        for name in wanted:
            has_images = "vl" in name or name in PREPROCESSORS
            check(name, shards["images" if has_images else "texts"], scratch)


if __name__ == "__main__":
    main()
