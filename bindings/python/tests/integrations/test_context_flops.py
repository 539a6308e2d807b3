"""Tests the FLOPs of slices: PyTorch counts as many in its own ring attention and in layers, on four ranks."""

from __future__ import annotations

import json
import sys
import unittest
from pathlib import Path

import dflop
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode
from trainers import WithData, torchrun
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

RANKS = 4
TOKENS = 4096
RELATIVE_MAX = 1e-3


class Passes:
    """FLOPs forward and backward of functions, as PyTorch counts them."""

    def __init__(self) -> None:
        self.forward: list[int] = []
        self.backward: list[int] = []

    def run(self, function, *inputs: torch.Tensor) -> torch.Tensor:
        inputs = [one.detach().requires_grad_() for one in inputs]
        with FlopCounterMode(display=False) as forward:
            out = function(*inputs)
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
        self.forward.append(forward.get_total_flops())
        self.backward.append(backward.get_total_flops())
        return out.detach()


def attend(query, key, value, is_causal):
    """Attends with the products of visible pairs only: row by row if masked, as kernels skip the rest."""
    if not is_causal:
        return (query @ key.transpose(-1, -2)).softmax(-1) @ value
    ends = range(1, query.shape[2] + 1)
    rows = [attend(query[:, :, end - 1 : end], key[:, :, :end], value[:, :, :end], False) for end in ends]
    return torch.cat(rows, 2)


def count(directory: Path) -> None:
    """Counts the FLOPs of a slice on every rank of this process group."""
    from torch.distributed.tensor.experimental._context_parallel._attention import _templated_ring_attention

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config = Qwen2VLConfig.from_pretrained(directory / "model")
    model, text = Qwen2VLForConditionalGeneration(config), config.text_config
    heads, width = text.num_attention_heads, text.hidden_size // text.num_attention_heads
    ring, linear = Passes(), Passes()

    def op(query, key, value, is_causal=False, **_):
        out = ring.run(lambda *inputs: attend(*inputs, is_causal), query, key, value)
        return out, torch.zeros(query.shape[:3])

    parts = [torch.randn(1, heads, TOKENS // RANKS, width) for _ in range(3)]
    _templated_ring_attention(dist.group.WORLD, 2, op, *parts, is_causal=True)
    rows = torch.randn(1, TOKENS // RANKS, text.hidden_size)
    for layer in model.model.language_model.layers:
        attention = layer.self_attn
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            linear.run(projection, rows)
        linear.run(attention.o_proj, torch.randn(1, len(rows[0]), heads * width))
        linear.run(layer.mlp, rows)
    linear.run(model.lm_head, rows)
    layers = len(model.model.language_model.layers)
    found = {
        "rank": dist.get_rank(),
        "attention": [layers * flops for flops in ring.forward],
        "forward": layers * sum(ring.forward) + sum(linear.forward),
        "backward": layers * sum(ring.backward) + sum(linear.backward),
    }
    everything: list[dict | None] = [None] * RANKS
    dist.all_gather_object(everything, found)
    if dist.get_rank() == 0:
        print(json.dumps(everything), flush=True)
    dist.destroy_process_group()


class ContextFlopsTest(WithData):
    def test_slices_have_the_flops_of_torch(self) -> None:
        try:
            from torch.distributed.tensor.experimental._context_parallel import _attention  # noqa: F401
        except ImportError:
            self.skipTest("this version of PyTorch has no ring attention")
        printed = torchrun(__file__, self.directory, ranks=RANKS)
        counted = json.loads(next(line for line in printed.splitlines() if line.startswith("[")))
        costs = dflop.CostModel(str(self.directory / "model"))
        slices, (whole,) = costs.slices(TOKENS, RANKS), costs.slices(TOKENS, 1)
        for torch_counts, own in zip(counted, slices, strict=True):
            with self.subTest(rank=torch_counts["rank"]):
                for wanted, found in zip(torch_counts["attention"], own["attention_flops"], strict=True):
                    self.near(found, wanted)
                self.near(own["forward_flops"], torch_counts["forward"])
                self.near(own["backward_flops"], torch_counts["backward"])
        for name in ("forward", "backward"):
            self.assertEqual(sum(own[f"{name}_flops"] for own in slices), whole[f"{name}_flops"])
            self.near(whole[f"{name}_flops"], sum(one[name] for one in counted))

    def near(self, found: int, wanted: int) -> None:
        self.assertGreater(found, 0)
        self.assertLess(abs(found / wanted - 1), RELATIVE_MAX, f"{found} {wanted}")


if __name__ == "__main__":
    if len(sys.argv) == 2 and Path(sys.argv[1]).is_dir():
        count(Path(sys.argv[1]))
    else:
        unittest.main()
