"""Tests `dflop.Loader` over indexes: ranks, global order, mixtures, weights, splits, length, state."""

import collections
import copy
import itertools
import json
import pickle
import unittest
import warnings

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
            loaders = [self.loader(rank, world, order=dflop.Order()) for rank in range(world)]
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
        with self.assertRaisesRegex(dflop.StateError, "was split `filtered`"):
            self.loader(0, 2).load_state_dict(ranks[0].state_dict())

    def test_a_filter_that_fails_is_an_error(self) -> None:
        with self.assertRaisesRegex(dflop.ConfigError, "the function failed: .*division") as caught:
            dflop.Loader(self.shards, filter=lambda samples: 1 // 0)
        self.assertIsInstance(caught.exception.__cause__, ZeroDivisionError)
        with self.assertRaisesRegex(dflop.ConfigError, "it keeps none of 96 samples"):
            dflop.Loader(self.shards, filter=lambda samples: [False for _ in samples])
        with self.assertRaisesRegex(dflop.ConfigError, "it returned 1 values for"):
            dflop.Loader(self.shards, filter=lambda samples: [True])

    def test_a_state_resumes_on_any_number_of_ranks_at_any_batch(self) -> None:
        for order in (dflop.Order(), dflop.Order(shuffle="blocks:8:3"), dflop.Order(tail="short"), None):
            read = dflop.Read(fields=["cls"], workers=1)
            settings = {"order": order, "epochs": 2, "seed": 4, "read": read}
            with dflop.Loader(self.shards, batch_size=24, **settings) as loader:
                states, whole = [loader.state_dict()], []
                for batch in loader:
                    whole.append(sorted(batch.sample_keys))
                    states.append(json.loads(json.dumps(loader.state_dict())))
            if order is None:
                self.assertIn("position", states[0], "whole shards need no index")
                continue
            self.assertEqual(len(whole), 8)
            for delivered, world in itertools.product((0, 3, 4, len(whole)), (1, 2, 3, 8)):
                with self.subTest(order, delivered=delivered, world=world):
                    state = states[delivered]
                    shares = []
                    for rank in range(world):
                        size = {"batch_size": 24 // world, "dp_rank": rank, "dp_size": world}
                        with dflop.Loader(self.shards, **size, **settings) as resumed:
                            resumed.load_state_dict(state)
                            self.assertEqual(resumed.state_dict(), state)
                            shares.append([batch.sample_keys for batch in resumed])
                    steps = [sorted(sum(step, [])) for step in zip(*shares, strict=True)]
                    self.assertEqual(steps, whole[delivered:])

    def test_a_state_of_another_run_is_refused(self) -> None:
        state = self.loader(1, 2, order=dflop.Order()).state_dict()
        others = {
            "this loader reads whole shards": dflop.Loader(self.shards),
            "a shuffle of the whole epoch": self.loader(0, 2),
            "seed 0, and this run has 1": self.loader(0, 2, order=dflop.Order(), seed=1),
            "tail `carry`": self.loader(1, 2, drop_last=True, order=dflop.Order()),
        }
        for reason, other in others.items():
            with self.subTest(reason), self.assertRaisesRegex(dflop.StateError, reason):
                other.load_state_dict(state)
        with self.assertRaisesRegex(dflop.StateError, "it is of whole shards"):
            self.loader(1, 2).load_state_dict(dflop.Loader(self.shards).state_dict())
        with self.assertRaisesRegex(dflop.ConfigError, "accept_changed_data"):
            whole = dflop.Loader(self.shards)
            whole.load_state_dict(whole.state_dict(), accept_changed_data=True)
        self.loader(0, 3, order=dflop.Order()).load_state_dict(state, accept_changed_data=True)

    def test_a_buffer_is_refused_where_a_global_shuffle_is_possible(self) -> None:
        for settings in ({"shuffle_buffer": 9}, {"shuffle_shards": True}):
            with self.assertRaisesRegex(dflop.ConfigError, "use `order`"):
                self.loader(0, 2, **settings)
        with self.assertRaisesRegex(TypeError, r"order=dflop.Order\(shuffle"):
            dflop.Loader(self.shards, shuffle="global")

    def test_the_next_pass_starts_after_the_last(self) -> None:
        loader = self.loader(0, 2, order=dflop.Order(), seed=1)
        first, second = keys(loader), keys(loader)
        self.assertNotEqual(first, second)
        state = self.loader(0, 2, order=dflop.Order(), seed=1)
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


class Weights(WithExample):
    def test_a_mixture_meets_its_weights_in_every_batch_and_names_the_samples(self) -> None:
        mixture = dflop.mix(
            [(self.shards / "000.tar", 0.75), (self.shards / "001.tar", 0.25)], names=["photos", "clips"]
        )
        for world in (1, 2, 4):
            settings = {"batch_size": 8, "epochs": None, "samples": 80, "order": dflop.Order()}
            loaders = [
                dflop.Loader(mixture, dp_rank=rank, dp_size=world, **settings) for rank in range(world)
            ]
            for loader in loaders:
                self.assertEqual(len(loader), 10)
                for batch in loader:
                    shards = [sample.shard[-7:] for sample in batch.samples]
                    names = {"000.tar": "photos", "001.tar": "clips"}
                    self.assertEqual(batch.sources, [names[shard] for shard in shards])
                self.assertEqual([one["source"] for one in loader.metrics()["sources"]], ["photos", "clips"])
            for loader in loaders:
                loader.set_epoch(0)
            for step in zip(*loaders, strict=True):
                sources = collections.Counter(source for batch in step for source in batch.sources)
                self.assertEqual(sources, {"photos": 6 * world, "clips": 2 * world})

    def test_classes_are_drawn_by_weight(self) -> None:
        dataset = dflop.Dataset(self.shards)
        classes = {int(batch) for one in dflop.Loader(dataset) for batch in one["cls"]}
        chosen = {number: 3 if number == 0 else 1 for number in classes}
        period = len(classes) + 2

        def label(samples: list[dict]) -> list[int]:
            by_key = {sample.key: sample["cls"] for sample in dataset[:]}
            return [by_key[sample["key"]] for sample in samples]

        for by in ("cls", label):
            mixture = dataset.by_class(by, weights=chosen)
            self.assertEqual(len(mixture), len(classes))
            loader = dflop.Loader(
                mixture, batch_size=period, epochs=None, samples=20 * period, order=dflop.Order()
            )
            self.assertEqual(len(loader), 20)
            for batch in loader:
                self.assertEqual(collections.Counter(batch["cls"]), chosen)
                self.assertEqual(batch.sources, [f"shards/{number}" for number in batch["cls"]])
        again = copy.copy(dataset.by_class("cls", weights=chosen))
        self.assertEqual(len(again), len(classes))
        self.assertIn(".by_class('cls', weights={", repr(again))
        self.assertEqual(len(pickle.loads(pickle.dumps(dataset.by_class("cls")))), len(classes))
        with self.assertRaisesRegex(dflop.ConfigError, "no sample has the class `kite`"):
            dataset.by_class("cls", weights={"kite": 1.0})
        with self.assertRaisesRegex(dflop.ConfigError, "has neither a field nor a key `kind`"):
            dataset.by_class("kind")
        with self.assertRaisesRegex(TypeError, "has no end"):
            len(dflop.Loader(mixture, epochs=None))

    def test_samples_are_drawn_as_often_as_their_weights(self) -> None:
        def weights(samples: list[dict]) -> list[float]:
            return [int(sample["key"]) % 3 / 2 for sample in samples]

        mixture = dflop.Dataset(self.shards).by_weight(weights)
        self.assertEqual(len(mixture), 2)
        for world in (1, 3):
            times: collections.Counter[str] = collections.Counter()
            for rank in range(world):
                # 96 draws per round: 32 samples twice, 32 samples once, 32 samples never.
                loader = dflop.Loader(
                    mixture,
                    batch_size=96 // world,
                    dp_rank=rank,
                    dp_size=world,
                    epochs=None,
                    samples=5 * 96 // world,
                    order=dflop.Order(),
                )
                times.update(keys(loader))
            self.assertEqual({times[f"{number:06}"] - 5 * (number % 3) for number in range(96)}, {0})
        with self.assertRaisesRegex(dflop.ConfigError, "the function failed: .*division"):
            dflop.Dataset(self.shards).by_weight(lambda samples: 1 // 0)
        with self.assertRaisesRegex(dflop.ConfigError, "-1 is not between"):
            dflop.Dataset(self.shards).by_weight(lambda samples: [-1.0 for _ in samples])

    def test_the_balanced_loader_takes_the_same_mixtures(self) -> None:
        mixture = dflop.Dataset(self.shards).by_class("cls")
        loader = dflop.BalancedLoader(
            mixture, model=self.model, global_batch_size=4 * len(mixture), steps=3, seed=9
        )
        for step in loader:
            sources = [source for mb in step.microbatches for source in mb.sources]
            self.assertEqual(set(collections.Counter(sources).values()), {4})
            plain = dflop.Loader(
                mixture, batch_size=4 * len(mixture), seed=9, epochs=None, order=dflop.Order()
            )
            batches = iter(plain)
            for _ in range(step.step + 1):
                batch = next(batches)
            self.assertEqual(
                sorted(batch.sample_keys), sorted(key for mb in step.microbatches for key in mb.sample_keys)
            )
            plain.close()


class Directories(InFolder):
    def test_three_ranks_over_directories_by_class_see_all_classes(self) -> None:
        paths = [
            self.shard({f"{name}-{number:02}.cls": name.encode() for number in range(30)}, f"{name}.tar")
            for name in ("crow", "kite", "lake")
        ]
        for rank in range(3):
            loader = dflop.Loader(paths, batch_size=30, dp_rank=rank, dp_size=3, order=dflop.Order())
            for batch in loader:
                self.assertEqual({key[:4] for key in batch.sample_keys}, {"crow", "kite", "lake"})
            in_order = dflop.Loader(paths, batch_size=10, dp_rank=rank, dp_size=3)
            counts = collections.Counter(key[:4] for key in keys(in_order))
            self.assertEqual(counts, {"crow": 10, "kite": 10, "lake": 10})


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
        with self.assertRaisesRegex(dflop.DataError, "none of 12 samples can be delivered"):
            list(dflop.Loader(shard, dp_size=2, read=dflop.Read(error_budget=1), transforms={"txt": refuse}))

    @staticmethod
    def some(values: list[str], contexts: list[dict[str, object]]) -> list[object]:
        bad = {"00", "01", "02", "07"}
        return [
            ValueError("refused") if context["key"] in bad else value
            for value, context in zip(values, contexts, strict=True)
        ]

    def test_pipes_have_no_length_and_ranks_share_whole_pipes_with_a_warning(self) -> None:
        shard = self.shard({"a.txt": b"x"})
        piped = dflop.Dataset(f"pipe:cat {shard}", allow="pipe")
        loader = dflop.Loader(piped)
        self.assertTrue(loader)
        with self.assertRaisesRegex(TypeError, "unknown"):
            len(loader)
        self.assertEqual(keys(loader), ["a"])
        two = dflop.Dataset([f"pipe:cat {shard}", f"pipe:cat {shard}"], allow="pipe")
        with self.assertWarnsRegex(UserWarning, "pipes and standard input have no index"):
            loaders = [dflop.Loader(two, dp_rank=rank, dp_size=2, shuffle_buffer=4) for rank in range(2)]
        self.assertEqual([keys(loader) for loader in loaders], [["a"], ["a"]])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.assertEqual(keys(dflop.Loader(two, shuffle_shards=True)), ["a", "a"])
        for settings in ({"order": dflop.Order()}, {"filter": lambda samples: [True for _ in samples]}):
            with self.assertRaisesRegex(dflop.ConfigError, "stream and cannot be indexed"):
                dflop.Loader(two, **settings)
        with self.assertRaisesRegex(dflop.ConfigError, "stream and cannot be indexed"):
            dflop.Loader(dflop.mix([(two, 1.0)]))


if __name__ == "__main__":
    unittest.main()
