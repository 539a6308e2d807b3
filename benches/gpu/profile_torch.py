#!/usr/bin/env python3
"""Measures layers of multimodal models with plain PyTorch, into the profile schema of `dflop`.

A few layers with random weights run alone: linear work (projections, norms, MLP; attention replaced by an
element-wise sum of queries, keys and values, so that all projections have gradients), scaled dot-product
attention, what is outside the layers (patch embedding, convolutions and projector of an encoder; embedding,
LM head and loss of an LLM), and the update of the weights by AdamW. Two layer counts separate the cost of a layer
from what does not grow with layers. Every run is a row; `dflop` takes medians and spreads.

    python3 benches/gpu/profile_torch.py --out h100.csv                       # all models, on the device found
    python3 benches/gpu/profile_torch.py --miniature --out cpu-miniature.csv  # minutes on one CPU core
    python3 benches/gpu/profile_torch.py --between --out held-out.csv         # other shapes, to check predictions

On CUDA, times are those of events, and a buffer of twice the L2 cache is written before each run, so that weights
and inputs come from memory as they do in training. On a CPU, times are those of `perf_counter`.
Tensor-parallel degree 1 only: a shard of a layer without its communication takes less time than on a real group.
The schema is documented in `costmodel/src/profile/mod.rs`. Needs PyTorch 2.5 or newer and nothing else.
"""

import argparse
import dataclasses
import platform
import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

COLUMNS = "module,part,phase,tp,layers,batch,tokens,microseconds,bytes"
PATCH_INPUTS = 3 * 14 * 14
MEL_BINS = 128


@dataclasses.dataclass(frozen=True)
class Widths:
    """Widths of a module, from its published configuration."""

    name: str
    module: str
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    head_dim: int = 0
    # Encoders: tokens of one sequence, tokens merged into one for the LLM, width of the LLM.
    tokens: int = 0
    merged: int = 1
    llm_hidden: int = 0
    # LLMs.
    vocab: int = 0
    mel_bins: int = MEL_BINS

    @property
    def width_of_head(self):
        return self.head_dim or self.hidden // self.heads

    def line(self):
        kv_heads = f" kv_heads={self.kv_heads}" if self.module == "llm" else ""
        return f"# {self.module}: name={self.name} hidden={self.hidden} heads={self.heads}{kv_heads} ffn={self.ffn}"


def encoder(name, module, hidden, heads, ffn, tokens, merged, llm_hidden, **rest):
    return Widths(name, module, hidden, heads, heads, ffn, 0, tokens, merged, llm_hidden, **rest)


def llm(name, hidden, heads, kv_heads, ffn, vocab):
    return Widths(name, "llm", hidden, heads, kv_heads, ffn, vocab=vocab)


MODELS = [
    encoder("siglip-so400m", "vision", 1152, 16, 4304, 729, 1, 3584),
    encoder("internvit-300m", "vision", 1024, 16, 4096, 1024, 4, 3584),
    encoder("internvit-6b", "vision", 3200, 25, 12800, 1024, 4, 8192),
    encoder("whisper-large", "audio", 1280, 20, 5120, 1500, 2, 4096),
    llm("qwen2.5-7b", 3584, 28, 4, 18944, 152064),
    llm("llama3-8b", 4096, 32, 8, 14336, 128256),
]
# The preset `tiny` of dflop.
MINIATURES = [
    encoder("tiny-vision", "vision", 256, 4, 1024, 256, 4, 256),
    encoder("tiny-audio", "audio", 256, 4, 1024, 1500, 2, 256, mel_bins=80),
    llm("tiny-llm", 256, 4, 2, 1024, 4096),
]

BATCHES = {False: [1, 2, 4, 8, 16, 32, 64], True: [1, 2, 4]}
LENGTHS = {False: [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384], True: [64, 128, 256, 512, 1024]}


class Layer(nn.Module):
    """Transformer layer: pre-norm, fused projection of queries, keys and values, plain or gated MLP."""

    def __init__(self, widths, attention):
        super().__init__()
        hidden, self.widths, self.attention = widths.hidden, widths, attention
        queries = widths.heads * widths.width_of_head
        keys = widths.kv_heads * widths.width_of_head
        is_llm = widths.module == "llm"
        norm = nn.RMSNorm if is_llm else nn.LayerNorm
        self.split = [queries, keys, keys]
        self.norm1, self.norm2 = norm(hidden), norm(hidden)
        self.qkv = nn.Linear(hidden, queries + 2 * keys, bias=not is_llm or widths.name.startswith("qwen"))
        self.out = nn.Linear(queries, hidden, bias=not is_llm)
        self.up = nn.Linear(hidden, widths.ffn * (2 if is_llm else 1), bias=not is_llm)
        self.down = nn.Linear(widths.ffn, hidden, bias=not is_llm)

    def forward(self, x, rotation):
        q, k, v = self.qkv(self.norm1(x)).split(self.split, dim=-1)
        heads = lambda t: t.unflatten(-1, (-1, self.widths.width_of_head))  # noqa: E731
        q, k, v = heads(q), heads(k), heads(v)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        mixed = attend(q, k, v, self.widths) if self.attention else mix(q, k, v)
        x = x + self.out(mixed.flatten(-2))
        up = self.up(self.norm2(x))
        if self.widths.module == "llm":
            gate, up = up.chunk(2, dim=-1)
            return x + self.down(F.silu(gate) * up)
        return x + self.down(F.gelu(up, approximate="tanh"))


def rotate(x, rotation):
    cos, sin = rotation
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def mix(q, k, v):
    """Replaces attention: each of queries, keys and values is read once, and has a gradient."""
    grouped = q.unflatten(-2, (k.shape[-2], -1))
    return (grouped + (k + v).unsqueeze(-2)).flatten(-3, -2)


def attend(q, k, v, widths):
    """Computes attention over `[batch, tokens, heads, width]`: causal for an LLM, full for an encoder."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    is_llm = widths.module == "llm"
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=is_llm, enable_gqa=widths.heads != widths.kv_heads)
    return mixed.transpose(1, 2)


class Layers(nn.Module):
    """Some layers, with or without attention."""

    def __init__(self, widths, layers, attention):
        super().__init__()
        self.widths = widths
        self.layers = nn.ModuleList(Layer(widths, attention) for _ in range(layers))

    def inputs(self, batch, tokens, like):
        return torch.randn(batch, tokens, self.widths.hidden, **like).requires_grad_()

    def forward(self, x):
        rotation = None
        if self.widths.module == "llm":
            half = self.widths.width_of_head // 2
            angles = torch.arange(x.shape[1], device=x.device)[:, None] / 1e4 ** (
                torch.arange(half, device=x.device) / half
            )
            rotation = (angles.cos().to(x.dtype)[:, None], angles.sin().to(x.dtype)[:, None])
        for layer in self.layers:
            x = layer(x, rotation)
        return x


class Attention(nn.Module):
    """Scaled dot-product attention of one layer; no weights."""

    def __init__(self, widths):
        super().__init__()
        self.widths = widths

    def inputs(self, batch, tokens, like):
        heads = self.widths.heads + 2 * self.widths.kv_heads
        return torch.randn(batch, tokens, heads, self.widths.width_of_head, **like).requires_grad_()

    def forward(self, x):
        kv_heads = self.widths.kv_heads
        return attend(*x.split([self.widths.heads, kv_heads, kv_heads], dim=2), self.widths)


class PictureEnds(nn.Module):
    """Patch embedding and projector: tokens merged, two matrices with GELU between."""

    def __init__(self, widths):
        super().__init__()
        self.widths = widths
        joined = widths.hidden * widths.merged
        self.embed = nn.Linear(PATCH_INPUTS, widths.hidden)
        self.project = nn.Sequential(
            nn.Linear(joined, widths.llm_hidden), nn.GELU(), nn.Linear(widths.llm_hidden, widths.llm_hidden)
        )

    def inputs(self, batch, tokens, like):
        return torch.randn(batch, tokens, PATCH_INPUTS, **like)

    def forward(self, x):
        return self.project(self.embed(x).unflatten(1, (-1, self.widths.merged)).flatten(-2))


class SoundEnds(nn.Module):
    """Two convolutions over mel frames, pooling, one matrix."""

    def __init__(self, widths):
        super().__init__()
        self.widths = widths
        self.narrow = nn.Conv1d(widths.mel_bins, widths.hidden, 3, padding=1)
        self.halve = nn.Conv1d(widths.hidden, widths.hidden, 3, stride=2, padding=1)
        self.project = nn.Linear(widths.hidden, widths.llm_hidden)

    def inputs(self, batch, tokens, like):
        return torch.randn(batch, self.widths.mel_bins, 2 * tokens, **like)

    def forward(self, x):
        x = F.gelu(self.halve(F.gelu(self.narrow(x))))
        return self.project(F.avg_pool1d(x, self.widths.merged).transpose(1, 2))


class TextEnds(nn.Module):
    """Embedding, last norm, LM head and the mean loss of every token."""

    def __init__(self, widths):
        super().__init__()
        self.widths = widths
        self.embed = nn.Embedding(widths.vocab, widths.hidden)
        self.norm = nn.RMSNorm(widths.hidden)
        self.head = nn.Linear(widths.hidden, widths.vocab, bias=False)

    def inputs(self, batch, tokens, like):
        return torch.randint(self.widths.vocab, (batch, tokens), device=like["device"])

    def forward(self, ids):
        logits = self.head(self.norm(self.embed(ids)))
        return F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


ENDS = {"vision": PictureEnds, "audio": SoundEnds, "llm": TextEnds}


class Meter:
    """Runs functions and measures their time, and their memory above what was allocated before."""

    def __init__(self, device, warmup, repeats, clock):
        self.device, self.warmup, self.repeats, self.clock = device, warmup, repeats, clock
        self.is_cuda = device.type == "cuda"
        if self.is_cuda:
            cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20)
            self.flush = torch.empty(2 * cache, dtype=torch.int8, device=device)

    def before(self):
        if self.is_cuda:
            self.flush.zero_()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        return 0

    def time(self, run):
        """Returns microseconds of a call, and the rise of the allocator's peak in bytes (`None` on a CPU)."""
        base = self.before()
        if not self.is_cuda:
            start = self.clock()
            result = run()
            return (self.clock() - start) * 1e6, None, result
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        result = run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3, torch.cuda.max_memory_allocated() - base, result

    def passes(self, model, x):
        """Measures forward and backward of a module, run after run."""
        for number in range(self.warmup + self.repeats):
            model.zero_grad(set_to_none=True)
            x.grad = None
            forward = self.time(lambda: model(x))
            y = forward[2]
            gradient = torch.ones_like(y)
            backward = self.time(lambda: y.backward(gradient))
            if number >= self.warmup:
                yield forward[:2], backward[:2]
            del y, gradient, forward, backward

    def steps(self, model):
        """Measures the update of a module's weights; its memory is that of weights, gradients and optimizer state."""
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.AdamW(model.parameters(), fused=self.is_cuda)
        for number in range(self.warmup + self.repeats):
            microseconds, _, _ = self.time(optimizer.step)
            if number >= self.warmup:
                yield microseconds, state_bytes(model, optimizer)


def state_bytes(model, optimizer):
    tensors = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    tensors += [t for p in model.parameters() for t in (p, p.grad) if t is not None]
    return sum(t.numel() * t.element_size() for t in tensors)


class Writer:
    """Writes rows as they are measured, so that an interrupted run leaves a valid profile."""

    def __init__(self, out):
        self.out = out

    def row(self, widths, part, phase, layers, shape, microseconds, size):
        size = "" if size is None else size
        fields = [widths.module, part, phase, 1, layers, *shape, f"{microseconds:.3f}", size]
        print(*fields, sep=",", file=self.out, flush=True)


def measure(widths, part, model, layers, shapes, meter, like, writer):
    """Measures one part over its shapes; shapes that do not fit into memory are named on standard error."""
    model = model.to(**like)
    for batch, tokens in shapes:
        times = []
        try:
            x = model.inputs(batch, tokens, like)
            for forward, backward in meter.passes(model, x):
                writer.row(widths, part, "forward", layers, (batch, tokens), *forward)
                writer.row(widths, part, "backward", layers, (batch, tokens), *backward)
                times.append(forward[0] + backward[0])
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            print(f"{widths.name} {part}: out of memory at {batch} x {tokens}, left out", file=sys.stderr)
            continue
        print(f"{widths.name} {part} x{layers}: {batch} x {tokens}: {statistics.median(times):.0f} us", file=sys.stderr)
    model.zero_grad(set_to_none=True)
    if any(True for _ in model.parameters()):
        for microseconds, size in meter.steps(model):
            writer.row(widths, part, "optimizer", layers, (0, 0), microseconds, size)


def shapes_of(widths, is_miniature, is_between):
    """Returns the grid of shapes, or the shapes halfway between its points."""
    grid = (LENGTHS if widths.module == "llm" else BATCHES)[is_miniature]
    if is_between:
        grid = [(low + high) // 2 for low, high in zip(grid, grid[1:]) if high > low + 1]
    return [(1, side) if widths.module == "llm" else (side, widths.tokens) for side in grid]


def profile(widths, arguments, meter, like, writer):
    shapes = shapes_of(widths, arguments.miniature, arguments.between)
    if "linear" in arguments.parts:
        for layers in arguments.layers:
            measure(widths, "linear", Layers(widths, layers, False), layers, shapes, meter, like, writer)
    if "attention" in arguments.parts:
        measure(widths, "attention", Attention(widths), 1, shapes, meter, like, writer)
    if "ends" in arguments.parts:
        measure(widths, "ends", ENDS[widths.module](widths), 0, shapes, meter, like, writer)
    if "whole" in arguments.parts:
        for layers in arguments.layers:
            measure(widths, "whole", Layers(widths, layers, True), layers, shapes, meter, like, writer)


def clock_of(arguments):
    return time.process_time if arguments.miniature else time.perf_counter


def cpu_name():
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def header(arguments, device, dtype, models):
    """Returns the metadata before the rows."""
    is_cuda = device.type == "cuda"
    threads = torch.get_num_threads()
    processor = f"{cpu_name()}, {threads} thread{'' if threads == 1 else 's'}"
    name = torch.cuda.get_device_name(device) if is_cuda else processor
    driver = "none"
    if is_cuda:
        driver = f"CUDA {torch.version.cuda}, compute capability {torch.cuda.get_device_capability(device)}"
    kind = "miniature of a CPU, for tests: no accelerator was measured" if arguments.miniature else "full"
    metadata = {
        "dflop-profile": 1,
        "device": name,
        "driver": driver,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "dtype": str(dtype).removeprefix("torch."),
        "recompute": "none",
        "clock": "CUDA events" if is_cuda else clock_of(arguments).__name__,
        "kind": kind,
    }
    return [f"# {key}: {value}" for key, value in metadata.items()] + [widths.line() for widths in models] + [COLUMNS]


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", metavar="FILE", help="output file [default: standard output]")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="only these: " + ", ".join(m.name for m in MODELS))
    parser.add_argument("--miniature", action="store_true", help="tiny models in float32 on the CPU")
    parser.add_argument("--between", action="store_true", help="shapes between the grid, to check predictions")
    parser.add_argument("--parts", nargs="+", default=["linear", "attention", "ends"], metavar="PART",
                        choices=["linear", "attention", "ends", "whole"])
    parser.add_argument("--layers", nargs="+", type=int, default=[1, 3], metavar="N", help="layer counts")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--threads", type=int, help="CPU threads")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    if arguments.threads or arguments.miniature:
        torch.set_num_threads(arguments.threads or 1)
    torch.manual_seed(0)
    known = MINIATURES if arguments.miniature else MODELS
    models = [m for m in known if arguments.models is None or m.name in arguments.models]
    unknown = set(arguments.models or []) - {m.name for m in known}
    if unknown:
        sys.exit(f"unknown models {sorted(unknown)}, known are {[m.name for m in known]}")
    # A file has one model per module: the widths in its header identify it.
    modules = [m.module for m in models]
    if len(set(modules)) < len(modules) and arguments.out is None:
        sys.exit("several models of one module need several files: name one with --out, and one is written per model")
    use_cuda = torch.cuda.is_available() and not arguments.miniature
    device = torch.device("cuda" if use_cuda else "cpu")
    dtype = torch.float32 if arguments.miniature else torch.bfloat16
    like = {"device": device, "dtype": dtype}
    meter = Meter(device, arguments.warmup, arguments.repeats, clock_of(arguments))
    groups = {arguments.out: models}
    if len(set(modules)) < len(modules):
        stem = arguments.out.removesuffix(".csv")
        groups = {f"{stem}-{m.name}.csv": [m] for m in models}
    for path, group in groups.items():
        out = open(path, "w", encoding="utf-8") if path else sys.stdout
        print(*header(arguments, device, dtype, group), sep="\n", file=out)
        for widths in group:
            profile(widths, arguments, meter, like, Writer(out))
        if path:
            out.close()


if __name__ == "__main__":
    main()
