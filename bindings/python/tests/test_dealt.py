"""Tests `dflop.Loader` with several ranks and splits: equal numbers of batches, length, state."""

import json
import unittest

import dflop
from support import InFolder, WithExample


def keys(loader: dflop.Loader) -> list[str]:
    return [key for batch in loader for key in batch.sample_keys]


def lengths(loader: dflop.Loader) -> list[int]:
    return [len(batch.samples) for batch in loader]


class Ranks(WithExample):
    def loader(self, rank: int, world: int, **settings: object) -> dflop.Loader:
        return dflop.Loader(self.shards, dp_rank=rank, dp_size=world, batch_size=5, **settings)

    def test_all_ranks_have_the_same_number_of_batches(self) -> None:
        everything = sorted(keys(dflop.Loader(self.shards)))
        for world in (2, 3, 7):
            loaders = [
                self.loader(rank, world, shuffle_shards=True, shuffle_buffer=9) for rank in range(world)
            ]
            shapes = [lengths(loader) for loader in loaders]
            self.assertEqual([len(loader) for loader in loaders], [len(shapes[0])] * world)
            self.assertEqual(shapes, [shapes[0]] * world)
            self.assertEqual(sum(shapes[0]), -(-96 // world))
            for loader in loaders:
                loader.set_epoch(0)
            self.assertEqual(sorted({key for loader in loaders for key in keys(loader)}), everything)

    def test_drop_last_repeats_nothing(self) -> None:
        parts = [keys(self.loader(rank, 7, drop_last=True)) for rank in range(7)]
        self.assertEqual([len(part) for part in parts], [10] * 7)
        self.assertEqual(len({key for part in parts for key in part}), 70)
        self.assertEqual(len(self.loader(0, 7, drop_last=True)), 2)
        with self.assertRaisesRegex(dflop.ConfigError, "no full batch"):
            self.loader(0, 32, drop_last=True)

    def test_a_filter_selects_samples_before_the_pass(self) -> None:
        def even(samples: list[dict]) -> list[bool]:
            self.assertLessEqual({"key", "bytes", "text_tokens", "target_tokens", "images"}, set(samples[0]))
            return [sum(map(ord, sample["key"])) % 2 == 0 for sample in samples]

        everything = keys(dflop.Loader(self.shards))
        wanted = [key for key in everything if sum(map(ord, key)) % 2 == 0]
        loader = dflop.Loader(self.shards, filter=even, batch_size=5)
        self.assertEqual(keys(loader), wanted)
        self.assertEqual((len(loader), loader.filtered_samples), (-(-len(wanted) // 5), 96 - len(wanted)))
        ranks = [self.loader(rank, 2, filter=even) for rank in range(2)]
        self.assertEqual(len({len(rank) for rank in ranks}), 1)
        self.assertEqual(sorted({key for rank in ranks for key in keys(rank)}), sorted(wanted))
        with self.assertRaisesRegex(dflop.StateError, "other samples"):
            self.loader(0, 2).load_state_dict(ranks[0].state_dict())

    def test_a_filter_that_fails_is_an_error(self) -> None:
        with self.assertRaisesRegex(dflop.ConfigError, "the function failed: .*division") as caught:
            dflop.Loader(self.shards, filter=lambda samples: 1 // 0)
        self.assertIsInstance(caught.exception.__cause__, ZeroDivisionError)
        with self.assertRaisesRegex(dflop.ConfigError, "it keeps none of 96 samples"):
            dflop.Loader(self.shards, filter=lambda samples: [False for _ in samples])
        with self.assertRaisesRegex(dflop.ConfigError, "it returned 1 values for"):
            dflop.Loader(self.shards, filter=lambda samples: [True])

    def test_a_state_resumes_the_same_rank(self) -> None:
        settings = {"shuffle_shards": True, "shuffle_buffer": 20, "epochs": 2}
        whole = keys(self.loader(1, 2, **settings))
        loader = self.loader(1, 2, **settings)
        batches = iter(loader)
        for _ in range(7):
            next(batches)
        state = json.loads(json.dumps(loader.state_dict()))
        again = self.loader(1, 2, **settings)
        again.load_state_dict(state)
        self.assertEqual(again.state_dict(), state)
        self.assertEqual(keys(again), whole[35:])
        others = {
            "rank 0 of 2": self.loader(0, 2, **settings),
            "rank 1 of 3": self.loader(1, 3, **settings),
            "whole shards": dflop.Loader(self.shards, **settings),
            "drop_last": self.loader(1, 2, drop_last=True, **settings),
        }
        for reason, other in others.items():
            with self.subTest(reason), self.assertRaisesRegex(dflop.StateError, reason):
                other.load_state_dict(state)

    def test_the_next_pass_starts_after_the_last(self) -> None:
        loader = self.loader(0, 2, shuffle_shards=True, seed=1)
        first, second = keys(loader), keys(loader)
        self.assertNotEqual(first, second)
        state = self.loader(0, 2, shuffle_shards=True, seed=1)
        state.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        self.assertEqual(keys(state), keys(loader))
        loader.set_epoch(1)
        self.assertEqual(keys(loader), second)

    def test_the_length_counts_epochs_samples_and_full_batches(self) -> None:
        cases = {
            20: {},
            39: {"epochs": 2},
            2: {"samples": 8},
            19: {"drop_last": True},
            1: {"samples": 8, "drop_last": True},
        }
        for batches, settings in cases.items():
            with self.subTest(settings):
                whole = dflop.Loader(self.shards, batch_size=5, **settings)
                self.assertEqual((len(whole), len(lengths(whole))), (batches, batches))

    def test_a_split_is_delivered_alone(self) -> None:
        names = keys(dflop.Loader(self.shards))
        splits = self.directory / "splits.json"
        splits.write_text(json.dumps({"splits": {"few": {"keys": names[3:40:4]}}}))
        dataset = dflop.Dataset(self.shards, split=("few", splits))
        self.assertEqual(keys(dflop.Loader(dataset)), names[3:40:4])
        parts = [keys(dflop.Loader(dataset, dp_rank=rank, dp_size=3, batch_size=2)) for rank in range(3)]
        self.assertEqual([len(part) for part in parts], [4, 4, 4])
        self.assertEqual({key for part in parts for key in part}, set(names[3:40:4]))

    def test_a_rank_outside_the_world_is_refused(self) -> None:
        for rank, world, setting in ((2, 2, "dp_rank"), (1, 1, "dp_rank"), (0, 0, "dp_size")):
            with self.assertRaises(dflop.ConfigError) as caught:
                self.loader(rank, world)
            self.assertEqual(caught.exception.setting, setting)


class BadSamples(InFolder):
    def test_ranks_agree_where_samples_cannot_be_decoded(self) -> None:
        shard = self.shard({f"{number:02}.txt": b"x" for number in range(12)})

        def refuse(values: list[str]) -> list[object]:
            raise ValueError("refused")

        for world in (1, 2, 5):
            bad = [
                lengths(
                    dflop.Loader(
                        dflop.Dataset(shard),
                        dp_rank=rank,
                        dp_size=world,
                        batch_size=2,
                        read=dflop.Read(error_budget=1),
                        transforms=[dflop.Transform("txt", self.some, has_context=True)],
                    )
                )
                for rank in range(world)
            ]
            self.assertEqual(len(bad), world)
            if world > 1:
                self.assertEqual(bad, [bad[0]] * world)
                self.assertEqual(sum(bad[0]), -(-12 // world))
        with self.assertRaisesRegex(dflop.DataError, "in a row"):
            list(dflop.Loader(shard, dp_size=2, read=dflop.Read(error_budget=1), transforms={"txt": refuse}))

    @staticmethod
    def some(values: list[str], contexts: list[dict[str, object]]) -> list[object]:
        bad = {"00", "01", "02", "07"}
        return [
            ValueError("refused") if context["key"] in bad else value
            for value, context in zip(values, contexts, strict=True)
        ]

    def test_pipes_have_no_length_and_cannot_be_dealt(self) -> None:
        shard = self.shard({"a.txt": b"x"})
        piped = dflop.Dataset(f"pipe:cat {shard}", allow="pipe")
        loader = dflop.Loader(piped)
        self.assertTrue(loader)
        with self.assertRaisesRegex(TypeError, "unknown"):
            len(loader)
        self.assertEqual(keys(loader), ["a"])
        with self.assertRaisesRegex(dflop.ConfigError, "stream and cannot be indexed"):
            dflop.Loader(piped, dp_rank=0, dp_size=2)


if __name__ == "__main__":
    unittest.main()
