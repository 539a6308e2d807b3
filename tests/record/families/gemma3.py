"""Records tiny Gemma 3 models, with and without images, as truth for `executor/`; see `executor_parity.py`.

    make record-models NAMES=gemma3 PYTHON=venv/bin/python        # needs torch, transformers, safetensors

Windows are shorter than samples, and images longer than windows; samples run one by one, with `token_type_ids` as the
processor makes them.
"""

import sys
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import executor_parity as parity  # noqa: E402
from common import run  # noqa: E402
from executor_parity import IMAGE, TEXT, TOWER, counted, record, text_samples, with_media  # noqa: E402

ROPE = dict(
    full_attention=dict(rope_type="linear", rope_theta=1000.0, factor=8.0),
    sliding_attention=dict(rope_type="default", rope_theta=100.0),
)
GEMMA = TEXT | dict(
    head_dim=8, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"],
    sliding_window=9, query_pre_attn_scalar=5, rope_parameters=ROPE, pad_token_id=None,
)


def gemma3_text(generator):
    config = transformers.Gemma3TextConfig(**GEMMA, attn_implementation="eager")
    model = transformers.Gemma3ForCausalLM(config)
    record("gemma3_text", model, text_samples(generator, [17, 1, 70, 9]), {}, generator)


def gemma3(generator):
    config = transformers.Gemma3Config(
        text_config=GEMMA, vision_config=dict(
            model_type="siglip_vision_model", image_size=24, patch_size=4, vision_use_head=False, **TOWER
        ),
        mm_tokens_per_image=9, image_token_index=IMAGE, boi_token_index=45, eoi_token_index=46,
        attn_implementation="eager",
    )
    samples, pixels = [], []
    for images in (2, 0, 1):
        input_ids = with_media(generator, 5, [(IMAGE, 9)] * images, 12)
        values = torch.randn(images, 3, 24, 24, generator=generator)
        arguments = dict(token_type_ids=(input_ids == IMAGE).long()[None])
        samples.append((input_ids, counted(input_ids), arguments | (dict(pixel_values=values) if images else {})))
        pixels.append(values)
    model = transformers.Gemma3ForConditionalGeneration(config)
    record("gemma3", model, samples, dict(pixel_values=torch.cat(pixels)), generator)


def main(golden):
    """Records logits, loss and gradients."""
    parity.GOLDEN = golden / "executor"
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for index, make in enumerate([gemma3_text, gemma3]):
        torch.manual_seed(index)
        make(torch.Generator().manual_seed(index))


if __name__ == "__main__":
    run(main, "gemma3", "gemma3_text")
