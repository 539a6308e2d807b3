"""Records parameters and FLOPs of InternVL3.5 on Qwen3 and Qwen3-MoE as PyTorch counts them; see `flops.py`.

    python3 tests/record/families/intern_vl_3_5.py        # needs torch, transformers 5.24.0

Sizes are the published ones and run on the meta device. Experts run as products of gathered matrices (`batched_mm`), so that
the counter sees the rows that are routed.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import run  # noqa: E402
from flops import Intern  # noqa: E402
from transformers import masking_utils  # noqa: E402

# One sequence is one sample; the search for more reads values, which the meta device has none of.
masking_utils.find_packed_sequence_indices = lambda _: None

SMALL_TOWER = {"attention_bias": True}
LARGE_TOWER = {"hidden_size": 3200, "num_hidden_layers": 45, "num_attention_heads": 25, "intermediate_size": 12800,
               "norm_type": "rms_norm", "use_qk_norm": True}
QWEN3_8B = {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
            "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
QWEN3_32B = QWEN3_8B | {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64}
QWEN3_30B_A3B = {"model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
                 "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
                 "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
QWEN3_235B_A22B = QWEN3_30B_A3B | {"hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536,
                                   "num_hidden_layers": 94, "num_attention_heads": 64}


class InternVl35(Intern):
    def make(self, config):
        config.text_config._experts_implementation = "batched_mm"
        # A configuration without the field has an LM head of its own.
        config.tie_word_embeddings = config.text_config.tie_word_embeddings = False
        return super().make(config)


def cases():
    for name, text, tower in [
        ("internvl3.5-8b", QWEN3_8B, SMALL_TOWER),
        ("internvl3.5-30b-a3b", QWEN3_30B_A3B, SMALL_TOWER),
        ("internvl3.5-38b", QWEN3_32B, LARGE_TOWER),
        ("internvl3.5-241b-a28b", QWEN3_235B_A22B, LARGE_TOWER),
    ]:
        yield InternVl35(name, {"model_type": "internvl", "text_config": text, "vision_config": tower})


def main(golden):
    """Records parameters and FLOPs of InternVL3.5."""
    text = ",\n".join(json.dumps(case.recorded()) for case in cases())
    (golden / "flops" / "intern_vl_3_5.json").write_text(f"[\n{text}\n]\n")


if __name__ == "__main__":
    run(main, "internvl")
