"""Encoder microbatches with images and videos: losses and gradients are those of one process.

Microbatches are made up here, in place of a loader, because a loader decodes videos only where FFmpeg is.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dflop
import dflop.torch
import torch
import torch.distributed as dist
import transformers
from split_models import FAMILIES, write_model
from test_torch_split import modules, quiet
from torch.nn.functional import cross_entropy

# Layers, rows and columns of patches; kinds and sizes by sample, in the order in which a text has them.
SMALL, WIDE, SHORT, LONG = (1, 4, 4), (1, 4, 8), (2, 4, 4), (3, 8, 4)
SAMPLES: list[list[tuple[str, tuple[int, int, int]]]] = [
    [("video", SHORT), ("image", SMALL)],
    [("image", WIDE)],
    [("video", LONG)],
    [],
    [("image", SMALL), ("video", SHORT), ("image", WIDE), ("video", SHORT)],
    [("video", LONG), ("image", SMALL), ("image", SMALL)],
    [("image", WIDE)],
    [("image", SMALL)],
    [],
    [("video", SHORT)],
    [("video", SHORT), ("video", LONG)],
    [],
]
TENSORS = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}
PATCH_WIDTH, MERGED, TARGETS = 1176, 4, 9
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one encoder rank, two replicas": (modules((1, 1), (1, 2)), {"schedule": "gpipe"}),
    "encoder and LLM stages": (modules((2, 1), (2, 1)), {"schedule": "1f1b"}),
    "split backward passes": (modules((2, 1), (2, 1)), {"schedule": "zb-h1"}),
    "encoder ranks that do not divide replicas": (modules((1, 2), (1, 3)), {}),
    "colocated": (modules((1, 2), (1, 2)), {"placement": "colocated"}),
}
RANKS, MICROBATCHES = 5, 2


class Data:
    """Samples of a model: tensors of each, as the whole model reads them."""

    def __init__(self, model: Any) -> None:
        self.config, generator = model.config, torch.Generator().manual_seed(0)
        self.samples: list[dict[str, torch.Tensor]] = []
        for number, media in enumerate(SAMPLES):
            ids, types = [1, 2, 3 + number], [0, 0, 0]
            for kind, grid in media:
                for start, tokens, end in self._runs(kind, grid):
                    ids += [*start, *[self._token(kind)] * tokens, *end]
                    types += [0] * len(start) + [1 + (kind == "video")] * tokens + [0] * len(end)
            ids += torch.randint(0, 500, (TARGETS,), generator=generator).tolist()
            types += [0] * TARGETS
            labels = [-100] * (len(ids) - TARGETS) + ids[-TARGETS:]
            sample = {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels])}
            sample["mm_token_type_ids"] = torch.tensor([types])
            for kind, (pixels, grids) in TENSORS.items():
                own = [grid for other, grid in media if other == kind]
                if own:
                    rows = sum(layers * height * width for layers, height, width in own)
                    sample[pixels] = torch.randn(rows, PATCH_WIDTH, generator=generator)
                    sample[grids] = torch.tensor(own)
            grids = {name: sample.get(name) for _, name in TENSORS.values()}
            places, _ = model.model.get_rope_index(
                sample["input_ids"], mm_token_type_ids=sample["mm_token_type_ids"], **grids
            )
            # Models read positions in the text before those of their rotary axes.
            sample["position_ids"] = torch.cat([torch.arange(len(ids))[None, None], places])
            self.samples.append(sample)

    def _token(self, kind: str) -> int:
        return int(getattr(self.config, f"{kind}_token_id"))

    def _runs(self, kind: str, grid: tuple[int, int, int]) -> Iterator[tuple[list[int], int, list[int]]]:
        """Returns tokens before, number of and tokens behind the runs of a medium."""
        layers, height, width = grid
        start, end = [self.config.vision_start_token_id], [self.config.vision_end_token_id]
        if kind == "video" and self.config.model_type.startswith("qwen3"):
            # Each frame has a time before it.
            for layer in range(layers):
                yield [7 + layer, *start], height * width // MERGED, end
        else:
            yield start, layers * height * width // MERGED, end

    def media(self, number: int) -> list[tuple[str, int]]:
        """Returns kinds and rows of the media of a sample, in the order of a route."""
        found = []
        for kind in TENSORS:
            own = [grid for other, grid in SAMPLES[number] if other == kind]
            found += [(kind, layers * height * width // MERGED) for layers, height, width in own]
        return found

    def places(self, number: int) -> torch.Tensor:
        """Returns the tokens of the media of a sample, in the order of a route."""
        types = self.samples[number]["mm_token_type_ids"][0]
        return torch.cat([torch.nonzero(types == 1)[:, 0], torch.nonzero(types == 2)[:, 0]])


def microbatch(data: Data, role: dflop.RankRole, numbers: list[int]) -> dflop.RoleMicrobatch:
    """Returns samples as a loader delivers them for a role."""
    made, own = dflop.RoleMicrobatch(), [data.samples[number] for number in numbers]
    made.sample_keys = [str(number) for number in numbers]
    made.media_runs = [run for number in numbers for run in data.media(number)]
    if role.module == "vision":
        for name in (one for names in TENSORS.values() for one in names):
            parts = [sample[name] for sample in own if name in sample]
            if parts:
                made[name] = torch.cat(parts)
        made.tokens, made.max_seqlen, made.cu_seqlens, made.media_rows = 0, 0, None, None
        return made
    for name in ("input_ids", "labels", "mm_token_type_ids", "position_ids"):
        made[name] = torch.cat([sample[name] for sample in own], -1)
    made["use_cache"] = False
    lengths = [sample["input_ids"].shape[1] for sample in own]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    # No sample predicts the first token of the next one.
    made["labels"][0, starts[:-1]] = -100
    made.tokens, made.max_seqlen, made.cu_seqlens = sum(lengths), max(lengths), starts.int()
    places = [data.places(number) + start for number, start in zip(numbers, starts, strict=False)]
    made.media_rows = torch.cat(places)
    return made


class Step:
    """A step of a role, as a loader delivers it."""

    step, digest, counts = 0, "0", torch.zeros(1, dtype=torch.int64)

    def __init__(self, data: Data, role: dflop.RankRole) -> None:
        self._data, self._role, schedule = data, role, role.schedule
        replicas = schedule.dp_size
        # Samples by replica and round, and by microbatch of the LLM.
        count = len(SAMPLES) // (replicas * schedule.microbatches)
        parts = [
            [list(range(start, start + count)) for start in self._starts(replica, count)]
            for replica in range(replicas)
        ]
        self._llm = {
            place * replicas + replica: numbers
            for replica, rounds in enumerate(parts)
            for place, numbers in enumerate(rounds)
        }
        self._route = dflop.Route(schedule, [[self._rows(one) for one in rounds] for rounds in parts])

    def _starts(self, replica: int, count: int) -> list[int]:
        rounds = self._role.schedule.microbatches
        return [(replica * rounds + place) * count for place in range(rounds)]

    def _rows(self, numbers: list[int]) -> dflop.MicrobatchRows:
        tokens = sum(self._data.samples[number]["input_ids"].shape[1] for number in numbers)
        media = []
        for number in numbers:
            rows = sum(own for _, own in self._data.media(number))
            if rows:
                media.append(dflop.MediumRows("vision", rows, encoder_rows=MERGED * rows, key=str(number)))
        return dflop.MicrobatchRows(tokens, media)

    def inputs(self, counts: Any) -> dflop.RoleInputs:
        del counts
        if self._role.module == "llm":
            numbers = self._llm
            own = {place for place in numbers if place % self._role.schedule.dp_size == self._role.replica}
        else:
            numbers = {}
            for routed in self._route.media:
                numbers.setdefault(routed.encoder_microbatch, []).append(int(routed.medium.key))
            stages = self._role.schedule.stage_ranks(0)
            own = {place for place in numbers if place % len(stages) == self._role.replica}
        made = {place: microbatch(self._data, self._role, numbers[place]) for place in sorted(own)}
        return dflop.RoleInputs(self._route, made, TARGETS * len(SAMPLES), [])


class Loader:
    """A loader of one step."""

    step = 0

    def __init__(self, data: Data, role: dflop.RankRole) -> None:
        self._steps = [Step(data, role)]

    def __iter__(self) -> Iterator[Step]:
        return iter(self._steps)

    def close(self) -> None:
        """Does nothing."""


def rank_of_job(rank: int, directory: Path) -> None:
    """Runs a rank through all cases that have it; saves losses and gradients."""
    quiet()
    split = dflop.torch.split(directory / "model")
    data = Data(transformers.AutoModelForMultimodalLM.from_pretrained(directory / "model"))
    for number, (sizes, settings) in enumerate(CASES.values()):
        schedule = dflop.Schedule(sizes, microbatches=MICROBATCHES, **settings)
        if rank >= schedule.world_size:
            continue
        store = dist.FileStore(str(directory / f"store-{number}"), schedule.world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=schedule.world_size)
        loader = lambda role: Loader(data, role)
        pipeline = dflop.torch.Pipeline(split, schedule, loader, layers=split.layers, timeout=60)
        (step,) = pipeline
        mixed = [
            one
            for one in step.microbatches.get("vision", {}).values()
            if {"pixel_values", "pixel_values_videos"} <= one.keys() and len(one.sample_keys) > 1
        ]
        loss = pipeline.step(step)
        gradients = {
            name.split(".", 3)[3]: one.grad
            for name, one in pipeline.module.named_parameters()
            if one.grad is not None
        }
        found = {"loss": loss, "gradients": gradients, "mixed": len(mixed)}
        torch.save(found, directory / f"found-{number}-{rank}")
        dist.destroy_process_group()


def one_process(directory: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """Returns loss and gradients of the whole model, sample by sample, with positions of its own."""
    model = transformers.AutoModelForMultimodalLM.from_pretrained(directory / "model").train()
    total = 0.0
    for sample in Data(model).samples:
        own = {name: one for name, one in sample.items() if name not in ("labels", "position_ids")}
        logits = model(**own).logits[0, :-1]
        loss = cross_entropy(logits, sample["labels"][0, 1:], reduction="sum") / (TARGETS * len(SAMPLES))
        loss.backward()
        total += loss.item()
    return total, {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


class Videos(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        quiet()
        multiprocessing.set_forkserver_preload(
            ["torch", "transformers.modeling_utils", "dflop.torch.pipeline"]
        )

    def check(self, name: str) -> None:
        directory = Path(self.enterContext(tempfile.TemporaryDirectory()))
        write_model(directory / "model", FAMILIES[name])
        torch.multiprocessing.start_processes(rank_of_job, (directory,), RANKS, start_method="forkserver")
        loss, wanted = one_process(directory)
        for number, (case, (sizes, settings)) in enumerate(CASES.items()):
            with self.subTest(case):
                size = dflop.Schedule(sizes, microbatches=MICROBATCHES, **settings).world_size
                ranks = [torch.load(directory / f"found-{number}-{rank}") for rank in range(size)]
                self.assertGreater(sum(found["mixed"] for found in ranks), 0)
                names: set[str] = set()
                for found in ranks:
                    self.assertAlmostEqual(found["loss"], loss, delta=1e-5)
                    names |= found["gradients"].keys()
                    for key, gradient in found["gradients"].items():
                        one = wanted.get(key, torch.zeros_like(gradient))
                        torch.testing.assert_close(gradient, one, rtol=1e-4, atol=1e-5, msg=key)
                self.assertEqual(wanted.keys() - names, set())

    def test_qwen2_5_vl(self) -> None:
        self.check("qwen2_5_vl")

    def test_features_of_several_levels(self) -> None:
        self.check("qwen3_vl")


if __name__ == "__main__":
    unittest.main()
