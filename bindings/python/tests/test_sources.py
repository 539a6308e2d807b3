"""Tests the datasets of mixtures in microbatches and metrics."""

import collections
import pickle
import unittest

import dflop
from dflop import example
from support import WithExample


class Sources(WithExample):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.other = cls.directory / "clips"
        example.write_shards(cls.other, samples=48, shards=2)

    def loader(self, mixture: object, **settings: object) -> dflop.BalancedLoader:
        settings = {"model": self.model, "global_batch_size": 16, "microbatches": 2, "steps": 4} | settings
        return dflop.BalancedLoader(mixture, **settings)

    def counted(self, loader: dflop.BalancedLoader) -> dict[str, int]:
        """Counts samples by source, which has the shard of each of them."""
        samples: collections.Counter[str] = collections.Counter()
        for step in loader:
            for mb in step.microbatches:
                self.assertEqual(len(mb.sources), len(mb.sample_keys))
                samples.update(mb.sources)
                for sample, source in zip(mb.samples, mb.sources, strict=True):
                    self.assertEqual("/clips/" in sample.shard, source == "clips", sample.shard)
        return dict(samples)

    def test_samples_have_the_names_of_their_datasets(self) -> None:
        mixture = dflop.mix([(self.shards, 3.0), (self.other, 1.0)])
        loader = self.loader(mixture)
        counted = self.counted(loader)
        self.assertEqual(counted, {"shards": 48, "clips": 16})
        sources = {one.pop("source"): one for one in loader.metrics()["sources"]}
        self.assertEqual({name: one["samples"] for name, one in sources.items()}, counted)
        self.assertEqual({one["skipped_samples"] for one in sources.values()}, {0})
        self.assertEqual(sum(one["tokens"] for one in sources.values()), loader.prepare_report()["tokens"])

    def test_names_are_the_users(self) -> None:
        mixture = dflop.mix([(self.shards, 1.0), (self.other, 1.0)], names=["a", "clips"])
        for one in (mixture, pickle.loads(pickle.dumps(mixture))):
            self.assertEqual(self.counted(self.loader(one)), {"a": 32, "clips": 32})

    def test_equal_directories_are_numbered(self) -> None:
        loader = self.loader(dflop.mix([(self.shards, 1.0), (self.shards, 1.0)]), steps=1)
        next(iter(loader))
        self.assertEqual([one["source"] for one in loader.metrics()["sources"]], ["shards", "shards#2"])

    def test_names_must_fit(self) -> None:
        pairs = [(self.shards, 1.0), (self.other, 1.0)]
        for names in (["a"], ["a", "b", "c"], ["a", "a"], ["a", ""]):
            with self.assertRaisesRegex(dflop.ConfigError, "names"):
                dflop.mix(pairs, names=names)

    def test_one_dataset_is_one_source(self) -> None:
        self.assertEqual(self.counted(self.loader(self.shards)), {"shards": 64})

    def test_skipped_samples_are_counted_by_source(self) -> None:
        def drop_half(samples: list[dflop.Sample]) -> list[object]:
            return [None if "/clips/" in sample.shard else sample for sample in samples]

        mixture = dflop.mix([(self.shards, 1.0), (self.other, 1.0)])
        loader = self.loader(mixture, transforms=[dflop.SampleTransform(drop_half)])
        self.assertEqual(self.counted(loader), {"shards": 32})
        counts = {
            one["source"]: (one["samples"], one["skipped_samples"]) for one in loader.metrics()["sources"]
        }
        self.assertEqual(counts, {"shards": (32, 0), "clips": (0, 32)})
        self.assertEqual(loader.skipped_samples, 32)

    def test_sources_survive_held_and_repeated_steps(self) -> None:
        loader = self.loader(dflop.mix([(self.shards, 1.0), (self.other, 1.0)]))
        step = next(iter(loader))
        held = pickle.loads(pickle.dumps(step.hold()))
        with self.assertWarns(UserWarning):
            again = [mb.sources for mb in step.microbatches]
        self.assertEqual([mb.sources for mb in held.microbatches], again)


if __name__ == "__main__":
    unittest.main()
