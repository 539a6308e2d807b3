"""Records parameters, FLOPs and attention masks of language models as PyTorch has them, as truth for `costmodel`.

Run by hand with transformers 5.24.0, `make record-llm-flops`; `costmodel/tests/llm_flops.rs` compares the cost model with
`tests/golden/llm_flops.json`. Needs no network and no weights.

- Published sizes run on the meta device, where nothing is computed; small ones on the CPU, where masks have values.
- FLOPs are what `torch.utils.flop_counter.FlopCounterMode` counts forward and backward. Experts run as products of
  gathered matrices (`batched_mm`), so that the counter sees the rows that are routed; Llama 4 has no such
  implementation and runs every expert on every token (`every_expert`).
- Attention is eager: it computes and counts all query-key pairs, also those outside a window.
- `pairs` are the query-key pairs that the attention mask of each layer leaves, counted in the mask.
- `parameters` count tied ones once; `layers` are the parameters of each layer.
"""

import argparse
import contextlib
import json
from pathlib import Path

import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING

from common import note_versions

# Rotary embeddings disable automatic casting, which the meta device does not support.
torch.autocast = lambda *_, **__: contextlib.nullcontext()
# One sequence is one sample; the search for more reads values, which the meta device has none of.
transformers.masking_utils.find_packed_sequence_indices = lambda _: None
GOLDEN = Path(__file__).resolve().parents[1] / "golden"
TOKENS = {"meta": 1000, "cpu": 96}
# Text models that are part of a multimodal class only: their class, which has no LM head.
NESTED = {
    "qwen3_vl_text": "qwen3_vl.modeling_qwen3_vl.Qwen3VLTextModel",
    "qwen3_vl_moe_text": "qwen3_vl_moe.modeling_qwen3_vl_moe.Qwen3VLMoeTextModel",
    "qwen2_5_omni_text": "qwen2_5_omni.modeling_qwen2_5_omni.Qwen2_5OmniThinkerTextModel",
    "qwen3_omni_moe_text": "qwen3_omni_moe.modeling_qwen3_omni_moe.Qwen3OmniMoeThinkerTextModel",
    "mistral4": "mistral4.modeling_mistral4.Mistral4Model",
    "glm4v_text": "glm4v.modeling_glm4v.Glm4vTextModel",
    "glm4v_moe_text": "glm4v_moe.modeling_glm4v_moe.Glm4vMoeTextModel",
}


class WithHead(torch.nn.Module):
    """A text model with an LM head of its own, or that of its embedding."""

    def __init__(self, config, model):
        super().__init__()
        self.config, self.model = config, model
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = model.embed_tokens.weight

    def forward(self, ids):
        return self.lm_head(self.model(input_ids=ids, use_cache=False).last_hidden_state)


def build(config):
    path = NESTED.get(config.model_type)
    if path is None:
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        model.tie_weights()
        return model, lambda ids: model(input_ids=ids, use_cache=False).logits
    module, name = path.rsplit(".", 1)
    family = getattr(transformers.models, module.split(".")[0])
    model = WithHead(config, getattr(getattr(family, module.split(".")[1]), name)(config))
    return model, model


def parsed(document):
    settings = json.loads(json.dumps(document))
    config = CONFIG_MAPPING[settings.pop("model_type")].from_dict(settings)
    # A published configuration that is older than a field has no value for it.
    config.tie_word_embeddings = document.get("tie_word_embeddings", False)
    config._attn_implementation = "eager"
    config._experts_implementation = "batched_mm"
    return config


def parameters(module):
    return sum(parameter.numel() for parameter in module.parameters())


def recorded(name, document, device):
    config = parsed(document)
    with torch.device(device):
        model, run = build(config)
    model.train()
    layers = next(module for path, module in model.named_modules() if path.endswith("layers"))
    tokens = TOKENS[device]
    ids = torch.zeros((1, tokens), dtype=torch.long, device=device)
    pairs = []

    def count_pairs(_, args, kwargs):
        mask = kwargs["attention_mask"]
        pairs.append(int((mask == 0).sum() if mask.dtype != torch.bool else mask.sum()))

    if device == "cpu":
        for layer in layers:
            layer.self_attn.register_forward_pre_hook(count_pairs, with_kwargs=True)
    with FlopCounterMode(display=False) as forward:
        output = run(ids)
    with FlopCounterMode(display=False) as backward:
        output.float().sum().backward()
    case = {
        "name": name,
        "config": document,
        "parameters": parameters(model),
        "layers": [parameters(layer) for layer in layers],
        "tokens": tokens,
        "forward": forward.get_total_flops(),
        "backward": backward.get_total_flops(),
    }
    if document["model_type"] == "llama4_text":
        case["every_expert"] = True
    if device == "cpu":
        case["pairs"] = pairs
    print(name, case["parameters"], case["forward"], flush=True)
    return case


QWEN3_MOE = {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
             "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
             "num_experts": 128, "num_experts_per_tok": 8}
DEEPSEEK_V2_LITE = {"model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944,
                    "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
                    "num_key_value_heads": 16, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
                    "first_k_dense_replace": 1, "moe_layer_freq": 1, "q_lora_rank": None, "kv_lora_rank": 512,
                    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
GLM4_AIR = {"vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408,
            "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
            "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
            "attention_bias": True}
PUBLISHED = {
    "qwen3-30b-a3b": {"model_type": "qwen3_moe", **QWEN3_MOE},
    "qwen3-vl-30b-a3b": {"model_type": "qwen3_vl_moe_text", **QWEN3_MOE,
                         "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]}},
    "qwen1.5-moe-a2.7b": {"model_type": "qwen2_moe"},
    "mixtral-8x7b": {"model_type": "mixtral"},
    "mistral-7b": {"model_type": "mistral", "sliding_window": None},
    "mistral-small-24b": {"model_type": "mistral", "vocab_size": 131072, "hidden_size": 5120, "intermediate_size": 32768,
                          "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
                          "sliding_window": None},
    "gemma-3-4b": {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
                   "sliding_window": 1024, "tie_word_embeddings": True},
    "deepseek-v3": {"model_type": "deepseek_v3", "num_nextn_predict_layers": 1},
    "deepseek-v2-lite": DEEPSEEK_V2_LITE,
    "gpt-oss-20b": {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": {"model_type": "gpt_oss"},
    "llama-4-scout": {"model_type": "llama4_text"},
    "llama-4-maverick": {"model_type": "llama4_text", "num_local_experts": 128, "interleave_moe_layer_step": 2},
    "glm-4.5-air": {"model_type": "glm4_moe", **GLM4_AIR},
    "glm-4.5v": {"model_type": "glm4v_moe_text", **GLM4_AIR},
    "qwen2.5-omni-7b": {"model_type": "qwen2_5_omni_text",
                        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}},
    "qwen3-omni-30b-a3b": {"model_type": "qwen3_omni_moe_text", **QWEN3_MOE,
                           "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [24, 20, 20]}},
}
SMALL = {"vocab_size": 1200, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 5,
         "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"moe_intermediate_size": 48, "num_experts": 6, "num_experts_per_tok": 2}
ROUTED = {"moe_intermediate_size": 48, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
          "num_key_value_heads": 4}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
# Sections of rotary positions are halves of a head of 16.
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
# GLM rotates half of a head.
HALF_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}}
LISTED = ["full_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
TINY = {
    "qwen2-upper": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3},
    "qwen2-listed": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16, "layer_types": LISTED},
    "qwen3-upper": {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2, "head_dim": 32},
    "qwen3-moe-step": {"model_type": "qwen3_moe", **EXPERTS, "head_dim": 16, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
    "qwen3-moe-windows": {"model_type": "qwen3_moe", **EXPERTS, "head_dim": 16, "use_sliding_window": True, "sliding_window": 8},
    "qwen3-vl-moe": {"model_type": "qwen3_vl_moe_text", **EXPERTS, "head_dim": 16, "mlp_only_layers": [0], **MROPE},
    "qwen2-moe-windows": {"model_type": "qwen2_moe", **EXPERTS, "shared_expert_intermediate_size": 72, "use_sliding_window": True,
                          "sliding_window": 16, "max_window_layers": 4, "decoder_sparse_step": 2},
    "mixtral-windows": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 24},
    "mistral-windows": {"model_type": "mistral", "sliding_window": 24, "head_dim": 32},
    "ministral3": {"model_type": "ministral3", "head_dim": 16},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 32, "sliding_window": 16, "sliding_window_pattern": 3, "tie_word_embeddings": True},
    "deepseek-v3": {"model_type": "deepseek_v3", **ROUTED, **LATENT, "first_k_dense_replace": 2, "attention_bias": True},
    "deepseek-v2": {"model_type": "deepseek_v2", **ROUTED, **LATENT, "q_lora_rank": None, "first_k_dense_replace": 1},
    "mistral4": {"model_type": "mistral4", **ROUTED, **LATENT, "n_shared_experts": 2},
    "gpt-oss": {"model_type": "gpt_oss", "num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 16, "sliding_window": 12},
    "llama4": {"model_type": "llama4_text", "intermediate_size_mlp": 96, "num_local_experts": 4, "head_dim": 16,
               "attention_chunk_size": 20, "interleave_moe_layer_step": 2},
    "glm4v": {"model_type": "glm4v_text", **HALF_MROPE},
    "glm4-moe": {"model_type": "glm4_moe", **ROUTED, "use_qk_norm": True, "attention_bias": True, "head_dim": 16},
    "glm4v-moe": {"model_type": "glm4v_moe_text", **ROUTED, "head_dim": 16, **HALF_MROPE},
    "qwen3-omni-moe": {"model_type": "qwen3_omni_moe_text", **EXPERTS, "head_dim": 16, **MROPE},
}


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("names", nargs="*", help="cases to record and print, all by default, which are written")
    arguments.add_argument("--golden", type=Path, default=GOLDEN, help="directory to write below")
    options = arguments.parse_args()
    cases = [(name, config, "meta") for name, config in PUBLISHED.items()]
    cases += [(f"{name}-small", SMALL | config, "cpu") for name, config in TINY.items()]
    text = ",\n".join(json.dumps(recorded(*case)) for case in cases if not options.names or case[0] in options.names)
    if options.names:
        print(text)
    else:
        (options.golden / "llm_flops.json").write_text(f"[\n{text}\n]\n")
        for family in sorted({config["model_type"] for _, config, _ in cases}):
            note_versions(options.golden, family)


if __name__ == "__main__":
    main()
