"""Records tiny decoders with mixtures of experts as truth for `executor/`; see `executor_parity.py`.

    python3 tests/record/families/experts.py [NAME…]        # needs torch, transformers, safetensors

Files have the tensors that `save_pretrained` writes: one per expert for most architectures, although transformers trains
all experts of a layer as one parameter. Gradients are recorded under the names of the file.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import GOLDEN  # noqa: E402
from executor_parity import IMAGE, TEXT, TOWER, counted, run_language_model, text_samples, with_media  # noqa: E402


def randomize(model, generator):
    """Gives every parameter, and the correction of routers, random values of bf16."""
    with torch.no_grad():
        named = list(model.named_parameters())
        named += [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("correction_bias")]
        for name, parameter in named:
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(".gate.weight") or name.endswith("router.weight"):
                parameter.copy_(noise)  # so that tokens prefer some experts clearly
            elif parameter.dim() > 1:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
            else:
                ones = 1.0 if parameter.numel() and float(parameter.float().mean()) > 0.5 else 0.0
                parameter.copy_(noise * 0.2 + ones)
    return model.to(torch.bfloat16)


def pieces(name, value):
    """Yields the tensors that files may have of a parameter."""
    yield value
    if ".experts." in name and value.dim() == 3:
        yield value.transpose(1, 2)
        for expert in value:
            yield expert
            if name.endswith("gate_up_proj"):
                yield from expert.chunk(2)


def record(name, model, samples, generator, extra=None):
    """Saves a model, runs its samples one by one, saves the results under the names of the file."""
    directory = OPTIONS.golden / "executor" / name
    directory.mkdir(parents=True, exist_ok=True)
    randomize(model, generator).eval().save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    model = type(model).from_pretrained(directory, dtype=torch.float32, experts_implementation="eager").eval()
    tensors = dict(extra or {}) | run_language_model(model, samples, generator)
    saved = load_file(directory / "model.safetensors")
    left = {key for key in saved if not key.endswith("correction_bias")}
    for own, parameter in model.named_parameters():
        gradients = pieces(own, torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        for value, gradient in zip(pieces(own, parameter.detach()), gradients):
            for key in sorted(left):
                if saved[key].shape == value.shape and torch.equal(saved[key].float(), value):
                    left.remove(key)
                    tensors[f"grad.{key}"] = gradient
                    break
    assert not left, left
    save_file({key: value.detach().contiguous().clone() for key, value in tensors.items()}, directory / "expected.safetensors")
    versions = dict(torch=torch.__version__.split("+")[0], transformers=transformers.__version__)
    (directory / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")
    size = sum(path.stat().st_size for path in directory.iterdir())
    print(f"{name}: loss {tensors['loss'].item():.6f}, {len(saved)} tensors, {size} bytes")


def mixtral(generator):
    sizes = TEXT | dict(num_hidden_layers=2, intermediate_size=12)
    config = transformers.MixtralConfig(
        **sizes, num_local_experts=4, num_experts_per_tok=2, sliding_window=None, tie_word_embeddings=False
    )
    record("mixtral", transformers.MixtralForCausalLM(config), text_samples(generator, [9, 1, 40]), generator)


def qwen2_moe(generator):
    config = transformers.Qwen2MoeConfig(
        **(TEXT | dict(num_hidden_layers=2)), num_experts=5, num_experts_per_tok=2, moe_intermediate_size=6,
        shared_expert_intermediate_size=10, mlp_only_layers=[0], norm_topk_prob=False, tie_word_embeddings=False,
    )
    record("qwen2_moe", transformers.Qwen2MoeForCausalLM(config), text_samples(generator, [7, 30, 2]), generator)


def qwen3_moe(generator):
    config = transformers.Qwen3MoeConfig(
        **(TEXT | dict(num_hidden_layers=2, head_dim=8)), num_experts=6, num_experts_per_tok=3, moe_intermediate_size=6,
        norm_topk_prob=True, tie_word_embeddings=True,
    )
    record("qwen3_moe", transformers.Qwen3MoeForCausalLM(config), text_samples(generator, [11, 1, 37, 6]), generator)


def deepseek_v3(generator):
    """Ranks are multiples of 4: products on a device depend on the alignment of matrices, which follow each other in memory."""
    rope = dict(
        rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16, beta_fast=32, beta_slow=1,
        mscale=1.0, mscale_all_dim=1.0,
    )
    sizes = TEXT | dict(num_hidden_layers=2, num_key_value_heads=4)
    config = transformers.DeepseekV3Config(
        **sizes, n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2, moe_intermediate_size=6,
        n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=12, qk_nope_head_dim=4, qk_rope_head_dim=4,
        v_head_dim=5, routed_scaling_factor=2.5, rope_parameters=rope, attention_bias=True, tie_word_embeddings=False,
    )
    record("deepseek_v3", transformers.DeepseekV3ForCausalLM(config), text_samples(generator, [9, 1, 33]), generator)


def gpt_oss(generator):
    """Windows of 8 tokens in every second layer; gates beyond the bounds of this limit."""
    rope = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16, truncate=False,
                beta_fast=32.0, beta_slow=1.0)
    sizes = TEXT | dict(num_hidden_layers=2, head_dim=8, intermediate_size=6)
    config = transformers.GptOssConfig(
        **sizes, num_local_experts=5, num_experts_per_tok=2, sliding_window=8, rope_parameters=rope, swiglu_limit=0.7,
        tie_word_embeddings=False,
    )
    record("gpt_oss", transformers.GptOssForCausalLM(config), text_samples(generator, [9, 1, 33]), generator)


def internvl_moe(generator):
    """InternVL3.5 with a Qwen3-MoE; samples with two images, none and one."""
    text = TEXT | dict(head_dim=8, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=6, norm_topk_prob=True)
    config = transformers.InternVLConfig(
        vision_config=dict(image_size=[16, 16], patch_size=[4, 4], attention_bias=True, **TOWER),
        text_config=dict(model_type="qwen3_moe", **text),
        image_token_id=IMAGE, image_seq_length=4, downsample_ratio=0.5, tie_word_embeddings=False,
    )
    samples, pixels = [], []
    for tiles in (2, 0, 1):
        input_ids = with_media(generator, 3, [(IMAGE, 4)] * tiles, 5)
        values = torch.randn(tiles, 3, 16, 16, generator=generator)
        samples.append((input_ids, counted(input_ids), dict(pixel_values=values) if tiles else {}))
        pixels.append(values)
    model = transformers.InternVLForConditionalGeneration(config)
    record("internvl_moe", model, samples, generator, dict(pixel_values=torch.cat(pixels)))


def llama4_text(generator):
    """A layer with rotation, chunks of 8 tokens and an MLP, then one without rotation, with experts and queries scaled from the
    fourth token on."""
    sizes = TEXT | dict(num_hidden_layers=2, head_dim=8, intermediate_size=6)
    config = transformers.Llama4TextConfig(
        **sizes, intermediate_size_mlp=20, num_local_experts=5, num_experts_per_tok=2, moe_layers=[1], no_rope_layers=[1, 0],
        attention_chunk_size=8, floor_scale=4, attn_scale=0.5, rope_parameters=dict(rope_type="default", rope_theta=500.0),
        pad_token_id=None, tie_word_embeddings=False,
    )
    record("llama4_text", transformers.Llama4ForCausalLM(config), text_samples(generator, [9, 1, 33]), generator)


def deepseek_v2(generator):
    """Queries without a latent vector; experts of the two groups of three whose best expert is best."""
    sizes = TEXT | dict(num_hidden_layers=2, num_key_value_heads=4)
    config = transformers.DeepseekV2Config(
        **sizes, n_routed_experts=6, num_experts_per_tok=3, n_group=3, topk_group=2, topk_method="group_limited_greedy",
        moe_intermediate_size=6, n_shared_experts=2, first_k_dense_replace=1, q_lora_rank=None, kv_lora_rank=12, qk_nope_head_dim=4,
        qk_rope_head_dim=4, v_head_dim=5, routed_scaling_factor=1.5, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="default", rope_theta=500.0),
    )
    record("deepseek_v2", transformers.DeepseekV2ForCausalLM(config), text_samples(generator, [11, 1, 30]), generator)


def glm4_moe(generator):
    """Half of every head is rotated, and a layer without experts comes first."""
    sizes = TEXT | dict(num_hidden_layers=2, head_dim=8)
    config = transformers.Glm4MoeConfig(
        **sizes, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=6, n_shared_experts=1, first_k_dense_replace=1,
        routed_scaling_factor=1.5, use_qk_norm=True, attention_bias=True, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=0.5),
    )
    record("glm4_moe", transformers.Glm4MoeForCausalLM(config), text_samples(generator, [9, 1, 35]), generator)


MODELS = [mixtral, qwen2_moe, qwen3_moe, deepseek_v3, internvl_moe, gpt_oss, llama4_text, deepseek_v2, glm4_moe]


def main():
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for index, make in enumerate(MODELS):
        if not OPTIONS.names or make.__name__ in OPTIONS.names:
            torch.manual_seed(100 + index)
            make(torch.Generator().manual_seed(100 + index))


PARSER = argparse.ArgumentParser(description=__doc__.splitlines()[0])
PARSER.add_argument("names", nargs="*", help="models to record, all by default")
PARSER.add_argument("--golden", type=Path, default=GOLDEN, help="directory to write below")

if __name__ == "__main__":
    OPTIONS = PARSER.parse_args()
    main()
