"""Records a tiny Qwen3, whose queries and keys are normalized, as truth for `executor/`; see `executor_parity.py`.

    make record-models NAMES=qwen3 PYTHON=venv/bin/python        # needs torch, transformers, safetensors
"""

import sys
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import executor_parity as parity  # noqa: E402
from common import run  # noqa: E402


def main(golden):
    """Records logits, loss and gradients."""
    parity.GOLDEN = golden / "executor"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    config = transformers.Qwen3Config(
        **(parity.TEXT | dict(num_hidden_layers=2, head_dim=8, hidden_size=24)), tie_word_embeddings=False
    )
    samples = parity.text_samples(generator, [11, 1, 67, 6])
    parity.record("qwen3", transformers.Qwen3ForCausalLM(config), samples, {}, generator)


if __name__ == "__main__":
    run(main, "qwen3")
