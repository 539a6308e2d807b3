#!/usr/bin/env python3
"""Compares a training step of the executor with one of PyTorch, on one model, alternating, on pinned threads.

    cargo build --release -p dflop-executor --example train_step
    python3 benches/train_step.py --python venv/bin/python --out out.json

The model is the language model of `executor/examples/train_step.rs`: a decoder of 2 layers, width 128, 4 heads, a SwiGLU
MLP of 512, RMSNorm, rotary positions, a vocabulary of 256 with separate embedding and head; 8 samples of 128
tokens, f32. A step is forward, backward and AdamW. PyTorch runs eagerly with `scaled_dot_product_attention`,
`rms_norm` and fused AdamW; queries, keys and values are one product, gate and up another (`--apart` makes them five).
Both print their number of parameters, which must agree.

Each round runs both, one after the other, on the CPUs that are named. A figure is the best of all rounds. A round in
which PyTorch falls below half its best is discarded: the machine was busy. `--torch THREADS STEPS` runs PyTorch alone.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYERS, HIDDEN, HEADS, MIDDLE, VOCABULARY = 2, 128, 4, 512, 256
SAMPLES, TOKENS = 8, 128


def torch_steps(threads, steps, runs, is_apart):
    """Trains the model and prints its parameters, its losses and steps a second."""
    import time

    import torch
    from torch import nn
    from torch.nn import functional

    class Layer(nn.Module):
        """Decoder layer."""

        def __init__(self):
            super().__init__()
            self.norms = nn.ParameterList([torch.ones(HIDDEN), torch.ones(HIDDEN)])
            qkv, inner = ([HIDDEN] * 3, [MIDDLE] * 2) if is_apart else ([3 * HIDDEN], [2 * MIDDLE])
            self.qkv = nn.ModuleList(nn.Linear(HIDDEN, width, bias=False) for width in qkv)
            self.output = nn.Linear(HIDDEN, HIDDEN, bias=False)
            self.inner = nn.ModuleList(nn.Linear(HIDDEN, width, bias=False) for width in inner)
            self.down = nn.Linear(MIDDLE, HIDDEN, bias=False)

        def forward(self, x, cos, sin):
            normal = functional.rms_norm(x, (HIDDEN,), self.norms[0], 1e-5)
            parts = [linear(normal) for linear in self.qkv]
            if not is_apart:
                parts = parts[0].split(HIDDEN, -1)
            q, k, v = (part.view(SAMPLES, TOKENS, HEADS, -1).transpose(1, 2) for part in parts)
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.output(attended.transpose(1, 2).reshape(SAMPLES, TOKENS, HIDDEN))
            normal = functional.rms_norm(x, (HIDDEN,), self.norms[1], 1e-5)
            parts = [linear(normal) for linear in self.inner]
            if not is_apart:
                parts = parts[0].split(MIDDLE, -1)
            return x + self.down(functional.silu(parts[0]) * parts[1])

    def rotated(x, cos, sin):
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat((-high, low), -1) * sin

    class Model(nn.Module):
        """Language model."""

        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
            self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
            self.norm = nn.Parameter(torch.ones(HIDDEN))
            self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

        def forward(self, ids, cos, sin):
            x = self.embedding(ids)
            for layer in self.layers:
                x = layer(x, cos, sin)
            # As in the executor, the last token of a sample predicts nothing.
            return self.head(functional.rms_norm(x[:, :-1], (HIDDEN,), self.norm, 1e-5))

    torch.set_num_threads(threads)
    dim = HIDDEN // HEADS
    angles = torch.arange(TOKENS)[:, None] / 10000 ** (torch.arange(0, dim, 2) / dim)
    cos, sin = (torch.cat((turn, turn), -1) for turn in (angles.cos(), angles.sin()))
    ids = torch.arange(SAMPLES * TOKENS)
    ids = ((ids * ids + 7 * ids // 3) % VOCABULARY).view(SAMPLES, TOKENS)
    targets = ids[:, 1:].reshape(-1)
    for _ in range(runs):
        torch.manual_seed(1)
        model = Model()
        for parameter in model.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
        for step in range(steps + 1):
            if step == 1:
                start = time.perf_counter()
            loss = functional.cross_entropy(model(ids, cos, sin).flatten(0, 1), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            last = loss.item()
            first = last if step == 0 else first
        rate = steps / (time.perf_counter() - start)
        print(f"loss {first:.5f} to {last:.5f}, {rate:.1f} steps/s", flush=True)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"torch {torch.__version__}, {parameters} parameters")


def run(command, cpus):
    """Runs a program on some CPUs; returns its parameters, the best of its runs, and its output."""
    threads = str(cpus.count(",") + 1)
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    done = subprocess.run(
        ["taskset", "-c", cpus, *map(str, command)], env=environment, capture_output=True, text=True, check=True
    )
    rates = [float(rate) for rate in re.findall(r"to [\d.]+, ([\d.]+) steps/s", done.stdout)]
    parameters = int(re.search(r"(\d+) parameters", done.stdout).group(1))
    return parameters, max(rates), done.stdout


def compare(options, cpus):
    """Alternates both programs; returns the rounds and the figures."""
    threads = cpus.count(",") + 1
    ours = [options.example, threads, options.steps, options.runs]
    theirs = [options.python, __file__, "--torch", threads, options.steps, "--runs", options.runs]
    rounds = []
    for number in range(options.rounds):
        pair = {}
        # The order changes from round to round.
        order = [("dflop", ours), ("torch", theirs), ("torch apart", [*theirs, "--apart"])]
        for name, command in order if number % 2 == 0 else order[::-1]:
            parameters, rate, printed = run(command, cpus)
            pair[name] = {"parameters": parameters, "steps_per_second": rate, "printed": printed}
        assert len({side["parameters"] for side in pair.values()}) == 1, "the models are the same"
        rounds.append(pair)
        rates = ", ".join(f"{name} {side['steps_per_second']:.1f}" for name, side in pair.items())
        print(f"  {threads} threads, round {number}: {rates} steps/s", flush=True)

    def best_torch(pair):
        return max(pair[name]["steps_per_second"] for name in ("torch", "torch apart"))

    best = max(map(best_torch, rounds))
    kept = [pair for pair in rounds if best_torch(pair) >= best / 2]
    ours_best = max(pair["dflop"]["steps_per_second"] for pair in kept)
    figures = {
        "threads": threads,
        "parameters": rounds[0]["dflop"]["parameters"],
        "rounds": len(rounds),
        "discarded": len(rounds) - len(kept),
        "dflop_steps_per_second": ours_best,
        "torch_steps_per_second": best,
        "ratio": ours_best / best,
        "ratios_of_rounds": [pair["dflop"]["steps_per_second"] / best_torch(pair) for pair in kept],
    }
    return {"figures": figures, "rounds": rounds}


def main():
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release" / "examples"
    parser.add_argument("--example", type=Path, default=target / "train_step", help="release build of the example")
    parser.add_argument("--python", default=sys.executable, help="Python interpreter with torch")
    parser.add_argument("--cpus", nargs="*", default=["0", "0,1"], help="CPUs to pin to, as taskset takes them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="timed steps of a run")
    parser.add_argument("--runs", type=int, default=3, help="runs of a round, of which the best counts")
    parser.add_argument("--out", type=Path, help="JSON file for all measurements")
    parser.add_argument("--torch", nargs=2, type=int, metavar=("THREADS", "STEPS"), help=argparse.SUPPRESS)
    parser.add_argument("--apart", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.torch:
        torch_steps(*options.torch, options.runs, options.apart)
        return
    found = [compare(options, cpus) for cpus in options.cpus]
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    for one in found:
        print(json.dumps(one["figures"]))


if __name__ == "__main__":
    main()
