"""Tests looking at data: samples by their places, HTML of samples, batches, datasets, steps and answers."""

import base64
import html.parser
import io
import json
import struct
import unittest
import wave
import zlib

import dflop
import numpy as np
from support import InFolder, WithExample

VOID = {"img"}
EVIL = "<script>alert(1)</script>&\"'"


class Reader(html.parser.HTMLParser):
    """Checks that elements are closed in order, and collects names, tooltips and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: list[str] = []
        self.texts: list[str] = []
        self.tips: list[str] = []
        self.media: list[bytes] = []
        self.feed(page)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            assert not name.startswith("on") and name != "href", name
            if name == "src":
                kind, _, content = (value or "").partition(";base64,")
                assert kind in {"data:image/png", "data:image/jpeg", "data:audio/wav"}, kind
                self.media.append(base64.b64decode(content))

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
        parts = [one for rank in step.plan.module_seconds for modules in rank for one in modules if one > 0]
        self.assertEqual(page.names.count("rect"), len(parts))
        named = {"rank 0", "rank 1", "rank 2", "encoder", "LLM", "0", step.digest}
        self.assertTrue(named <= set(page.texts), named - set(page.texts))
        # A microbatch has a tip on each of its modules.
        listed = [tip.split(": ")[-1].split(", ") for tip in dict.fromkeys(page.tips)]
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

    def test_a_batch_is_a_grid_of_its_samples(self) -> None:
        for settings in ({}, {"image": dflop.Image(32), "read": dflop.Read(fields=["images", "cls"])}):
            batch = next(iter(dflop.Loader(self.shards, batch_size=30, **settings)))
            page = Reader(batch._repr_html_())
            first = batch.samples[:12]
            for one in first:
                self.assertTrue(any(text.startswith(f"{one.key}, cls {one['cls']}") for text in page.texts))
            self.assertIn("and 18 more", page.texts)
            rows = batch.image_rows or [(0, len([name for name in one if "png" in name])) for one in first]
            self.assertEqual(len(page.media), sum(end > start for start, end in rows[:12]))
        self.assertIn("float32 [", "".join(page.texts))

    def test_a_microbatch_has_its_costs_and_tensors(self) -> None:
        loader = dflop.BalancedLoader(self.shards, model=self.model, global_batch_size=16, steps=1)
        microbatch = next(iter(loader)).microbatches[0]
        page = Reader(microbatch._repr_html_())
        self.assertTrue(any(text.startswith(f"{microbatch.tokens:,}, of which") for text in page.texts))
        self.assertIn(f"int64 [1, {microbatch['input_ids'].shape[1]}]", page.texts)
        self.assertEqual(page.names.count("rect"), sum(it > 0 for it in microbatch.module_seconds.values()))
        Reader(type(microbatch)(microbatch)._repr_html_())

    def test_answers_of_commands_are_pages(self) -> None:
        simulated = dflop.simulate(self.shards, model=self.model, gpus=2, steps=2)
        page = Reader(simulated._repr_html_())
        self.assertTrue({"data-blind", "dflop", "lower bound", "FSDP"} <= set(page.texts))
        self.assertIn(f"{simulated.strategies[-1].speedup:.2f} x", "".join(page.texts))
        page = Reader(dflop.stats(self.shards, model=self.model)._repr_html_())
        self.assertIn("most expensive samples", page.texts)
        self.assertGreaterEqual(page.names.count("svg"), 4)
        self.assertIn("qwen2_vl", Reader(dflop.models(self.model)._repr_html_()).texts)
        self.assertIn("qwen2_vl", Reader(dflop.models()._repr_html_()).texts)
        shapes = self.directory / "shapes.csv"
        shapes.write_text("tiles,seq_len\n" + "4,3003\n2,1552\n0,512\n" * 20)
        job = {"model": "llava-ov-qwen2.5-7b", "gpus": 4, "global_batch_size": 8, "batches": 2}
        plan = dflop.plan_parallelism(shapes=shapes, space={"kinds": "basic"}, **job)
        self.assertTrue(
            {"this plan", "DDP", "FSDP", "encoder", "llm"} <= set(Reader(plan._repr_html_()).texts)
        )


class Escapes(InFolder):
    def test_a_dataset_shows_its_data_escaped(self) -> None:
        (self.directory / "<b>").mkdir()
        samples = {f"{EVIL}{number}.txt".replace("/", ""): b"a word " * (number + 1) for number in range(4)}
        shard = self.shard(samples, name="<b>/a.tar")
        page = dflop.Dataset(shard)._repr_html_()
        read = Reader(page)
        expected = {"div", "table", "tr", "td", "svg", "rect", "title", "line", "text"}
        self.assertEqual(set(read.names), expected)
        self.assertIn("Dataset <b>", read.texts)
        self.assertTrue(any("<script>" in text for text in read.texts))
        counts = sum(int(tip.split(": ")[1].split()[0]) for tip in read.tips)
        self.assertEqual(counts, 8, "two histograms of four samples")

    def test_histograms_have_axes(self) -> None:
        shard = self.shard({f"{place}.txt": b"x" * (100 + 100 * place) for place in range(9)})
        texts = Reader(dflop.Dataset(shard)._repr_html_()).texts
        at = texts.index("bytes of a sample: 100 B to 900 B, median 500 B; height: samples")
        self.assertEqual(texts[at + 1 : at + 6], ["0", "1", "100 B", "500 B", "900 B"])

    def test_a_sample_shows_pictures_players_and_turns_escaped(self) -> None:
        photo = np.zeros((700, 1000, 3), np.uint8)
        photo[:, :, 0] = np.arange(1000) // 4
        turns = [{"from": "human", "value": f"<image>\n{EVIL}"}, {"from": "gpt", "value": "answer"}]
        tone = dflop.Audio(np.full((24_000, 2), 0.5, np.float32), 16_000)
        clip = dflop.Video(np.stack([photo] * 9), np.arange(9) / 3, 3.0)
        sample = dflop.Sample({"jpg": photo, "json": {"conversations": turns}, "cls": 7})
        sample |= {"flac": tone, "mp4": clip, "more.json": {EVIL: EVIL}, "bin": object()}
        sample.key, sample.shard, sample.offset, sample.epoch, sample.bytes = EVIL, "a.tar", 512, 0, 2_000
        page = Reader(sample._repr_html_())
        self.assertNotIn("script", page.names)
        self.assertTrue({EVIL, "answer", "user", "assistant", "cls", "a.tar at byte 512"} <= set(page.texts))
        self.assertIn("1000 x 700", page.texts)
        self.assertEqual(page.texts.count("json"), 0, "the turns show it")
        images = [content for content in page.media if content.startswith(b"\x89PNG")]
        self.assertEqual(len(images), 1 + 6)
        sizes = sorted({struct.unpack(">II", content[16:24]) for content in images})
        self.assertEqual(sizes, [(125, 87), (250, 175)], "reduced by 8 and by 4")
        first = next(content for content in images if struct.unpack(">I", content[16:20])[0] == 250)
        start = first.index(b"IDAT") + 4
        rows = zlib.decompress(first[start : start + int.from_bytes(first[start - 8 : start - 4], "big")])
        self.assertEqual(len(rows), 175 * (1 + 3 * 250))
        self.assertEqual([rows[1 + 3 * column] for column in (0, 100, 249)], [0, 100, 249])
        with wave.open(io.BytesIO(next(it for it in page.media if it.startswith(b"RIFF")))) as file:
            self.assertEqual(
                (file.getnchannels(), file.getframerate(), file.getnframes()), (1, 16_000, 24_000)
            )
            self.assertEqual(int.from_bytes(file.readframes(1), "little"), 16383)

    def test_tool_calls_are_shown_and_kept_for_processors(self) -> None:
        call = {"type": "function", "function": {"name": "weather", "arguments": {"city": EVIL}}}
        messages = [
            {"role": "user", "content": "How warm is it?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "name": "weather", "content": "21"},
        ]
        sample = dflop.Sample({"json": {"messages": messages}})
        kept = dflop.hugging_face.messages_of(sample)
        self.assertEqual(kept[1], {"role": "assistant", "content": [], "tool_calls": [call]})
        self.assertEqual(kept[2]["name"], "weather")
        texts = Reader(sample._repr_html_()).texts
        written = json.dumps({"city": EVIL})
        self.assertTrue({f"weather({written})", "tool", "21"} <= set(texts), texts)

    def test_long_things_are_cut(self) -> None:
        sample = dflop.Sample(
            {"wav": dflop.Audio(np.zeros((480_000, 1), np.float32), 16_000), "txt": "x" * 9_000}
        )
        page = Reader(sample._repr_html_())
        self.assertIn("30.0 s at 16,000 Hz, the first 10 s", page.texts)
        self.assertIn("… 7,500 more characters", page.texts)
        self.assertLessEqual(max(map(len, page.texts)), 1_501)
        thin = dflop.Sample({"png": np.zeros((3, 5_000, 3), np.uint8)})
        (content,) = Reader(thin._repr_html_()).media
        self.assertEqual(struct.unpack(">II", content[16:24]), (312, 1))

    def test_documents_that_are_no_conversation_are_shown_as_they_are(self) -> None:
        for document in (
            {"messages": [{"role": 3}]},
            {"conversations": "no"},
            [1, {"a": EVIL}],
            {"b": 2},
            "text",
        ):
            page = Reader(dflop.Sample({"json": document})._repr_html_())
            self.assertIn("json", page.texts)
        stored = dflop.Sample({"jpg": b"\xff\xd8\xff\xe0" + bytes(30), "bin": b"\0" * 8})
        self.assertEqual(Reader(stored._repr_html_()).media, [stored["jpg"]])

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
