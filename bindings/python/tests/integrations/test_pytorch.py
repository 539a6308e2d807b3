"""Tests a plain PyTorch loop: gradients of the whole batch, equal layouts, bit-exact resumption."""

from __future__ import annotations

import copy
import io
import unittest
from contextlib import redirect_stdout

import dflop
import packed_attention
import torch
from trainers import EXAMPLES, WithData, difference, example, gradients_of, keys_of, run

pytorch = example("pytorch")


def copy_of(microbatch: dflop.Microbatch, tensors: dict[str, object]) -> dflop.Microbatch:
    """Returns a microbatch with the same samples and other tensors."""
    made = copy.copy(microbatch)
    made.clear()
    made.update(tensors)
    return made


class Gradients(WithData):
    def steps(self, **settings: object) -> list[dflop.Step]:
        loader = pytorch.loader_of(self.directory, **{"steps": 3, "global_batch_size": 12} | settings)
        return [step.hold() for step in loader]

    def gradients(self, step: dflop.Step) -> tuple[float, dict[str, torch.Tensor]]:
        model = pytorch.model_of(self.directory)
        return pytorch.backward(model, step), gradients_of(model)

    def test_a_balanced_step_has_the_gradient_of_its_global_batch_in_one_pass(self) -> None:
        whole = self.steps(microbatches=1)
        blind = dflop.Plan(strategy="data-blind")
        for settings in ({"microbatches": 4}, {"microbatches": 3, "plan": blind}):
            cut = self.steps(**settings)
            self.assertEqual(keys_of(cut), keys_of(whole))
            for one, other in zip(cut, whole, strict=True):
                with self.subTest(**settings, step=one.step):
                    self.assertAlmostEqual(sum(each.loss_scale for each in one.microbatches), 1, places=9)
                    (loss, found), (wanted_loss, wanted) = self.gradients(one), self.gradients(other)
                    self.assertAlmostEqual(loss, wanted_loss, places=5)
                    self.assertLess(difference(found, wanted), 1e-4)

    def test_the_loss_is_the_mean_over_all_target_tokens(self) -> None:
        (step,) = self.steps(steps=1, processor=dflop.Processor(layout="padded"))
        model, summed, targets = pytorch.model_of(self.directory), 0.0, 0
        with torch.no_grad():
            for one in step.microbatches:
                inputs = {name: value for name, value in one.items() if name != "labels"}
                logits, labels = model(**inputs).logits[:, :-1].flatten(0, 1), one["labels"][:, 1:].flatten()
                summed += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
                targets += int((one["labels"] != -100).sum())
        self.assertEqual(
            (step.target_tokens, step.target_tokens),
            (targets, sum(one.target_tokens for one in step.microbatches)),
        )
        self.assertAlmostEqual(self.gradients(step)[0], summed / targets, places=5)

    def test_packed_and_padded_layouts_learn_the_same(self) -> None:
        layouts = {
            layout: self.steps(processor=dflop.Processor(layout=layout))
            for layout in ("packed", "padded", "padded_left")
        }
        for packed, *padded in zip(*layouts.values(), strict=True):
            loss, wanted = self.gradients(packed)
            self.assertTrue(all(one["input_ids"].shape[0] == 1 for one in packed.microbatches))
            for step in padded:
                self.assertTrue(any(one["input_ids"].shape[0] > 1 for one in step.microbatches))
                found_loss, found = self.gradients(step)
                self.assertAlmostEqual(found_loss, loss, places=5)
                self.assertLess(difference(found, wanted), 1e-4)

    def test_a_scaled_mean_is_the_same_loss(self) -> None:
        (step,) = self.steps(steps=1)
        model = pytorch.model_of(self.directory)
        sum(model(**one).loss * one.loss_scale for one in step.microbatches).backward()
        self.assertLess(difference(gradients_of(model), self.gradients(step)[1]), 1e-5)
        # A mean over microbatches would be noticed.
        model = pytorch.model_of(self.directory)
        sum(model(**one).loss / len(step.microbatches) for one in step.microbatches).backward()
        self.assertGreater(difference(gradients_of(model), self.gradients(step)[1]), 0.01)

    def test_boundaries_by_the_names_of_flash_attention_are_taken(self) -> None:
        (step,) = self.steps(steps=1)
        model = pytorch.model_of(self.directory)
        with torch.no_grad():
            for one in step.microbatches:
                losses = [model(**one, **more).loss for more in ({}, one.flash_attention)]
                self.assertEqual(*losses)

    def test_attention_by_boundaries_is_that_of_a_mask(self) -> None:
        (step,) = self.steps(steps=1)
        model, plain = (
            packed_attention.use(pytorch.model_of(self.directory)),
            pytorch.model_of(self.directory),
        )
        with torch.no_grad():
            for one in step.microbatches:
                loss = model(**one, **one.flash_attention).loss
                self.assertAlmostEqual(float(loss), float(plain(**one).loss), places=4)
        self.assertTrue(any("pixel_values" in one for one in step.microbatches))

    def test_media_of_any_name_keep_boundaries_from_the_encoder(self) -> None:
        (step,) = self.steps(steps=1)
        one = step.microbatches[0]
        text = {name: one[name] for name in ("input_ids", "labels", "position_ids")}
        self.assertEqual(len(copy_of(one, text).flash_attention), 4)
        for name in (
            "pixel_values_videos",
            "image_patches",
            "input_features",
            "input_values",
            "audio_values",
        ):
            self.assertEqual(copy_of(one, {**text, name: torch.ones(1)}).flash_attention, {}, name)

    def test_half_precision_is_of_pixels_alone(self) -> None:
        (step,) = self.steps(steps=1)
        for one in step.microbatches:
            half = one.to(torch.bfloat16)
            types = {name: value.dtype for name, value in half.items() if hasattr(value, "dtype")}
            floats = {name for name, dtype in types.items() if dtype == torch.bfloat16}
            self.assertEqual(floats, {"pixel_values"} & set(one))
            self.assertTrue(torch.equal(half["input_ids"], one["input_ids"]))
            self.assertEqual((half.sample_keys, half["use_cache"]), (one.sample_keys, False))
        with self.assertRaisesRegex(TypeError, "floating-point type"):
            one.to(torch.int32)


class PixelTypes(WithData):
    def pixels(self, dtype: str) -> list[dflop.Microbatch]:
        loader = pytorch.loader_of(
            self.directory, steps=1, processor=dflop.Processor(dtype=dtype), array_type="torch"
        )
        return [mb for step in loader for mb in step.microbatches if "pixel_values" in mb]

    def test_pixels_are_those_of_single_precision_in_every_type(self) -> None:
        types = map(self.pixels, ("float32", "bfloat16", "uint8"))
        for floats, halves, bytes_ in zip(*types, strict=True):
            wanted = floats["pixel_values"]
            self.assertTrue(torch.equal(halves["pixel_values"], wanted.to(torch.bfloat16)))
            self.assertTrue(torch.allclose(bytes_.normalized()["pixel_values"], wanted, atol=1e-6))
            self.assertEqual(bytes_.normalized(torch.bfloat16)["pixel_values"].dtype, torch.bfloat16)


class Runs(WithData):
    def losses(self, model: torch.nn.Module, optimizer, loader: dflop.BalancedLoader) -> list[float]:
        with redirect_stdout(io.StringIO()):
            return pytorch.train(model, optimizer, loader)

    def test_a_restored_run_has_the_very_losses_of_one_that_never_stopped(self) -> None:
        def begin() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
            model = pytorch.model_of(self.directory)
            return model, torch.optim.AdamW(model.parameters(), lr=3e-3)

        wanted = self.losses(*begin(), pytorch.loader_of(self.directory, steps=6))
        model, optimizer = begin()
        loader = pytorch.loader_of(self.directory, steps=3)
        self.assertEqual(self.losses(model, optimizer, loader), wanted[:3])
        saved = io.BytesIO()
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "loader": loader.state_dict(),
        }
        torch.save(state, saved)

        saved.seek(0)
        state = torch.load(saved)
        model, optimizer = begin()
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        resumed = pytorch.loader_of(self.directory, steps=6)
        resumed.load_state_dict(state["loader"])
        self.assertEqual(self.losses(model, optimizer, resumed), wanted[3:])

    def test_a_run_that_is_left_in_the_middle_of_an_iteration_resumes_after_the_last_step(self) -> None:
        loader = pytorch.loader_of(self.directory, steps=None)
        seen = [step.step for _, step in zip(range(3), loader, strict=False)]
        resumed = pytorch.loader_of(self.directory, steps=None)
        resumed.load_state_dict(loader.state_dict())
        self.assertEqual((seen, next(iter(resumed)).step), ([0, 1, 2], 3))

    def test_the_example_learns(self) -> None:
        printed = run(EXAMPLES / "pytorch.py")
        first, last = printed.splitlines()[-1].split(";")[0].removeprefix("loss ").split(" -> ")
        self.assertLess(float(last), float(first) - 0.5, printed)


if __name__ == "__main__":
    unittest.main()
