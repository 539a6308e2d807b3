"""The decoder of `gpu-check train` in plain PyTorch: same sizes, packs, weights, optimizer and recomputation.

Parameters are bf16 with f32 masters, as in the executor; linear layers that share an input are one matrix; layers and
loss are compiled; the layers are recomputed in the backward pass if the executor's are. `pytorch_side.py` uses it.
"""

import json
import struct
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

IGNORED = -100
# Sequences of a pack are padded to a multiple of this with empty ones, so that shapes do not change.
SEQUENCES = 64


def attend_varlen(q, k, v, pack):
    """FlashAttention over packed sequences, the operator below nested tensors."""
    starts, longest = pack["starts"], pack["longest"]
    return torch.ops.aten._flash_attention_forward(
        q, k, v, starts, starts, longest, longest, 0.0, True, False, scale=q.shape[-1] ** -0.5
    )[0]


def attend_flex(q, k, v, pack):
    """FlexAttention with a block mask of the pack."""
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
    return flex_attention(q, k, v, block_mask=pack["mask"], enable_gqa=True)[0].transpose(0, 1)


def attend_segments(q, k, v, pack):
    """Scaled dot product attention, sequence by sequence."""
    parts = []
    for first, end in zip(pack["bounds"], pack["bounds"][1:]):
        one = (part[first:end].transpose(0, 1)[None] for part in (q, k, v))
        done = functional.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True)
        parts.append(done[0].transpose(0, 1))
    return torch.cat(parts)


WAYS = {"varlen": attend_varlen, "flex": attend_flex, "segments": attend_segments}


def rotated(x, cos, sin):
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


class Layer(nn.Module):
    """Transformer layer of Qwen2."""

    def __init__(self, config, attend):
        super().__init__()
        hidden, middle = config["hidden_size"], config["intermediate_size"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim, self.epsilon, self.attend = hidden // self.heads, config["rms_norm_eps"], attend
        self.first_norm, self.second_norm = nn.Parameter(torch.ones(hidden)), nn.Parameter(torch.ones(hidden))
        self.qkv = nn.Linear(hidden, (self.heads + 2 * self.kv_heads) * self.head_dim)
        self.output = nn.Linear(self.heads * self.head_dim, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * middle, bias=False)
        self.down = nn.Linear(middle, hidden, bias=False)

    def forward(self, x, cos, sin, pack):
        normal = functional.rms_norm(x, x.shape[-1:], self.first_norm, self.epsilon)
        qkv = self.qkv(normal).view(x.shape[0], -1, self.head_dim)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
        attended = self.attend(rotated(q, cos, sin), rotated(k, cos, sin), v, pack)
        x = x + self.output(attended.reshape(x.shape[0], -1))
        normal = functional.rms_norm(x, x.shape[-1:], self.second_norm, self.epsilon)
        gate, up = self.gate_up(normal).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


class Decoder(nn.Module):
    """Language model over one pack of sequences."""

    def __init__(self, config, attend, is_compiled):
        super().__init__()
        hidden, vocabulary = config["hidden_size"], config["vocab_size"]
        self.is_recomputed, self.epsilon = config["is_recomputed"], config["rms_norm_eps"]
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Layer(config, attend) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.Parameter(torch.ones(hidden))
        self.head = self.embedding.weight
        if not config["tie_word_embeddings"]:
            self.head = nn.Parameter(torch.empty(vocabulary, hidden))
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        for layer in self.layers:
            nn.init.zeros_(layer.qkv.bias)
        self.loss = head_loss
        if is_compiled:
            # Each layer by itself: they share one graph, and compiling takes seconds instead of minutes.
            for layer in self.layers:
                layer.compile(dynamic=False)
            self.loss = torch.compile(head_loss, dynamic=False)

    def forward(self, pack):
        x = self.embedding(pack["tokens"])
        for layer in self.layers:
            if self.is_recomputed:
                x = checkpoint(layer, x, pack["cos"], pack["sin"], pack, use_reentrant=False)
            else:
                x = layer(x, pack["cos"], pack["sin"], pack)
        return self.loss(x, self.norm, self.head, pack["targets"], self.epsilon) / pack["count"]


def head_loss(x, norm, head, targets, epsilon):
    logits = functional.rms_norm(x, x.shape[-1:], norm, epsilon) @ head.T
    return functional.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")


def read_tensors(path):
    """Reads the f32 tensors of a safetensors file, without the package of that name."""
    raw = Path(path).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    found = {}
    for name, tensor in json.loads(raw[8 : 8 + length]).items():
        if name != "__metadata__":
            first, end = (8 + length + offset for offset in tensor["data_offsets"])
            values = torch.frombuffer(bytearray(raw[first:end]), dtype=torch.float32)
            found[name] = values.view(tensor["shape"])
    return found


def named(model):
    """Yields parts of parameters with their names in checkpoints; parts are views."""
    yield "model.embed_tokens.weight", model.embedding.weight, None
    yield "model.norm.weight", model.norm, None
    if model.head is not model.embedding.weight:
        yield "lm_head.weight", model.head, None
    for number, layer in enumerate(model.layers):
        start = f"model.layers.{number}."
        yield start + "input_layernorm.weight", layer.first_norm, None
        yield start + "post_attention_layernorm.weight", layer.second_norm, None
        yield start + "self_attn.o_proj.weight", layer.output.weight, None
        yield start + "mlp.down_proj.weight", layer.down.weight, None
        middle = layer.down.weight.shape[1]
        ends = [0, middle, 2 * middle]
        for index, name in enumerate(("gate_proj", "up_proj")):
            yield start + f"mlp.{name}.weight", layer.gate_up.weight, slice(ends[index], ends[index + 1])
        query = layer.heads * layer.head_dim
        ends = [0, query, query + layer.kv_heads * layer.head_dim, query + 2 * layer.kv_heads * layer.head_dim]
        for index, name in enumerate(("q_proj", "k_proj", "v_proj")):
            rows = slice(ends[index], ends[index + 1])
            yield start + f"self_attn.{name}.weight", layer.qkv.weight, rows
            yield start + f"self_attn.{name}.bias", layer.qkv.bias, rows


def load(model, folder):
    """Copies the weights of a folder, all of which the model has."""
    tensors = read_tensors(Path(folder) / "model.safetensors")
    with torch.no_grad():
        for name, parameter, rows in named(model):
            (parameter if rows is None else parameter[rows]).copy_(tensors.pop(name))
    assert not tensors, f"weights that the model does not have: {sorted(tensors)}"


def prepare(packs, config, device, dtype, way):
    """Turns packs of `gpu-check` into inputs of the model."""
    longest = max(max(pack["lengths"]) for pack in packs)
    most = max(len(pack["lengths"]) for pack in packs)
    sequences = -(-most // SEQUENCES) * SEQUENCES
    dim = config["hidden_size"] // config["num_attention_heads"]
    frequencies = config["rope_theta"] ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    prepared = []
    for pack in packs:
        lengths, tokens = pack["lengths"], torch.tensor(pack["tokens"])
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        starts = functional.pad(bounds, (0, sequences + 1 - len(bounds)), value=len(tokens))
        angles = torch.cat([torch.arange(length, dtype=torch.float64) for length in lengths])[:, None] * frequencies
        targets = tokens.roll(-1)
        targets[bounds[1:] - 1] = IGNORED
        one = {
            "tokens": tokens.to(device),
            "targets": targets.to(device),
            "count": float(len(tokens) - len(lengths)),
            "starts": starts.to(device, torch.int32),
            "longest": longest,
            "bounds": bounds.tolist() if way == "segments" else None,
            "mask": flex_mask(lengths, device) if way == "flex" else None,
        }
        for name, turn in (("cos", angles.cos()), ("sin", angles.sin())):
            one[name] = torch.cat((turn, turn), -1)[:, None].to(device, dtype)
        prepared.append(one)
    return prepared


def flex_mask(lengths, device):
    from torch.nn.attention.flex_attention import create_block_mask

    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)

    def visible(_batch, _head, query, key):
        return (documents[query] == documents[key]) & (query >= key)

    return create_block_mask(visible, None, None, len(documents), len(documents), device=device)


class Trainer:
    """AdamW on f32 masters of bf16 parameters, with the settings of the executor."""

    def __init__(self, model, learning_rate):
        self.model, self.parameters = model, list(model.parameters())
        self.masters = [parameter.detach().float() for parameter in self.parameters]
        for master in self.masters:
            master.grad = torch.empty_like(master)
        matrices = [master for master in self.masters if master.dim() > 1]
        others = [master for master in self.masters if master.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), eps=1e-8, fused=True)

    def step(self, pack):
        """Trains on a pack; returns the loss on the device."""
        loss = self.model(pack)
        loss.backward()
        with torch.no_grad():
            torch._foreach_copy_([master.grad for master in self.masters], [one.grad for one in self.parameters])
            torch.nn.utils.clip_grad_norm_(self.masters, 1.0, foreach=True)
            self.optimizer.step()
            torch._foreach_copy_(self.parameters, self.masters)
        for parameter in self.parameters:
            parameter.grad = None
        return loss.detach()
