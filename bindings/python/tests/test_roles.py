"""Loaders for the roles of a schedule: together they read what a loader for all modules reads."""

import io
import pickle
import tarfile
import unittest
from pathlib import Path
from typing import Any

import dflop
import numpy as np
from support import WithExample

# Patches that the model of the example merges into a row.
PATCHES = 4


class Roles(WithExample):
    def settings(self, **settings: Any) -> dict[str, Any]:
        return {"model": self.model, "global_batch_size": 24, "steps": 2, **settings}

    def loaders(self, schedule: dflop.Schedule, **settings: Any) -> dict[Any, dflop.BalancedLoader]:
        """Returns a loader for every role of every rank."""
        shards = settings.pop("shards", self.shards)
        roles = [role for rank in range(schedule.world_size) for role in schedule.roles(rank)]
        settings = self.settings(**settings)
        loaders = [dflop.BalancedLoader(shards, role=role, **settings) for role in roles]
        return {(role.rank, role.module): loader for role, loader in zip(roles, loaders, strict=True)}

    def inputs(self, steps: dict[Any, Any]) -> dict[Any, dflop.RoleInputs]:
        counts = sum(step.counts for step in steps.values())
        return {place: step.inputs(counts) for place, step in steps.items()}

    def steps(self, loaders: dict[Any, dflop.BalancedLoader]) -> list[dict[Any, dflop.RoleInputs]]:
        """Runs all loaders step by step, as their ranks would together."""
        iterators = {place: iter(loader) for place, loader in loaders.items()}
        return [
            self.inputs({place: next(iterator) for place, iterator in iterators.items()})
            for _ in range(self.settings()["steps"])
        ]

    def whole(self, schedule: dflop.Schedule) -> list[list[dflop.Step]]:
        """Returns the steps of the ranks of a job that runs all modules on every rank."""
        ranks = {"dp_size": schedule.dp_size, "microbatches": schedule.microbatches}
        processor = dflop.Processor(blank_media="never")
        return [
            [
                step.hold()
                for step in dflop.BalancedLoader(
                    self.shards, dp_rank=rank, processor=processor, **self.settings(**ranks)
                )
            ]
            for rank in range(schedule.dp_size)
        ]

    def check(self, schedule: dflop.Schedule) -> None:
        whole = self.whole(schedule)
        for number, roles in enumerate(self.steps(self.loaders(schedule))):
            self.assertEqual(len({inputs.route.digest for inputs in roles.values()}), 1)
            merged: dict[str, dict[int, dflop.RoleMicrobatch]] = {"vision": {}, "llm": {}}
            for (_, module), inputs in roles.items():
                self.assertEqual(inputs.skipped, [])
                merged[module] |= inputs.microbatches
            route = next(iter(roles.values())).route
            for microbatch, vision in merged["vision"].items():
                own = [routed for routed in route.media if routed.encoder_microbatch == microbatch]
                self.assertEqual([routed.medium.key for routed in own], vision.sample_keys)
                rows = sum(routed.medium.rows for routed in own)
                self.assertEqual(len(vision["pixel_values"]), PATCHES * rows)
                self.assertEqual(len(vision.media_runs), len(vision["image_grid_thw"]))
                self.assertEqual(sum(own for kind, own in vision.media_runs if kind == "image"), rows)
                self.assertNotIn("input_ids", vision)
            for rank in range(schedule.dp_size):
                for place, expected in enumerate(whole[rank][number].microbatches):
                    self.compare(merged, route, place * schedule.dp_size + rank, expected)
            targets = sum(own.target_tokens for rank in whole for own in rank[number].microbatches)
            self.assertEqual({inputs.target_tokens for inputs in roles.values()}, {targets})

    def compare(
        self,
        merged: dict[str, dict[int, dflop.RoleMicrobatch]],
        route: dflop.Route,
        number: int,
        expected: dflop.Microbatch,
    ) -> None:
        """Compares a microbatch of the LLM, with its routed media, with that of a single loader."""
        if number not in merged["llm"]:
            self.assertEqual(expected.sample_keys, [])
            return
        llm = merged["llm"][number]
        self.assertEqual(llm.sample_keys, expected.sample_keys)
        self.assertNotIn("pixel_values", llm)
        for name in ("input_ids", "labels", "position_ids"):
            np.testing.assert_array_equal(llm[name], expected[name])
        np.testing.assert_array_equal(llm.cu_seqlens, expected.cu_seqlens)
        places = np.flatnonzero(np.asarray(expected["mm_token_type_ids"])[0])
        np.testing.assert_array_equal(llm.media_rows, places)
        self.assertEqual(sum(rows for _, rows in llm.media_runs), len(places))
        media = [routed for routed in route.media if routed.llm_microbatch == number]
        self.assertEqual(sum(routed.medium.rows for routed in media), len(places))
        pixels = []
        for routed in sorted(media, key=lambda routed: routed.llm_row):
            encoded = np.asarray(merged["vision"][routed.encoder_microbatch]["pixel_values"])
            first = PATCHES * routed.encoder_row
            pixels.append(encoded[first : first + PATCHES * routed.medium.rows])
        if pixels:
            np.testing.assert_array_equal(np.concatenate(pixels), expected["pixel_values"])

    def test_roles_read_what_a_loader_for_all_modules_reads(self) -> None:
        for modules, settings in [
            ({"vision": {"dp": 2}, "llm": {"dp": 3}}, {}),
            ({"vision": {}, "llm": {"stages": 2}}, {"schedule": "gpipe"}),
            ({"vision": {"dp": 2}, "llm": {"dp": 2}}, {}),
            ({"vision": {"dp": 2}, "llm": {"stages": 2}}, {"placement": "colocated"}),
            ({"vision": {}, "llm": {"dp": 2, "stages": 2, "layers": [0, 1]}}, {"placement": "joint"}),
        ]:
            with self.subTest(modules, **settings):
                self.check(dflop.Schedule(modules, microbatches=2, **settings))

    def test_all_ranks_leave_out_a_sample_that_one_cannot_decode(self) -> None:
        shards = self.directory / "bad"
        shards.mkdir(exist_ok=True)
        key = damage(min(self.shards.glob("*.tar")), shards / "0.tar")
        schedule = dflop.Schedule({"vision": {"dp": 2}, "llm": {"dp": 2}}, microbatches=1)
        read = dflop.Read(error_budget=0.5)
        loaders = self.loaders(schedule, shards=shards, global_batch_size=32, steps=1, read=read)
        roles = self.inputs({place: next(iter(loader)) for place, loader in loaders.items()})
        self.assertEqual(len({inputs.route.digest for inputs in roles.values()}), 1)
        for inputs in roles.values():
            self.assertEqual([skipped for skipped, _ in inputs.skipped], [key])
            self.assertIn("could not be", inputs.skipped[0][1])
            keys = [own for microbatch in inputs.microbatches.values() for own in microbatch.sample_keys]
            self.assertNotIn(key, keys)
        self.assertEqual(sum(loader.skipped_samples for loader in loaders.values()), 1)

    def test_counts_that_are_not_the_sum_are_refused(self) -> None:
        schedule = dflop.Schedule({"vision": {}, "llm": {"dp": 2}}, microbatches=1)

        def steps() -> list[Any]:
            return [next(iter(loader)) for loader in self.loaders(schedule).values()]

        first, second, third = steps()
        with self.assertRaisesRegex(dflop.ConfigError, "sum over 3 roles on all ranks, found 2"):
            first.inputs(first.counts + second.counts)
        with self.assertRaisesRegex(dflop.ConfigError, "numbers, found 1"):
            second.inputs([3])
        with self.assertRaisesRegex(dflop.ConfigError, "whole numbers"):
            third.inputs("many")
        first, second, _ = steps()
        with self.assertRaisesRegex(dflop.Error, "built before"):
            counts = sum(step.counts for step in steps())
            second.inputs(counts)
            second.inputs(counts)
        other = dflop.BalancedLoader(self.shards, role=schedule.roles(2)[0], **self.settings(seed=1))
        with self.assertRaisesRegex(dflop.ConfigError, "different plans"):
            first.inputs(first.counts + second.counts + next(iter(other)).counts)

    def test_a_role_resumes(self) -> None:
        schedule = dflop.Schedule({"vision": {}, "llm": {}}, microbatches=2)
        loader = dflop.BalancedLoader(self.shards, role=schedule.roles(0)[0], **self.settings())
        steps = iter(loader)
        next(steps)
        resumed = pickle.loads(pickle.dumps(loader))
        self.assertEqual(repr(resumed), repr(loader))
        expected, found = next(steps), next(iter(resumed))
        self.assertEqual((expected.step, expected.digest), (found.step, found.digest))
        np.testing.assert_array_equal(expected.counts, found.counts)

    def test_what_does_not_fit_a_role_is_refused(self) -> None:
        def schedule(*modules: str) -> dflop.Schedule:
            return dflop.Schedule({name: {} for name in modules}, microbatches=2)

        role = schedule("vision", "llm").roles(1)[0]
        for settings, expected in [
            ({"role": "vision"}, "RankRole"),
            ({"role": schedule("vision", "audio", "llm").roles(2)[0]}, "no module `audio`"),
            ({"role": schedule("llm").roles(0)[0]}, "no module `vision`"),
            ({"role": role, "dp_size": 2}, "dp_size"),
            ({"role": role, "dp_rank": 1}, "dp_rank"),
            ({"role": role, "microbatches": 3}, "microbatches"),
            ({"role": role, "processor": dflop.Processor(layout="padded_left")}, "layout"),
            ({"role": role, "processor": dflop.Processor(length_buckets="fixed:512")}, "length_buckets"),
            ({"role": role, "processor": dflop.Processor(length_buckets=64)}, "length_buckets"),
            ({"role": role, "tokenizer": False}, "tokenizer"),
        ]:
            with self.subTest(**settings), self.assertRaises(dflop.ConfigError) as caught:
                dflop.BalancedLoader(self.shards, **self.settings(**settings))
            self.assertIn(expected, str(caught.exception))


def damage(shard: Path, to: Path) -> str:
    """Copies a shard and damages the pixels of its first image, not the header; returns the key."""
    key = ""
    with tarfile.open(shard) as source, tarfile.open(to, "w") as target:
        for member in source:
            file = source.extractfile(member)
            content = file.read() if file is not None else b""
            if not key and member.name.endswith(".png"):
                key = member.name.partition(".")[0]
                content = content[: len(content) // 2] + bytes(len(content) - len(content) // 2)
            target.addfile(member, io.BytesIO(content))
    return key


if __name__ == "__main__":
    unittest.main()
