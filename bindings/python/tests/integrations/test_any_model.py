"""Tests models that dflop does not know: a made-up one, and processors of ``transformers``."""

from __future__ import annotations

import copy
import unittest

import dflop
import torch
import transformers
from dflop import example as made_up
from dflop.hugging_face import Inputs, TokenCounts, aligned
from trainers import EXAMPLES, difference, example, gradients_of, run

IMAGE = "<|image_pad|>"
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|> ' + m['role'] + ' ' }}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{{ ' <|im_end|> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|> assistant ' }}{% endif %}"
)


class MadeUp(unittest.TestCase):
    def test_it_learns_and_counts_its_tokens(self) -> None:
        losses, tokens = (line.split() for line in run(EXAMPLES / "any_model.py").splitlines()[-2:])
        losses = [float(loss) for loss in losses[1:]]
        self.assertEqual(len(losses), 8)
        self.assertLess(losses[-1], losses[0] - 0.2)
        self.assertGreater(int(tokens[1]), 1000)
        self.assertEqual(tokens[1], tokens[3], "planned and delivered tokens")

    def test_gradients_do_not_depend_on_the_cut(self) -> None:
        kite, found = example("any_model"), []
        shards = made_up.directory() / "shards"
        for microbatches in (1, 4):
            torch.manual_seed(0)
            model = kite.Kite()
            for one in next(iter(kite.loader_of(shards, microbatches=microbatches))).microbatches:
                model(**one).backward()
            found.append(gradients_of(model))
        self.assertLess(difference(*found), 1e-4)


class HuggingFace(unittest.TestCase):
    def setUp(self) -> None:
        self.directory = made_up.directory()
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(self.directory / "model" / "tokenizer.json"),
            eos_token="<|im_end|>",
            pad_token="<|endoftext|>",
            unk_token="<unk>",
        )
        images = transformers.Qwen2VLImageProcessor(min_pixels=28**2, max_pixels=28**2 * 64)
        videos = transformers.Qwen2VLVideoProcessor()
        self.processor = transformers.Qwen2VLProcessor(images, tokenizer, videos, chat_template=TEMPLATE)

    def loader(self, **settings: object) -> dflop.BalancedLoader:
        costs = dflop.CostModel("qwen2-vl-7b")
        # Two markers around an image, four of every turn.
        counts = TokenCounts(self.processor, encoder_tokens=4, sample_tokens=12)
        processor = dflop.CustomProcessor(batch=Inputs(self.processor))
        settings = {
            "processor": processor,
            "read": dflop.Read(python_threads=2),
            "model": dflop.Custom(modules=costs, tokens=counts),
        } | settings
        return dflop.BalancedLoader(
            dflop.Dataset(self.directory / "shards").count_tokens(self.processor.tokenizer),
            global_batch_size=16,
            microbatches=4,
            steps=4,
            **settings,
        )

    def test_a_processor_makes_the_inputs_of_microbatches(self) -> None:
        loader = self.loader()
        image = self.processor.tokenizer.convert_tokens_to_ids(IMAGE)
        for step in loader:
            for mb in step.microbatches:
                ids, labels = mb["input_ids"], mb["labels"]
                self.assertEqual(ids.shape, labels.shape)
                self.assertEqual(int((ids == image).sum()) * 4, len(mb.get("pixel_values", ())))
                for row, sample in enumerate(mb.samples):
                    answer = sample["json"]["conversations"][1]["value"] + " <|im_end|>"
                    wanted = self.processor.tokenizer(answer, add_special_tokens=False)["input_ids"]
                    self.assertEqual(labels[row][labels[row] != -100].tolist(), wanted)
                self.assertEqual(mb.target_tokens, int((labels != -100).sum()))
                self.assertEqual(mb.tokens, int(mb["attention_mask"].sum()))
        report = loader.prepare_report()
        self.assertEqual(report["microbatches"], 16)
        self.assertLess(abs(report["tokens"] - report["planned_tokens"]), 0.2 * report["tokens"])

    def test_planned_tokens_are_those_that_inputs_deliver(self) -> None:
        inputs = Inputs(self.processor)
        for counts in (
            inputs.token_counts(encoder_tokens=4),
            copy.copy(inputs.token_counts(encoder_tokens=4)),
        ):
            model = dflop.Custom(modules=dflop.CostModel("qwen2-vl-7b"), tokens=counts)
            loader = self.loader(model=model)
            for step in loader:
                for mb in step.microbatches:
                    self.assertEqual(mb.tokens, mb.planned_tokens)
            report = loader.prepare_report()
            self.assertEqual((report["microbatches"], report["differing_microbatches"]), (16, 0))

    def test_images_are_counted_by_processing_where_the_class_does_not_count(self) -> None:
        class Uncounted:
            """Is the processor, except that its class counts nothing."""

            def __init__(self, processor: object) -> None:
                self.processor = processor

            def __getattr__(self, name: str) -> object:
                if name == "_get_num_multimodal_tokens":
                    raise AttributeError(name)
                return getattr(self.processor, name)

            def __call__(self, **arguments: object) -> object:
                return self.processor(**arguments)

        sample = {"text_tokens": 10, "images": [(56, 84), (200, 140)], "audio": [], "videos": []}
        counted = [
            Inputs(one).token_counts()([sample]) for one in (self.processor, Uncounted(self.processor))
        ]
        self.assertEqual(counted[0], counted[1])
        # 2 x 3 and 7 x 5 tokens, two markers around each, and four tokens of both turns.
        self.assertEqual(counted[0][0]["vision"], [6 + 2, 35 + 2])

    def test_samples_without_media_need_no_processor_that_takes_them(self) -> None:
        class Refusing:
            """Is the processor, except that it accepts flat lists of images and only texts with one."""

            def __init__(self, processor: object) -> None:
                self.processor = processor

            def __getattr__(self, name: str) -> object:
                return getattr(self.processor, name)

            def __call__(self, *, text: list[str], images: list | None = None, **more: object) -> object:
                if images is None or any(isinstance(one, list) for one in images):
                    raise ValueError("images are required, not nested")
                if not all(IMAGE in one for one in text):
                    raise ValueError("every text needs an image")
                return self.processor(text=text, images=images, **more)

        samples = [dflop.Dataset(self.directory / "shards")[at] for at in range(8)]
        have = ["0.png" in sample for sample in samples]
        self.assertTrue(any(have) and not all(have))
        made, expected = (Inputs(one)(samples) for one in (Refusing(self.processor), self.processor))
        for name in ("input_ids", "attention_mask", "labels", "pixel_values"):
            self.assertTrue(torch.equal(made[name], expected[name]), name)
        texts = [sample for sample, has in zip(samples, have, strict=True) if not has]
        self.assertNotIn("pixel_values", Inputs(Refusing(self.processor))(texts))

    def test_packed_inputs_are_padded_ones_without_padding(self) -> None:
        samples = [dflop.Dataset(self.directory / "shards")[at] for at in range(5)]
        padded = Inputs(self.processor)(samples)
        packed = Inputs(self.processor, packed=True)(samples)
        mask = padded["attention_mask"].bool()
        self.assertNotIn("attention_mask", packed)
        self.assertEqual(packed["input_ids"].tolist(), [padded["input_ids"][mask].tolist()])
        lengths = mask.sum(1).tolist()
        positions = [at for length in lengths for at in range(length)]
        self.assertEqual(packed["position_ids"].tolist(), [positions])
        labels = padded["labels"].clone()
        labels[:, 0] = -100
        self.assertEqual(packed["labels"].tolist(), [labels[mask].tolist()])
        self.assertTrue(torch.equal(packed["pixel_values"], padded["pixel_values"]))

    def test_a_sample_that_a_processor_refuses_is_skipped_and_others_stay(self) -> None:
        def messages(sample: dflop.Sample) -> list[dict]:
            if sample.key.endswith("3"):
                raise ValueError("not this one")
            return dflop.hugging_face.messages_of(sample)

        processor = dflop.CustomProcessor(batch=Inputs(self.processor, messages=messages))
        loader = self.loader(processor=processor, read=dflop.Read(error_budget=1.0))
        keys = {key for step in loader for mb in step.microbatches for key in mb.sample_keys}
        self.assertFalse([key for key in keys if key.endswith("3")])
        self.assertEqual({one["reason"] for one in loader.skipped}, {"ValueError: not this one"})

    def test_times_of_counted_tokens_have_attention_in_them(self) -> None:
        def seconds(lengths: list[int]) -> float:
            model = dflop.Custom(
                modules=dflop.CostModel("qwen2-vl-7b"),
                tokens=lambda samples: [{"vision": lengths, "llm": 10}] * len(samples),
            )
            loader = dflop.BalancedLoader(
                self.directory / "shards", model=model, global_batch_size=4, tokenizer=False
            )
            return next(iter(loader)).microbatches[0].module_seconds["vision"]

        self.assertGreater(seconds([16384]), 1.2 * seconds([1024] * 16))

    def test_labels_find_their_tokens_around_media_of_any_length(self) -> None:
        plain = [(1, False), (7, False), (2, False), (3, True), (4, True)]
        self.assertEqual(aligned(plain, [1, 7, 7, 7, 2, 3, 4]), [-100] * 5 + [3, 4])
        # The token after the medium has merged with it.
        self.assertEqual(aligned(plain, [1, 7, 9, 3, 4]), [-100] * 3 + [3, 4])
        with self.assertRaisesRegex(ValueError, "1 of 2 target tokens"):
            aligned(plain, [1, 7, 2, 3, 9])
        texts = {1: "a", 7: "<i>", 2: "b", 3: "c", 4: "\n", 9: "\n\n"}

        def decode(ids: list[int]) -> str:
            return "".join(texts[one] for one in ids)

        # The last target has merged with a line break that the processor adds.
        self.assertEqual(aligned(plain, [1, 7, 2, 3, 9], decode), [-100] * 3 + [3, 9])
        with self.assertRaisesRegex(ValueError, "1 of 2 target tokens"):
            aligned(plain, [1, 7, 2, 3, 2], decode)


if __name__ == "__main__":
    unittest.main()
