"""Tests samples that ranks share: losses and gradients equal those of whole samples, on four ranks."""

from __future__ import annotations

import json
import random
import sys
import tempfile
import unittest
from pathlib import Path

import dflop
import torch
import torch.distributed as dist
from dflop import example as made_up
from trainers import WithData, difference, example, gradients_of, torchrun
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

shared = example("context_parallel")
RANKS = 4
# Words and images of each sample.
CASES = {
    "text": [(400, 0), (20, 0), (60, 0), (45, 0), (100, 0), (33, 0), (10, 0), (40, 0)],
    "images in a long document": [(300, 5), (20, 0), (30, 1), (12, 0)],
    "split and whole samples in one row": [(260, 2), (240, 0), (15, 1), (30, 0), (20, 1), (21, 0)],
}


def write(directory: Path, sizes: list[tuple[int, int]]) -> None:
    chance = random.Random(4)
    with dflop.Writer(directory) as writer:
        for words, images in sizes:
            sides = [(28 * chance.randint(2, 9), 28 * chance.randint(2, 9)) for _ in range(images)]
            fields = {f"{at}.png": made_up._png(*side, at) for at, side in enumerate(sides)}
            text = [f"w{chance.randrange(400)}" for _ in range(words)]
            for at in range(images):
                text.insert(at * words // images, "<image>")
            turns = [{"from": "human", "value": " ".join(text)}, {"from": "gpt", "value": "w1 w2 w3 w4"}]
            turns += [
                {"from": "human", "value": "w5"},
                {"from": "gpt", "value": " ".join(text[-words // 3 :]).replace("<image>", "w6")},
            ]
            writer.write(fields | {"json": {"conversations": turns}})


def of_whole_samples(directory: Path, count: int) -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = Qwen2VLConfig.from_pretrained(directory / "model")
    model = Qwen2VLForConditionalGeneration(config)
    settings = {"model": directory / "model", "global_batch_size": count, "array_type": "torch"}
    step = next(iter(dflop.BalancedLoader(directory / "shards", microbatches=count, **settings)))
    total = 0.0
    for microbatch in step.microbatches:
        loss = dflop.torch.loss(model, microbatch, step)
        loss.backward()
        total += loss.item()
    return total, gradients_of(model)


def of_shared_samples(directory: Path, count: int, groups: dict) -> tuple[float, dict, set[int]]:
    model = shared.Sliced(shared.model_of(directory))
    plan = dflop.Plan(context=RANKS, tokens_max=300, schedule="microbatch")
    loader = dflop.BalancedLoader(
        directory / "shards",
        model=directory / "model",
        global_batch_size=count,
        dp_rank=dist.get_rank(),
        dp_size=RANKS,
        plan=plan,
        array_type="torch",
    )
    step = next(iter(loader))
    total, sizes = torch.zeros(()), set()
    for microbatch in step.microbatches:
        loss = dflop.torch.loss(model, microbatch, step, slices=microbatch, groups=groups)
        loss.backward()
        total += loss.detach()
        sizes |= {len(group.ranks) for group in microbatch.context.groups}
    dist.all_reduce(total)
    digests = [None] * RANKS
    dist.all_gather_object(digests, (step.digest, loader.state_dict()))
    assert all(digest == digests[0] for digest in digests), digests
    gradients = {}
    for name, parameter in model.model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(gradient)
        gradients[name] = gradient / RANKS
    all_sizes: list[set[int]] = [set()] * RANKS
    dist.all_gather_object(all_sizes, sizes)
    return total.item() / RANKS, gradients, set().union(*all_sizes)


def compare(directory: Path) -> None:
    """Compares on the ranks of this process group; the first rank prints the differences."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = shared.make_groups(RANKS)
    for case, sizes in CASES.items():
        place = directory / case
        loss, gradients, split = of_shared_samples(place, len(sizes), groups)
        wanted_loss, wanted = of_whole_samples(place, len(sizes))
        differences = {
            "loss": abs(loss - wanted_loss) / wanted_loss,
            "gradients": difference(gradients, wanted),
        }
        if dist.get_rank() == 0:
            print(json.dumps({"case": case, "split": sorted(split), **differences}), flush=True)
    dist.destroy_process_group()


class ContextParallelTest(WithData):
    def test_losses_and_gradients_are_those_of_whole_samples(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            for case, sizes in CASES.items():
                write(Path(name) / case / "shards", sizes)
                made_up.write_model(Path(name) / case / "model")
            printed = torchrun(__file__, name, ranks=RANKS)
        found = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
        self.assertEqual([one["case"] for one in found], list(CASES))
        for one in found:
            with self.subTest(one["case"]):
                self.assertTrue(one["split"], "no sample is split")
                self.assertLess(one["loss"], 1e-5)
                self.assertLess(one["gradients"], 1e-5)

    def test_the_example_shares_samples(self) -> None:
        printed = torchrun(shared.__file__, ranks=RANKS)
        self.assertEqual(printed.count(" tokens, shared ["), 4 * 2 * RANKS, printed)
        self.assertIn("shared [([", printed)

    def test_chunks_are_those_of_torch(self) -> None:
        try:
            from torch.distributed.tensor.experimental._context_parallel._load_balancer import (
                _HeadTailLoadBalancer,
            )
        except ImportError:
            self.skipTest("this version of PyTorch has no load balancer of context parallelism")
        for plan in (
            dflop.Plan(context=2, tokens_max=120, schedule="microbatch"),
            dflop.Plan(context=2, tokens_max=120, stages=[1, 4]),
        ):
            found = 0
            for rank in range(2):
                loader = dflop.BalancedLoader(
                    self.directory / "shards",
                    model=self.directory / "model",
                    global_batch_size=2,
                    dp_rank=rank,
                    dp_size=2,
                    plan=plan,
                )
                for step, _ in zip(loader, range(4), strict=False):
                    for group in step.microbatches[0].context.groups:
                        positions, bounds = torch.as_tensor(group.positions), group.cu_seqlens.tolist()
                        for first, end in zip(bounds[:-1], bounds[1:]):
                            own = positions[(first <= positions) & (positions < end)] - first
                            balancer = _HeadTailLoadBalancer(end - first, 2, "cpu")
                            order = balancer._generate_indices().flatten()
                            self.assertEqual(own.tolist(), order.chunk(2)[rank].tolist())
                            found += 1
            self.assertGreater(found, 0)


if __name__ == "__main__":
    if len(sys.argv) == 2 and Path(sys.argv[1]).is_dir():
        compare(Path(sys.argv[1]))
    else:
        unittest.main()
