#!/usr/bin/env python3
"""PyTorch's side of `run.sh`: the same products, attention, models and training as `gpu-check`.

    pytorch_side.py probe                        # exit status 4 and the reason if PyTorch has no CUDA device
    pytorch_side.py gemm|attention --lists FILE  # FILE: output of `gpu-check buckets`
    pytorch_side.py parity|curve|throughput --folder DIR

Results are JSON lines as those of `gpu-check`, the last one a summary. Needs PyTorch and nothing else.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

SKIPPED = 4
WARM_UP_CALLS = 3
SETS = 3


def result(part, **fields):
    print(json.dumps({"part": part, "side": "torch", **fields}, separators=(",", ":")), flush=True)


def summary(part, status, figure, asked):
    """Prints the summary of a part, and returns the exit status."""
    figure = figure.replace('"', " ").replace("\\", " ").replace("\n", " ")
    line = {"part": part, "summary": status, "figure": figure, "asked": asked}
    print(json.dumps(line, separators=(",", ":"), ensure_ascii=False), flush=True)
    print(f"{part}: {status}: {figure}", file=sys.stderr)
    return {"passed": 0, "failed": 1, "skipped": SKIPPED}[status]


def probe(options):
    """Says whether the other parts can run."""
    try:
        import torch
    except ImportError as error:
        return summary("PyTorch", "skipped", f"no PyTorch: {error}", "PyTorch with CUDA")
    if options.device == "cuda" and not torch.cuda.is_available():
        return summary("PyTorch", "skipped", f"PyTorch {torch.__version__} finds no CUDA device", "PyTorch with CUDA")
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    return summary("PyTorch", "passed", f"PyTorch {torch.__version__} on {name}", "PyTorch with CUDA")


def median_seconds(call, rounds, device):
    """Median of calls that the device runs one after the other, by its events."""
    import torch

    for number in range(WARM_UP_CALLS):
        call(number)
    if device == "cpu":
        times = []
        for number in range(rounds):
            start = time.perf_counter()
            call(number)
            times.append(time.perf_counter() - start)
        return statistics.median(times)
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    events[0].record()
    for number in range(rounds):
        call(number)
        events[number + 1].record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) * 1e-3 for a, b in zip(events, events[1:]))


def lists(options):
    with open(options.lists, encoding="utf-8") as file:
        for line in file:
            if "attention" in (found := json.loads(line)):
                return found
    raise SystemExit(f"{options.lists} has no lists")


def gemm(options):
    """Times the products of linear layers; the gradient of a weight is added in f32 where PyTorch can."""
    import torch

    def random(*shape):
        return torch.randn(shape, device=options.device, dtype=torch.bfloat16)

    def weight_products(one):
        yield "addmm f32", lambda: torch.addmm(one["sum"], one["dy"].T, one["x"], out_dtype=torch.float32)
        yield "mm f32", lambda: torch.mm(one["dy"].T, one["x"], out_dtype=torch.float32)
        yield "mm bf16", lambda: torch.mm(one["dy"].T, one["x"])

    count = 0
    for layer in lists(options)["gemm"]:
        rows, outputs, inputs = layer["rows"], layer["outputs"], layer["inputs"]
        sets = [{"x": random(rows, inputs), "weight": random(outputs, inputs), "dy": random(rows, outputs),
                 "sum": torch.zeros(outputs, inputs, device=options.device)} for _ in range(SETS)]  # fmt: skip
        calls = {
            "forward": ("matmul", lambda number: sets[number % SETS]["x"] @ sets[number % SETS]["weight"].T),
            "input": ("matmul", lambda number: sets[number % SETS]["dy"] @ sets[number % SETS]["weight"]),
        }
        for index, (way, call) in enumerate(weight_products(sets[0])):
            try:
                call()
            except (RuntimeError, TypeError, NotImplementedError):
                continue
            calls["weight"] = (way, lambda number, index=index: list(weight_products(sets[number % SETS]))[index][1]())
            break
        for name, (way, call) in calls.items():
            seconds = median_seconds(call, 15, options.device)
            rate = 2 * rows * outputs * inputs / seconds / 1e12
            result("gemm", name=f"{layer['name']} {name}", way=way, seconds=seconds, tflops=rate)
            count += 1
    return summary("gemm PyTorch", "passed", f"{count} products", "runs")


def attention(options):
    """Times attention of every bucket by every way that takes it."""
    import torch

    count, refused = 0, set()
    for bucket in lists(options)["attention"]:
        rows = sum(bucket["lengths"])

        def random(heads, rows=rows, width=bucket["head_dim"]):
            values = torch.randn(rows, heads, width, device=options.device, dtype=torch.bfloat16)
            return values.requires_grad_()

        q, k, v = random(bucket["heads"]), random(bucket["kv_heads"]), random(bucket["kv_heads"])
        gradient = random(bucket["heads"]).detach()
        for way, call in attention_ways(bucket, q, k, v, options.device):
            try:
                output = call()
                seconds = {"forward_seconds": median_seconds(lambda _: call(), 20, options.device)}
                backward = lambda _: torch.autograd.grad(output, (q, k, v), gradient, retain_graph=True)  # noqa: E731
                seconds["backward_seconds"] = median_seconds(backward, 20, options.device)
            except (RuntimeError, TypeError, NotImplementedError, AttributeError) as error:
                if way not in refused:
                    print(f"{way} refuses {bucket['name']}: {str(error).splitlines()[0]}", file=sys.stderr)
                refused.add(way)
                continue
            result("attention", name=bucket["name"], way=way, **seconds)
            count += 1
    status = "passed" if count else "failed"
    return summary("attention PyTorch", status, f"{count} times; refused at least once: {sorted(refused)}", "runs")


def attention_ways(bucket, q, k, v, device):
    """Yields ways of attention over a pack with their names."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as attend

    lengths, is_causal, scale = bucket["lengths"], bucket["is_causal"], bucket["scale"]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    starts, longest = bounds.to(device, torch.int32), max(lengths)
    rest = {"is_causal": is_causal, "scale": scale, "enable_gqa": True}

    def varlen():
        return torch.ops.aten._flash_attention_forward(
            q, k, v, starts, starts, longest, longest, 0.0, is_causal, False, scale=scale
        )[0]

    def dense(backend):
        def call():
            # [sequences, heads, rows, width] without a copy
            q_, k_, v_ = (part.view(len(lengths), longest, *part.shape[1:]).transpose(1, 2) for part in (q, k, v))
            with sdpa_kernel(backend):
                return attend(q_, k_, v_, **rest).transpose(1, 2).reshape(q.shape)

        return call

    def segments(backend):
        def call():
            parts = []
            for first, end in zip(bounds.tolist(), bounds.tolist()[1:]):
                q_, k_, v_ = (part[first:end].transpose(0, 1)[None] for part in (q, k, v))
                with sdpa_kernel(backend):
                    parts.append(attend(q_, k_, v_, **rest)[0].transpose(0, 1))
            return torch.cat(parts)

        return call

    if device == "cpu":
        yield "segments", segments(SDPBackend.MATH)
        return
    yield "varlen flash", varlen
    if min(lengths) == longest:
        yield "dense flash", dense(SDPBackend.FLASH_ATTENTION)
        yield "dense cuDNN", dense(SDPBackend.CUDNN_ATTENTION)
    elif len(lengths) <= 16:
        yield "segments cuDNN", segments(SDPBackend.CUDNN_ATTENTION)


def folder_of(options):
    folder = Path(options.folder)
    return folder, json.loads((folder / "config.json").read_text()), json.loads((folder / "packs.json").read_text())


def parity(options):
    """Compares loss and gradients of `gpu-check parity --write` with those of the same weights here, in f32."""
    import torch
    from pytorch_model import WAYS, Decoder, load, named, prepare, read_tensors

    folder, config, packs = folder_of(options)
    torch.backends.cuda.matmul.allow_tf32 = False
    model = Decoder(config, WAYS["segments"], is_compiled=False).to(options.device)
    load(model, folder)
    loss = model(prepare(packs, config, options.device, torch.float32, "segments")[0])
    loss.backward()
    expected = read_tensors(folder / "gradients" / "model.safetensors")
    least = 1e-3 * max(tensor.norm().item() for tensor in expected.values())
    of_loss = abs(loss.item() - config["loss"]) / config["loss"]
    result("parity", name="loss", error=of_loss)
    worst = ("loss", of_loss)
    for name, parameter, rows in named(model):
        found = (parameter.grad if rows is None else parameter.grad[rows]).float().cpu()
        error = (found - expected[name]).norm().item() / max(found.norm().item(), least)
        result("parity", name=name, error=error)
        worst = max(worst, (name, error), key=lambda one: one[1] if one[1] == one[1] else float("inf"))
    status = "passed" if worst[1] < 1e-4 else "failed"
    figure = f"loss {loss.item():.5f}, worst {worst[1]:.1e} ({worst[0]})"
    return summary("parity PyTorch", status, figure, "loss and gradients below 1e-4")


def usable_way(config, device):
    """Returns the first way of attention over packs that this PyTorch has."""
    import torch
    from pytorch_model import WAYS, prepare

    if device == "cpu":
        return "segments"
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config["hidden_size"] // heads
    for way in ("varlen", "flex"):
        pack = prepare([{"lengths": [60, 68], "tokens": [1] * 128}], config, device, torch.bfloat16, way)[0]
        q, k, v = (torch.randn(128, n, dim, device=device, dtype=torch.bfloat16) for n in (heads, kv_heads, kv_heads))
        try:
            WAYS[way](q.requires_grad_(), k, v, pack).sum().backward()
            return way
        except (RuntimeError, TypeError, NotImplementedError, AttributeError) as error:
            print(f"{way} is not usable: {str(error).splitlines()[0]}", file=sys.stderr)
    return "segments"


def trainer_of(options, config, folder):
    import torch
    from pytorch_model import WAYS, Decoder, Trainer, load

    torch.manual_seed(1)
    way = options.way or usable_way(config, options.device)
    with torch.device(options.device):
        model = Decoder(config, WAYS[way], is_compiled=options.device == "cuda")
    if (folder / "model.safetensors").exists():
        load(model, folder)
    return Trainer(model.to(torch.bfloat16), config["learning_rate"]), way


def curve(options):
    """Trains with the weights and packs of `gpu-check train --set curve`."""
    import torch
    from pytorch_model import prepare

    folder, config, packs = folder_of(options)
    trainer, way = trainer_of(options, config, folder)
    losses = []
    for pack in prepare(packs, config, options.device, torch.bfloat16, way):
        losses.append(trainer.step(pack))
    losses = torch.stack(losses).tolist()
    for step, loss in enumerate(losses):
        result("curve", step=step, loss=loss)
    figure = f"{len(losses)} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}"
    status = "passed" if all(loss == loss for loss in losses) else "failed"
    return summary("curve PyTorch", status, figure, "runs")


def throughput(options):
    """Trains with the packs of `gpu-check train --set throughput` and times the steps."""
    import torch
    from pytorch_model import prepare

    folder, config, packs = folder_of(options)
    trainer, way = trainer_of(options, config, folder)
    seconds = []
    for step, pack in enumerate(prepare(packs, config, options.device, torch.bfloat16, way)):
        start = time.perf_counter()
        loss = trainer.step(pack).item()
        seconds.append(time.perf_counter() - start)
        result("throughput", step=step, loss=loss, seconds=seconds[-1])
    step = statistics.median(seconds[config["warm_up_steps"] :])
    rate = len(packs[0]["tokens"]) / step
    memory = torch.cuda.max_memory_allocated() if options.device == "cuda" else None
    result("throughput", name="decoder", way=way, tokens_per_second=rate, step_seconds=step,
           memory_bytes=memory)  # fmt: skip
    return summary("throughput PyTorch", "passed", f"{rate:.0f} tokens/s, {1e3 * step:.1f} ms a step ({way})", "runs")


PARTS = {one.__name__: one for one in (probe, gemm, attention, parity, curve, throughput)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--lists", metavar="FILE", help="output of `gpu-check buckets`")
    parser.add_argument("--folder", metavar="DIR", help="folder that `gpu-check` wrote")
    parser.add_argument("--way", choices=["varlen", "flex", "segments"], help="attention of the model")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to try this script")
    options = parser.parse_args()
    try:
        sys.exit(PARTS[options.part](options))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        print(text, file=sys.stderr)
        summary(f"{options.part} PyTorch", "failed", text[:300], "no error")
        raise


if __name__ == "__main__":
    main()
