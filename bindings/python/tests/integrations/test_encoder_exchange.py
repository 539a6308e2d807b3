"""Tests `dflop.torch.BalancedEncoder` on real ranks, against the same encoder without the exchange."""

from __future__ import annotations

import os
import sys
import tempfile
import unittest
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import dflop
import torch
import torch.distributed as dist
from dflop.torch import BalancedEncoder
from trainers import torchrun

WIDTH, MERGE = 6, 4
# Patches of the images of each rank's samples, by microbatch: unequal counts, ranks without media.
MICROBATCHES = [
    [[8, 4], [16], [4, 4, 12], []],
    [[], [40, 4], [], [8]],
    [[], [], [4], []],
    [[], [], [], []],
    [[4], [4], [4], [4]],
]
SEED = 3


class Encoder(torch.nn.Module):
    """Attends within each image, as ``grid_thw`` bounds it, and merges patches."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, WIDTH)
        self.merger = torch.nn.Linear(WIDTH * MERGE, WIDTH)

    def forward(self, pixels: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
        rows = self.inner(pixels).tanh().split(grid_thw.prod(-1).tolist())
        mixed = [own + torch.softmax(own @ own.T, -1) @ own for own in rows]
        return self.merger(torch.cat(mixed).view(-1, WIDTH * MERGE))


class Pooled(Encoder):
    """Returns features as encoders with deepstack do."""

    def forward(self, pixels: torch.Tensor, grid_thw: torch.Tensor) -> Output:
        features = super().forward(pixels, grid_thw)
        return Output(features, [features.sin(), features.cos()])


class Output:
    def __init__(self, pooler_output: torch.Tensor, deepstack_features: list[torch.Tensor]) -> None:
        self.pooler_output, self.deepstack_features = pooler_output, deepstack_features


class Loader:
    """Plans the exchange of made-up media: every medium goes to the next rank in turn."""

    def __init__(self, rank: int, size: int, turn: int = 0) -> None:
        self.dp_rank, self.dp_size, self.turn = rank, size, turn

    def media_exchange(
        self, step: object, microbatch: int, *, group_size: int | None = None
    ) -> list[dflop.ExchangedMedium]:
        size = group_size or self.dp_size
        first = self.dp_rank // size * size
        media = []
        for rank in range(first, first + size):
            for index, rows in enumerate(MICROBATCHES[microbatch][rank]):
                to = first + (len(media) + self.turn) % size
                place = f"{rank}-{index}"
                sample = 10 * rank + index
                grid = (1, 2, rows // 2)
                media.append(dflop.ExchangedMedium(place, "image", 0, sample, rank, to, rows, grid, 1.0))
        return media


def microbatch(rank: int, number: int, *, skipped: int = 0, is_longer: bool = False) -> dflop.Microbatch:
    """Returns pixels of the images of a microbatch, and of a blank one if there are none."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    rows = list(enumerate(MICROBATCHES[number][rank]))[skipped:]
    made = dflop.Microbatch()
    made.sample_keys = [f"{rank}-{index}" for index, _ in rows]
    lengths = [own + 4 * is_longer for _, own in rows] or [4]
    made["pixel_values"] = torch.randn(sum(lengths), WIDTH, generator=generator)
    made["image_grid_thw"] = torch.tensor([[1, 2, length // 2] for length in lengths])
    made.cu_seqlens = made.pixel_normalization = None
    return made


def loss_of(features: torch.Tensor | Output, number: int, rank: int) -> torch.Tensor:
    parts = [features] if isinstance(features, torch.Tensor) else [features.pooler_output]
    parts += [] if isinstance(features, torch.Tensor) else features.deepstack_features
    weights = torch.arange(WIDTH) + number + rank
    return sum((place * part.square() * weights).sum() for place, part in enumerate(parts, 1))


def passes(
    encoder: torch.nn.Module, microbatches: Iterable[dflop.Microbatch], rank: int
) -> list[torch.Tensor]:
    """Runs the forward and backward passes, and returns the features."""
    found = []
    for number, one in enumerate(microbatches):
        features = encoder(one["pixel_values"], grid_thw=one["image_grid_thw"])
        loss = loss_of(features, number, rank)
        if loss.requires_grad:
            loss.backward()
        pooled = features if isinstance(features, torch.Tensor) else features.pooler_output
        found.append(pooled.detach())
    return found


def case(name: str, rank: int, size: int, group: object = None) -> dict:
    """Runs all microbatches with and without the exchange."""
    kind = Pooled if name == "deepstack" else Encoder
    options = {"skipped": {"skipped": 1}, "longer": {"is_longer": rank == 0}}.get(name, {})
    inputs = [microbatch(rank, number, **options) for number in range(len(MICROBATCHES))]
    found = {}
    for is_exchanged in (False, True):
        torch.manual_seed(SEED)
        encoder = kind()
        seen = []
        encoder.inner.register_forward_hook(lambda _, given, __, seen=seen: seen.append(given[0].shape[0]))
        encoder.requires_grad_(name != "frozen")
        if is_exchanged:
            balanced = BalancedEncoder(encoder, Loader(rank, size), group=group)
            step = SimpleNamespace(step=0, microbatches=inputs)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                features = passes(encoder, balanced.microbatches(step), rank)
            found["warnings"] = [str(one.message) for one in caught]
            balanced.close()
        else:
            features = passes(encoder, inputs, rank)
        gradients = {}
        for parameter, one in encoder.named_parameters():
            gradients[parameter] = torch.zeros_like(one) if one.grad is None else one.grad
            dist.all_reduce(gradients[parameter])
        found[is_exchanged] = {"features": features, "gradients": gradients, "rows": seen}
    return found


class Failing(Loader):
    def media_exchange(self, step: object, microbatch: int, *, group_size: int | None = None) -> list:
        raise dflop.ConfigError("no such microbatch")


def failure(encoder: Encoder, loader: Loader, inputs: list[dflop.Microbatch], step: int = 0) -> str:
    try:
        balanced = BalancedEncoder(encoder, loader)
    except dflop.ConfigError as error:
        return str(error)
    try:
        list(balanced.microbatches(SimpleNamespace(step=step, microbatches=inputs)))
    except dflop.Error as error:
        return f"{type(error).__name__}: {error}"
    finally:
        balanced.close()
    return "none"


CASES = ("plain", "deepstack", "frozen", "skipped", "longer")


def rank_of_job(directory: Path) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    found = {name: case(name, rank, size) for name in CASES}
    if size == 4:
        group, _ = dist.new_subgroups(group_size=2)
        found["groups"] = case("groups", rank, size, group)
    inputs = [microbatch(rank, number) for number in range(2)]
    encoder, last = Encoder(), size - 1
    kind = Failing if rank == last else Loader
    found["errors"] = {
        "plans": failure(encoder, Loader(rank, size, turn=int(rank == last)), inputs),
        "steps": failure(encoder, Loader(rank, size), inputs, step=int(rank == last)),
        "counts": failure(encoder, Loader(rank, size), inputs[: 1 + int(rank == last)]),
        "failing": failure(encoder, kind(rank, size), inputs),
        "ranks": failure(encoder, Loader((rank + 1) % size, size), inputs),
        "after": failure(encoder, Loader(rank, size), inputs),
    }
    torch.save(found, directory / f"found-{size}-{rank}")
    dist.destroy_process_group()


class EncoderExchange(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        directory = tempfile.TemporaryDirectory()
        cls.addClassCleanup(directory.cleanup)
        cls.found = {}
        for ranks in (3, 4):  # also groups of two
            torchrun(__file__, directory.name, ranks=ranks)
            files = [Path(directory.name) / f"found-{ranks}-{rank}" for rank in range(ranks)]
            cls.found[ranks] = [torch.load(file) for file in files]

    def cases(self):
        for ranks, of_ranks in self.found.items():
            for rank, found in enumerate(of_ranks):
                for name in found.keys() - {"errors"}:
                    with self.subTest(name, ranks=ranks, rank=rank):
                        yield name, ranks, rank, found[name]

    def test_features_and_gradients_are_those_without_the_exchange(self) -> None:
        for name, _, _, found in self.cases():
            alone, exchanged = found[False], found[True]
            for own, wanted in zip(exchanged["features"], alone["features"], strict=True):
                torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-5)
            for parameter, wanted in alone["gradients"].items():
                own = exchanged["gradients"][parameter]
                torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
                self.assertEqual(bool(wanted.any()), name != "frozen")

    def test_ranks_encode_what_the_plan_assigns_to_them(self) -> None:
        for name, ranks, rank, found in self.cases():
            if name not in ("plain", "frozen", "deepstack"):
                continue
            for number, rows in enumerate(found[True]["rows"]):
                media = Loader(rank, ranks).media_exchange(None, number)
                wanted = sum(medium.rows for medium in media if medium.encoder_rank == rank)
                wanted += 0 if MICROBATCHES[number][rank] else 4
                least = min((medium.rows for medium in media), default=0)
                self.assertEqual(rows, wanted or least)
        self.assertNotEqual(self.found[3][0]["plain"][True]["rows"], self.found[3][0]["plain"][False]["rows"])

    def test_media_that_differ_from_the_plan_stay_with_a_warning(self) -> None:
        for name, _, rank, found in self.cases():
            wanted = int(name == "longer" and rank == 0)
            self.assertEqual(len(found["warnings"]), wanted, found["warnings"])
            if wanted:
                self.assertIn("differ in size from the plan", found["warnings"][0])

    def test_different_plans_are_an_error_on_all_ranks(self) -> None:
        for ranks, of_ranks in self.found.items():
            for rank, found in enumerate(of_ranks):
                for name in ("plans", "steps", "counts"):
                    self.assertIn("PlanError: ranks have different plans", found["errors"][name])
                failing = found["errors"]["failing"]
                wanted = "ConfigError: no such" if rank == ranks - 1 else "PlanError: another rank"
                self.assertIn(wanted, failing)
                self.assertIn(f"found rank {rank} of {ranks}", found["errors"]["ranks"])
                self.assertEqual(found["errors"]["after"], "none")


class OneRank(unittest.TestCase):
    def setUp(self) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)

    def test_microbatches_need_pixels(self) -> None:
        inputs = [microbatch(0, 0)]
        del inputs[0]["pixel_values"]
        self.assertIn("blank_media", failure(Encoder(), Loader(0, 1), inputs))

    def test_pixels_of_the_microbatch_are_encoded(self) -> None:
        encoder, inputs = Encoder(), [microbatch(0, 0)]
        balanced = BalancedEncoder(encoder, Loader(0, 1))
        steps = balanced.microbatches(SimpleNamespace(step=0, microbatches=inputs))
        one = next(steps)
        with self.assertRaisesRegex(dflop.ConfigError, "got 4 rows of pixels"):
            encoder(one["pixel_values"][:4], grid_thw=one["image_grid_thw"])
        with self.assertRaisesRegex(dflop.ConfigError, "tensors besides pixels"):
            encoder(one["pixel_values"], one["image_grid_thw"], torch.zeros(1))
        balanced.close()

    def test_images_and_videos_are_encoded_together(self) -> None:
        encoder, one = Pooled(), microbatch(0, 0)
        grids = [*one["image_grid_thw"].tolist(), [2, 2, 3]]
        video = torch.randn(12, WIDTH)
        one["pixel_values_videos"], one["video_grid_thw"] = video, torch.tensor(grids[2:])
        media = [
            dflop.ExchangedMedium(f"0-{sample}", kind, 0, sample, 0, 0, rows, tuple(grid), 1.0)
            for kind, sample, rows, grid in [
                ("image", 0, 8, grids[0]),
                ("video", 0, 12, grids[2]),
                ("image", 1, 4, grids[1]),
            ]
        ]
        calls = [(one["pixel_values"], one["image_grid_thw"]), (video, one["video_grid_thw"])]
        wanted = [encoder(*call).pooler_output for call in calls]
        passed = []
        encoder.inner.register_forward_hook(lambda _, given, __: passed.append(given[0].shape[0]))
        loader = SimpleNamespace(dp_rank=0, dp_size=1, media_exchange=lambda *_, **__: media)
        balanced = BalancedEncoder(encoder, loader)
        for _ in balanced.microbatches(SimpleNamespace(step=0, microbatches=[one])):
            for _ in range(2):  # a second pass encodes again
                for call, own in zip(calls, wanted, strict=True):
                    torch.testing.assert_close(encoder(*call).pooler_output, own)
        self.assertEqual(passed, [24, 24])
        balanced.close()

    def test_outside_of_steps_the_encoder_is_unchanged(self) -> None:
        encoder, one = Encoder(), microbatch(0, 0)
        wanted = encoder(one["pixel_values"], one["image_grid_thw"])
        balanced = BalancedEncoder(encoder, Loader(0, 1))
        torch.testing.assert_close(encoder(one["pixel_values"], one["image_grid_thw"]), wanted)
        balanced.close()
        self.assertEqual(encoder.forward.__func__, Encoder.forward)
        self.assertEqual(list(encoder.state_dict()), list(Encoder().state_dict()))


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank_of_job(Path(sys.argv[1]))
    else:
        unittest.main()
