"""Trains with DDP on two ranks, alternating balanced and data-blind batches, and prints the speed-up.

    pip install ./bindings/python torch transformers
    python3 benches/ddp.py [--rounds 7] [--steps 8] [--global-batch-size 8] [--microbatches 2] [--json FILE]

Seven of eight samples are those of `dflop.example`, short texts and images, and one is a long text. Both kinds of
batches are the same global batches, read before the clock starts; each rank has one thread and needs its own core.
For every round, prints the seconds of both, and the CPU seconds of the slowest rank, step by step, which a busy
machine changes less; then the ratios, data-blind over balanced, and the predicted ratio.
"""

import argparse
import io
import json
import random
import statistics
import sys
import tarfile
import time
from pathlib import Path

import dflop

if __name__ == "__main__":
    dflop.example.on_ranks(2)

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bindings" / "python" / "examples"))
import ddp

STRATEGIES = ("balanced", "data-blind")


def directory_of():
    """Makes the example with some long texts, and a model wide enough for compute to dominate."""
    directory = dflop.example.directory(samples=448)
    dice = random.Random(1)
    with tarfile.open(directory / "shards" / "long.tar", "w") as tar:
        for number in range(64):
            words = " ".join(f"w{dice.randrange(512)}" for _ in range(dice.randrange(400, 1200)))
            turns = [{"from": "human", "value": "w0"}, {"from": "gpt", "value": words}]
            content = json.dumps({"conversations": turns}).encode()
            member = tarfile.TarInfo(f"long{number:03}.json")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    path = directory / "model" / "config.json"
    config = json.loads(path.read_text())
    heads = {"num_attention_heads": 32, "num_key_value_heads": 32}
    text = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, **heads}
    config |= text
    config["text_config"] |= text
    config["vision_config"] |= {"embed_dim": 128, "hidden_size": 256, "num_heads": 4}
    path.write_text(json.dumps(config))
    return directory


def train(model, optimizer, steps):
    """Returns wall seconds of all steps and CPU seconds of each on this rank."""
    busy = []
    dist.barrier()
    start = time.perf_counter()
    for step in steps:
        before = time.process_time()
        dflop.torch.backward(model, step)
        busy.append(time.process_time() - before)
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    return time.perf_counter() - start, busy


def slowest(busy):
    """Returns the CPU seconds of the busiest rank, summed over steps, from the steps' times of this rank."""
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, busy)
    return sum(map(max, zip(*of_ranks, strict=True)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--global-batch-size", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    settings = {
        "global_batch_size": arguments.global_batch,
        "microbatches": arguments.microbatches,
    }
    directory = directory_of()
    model = ddp.model_of(directory)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings["steps"] = arguments.steps
    plans = {name: dflop.Plan(strategy=name) for name in STRATEGIES}
    steps = {name: list(ddp.loader_of(directory, **settings, plan=plan)) for name, plan in plans.items()}
    train(model, optimizer, steps["balanced"][:2])
    rounds = []
    for turn in range(arguments.rounds):
        seconds = {}
        for name in STRATEGIES if turn % 2 == 0 else STRATEGIES[::-1]:
            wall, busy = train(model, optimizer, steps[name])
            seconds[name] = {"wall_seconds": wall, "cpu_seconds": slowest(busy)}
        rounds.append(seconds)
        if rank == 0:
            print(
                turn,
                *(
                    f"{name}: {one['wall_seconds']:.2f} s, CPU {one['cpu_seconds']:.2f} s;"
                    for name, one in seconds.items()
                ),
                flush=True,
            )
    if rank == 0:
        ratios = {
            kind: [one["data-blind"][kind] / one["balanced"][kind] for one in rounds]
            for kind in ("wall_seconds", "cpu_seconds")
        }
        makespans = {name: sum(step.makespan_seconds for step in steps[name]) for name in STRATEGIES}
        predicted = makespans["data-blind"] / makespans["balanced"]
        for kind, each in ratios.items():
            print(
                f"{kind}: data-blind over balanced {statistics.median(each):.3f} (rounds {min(each):.3f} to {max(each):.3f})"
            )
        print(f"predicted: {predicted:.3f}")
        if arguments.json:
            kept = {
                "rounds": rounds,
                "ratios": ratios,
                "predicted": predicted,
                "threads": torch.get_num_threads(),
            }
            Path(arguments.json).write_text(json.dumps(kept, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
