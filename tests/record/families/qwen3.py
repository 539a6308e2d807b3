"""Records a tiny Qwen3, whose queries and keys are normalized, as truth for `executor/`; see `executor_parity.py`.

    python3 tests/record/families/qwen3.py        # needs torch, transformers, safetensors
"""

import json
import sys
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from executor_parity import GOLDEN, TEXT, record, text_samples  # noqa: E402


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    config = transformers.Qwen3Config(
        **(TEXT | dict(num_hidden_layers=2, head_dim=8, hidden_size=24)), tie_word_embeddings=False
    )
    record("qwen3", transformers.Qwen3ForCausalLM(config), text_samples(generator, [11, 1, 67, 6]), {}, generator)
    versions = dict(torch=torch.__version__.split("+")[0], transformers=transformers.__version__)
    (GOLDEN / "qwen3" / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    main()
