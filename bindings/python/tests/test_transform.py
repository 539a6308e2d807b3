"""Tests user functions in the pipeline."""

import pickle
import threading
import traceback
import unittest

import dflop
import numpy as np
from support import InFolder, WithExample


class SampleTransforms(InFolder):
    def setUp(self) -> None:
        super().setUp()
        entries = {
            f"{number:02}.{name}": f"{name} {number}".encode()
            for number in range(20)
            for name in ("a.txt", "b.txt")
        }
        self.path = self.shard(entries)

    def loader(self, function: object, **settings: object) -> dflop.Loader:
        has_context = bool(settings.pop("has_context", False))
        transforms = [dflop.SampleTransform(function, has_context=has_context)]
        return dflop.Loader(self.path, batch_size=8, transforms=transforms, **settings)

    def test_fields_are_changed_added_and_removed(self) -> None:
        marker = object()

        def join(samples: list[dflop.Sample]) -> list[object]:
            self.assertIsInstance(samples[0], dflop.Sample)
            for sample in samples:
                sample["both"] = f"{sample.key}: {sample.pop('a.txt')} and {sample['b.txt']}"
                sample["marker"] = marker
            return samples

        (first, *_) = loader = self.loader(join)
        self.assertEqual(list(first), ["b.txt", "both", "marker"])
        self.assertEqual(first["both"][3], "03: a.txt 3 and b.txt 3")
        self.assertIs(first["marker"][0], marker)
        plain = dflop.Loader(
            self.path,
            batch_size=8,
            transforms=[dflop.SampleTransform(lambda samples: [{"n": 1} for _ in samples])],
        )
        self.assertEqual([list(batch) for batch in plain], [["n"]] * 3)
        del loader

    def test_samples_are_left_out_and_counted(self) -> None:
        loader = self.loader(
            lambda samples: [None if sample.key < "05" else sample for sample in samples],
            read=dflop.Read(error_budget=0.0),
        )
        self.assertEqual(
            [key for batch in loader for key in batch.sample_keys],
            [f"{number:02}" for number in range(5, 20)],
        )
        self.assertEqual(loader.skipped_samples, 5)
        self.assertIn("left it out", loader.skipped[0]["reason"])

    def test_only_samples_that_raise_are_lost(self) -> None:
        def picky(samples: list[dflop.Sample]) -> list[object]:
            if any(sample.key == "03" for sample in samples):
                raise RuntimeError("three is bad")
            return [ValueError("seven is bad") if sample.key == "07" else sample for sample in samples]

        loader = self.loader(picky, read=dflop.Read(error_budget=1.0))
        self.assertEqual(sum(len(batch.samples) for batch in loader), 18)
        self.assertEqual([bad["key"] for bad in loader.skipped], ["03", "07"])
        with self.assertRaises(dflop.ErrorBudgetError) as caught:
            list(self.loader(picky, read=dflop.Read(error_budget="0.05:0")))
        self.assertIsInstance(caught.exception.__cause__, RuntimeError)

    def test_wrong_results_are_named(self) -> None:
        with self.assertRaisesRegex(dflop.UserCodeError, "expected 8 samples from a transform, found 1"):
            list(self.loader(lambda samples: samples[:1]))
        loader = self.loader(lambda samples: [3 for _ in samples], read=dflop.Read(error_budget=1.0))
        self.assertEqual([batch.samples for batch in loader if batch.samples], [])
        self.assertIn("expected a mapping of fields from a transform, found", loader.skipped[0]["reason"])
        with self.assertRaises(TypeError):
            dflop.SampleTransform(3)
        with self.assertRaisesRegex(TypeError, "`Transform` and `SampleTransform`"):
            dflop.Loader(self.path, transforms=[len])

    def test_samples_before_one_that_raises_are_tried_again_with_the_fields_that_they_had(self) -> None:
        # Those whose field was removed before another sample raised were lost with it.
        def rename(samples: list[dflop.Sample]) -> list[object]:
            for sample in samples:
                text = sample.pop("a.txt")
                if sample.key == "05":
                    raise ValueError("no five")
                sample["txt"] = text
            return samples

        loader = self.loader(rename, read=dflop.Read(error_budget=1.0))
        found = {sample.key: sample["txt"] for batch in loader for sample in batch.samples}
        self.assertEqual(found, {f"{at:02}": f"a.txt {at}" for at in range(20) if at != 5})
        self.assertEqual([bad["reason"] for bad in loader.skipped], ["ValueError: no five"])

    def test_seeds_differ_by_sample(self) -> None:
        def seeds(samples: list[dflop.Sample], contexts: list[dict]) -> list[object]:
            return [{"seed": context["seed"]} for context in contexts]

        drawn = [
            [
                seed
                for batch in self.loader(seeds, has_context=True, read=dflop.Read(workers=workers))
                for seed in batch["seed"]
            ]
            for workers in (1, 2)
        ]
        self.assertEqual(drawn[0], drawn[1])
        self.assertEqual(len(set(drawn[0])), 20)

    def test_they_are_pickled(self) -> None:
        transform = dflop.SampleTransform(len, has_context=True)
        self.assertEqual(repr(pickle.loads(pickle.dumps(transform))), repr(transform))


class PreparedSamples(WithExample):
    def test_model_inputs_are_made_of_what_the_function_returns(self) -> None:
        def black(samples: list[dflop.Sample]) -> list[object]:
            for sample in samples:
                for name, value in sample.items():
                    if isinstance(value, np.ndarray):
                        sample[name] = np.zeros_like(value)
            return samples

        def steps(**settings: object) -> list[dflop.Step]:
            loader = dflop.BalancedLoader(
                self.shards,
                model=self.model,
                tokenizer=self.model,
                global_batch_size=32,
                microbatches=2,
                steps=1,
                array_type="numpy",
                **settings,
            )
            return [step.hold() for step in loader]

        def mb_of(steps: list[dflop.Step]) -> list[dflop.Microbatch]:
            return [mb for step in steps for mb in step.microbatches]

        plain, same = (
            mb_of(steps()),
            mb_of(steps(transforms=[dflop.SampleTransform(lambda samples: samples)])),
        )
        for before, after in zip(plain, same, strict=True):
            self.assertEqual(before.sample_keys, after.sample_keys)
            for name in ("input_ids", "labels", "pixel_values"):
                np.testing.assert_array_equal(before[name], after[name])
        for before, after in zip(plain, mb_of(steps(transforms=[dflop.SampleTransform(black)])), strict=True):
            np.testing.assert_array_equal(before["input_ids"], after["input_ids"])
            by_color = after["pixel_values"].reshape(len(after["pixel_values"]), 3, -1)
            self.assertEqual([len(np.unique(by_color[:, color])) for color in range(3)], [1, 1, 1])
            self.assertFalse(np.array_equal(before["pixel_values"], after["pixel_values"]))


class Transforms(InFolder):
    def setUp(self) -> None:
        super().setUp()
        self.path = self.shard({f"{number:02}.txt": f"text {number}".encode() for number in range(20)})

    def test_a_function_changes_a_field_in_batches(self) -> None:
        calls = []

        def shout(texts: list[str]) -> list[str]:
            calls.append((len(texts), threading.current_thread() is threading.main_thread()))
            return [text.upper() for text in texts]

        batches = list(dflop.Loader(self.path, batch_size=8, transforms={"txt": shout}))
        self.assertEqual(
            [text for batch in batches for text in batch["txt"]], [f"TEXT {n}" for n in range(20)]
        )
        self.assertEqual(calls, [(8, False), (8, False), (4, False)])

    def test_any_value_is_delivered_as_it_is(self) -> None:
        marker = object()
        (batch,) = dflop.Loader(self.path, transforms={"txt": lambda texts: [marker for _ in texts]})
        self.assertTrue(all(value is marker for value in batch["txt"]))

    def test_only_samples_that_raise_are_lost(self) -> None:
        def picky(texts: list[str]) -> list[object]:
            if "text 3" in texts:
                raise RuntimeError("three is bad")
            return [ValueError("seven is bad") if text == "text 7" else text for text in texts]

        loader = dflop.Loader(self.path, transforms={"txt": picky}, read=dflop.Read(error_budget=1.0))
        (batch,) = loader
        self.assertEqual(len(batch.samples), 18)
        self.assertEqual(
            [(bad["key"], bad["field"]) for bad in loader.skipped], [("03", "txt"), ("07", "txt")]
        )
        self.assertIn("three is bad", loader.skipped[0]["reason"])
        self.assertIn("seven is bad", loader.skipped[1]["reason"])

    def test_an_exit_is_no_fault_of_a_sample(self) -> None:
        def leave(texts: list[str]) -> list[str]:
            raise SystemExit("enough")

        with self.assertRaises(dflop.UserCodeError) as caught:
            list(dflop.Loader(self.path, transforms={"txt": leave}, read=dflop.Read(error_budget=1.0)))
        self.assertIsInstance(caught.exception.__cause__, SystemExit)

    def test_bad_samples_count_against_the_budget(self) -> None:
        with self.assertRaises(dflop.ErrorBudgetError):
            list(
                dflop.Loader(
                    self.path, transforms={"txt": lambda texts: 1 / 0}, read=dflop.Read(error_budget="0.05:5")
                )
            )

    def test_the_first_exception_is_the_cause_of_the_error(self) -> None:
        def divide(texts: list[str]) -> list[str]:
            return [text if int(text[5:]) < 7 else 1 // 0 for text in texts]

        reads = [dflop.Read(error_budget=budget) for budget in ("0.05:3", 0.0, 0.1)]
        for read in reads:
            loader = dflop.Loader(self.path, batch_size=4, transforms={"txt": divide}, read=read)
            with self.subTest(read), self.assertRaises(dflop.ErrorBudgetError) as caught:
                list(loader)
            cause = caught.exception.__cause__
            self.assertIsInstance(cause, ZeroDivisionError)
            frames = traceback.extract_tb(cause.__traceback__)
            self.assertIn("divide", [frame.name for frame in frames])

    def test_a_budget_of_zero_ends_the_pass_at_the_first_bad_sample(self) -> None:
        def picky(texts: list[str]) -> list[object]:
            return [ValueError("bad") if text == "text 9" else text for text in texts]

        delivered = []
        with self.assertRaises(dflop.ErrorBudgetError):
            strict = dflop.Read(error_budget=0.0)
            for batch in dflop.Loader(self.path, batch_size=4, transforms={"txt": picky}, read=strict):
                delivered.extend(batch.sample_keys)
        self.assertEqual(len(delivered), 8)

    def test_a_transform_without_a_field_is_an_error(self) -> None:
        def keep(texts: list[str]) -> list[str]:
            return texts

        for name, wrong in (("text?", "text\\?"), ("json", "json"), ("wav", "wav")):
            loader = dflop.Loader(self.path, transforms={"txt": keep, name: keep})
            message = f"none of 20 samples has a field `{wrong}`; they have: txt"
            with self.subTest(name), self.assertRaisesRegex(dflop.ConfigError, message) as caught:
                list(loader)
            self.assertEqual(caught.exception.setting, "transforms")
            with self.assertRaisesRegex(dflop.ConfigError, message):
                dflop.Loader(self.path, dp_size=2, transforms={"txt": keep, name: keep})

    def test_a_wrong_number_of_values_ends_the_pass(self) -> None:
        with self.assertRaisesRegex(dflop.Error, "expected 20 values from a transform, found 3"):
            list(dflop.Loader(self.path, transforms={"txt": lambda texts: texts[:3]}))

    def test_contexts_name_samples_and_seed_their_draws(self) -> None:
        seen: list[list[dict]] = [[], []]
        for run, workers in enumerate((1, 2)):

            def look(texts: list[str], contexts: list[dict], run: int = run) -> list[str]:
                seen[run].extend(contexts)
                return texts

            transform = dflop.Transform("txt", look, has_context=True)
            list(
                dflop.Loader(
                    self.path, transforms=[transform], read=dflop.Read(workers=workers), seed=9, epochs=2
                )
            )
        self.assertEqual(seen[0], seen[1])
        self.assertEqual(len({context["seed"] for context in seen[0]}), 40)
        self.assertEqual([context["key"] for context in seen[0][:2]], ["00", "01"])
        self.assertEqual({context["epoch"] for context in seen[0]}, {0, 1})

    def test_a_decoder_gets_bytes_as_stored(self) -> None:
        path = self.shard({"a.num": b"1,2,3", "b.num": b"4,x"}, "numbers.tar")

        def decode(stored: list[dflop.Array]) -> list[np.ndarray]:
            return [np.array([int(part) for part in bytes(one).split(b",")]) for one in stored]

        loader = dflop.Loader(
            path, transforms=[dflop.Transform("num", decode, decodes=True)], read=dflop.Read(error_budget=1.0)
        )
        (batch,) = loader
        np.testing.assert_array_equal(batch["num"][0], [1, 2, 3])
        self.assertEqual([bad["key"] for bad in loader.skipped], ["b"])

    def test_what_is_no_function_is_refused(self) -> None:
        for transforms in ({"txt": 3}, 3, [3]):
            with self.subTest(transforms), self.assertRaises(TypeError):
                dflop.Loader(self.path, transforms=transforms)
        with self.assertRaisesRegex(dflop.ConfigError, "tensor"):
            dflop.Loader(self.path, image=dflop.Image(8), transforms={"images": list})


class Prepared(WithExample):
    def test_a_function_changes_what_the_model_gets(self) -> None:
        def answer(documents: list[dict]) -> list[dict]:
            return [
                {"conversations": [document["conversations"][0], {"from": "gpt", "value": "w1 w2"}]}
                for document in documents
            ]

        def blacken(images: list[np.ndarray]) -> list[np.ndarray]:
            return [np.zeros_like(image) for image in images]

        settings = {"model": self.model, "global_batch_size": 8, "steps": 2}
        plain = dflop.BalancedLoader(self.shards, **settings)
        transforms = {"json": answer, "images": blacken}
        changed = dflop.BalancedLoader(self.shards, transforms=transforms, **settings)
        for one, other in zip(plain, changed, strict=True):
            for before, after in zip(one.microbatches, other.microbatches, strict=True):
                self.assertEqual(before.sample_keys, after.sample_keys)
                self.assertEqual(after.target_tokens, 3 * len(after.sample_keys))
                self.assertEqual(len(np.unique(after["pixel_values"])), 3)
                self.assertEqual(before["pixel_values"].shape, after["pixel_values"].shape)


if __name__ == "__main__":
    unittest.main()
