"""Tests the user's own code in `dflop.BalancedLoader`: custom models, processors, filters."""

import copy
import dataclasses
import json
import pickle
import threading
import time
import unittest

import dflop
import numpy as np
from support import WithExample


def tokens(samples: list[dict]) -> list[dict]:
    """Counts a token per 28 x 28 pixels, and four patches of it in the encoder."""
    images = [sum(width * height // 784 for width, height in sample["images"]) for sample in samples]
    return [
        {"vision": 4 * of_images, "llm": sample["text_tokens"] + of_images}
        for sample, of_images in zip(samples, images, strict=True)
    ]


def inputs(sample: dflop.Sample) -> np.ndarray:
    words = sample["json"]["conversations"][1]["value"].split()
    return np.array([int(word[1:]) for word in words])


def collate(made: list[np.ndarray]) -> dict:
    ids = np.concatenate(made)[None]
    return {"input_ids": ids, "labels": ids.copy()}


MODEL = dflop.Custom(modules={"vision": 4e8, "llm": 4e9}, tokens=tokens)
PROCESSOR = dflop.CustomProcessor(inputs=inputs, collate=collate)


class Own(WithExample):
    def loader(self, **settings: object) -> dflop.BalancedLoader:
        settings = {"model": MODEL, "global_batch_size": 16, "microbatches": 4} | settings
        return dflop.BalancedLoader(self.shards, **settings)

    def prepared(self, **settings: object) -> dflop.BalancedLoader:
        return self.loader(**{"processor": PROCESSOR} | settings)


class Models(Own):
    def test_costs_are_the_tokens_times_the_parameters(self) -> None:
        for step in self.prepared(steps=3):
            for mb in step.microbatches:
                self.assertEqual(set(mb.module_seconds), {"vision", "llm"})
                self.assertGreater(mb.planned_tokens, 0)
        models = {name: dataclasses.replace(MODEL, device=name) for name in ("h100", "a100")}
        rate = {name: self.prepared(steps=1, model=model) for name, model in models.items()}
        seconds = {name: next(iter(loader)).makespan_seconds for name, loader in rate.items()}
        self.assertGreater(seconds["a100"], seconds["h100"])

    def test_microbatches_are_balanced_by_the_tokens(self) -> None:
        predicted = {}
        for strategy in ("search", "data-blind"):
            steps = self.prepared(steps=5, plan=dflop.Plan(strategy=strategy), dp_size=2)
            predicted[strategy] = sum(step.makespan_seconds for step in steps)
        self.assertLess(predicted["search"], 0.95 * predicted["data-blind"])

    def test_targets_and_times_can_be_given(self) -> None:
        def with_targets(samples: list[dict]) -> list[dict]:
            return [{"llm": 10, "targets": 3} for _ in samples]

        def cost(samples: list[dict]) -> list[list[float]]:
            self.assertEqual({sample["tokens"] for sample in samples}, {10})
            return [[2.0]] * len(samples)

        model = dflop.Custom(modules={"llm": 1e9}, tokens=with_targets)
        step = next(iter(self.prepared(model=model, plan=dflop.Plan(cost=cost))))
        self.assertEqual(step.target_tokens, 48)
        self.assertEqual(step.makespan_seconds, 32.0)

    def test_wrong_models_are_refused(self) -> None:
        for modules, reason in [
            ({"tail": 1.0, "llm": 1.0}, "found 'tail'"),
            ({"vision": 1.0}, "'llm'"),
            ({"llm": 0}, "positive"),
        ]:
            with self.subTest(modules), self.assertRaisesRegex(ValueError, reason):
                dflop.Custom(modules=modules, tokens=tokens)
        with self.assertRaisesRegex(TypeError, r"dflop\.Custom"):
            self.loader(model={"llm": 1e9})
        for answer, reason in [
            ([{"llm": 1}], "of 16 samples, found 1"),
            ([{"tail": 1}] * 16, "found `tail`"),
        ]:
            model = dflop.Custom(modules={"llm": 1e9}, tokens=lambda samples, answer=answer: answer)
            with self.subTest(reason), self.assertRaisesRegex(dflop.UserCodeError, reason):
                next(iter(self.prepared(model=model)))

    def test_models_are_copied_and_pickled(self) -> None:
        self.assertEqual(pickle.loads(pickle.dumps(MODEL)), MODEL)
        loader = self.prepared(steps=2)
        for other in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
            wanted, found = (
                [mb.sample_keys for mb in next(iter(one)).microbatches] for one in (loader, other)
            )
            self.assertEqual(found, wanted)
            loader.load_state_dict(self.prepared().state_dict())


class Processors(Own):
    def test_microbatches_have_the_tensors_of_their_samples(self) -> None:
        for step in self.prepared(steps=3):
            for mb in step.microbatches:
                wanted = np.concatenate([inputs(sample) for sample in mb.samples])
                np.testing.assert_array_equal(mb["input_ids"][0], wanted)
                self.assertEqual(mb.target_tokens, wanted.size)
                self.assertAlmostEqual(mb.loss_scale, wanted.size / step.target_tokens)

    def test_a_sample_that_raises_is_skipped_and_its_place_filled(self) -> None:
        bad = {f"{number:06}" for number in range(0, 96, 3)}

        def picky(sample: dflop.Sample) -> np.ndarray:
            if sample.key in bad:
                raise ValueError(f"no inputs of {sample.key}")
            return inputs(sample)

        processor, tolerant = dataclasses.replace(PROCESSOR, inputs=picky), dflop.Read(error_budget=1.0)
        loader, empty = self.prepared(processor=processor, microbatches=16, epochs=1, read=tolerant), 0
        for step in loader:
            for mb in step.microbatches:
                self.assertFalse(bad & set(mb.sample_keys))
                self.assertGreater(mb["input_ids"].size, 0)
                if not mb.samples:
                    empty += 1
                    self.assertEqual((mb.target_tokens, mb.loss_scale), (0, 0.0))
                    self.assertTrue((mb["labels"] == -100).all())
        self.assertGreater(empty, 10)
        self.assertEqual(loader.skipped_samples, len(bad))
        self.assertEqual({one["key"] for one in loader.skipped}, bad)
        self.assertIn("ValueError: no inputs of", loader.skipped[0]["reason"])

        strict = self.prepared(processor=processor, read=dflop.Read(error_budget="0.05:3"))
        with self.assertRaises(dflop.ErrorBudgetError) as caught:
            for step in strict:
                list(step.microbatches)
        self.assertIsInstance(caught.exception.__cause__, ValueError)

    def test_inputs_of_the_next_microbatch_are_made_meanwhile(self) -> None:
        threads, made = set(), []

        def slow(sample: dflop.Sample) -> np.ndarray:
            threads.add(threading.current_thread().name)
            made.append(sample.key)
            return inputs(sample)

        processor = dataclasses.replace(PROCESSOR, inputs=slow)
        step = next(iter(self.prepared(processor=processor, read=dflop.Read(python_threads=2))))
        first = next(microbatches := iter(step.microbatches))
        deadline = time.monotonic() + 10
        while len(made) == len(first.samples) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.assertGreater(len(made), len(first.samples))
        self.assertLessEqual(len(threads), 2)
        self.assertTrue(all(name.startswith("dflop-inputs") for name in threads))
        self.assertEqual(len(list(microbatches)), 3)
        self.assertLess(len(made), 17)

    def test_half_a_processor_is_refused(self) -> None:
        for settings, error, reason in [
            ({"inputs": inputs}, TypeError, "collate"),
            ({"collate": collate}, TypeError, "inputs"),
            ({"inputs": inputs, "collate": 3}, TypeError, "`collate` to be a function, found int"),
            ({"inputs": inputs, "batch": collate}, TypeError, "found both"),
            ({"batch": 3}, TypeError, "`batch` to be a function, found int"),
        ]:
            with self.subTest(reason), self.assertRaisesRegex(error, reason):
                dflop.CustomProcessor(**settings)
        with self.assertRaisesRegex(dflop.ConfigError, "`python_threads`: must be at least 1"):
            self.prepared(read=dflop.Read(python_threads=0))
        with self.assertRaisesRegex(dflop.ConfigError, "your own code"):
            self.prepared(tokenizer=self.model)


class Batches(Own):
    def test_all_samples_of_a_microbatch_are_made_in_one_call(self) -> None:
        calls = []

        def batch(samples: list[dflop.Sample]) -> dict:
            calls.append([sample.key for sample in samples])
            return collate([inputs(sample) for sample in samples])

        loader = self.loader(
            processor=dflop.CustomProcessor(batch=batch), read=dflop.Read(python_threads=2), steps=3
        )
        delivered = []
        for step in loader:
            for mb in step.microbatches:
                wanted = np.concatenate([inputs(sample) for sample in mb.samples])
                np.testing.assert_array_equal(mb["input_ids"][0], wanted)
                self.assertEqual((mb.target_tokens, mb.tokens), (wanted.size, wanted.size))
                delivered.append(mb.sample_keys)
        # One call more, of one sample, makes the tensors that stand in for missing samples.
        many = [call for call in calls if call in delivered]
        self.assertEqual(len(many), len(delivered))
        self.assertLessEqual(len(calls) - len(many), 1)

    def test_only_a_batch_that_raises_is_made_sample_by_sample(self) -> None:
        bad = {f"{number:06}" for number in range(0, 96, 5)}

        def batch(samples: list[dflop.Sample]) -> dict:
            for sample in samples:
                if sample.key in bad:
                    raise ValueError(f"no inputs of {sample.key}")
            return collate([inputs(sample) for sample in samples])

        processor, tolerant = dflop.CustomProcessor(batch=batch), dflop.Read(error_budget=1.0)
        loader = self.loader(processor=processor, microbatches=16, epochs=1, read=tolerant)
        kept = [key for step in loader for mb in step.microbatches for key in mb.sample_keys]
        self.assertEqual(set(kept) | bad, {f"{number:06}" for number in range(96)})
        self.assertFalse(bad & set(kept))
        self.assertEqual({one["key"] for one in loader.skipped}, bad)

    def test_a_processor_that_fails_on_every_sample_is_named_with_its_reason(self) -> None:
        def batch(samples: list[dflop.Sample]) -> dict:
            raise KeyError("pixels")

        loader = self.loader(processor=dflop.CustomProcessor(batch=batch), steps=2)
        with self.assertRaisesRegex(dflop.Error, "no sample of which inputs .* KeyError: 'pixels'") as caught:
            [microbatch for step in loader for microbatch in step.microbatches]
        self.assertIsInstance(caught.exception.__cause__, KeyError)

    def test_a_processor_without_a_template_takes_that_of_its_tokenizer(self) -> None:
        class Named:
            def __init__(self, template: str | None, tokenizer: object = None) -> None:
                self.chat_template, self.given = template, {}
                if tokenizer is not None:
                    self.tokenizer = tokenizer

            def __call__(self, **arguments: object) -> None: ...

            def apply_chat_template(self, messages: list, **arguments: object) -> str:
                self.given = arguments
                return ""

        for own, expected in ((None, "of the tokenizer"), ("own", None)):
            processor = Named(own, Named("of the tokenizer"))
            dflop.hugging_face.Inputs(processor)._render([])
            self.assertEqual(processor.given.get("chat_template"), expected)

    def test_samples_that_are_good_alone_but_not_together_end_the_stream(self) -> None:
        def batch(samples: list[dflop.Sample]) -> dict:
            if len(samples) > 1:
                raise ValueError("not together")
            return collate([inputs(sample) for sample in samples])

        loader = self.loader(processor=dflop.CustomProcessor(batch=batch))
        with self.assertRaisesRegex(ValueError, "not together"):
            list(next(iter(loader)).microbatches)

    def test_planned_and_delivered_tokens_are_compared(self) -> None:
        def counted(samples: list[dict]) -> list[dict]:
            return [{"llm": 7} for _ in samples]

        def batch(samples: list[dflop.Sample]) -> dict:
            ids = np.ones((len(samples), 9), int)
            mask = np.ones_like(ids)
            mask[:, 7 if samples[0].key < "000090" else 9 :] = 0
            return {"input_ids": ids, "attention_mask": mask, "labels": ids.copy()}

        model = dflop.Custom(modules={"llm": 1e9}, tokens=counted)
        loader = self.loader(model=model, processor=dflop.CustomProcessor(batch=batch), epochs=1)
        for step in loader:
            for mb in step.microbatches:
                self.assertEqual(mb.tokens + mb.padding_tokens, mb["input_ids"].size)
        report = loader.prepare_report()
        self.assertEqual(report["microbatches"], 24)
        self.assertEqual(report["planned_tokens"], 7 * 96)
        self.assertEqual(report["differing_microbatches"], len(report["differing"]))
        self.assertLess(report["differing_microbatches"], 7)
        for one in report["differing"]:
            self.assertEqual(one["tokens"] - one["planned_tokens"], 2 * len(one["keys"]))

    def test_a_wrong_token_rule_is_warned_of_once(self) -> None:
        model = dflop.Custom(modules={"llm": 1e9}, tokens=lambda samples: [{"llm": 1}] * len(samples))
        loader = self.loader(model=model, processor=PROCESSOR, epochs=1)
        with self.assertWarnsRegex(UserWarning, "compare the token rule") as caught:
            for step in loader:
                list(step.microbatches)
        self.assertEqual(sum("token rule" in str(one.message) for one in caught.warnings), 1)


SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
RULE = {"rule": "native", "patch_size": 14, "merge_size": 2, "min_pixels": 784, "max_pixels": 1 << 20}
KITE = dflop.ModelDescription(
    name="kite", vision=SIZES | {"tokens": RULE}, llm=SIZES | {"num_key_value_heads": 2}
)


class Descriptions(Own):
    def test_a_description_stands_for_a_name(self) -> None:
        cost = dflop.CostModel(KITE).cost(text_tokens=10, images=[(280, 56)])
        self.assertEqual((cost["tokens"], cost["encoder_tokens"]), (10 + 20, 80))
        path = self.directory / "kite.json"
        KITE.save(path)
        self.assertEqual(dflop.CostModel(path).cost(text_tokens=10, images=[(280, 56)]), cost)
        self.assertEqual(pickle.loads(pickle.dumps(dflop.CostModel(KITE))).modules, ["vision", "llm"])
        of_data = dflop.stats(self.shards, model=KITE)["quantiles"]
        self.assertEqual(of_data, dflop.stats(self.shards, model=path)["quantiles"])

    def test_it_balances_with_the_users_processor(self) -> None:
        loader = self.prepared(model=KITE, steps=3, dp_size=2)
        for step in loader:
            for mb in step.microbatches:
                self.assertGreater(mb.module_seconds["vision"] + mb.module_seconds["llm"], 0)
                self.assertIn("input_ids", mb)
        self.assertGreater(loader.prepare_report()["planned_tokens"], 0)

    def test_families_are_listed_and_a_model_explained(self) -> None:
        levels = {row["family"]: row["levels"] for row in dflop.models()["families"]}
        self.assertEqual(levels["qwen2_vl"], ["cost", "plan", "inputs", "train"])
        self.assertEqual(levels["qwen3_moe"], ["cost", "inputs", "train"])
        kite = dflop.models(KITE)
        self.assertEqual((kite["model"], kite["level"]), ("kite", "plan"))
        self.assertEqual([lack["level"] for lack in kite["lacks"]], ["inputs", "train"])
        self.assertIn("docs/any-model.md", kite["lacks"][0]["because"])
        known = dflop.models(self.model)
        self.assertEqual((known["family"], known["level"], known["lacks"]), ("qwen2_vl", "train", []))

    def test_an_unknown_type_names_the_nearest_and_the_way_of_any_model(self) -> None:
        path = self.directory / "unknown.json"
        path.write_text('{"model_type": "qwen2_vl_next"}')
        with self.assertRaisesRegex(dflop.ConfigError, r"nearest is .qwen2_vl.*docs/any-model\.md"):
            dflop.CostModel(path)

    def test_faults_name_the_field(self) -> None:
        for vision, reason in [
            (SIZES, r"`vision.tokens` is missing"),
            (
                SIZES | {"tokens": RULE | {"patch_size": 0}},
                r"`vision.tokens.patch_size` must be at least 1",
            ),
            (SIZES | {"tokens": {"rule": "none"}}, r"known are any_res, .*, native, .*, tiles"),
        ]:
            with self.subTest(reason), self.assertRaisesRegex(dflop.ConfigError, reason):
                dflop.CostModel(dflop.ModelDescription(vision=vision, llm=SIZES))
        with self.assertRaises(TypeError):
            dflop.ModelDescription(llm={"hidden_size": object()})

    def test_counted_tokens_can_have_the_costs_of_a_description(self) -> None:
        model = dflop.Custom(modules=dflop.CostModel(KITE), tokens=tokens)
        step = next(iter(self.prepared(model=model, steps=1)))
        self.assertGreater(step.makespan_seconds, 0)
        lengths = dflop.Custom(
            modules=dflop.CostModel(KITE),
            tokens=lambda samples: [{"vision": [16, 16], "llm": 9}] * len(samples),
        )
        self.assertEqual(next(iter(self.prepared(model=lengths))).microbatches[0].planned_tokens % 9, 0)


class Filters(Own):
    def test_samples_are_selected_by_shape_and_cost_on_all_ranks(self) -> None:
        def short(samples: list[dict]) -> list[bool]:
            return [sample["tokens"] < 150 and len(sample["images"]) == 1 for sample in samples]

        settings = {"model": self.model, "filter": short, "microbatches": 1, "epochs": 1}
        settings["order"] = dflop.Order(tail="short")
        keys = []
        for rank in range(2):
            loader = self.loader(dp_rank=rank, dp_size=2, **settings)
            for step in loader:
                for mb in step.microbatches:
                    keys += mb.sample_keys
                    for sample in mb.samples:
                        self.assertEqual(json.dumps(sample["json"]).count("<image>"), 1)
        self.assertEqual(len(set(keys)), len(keys))
        self.assertEqual(len(keys) + loader.filtered_samples, 96)
        self.assertGreater(loader.filtered_samples, 10)

    def test_a_state_of_another_filter_is_refused(self) -> None:
        loader = self.loader(model=self.model, filter=lambda samples: [True] * len(samples))
        next(iter(loader))
        state = loader.state_dict()
        other = self.loader(model=self.model, filter=lambda samples: [sample["images"] for sample in samples])
        with self.assertRaises(dflop.StateError):
            other.load_state_dict(state)
        loader.load_state_dict(state)

    def test_filters_that_fail_are_errors(self) -> None:
        for function, reason in [
            (lambda samples: [False] * len(samples), "keeps none of 96"),
            (lambda samples: [True], "it returned 1 values for 96 samples"),
            (lambda samples: 1 / 0, "division by zero"),
        ]:
            with self.subTest(reason), self.assertRaisesRegex(dflop.ConfigError, reason):
                self.loader(model=self.model, filter=function)


if __name__ == "__main__":
    unittest.main()
