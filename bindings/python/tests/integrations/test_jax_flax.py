"""Tests the JAX example: images without a copy, one compilation per shape, falling losses."""

from __future__ import annotations

import unittest
from unittest import mock

import dflop
import numpy
from example_runs import load

try:
    import flax
    import jax
    import optax
except ImportError as missing:
    raise unittest.SkipTest(f"{missing.name} is not installed") from missing


class Training(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.example = load("jax_flax")

    def losses(self, model, batches) -> list[float]:
        optimizer = flax.nnx.Optimizer(model, optax.adam(5e-3), wrt=flax.nnx.Param)
        del self.example.COMPILED[:]
        return [float(self.example.update(model, optimizer, *batch)) for batch in batches]

    def test_a_classifier_learns_and_is_compiled_once_for_batches_of_changing_size(self) -> None:
        rows = [
            len(batch["image"])
            for batch in dflop.Loader(
                self.example.DIRECTORY / "shards", batch_size=16, image=dflop.Image(size=16)
            )
        ]
        self.assertGreater(len(set(rows)), 1)
        classifier = flax.nnx.Linear(3 * self.example.SIDE**2, 8, rngs=flax.nnx.Rngs(0))
        losses = self.losses(classifier, self.example.images())
        self.assertEqual((len(losses), len(self.example.COMPILED)), (len(rows), 1))
        self.assertLess(numpy.mean(losses[-4:]), 0.5 * numpy.mean(losses[:4]))

    def test_a_language_model_learns_and_is_compiled_once_for_packed_microbatches(self) -> None:
        losses = self.losses(self.example.LanguageModel(flax.nnx.Rngs(0)), self.example.texts())
        self.assertEqual(self.example.COMPILED, [(1, self.example.TOKENS)])
        self.assertLess(losses[-1], losses[0] - 0.1)


class Memory(unittest.TestCase):
    def setUp(self) -> None:
        self.shards = dflop.example.directory(samples=48) / "shards"

    def test_images_lie_where_the_loader_put_them(self) -> None:
        given = []

        def remembers(array, *arguments, take=jax.dlpack.from_dlpack, **settings):
            given.append((array.data_ptr, take(array, *arguments, **settings)))
            return given[-1][1]

        with mock.patch("jax.dlpack.from_dlpack", remembers):
            batches = list(
                dflop.Loader(self.shards, image=dflop.Image(size=32), batch_size=16, array_type="jax")
            )
        self.assertEqual(len(given), len(batches))
        for batch, (address, array) in zip(batches, given, strict=True):
            self.assertIs(batch["image"], array)
            self.assertEqual((address % 64, array.unsafe_buffer_pointer()), (0, address))

    def test_arrays_hold_their_values_when_all_else_is_gone(self) -> None:
        def images(array_type: str):
            return [
                batch["image"]
                for batch in dflop.Loader(
                    self.shards, image=dflop.Image(size=16), batch_size=8, array_type=array_type
                )
            ]

        kept = images("jax")
        for jax_array, array in zip(kept, images("numpy"), strict=True):
            numpy.testing.assert_array_equal(jax_array, array)
            self.assertIsInstance(jax_array, jax.Array)


if __name__ == "__main__":
    unittest.main()
