"""Tests user functions in the pipeline."""

import threading
import traceback
import unittest

import dflop
import numpy as np
from support import InFolder, WithExample


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

        loader = dflop.Loader(self.path, transforms={"txt": picky}, error_budget=1.0)
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
            list(dflop.Loader(self.path, transforms={"txt": leave}, error_budget=1.0))
        self.assertIsInstance(caught.exception.__cause__, SystemExit)

    def test_bad_samples_count_against_the_budget(self) -> None:
        with self.assertRaises(dflop.ErrorBudgetError):
            list(dflop.Loader(self.path, transforms={"txt": lambda texts: 1 / 0}, error_count=5))

    def test_the_first_exception_is_the_cause_of_the_error(self) -> None:
        def divide(texts: list[str]) -> list[str]:
            return [text if int(text[5:]) < 7 else 1 // 0 for text in texts]

        settings = ({"error_count": 3}, {"error_budget": 0.0}, {"error_budget": 0.1})
        for setting in settings:
            loader = dflop.Loader(self.path, batch_size=4, transforms={"txt": divide}, **setting)
            with self.subTest(setting), self.assertRaises(dflop.ErrorBudgetError) as caught:
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
            for batch in dflop.Loader(self.path, batch_size=4, transforms={"txt": picky}, error_budget=0.0):
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
                dflop.Loader(self.path, world=2, transforms={"txt": keep, name: keep})

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
            list(dflop.Loader(self.path, transforms=[transform], workers=workers, seed=9, epochs=2))
        self.assertEqual(seen[0], seen[1])
        self.assertEqual(len({context["seed"] for context in seen[0]}), 40)
        self.assertEqual([context["key"] for context in seen[0][:2]], ["00", "01"])
        self.assertEqual({context["epoch"] for context in seen[0]}, {0, 1})

    def test_a_decoder_gets_bytes_as_stored(self) -> None:
        path = self.shard({"a.num": b"1,2,3", "b.num": b"4,x"}, "numbers.tar")

        def decode(stored: list[dflop.Array]) -> list[np.ndarray]:
            return [np.array([int(part) for part in bytes(one).split(b",")]) for one in stored]

        loader = dflop.Loader(
            path, transforms=[dflop.Transform("num", decode, decodes=True)], error_budget=1.0
        )
        (batch,) = loader
        np.testing.assert_array_equal(batch["num"][0], [1, 2, 3])
        self.assertEqual([bad["key"] for bad in loader.skipped], ["b"])

    def test_what_is_no_function_is_refused(self) -> None:
        for transforms in ({"txt": 3}, 3, [3]):
            with self.subTest(transforms), self.assertRaises(TypeError):
                dflop.Loader(self.path, transforms=transforms)
        with self.assertRaisesRegex(dflop.ConfigError, "tensor"):
            dflop.Loader(self.path, image=dflop.Image(8), transforms={"txt": list})


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
