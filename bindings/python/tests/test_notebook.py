"""Tests looking at data: samples by their places, HTML of datasets, steps and cost models."""

import html.parser
import unittest

import dflop
import numpy as np
from support import InFolder, WithExample

VOID = {"rect"}


class Reader(html.parser.HTMLParser):
    """Checks that elements are closed in order, and collects names, tooltips and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: list[str] = []
        self.texts: list[str] = []
        self.tips: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.open.append(tag)
        for name, _ in attrs:
            assert not name.startswith("on") and name not in {"href", "src"}, name

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        (self.tips if self.open and self.open[-1] == "title" else self.texts).append(data)


class Places(WithExample):
    def test_a_sample_is_the_one_that_the_loader_delivers(self) -> None:
        dataset = dflop.Dataset(self.shards)
        delivered = [sample for batch in dflop.Loader(dataset) for sample in batch.samples]
        self.assertEqual(len(delivered), len(dataset))
        for place in (0, 1, 40, 95, -1, -96):
            sample, expected = dataset[place], delivered[place]
            self.assertIsInstance(sample, dflop.Sample)
            self.assertEqual((sample.key, sample.shard), (expected.key, expected.shard))
            self.assertEqual((sample.offset, sample.bytes), (expected.offset, expected.bytes))
            self.assertEqual(list(sample), list(expected))
            for name, value in expected.items():
                if isinstance(value, np.ndarray):
                    np.testing.assert_array_equal(sample[name], value)
                elif not isinstance(value, dflop.Array):
                    self.assertEqual(sample[name], value)
        keys = [sample.key for sample in delivered]
        for place in (slice(2, 5), slice(None, None, 31), slice(-2, None), slice(9, 2, -3), slice(5, 2)):
            self.assertEqual([sample.key for sample in dataset[place]], keys[place], place)
        self.assertEqual([sample.key for sample in dataset[::-1]], keys[::-1])

    def test_places_are_checked(self) -> None:
        dataset = dflop.Dataset(self.shards)
        for place in (96, -97, 2**62, -(2**63)):
            with self.assertRaisesRegex(IndexError, f"index {place} of 96 samples"):
                dataset[place]
        with self.assertRaises(TypeError):
            dataset["a"]
        with self.assertRaisesRegex(TypeError, "not iterable"):
            iter(dataset)

    def test_places_of_a_split_are_its_samples(self) -> None:
        splits = self.directory / "halves.json"
        splits.write_text('{"splits": {"first": {"fraction": [0, 0.5]}, "second": {"fraction": [0.5, 1]}}}')
        both = []
        for name in ("first", "second"):
            half = dflop.Dataset(self.shards, split=(name, splits))
            both += [sample.key for sample in half[:]]
            self.assertEqual(half[len(half) - 1].key, both[-1])
            with self.assertRaises(IndexError):
                half[len(half)]
            self.assertIn(f"of the split {name}", half._repr_html_())
        self.assertEqual(sorted(both), sorted(sample.key for sample in dflop.Dataset(self.shards)[:]))

    def test_a_step_is_a_timeline_and_reads_no_microbatch(self) -> None:
        loader = dflop.BalancedLoader(
            self.shards, model=self.model, global_batch_size=32, microbatches=2, dp_size=3, epochs=1
        )
        step = next(iter(loader))
        read = loader.metrics()["stages"][-1]["items"]
        page = Reader(step._repr_html_())
        self.assertEqual(loader.metrics()["stages"][-1]["items"], read)
        self.assertEqual(page.names.count("rect"), 6)
        self.assertTrue({"rank 0", "rank 1", "rank 2", step.digest} <= set(page.texts))
        listed = [tip.split(": ")[-1].split(", ") for tip in page.tips]
        numbers = sorted(int(one) for tip in listed for one in tip)
        self.assertEqual(len(numbers), 32)
        self.assertEqual(numbers, sorted(number for _, number in step.plan.samples))
        # The plan of all ranks has the times of this rank's microbatches.
        for planned, mb in zip(step.plan.module_seconds[0], step.microbatches, strict=True):
            np.testing.assert_allclose(planned, list(mb.module_seconds.values()), rtol=1e-12)

    def test_a_model_is_a_table_of_its_modules(self) -> None:
        page = Reader(dflop.CostModel("qwen2.5-vl-7b")._repr_html_())
        self.assertNotIn("script", page.names)
        texts = page.texts
        self.assertEqual(texts[texts.index("llm") : texts.index("llm") + 4], ["llm", "28", "3,584", "28"])
        self.assertIn("vision", texts)


class Escapes(InFolder):
    def test_a_dataset_shows_its_data_escaped(self) -> None:
        evil = "<script>alert(1)</script>&\"'"
        (self.directory / "<b>").mkdir()
        samples = {f"{evil}{number}.txt".replace("/", ""): b"a word " * (number + 1) for number in range(4)}
        shard = self.shard(samples, name="<b>/a.tar")
        page = dflop.Dataset(shard)._repr_html_()
        read = Reader(page)
        self.assertEqual(set(read.names), {"div", "strong", "table", "tr", "td", "svg", "rect", "title"})
        self.assertIn("Dataset <b>", read.texts)
        self.assertTrue(any("<script>" in text for text in read.texts))
        counts = sum(int(tip.split(": ")[1].split()[0]) for tip in read.tips)
        self.assertEqual(counts, 8, "two histograms of four samples")

    def test_a_damaged_sample_is_an_error_that_names_it(self) -> None:
        damaged = b"\xff\xd8\xff\xe0" + bytes(30)
        shard = self.shard({"good.txt": b"a", "bad.json": b"{", "late.txt": b"b", "worse.jpg": damaged})
        dataset = dflop.Dataset(shard)
        keys = []
        for place in range(len(dataset)):
            try:
                keys.append(dataset[place].key)
            except dflop.Error as error:
                self.assertIn("bad", str(error))
        self.assertEqual([key for key in keys if key in {"good", "late"}], ["good", "late"])


if __name__ == "__main__":
    unittest.main()
