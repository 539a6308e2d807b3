"""`dflop memory --trainer torch` counts the tensors that layers keep for the backward pass."""

from __future__ import annotations

import json
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from dflop import _native

TOKENS = 512
TEXT = {
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1000,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
NATIVE = {"hidden_size": 256, "intermediate_size": 640, "num_heads": 8, "out_hidden_size": 256}
TILES = {"hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 8}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}
GRID = torch.tensor([[1, 16, 32]])


def qwen2_5_vl(layers: int) -> Any:
    text = {key: value for key, value in TEXT.items() if key != "head_dim"}
    return transformers.Qwen2_5_VLConfig(
        text_config={**text, "num_hidden_layers": layers, "rope_parameters": ROPE},
        vision_config={**NATIVE, "depth": layers, "fullatt_block_indexes": list(range(layers))},
    )


def qwen3_vl(layers: int) -> Any:
    return transformers.Qwen3VLConfig(
        text_config={**TEXT, "num_hidden_layers": layers, "rope_parameters": ROPE},
        vision_config={**NATIVE, "depth": layers, "deepstack_visual_indexes": []},
    )


def intern_vl(layers: int) -> Any:
    text = {key: value for key, value in TEXT.items() if key != "head_dim"}
    sizes = {"image_size": [224, 224], "patch_size": [14, 14]}
    return transformers.InternVLConfig(
        text_config={"model_type": "qwen2", **text, "num_hidden_layers": layers},
        vision_config={**TILES, **sizes, "num_hidden_layers": layers},
        image_token_id=999,
        image_seq_length=64,
    )


def gemma3(layers: int) -> Any:
    sizes = {"image_size": 896, "patch_size": 14, "vision_use_head": False}
    return transformers.Gemma3Config(
        text_config={**TEXT, "num_hidden_layers": layers, "sliding_window": 4096},
        vision_config={**TILES, **sizes, "num_hidden_layers": layers},
    )


def saved_bytes(module: torch.nn.Module, call: Callable[[torch.nn.Module], Any]) -> int:
    """Returns the bytes of all tensors but weights that a forward pass keeps for the backward pass."""
    weights = {one.untyped_storage().data_ptr() for one in module.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = call(module)
    del output
    return sum(storage.nbytes() for storage in kept.values())


def llm_bytes(config: Any) -> int:
    module = transformers.AutoModel.from_config(config.text_config, dtype=torch.bfloat16).train()
    rows = torch.randn(1, TOKENS, 256, dtype=torch.bfloat16, requires_grad=True)
    return saved_bytes(module, lambda model: model(inputs_embeds=rows, use_cache=False))


def native_bytes(config: Any) -> int:
    module = transformers.AutoModel.from_config(config.vision_config, dtype=torch.bfloat16).train()
    width = 3 * config.vision_config.temporal_patch_size * config.vision_config.patch_size**2
    pixels = torch.randn(TOKENS, width, dtype=torch.bfloat16)
    return saved_bytes(module, lambda model: model(pixels, grid_thw=GRID))


def tile_bytes(config: Any) -> int:
    module = transformers.AutoModel.from_config(config.vision_config, dtype=torch.bfloat16).train()
    sizes = config.vision_config.image_size
    size = sizes[0] if isinstance(sizes, (list, tuple)) else sizes
    pixels = torch.randn(1, 3, size, size, dtype=torch.bfloat16)
    return saved_bytes(module, lambda model: model(pixels))


class Memory(unittest.TestCase):
    def counted(self, config: Any) -> dict[str, int]:
        """Returns the bytes per token that the command counts, by module."""
        directory = Path(self.enterContext(tempfile.TemporaryDirectory()))
        config.save_pretrained(directory)
        words = ["memory", "--model", str(directory), "--trainer", "torch", "--tokens", "1000,1000", "--json"]
        stages = json.loads(_native.command(words))["stages"]
        return {stage["module"]: stage["activation_bytes"] for stage in stages}

    def ratio(
        self, make: Callable[[int], Any], module: str, saved: Callable[[Any], int], tokens: int
    ) -> float:
        """Returns the counted bytes of a layer over those that PyTorch keeps, from two depths."""
        few, many = make(2), make(4)
        counted = (self.counted(many)[module] - self.counted(few)[module]) / 1000
        return counted / ((saved(many) - saved(few)) / tokens)

    def test_layers_of_llms(self) -> None:
        for make in (qwen2_5_vl, qwen3_vl, intern_vl, gemma3):
            with self.subTest(make.__name__):
                self.assertAlmostEqual(self.ratio(make, "llm", llm_bytes, TOKENS), 1, delta=0.002)

    def test_layers_of_encoders(self) -> None:
        # On the CPU, the rows of images are joined behind attention; FlashAttention has one output.
        for make in (qwen2_5_vl, qwen3_vl):
            with self.subTest(make.__name__):
                ratio = self.ratio(make, "vision", native_bytes, TOKENS)
                self.assertTrue(0.93 < ratio <= 1, ratio)
        with self.subTest("InternViT has layer scales"):
            self.assertAlmostEqual(self.ratio(intern_vl, "vision", tile_bytes, 257), 1, delta=0.002)
        with self.subTest("SigLIP keeps nothing beside"):
            ratio = self.ratio(gemma3, "vision", tile_bytes, 4096)
            self.assertTrue(1.1 < ratio < 1.16, ratio)


if __name__ == "__main__":
    unittest.main()
