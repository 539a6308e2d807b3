"""Tests microbatches of `dflop.BalancedLoader`: valid inputs whatever the samples, and one by one."""

import copy
import pickle
import subprocess
import sys
import unittest
import warnings

import dflop
import numpy as np
from dflop import example
from support import InFolder, WithExample


def damage(path: object, *, every: int) -> int:
    """Overwrites the pixels of every n-th image behind its header; returns their number."""
    content = bytearray(path.read_bytes())
    places = [at for at in range(0, len(content), 512) if content[at : at + 8] == b"\x89PNG\r\n\x1a\n"]
    for at in places[::every]:
        content[at + 41 : at + 57] = b"\xff" * 16
    path.write_bytes(content)
    return len(places[::every])


class Damaged(InFolder):
    def setUp(self) -> None:
        super().setUp()
        example.write_shards(self.directory / "shards", samples=48, shards=2)
        example.write_model(self.directory / "model")
        self.damaged = damage(self.directory / "shards" / "000.tar", every=1)

    def loader(self, **settings: object) -> dflop.BalancedLoader:
        settings = {
            "global_batch_size": 16,
            "microbatches": 8,
            "read": dflop.Read(error_budget=1.0),
        } | settings
        return dflop.BalancedLoader(self.directory / "shards", model=self.directory / "model", **settings)

    def test_microbatches_without_samples_are_rows_of_padding(self) -> None:
        loader, empty = self.loader(epochs=1), 0
        for step in loader:
            self.assertEqual(len(step.microbatches), 8)
            for mb in step.microbatches:
                self.assertEqual(mb["labels"].shape, mb["input_ids"].shape)
                if mb.samples:
                    continue
                empty += 1
                self.assertEqual((mb.loss_scale, mb.tokens, mb.padding_tokens), (0.0, 0, 1))
                self.assertEqual((mb["input_ids"].shape, mb["labels"].tolist()), ((1, 1), [[-100]]))
                self.assertEqual(mb.cu_seqlens.tolist(), [0, 1])
        self.assertGreater(empty, 0)
        self.assertGreater(loader.skipped_samples, 0)

    def test_with_several_ranks_every_microbatch_has_an_image(self) -> None:
        for layout in ("packed", "padded", "padded_left"):
            loaders = [
                self.loader(dp_rank=rank, dp_size=2, steps=3, processor=dflop.Processor(layout=layout))
                for rank in range(2)
            ]
            for shares in zip(*loaders, strict=True):
                counts = [len(share.microbatches) for share in shares]
                self.assertEqual(counts, [8, 8])
                for mb in (mb for share in shares for mb in share.microbatches):
                    patches = int(mb["image_grid_thw"].prod(axis=1).sum())
                    self.assertEqual(mb["pixel_values"].shape[0], patches)
                    self.assertEqual(int((mb["mm_token_type_ids"] == 1).sum()), patches // 4)
                    self.assertEqual(int((mb["labels"] != -100).sum()), mb.target_tokens)
                    self.assertEqual(mb["input_ids"].size, mb.tokens + mb.padding_tokens)

    def test_blank_media_are_a_choice(self) -> None:
        never = self.loader(dp_size=2, processor=dflop.Processor(blank_media="never"), steps=1)
        self.assertTrue(any("pixel_values" not in mb for step in never for mb in step.microbatches))
        always = self.loader(processor=dflop.Processor(blank_media="always"), steps=1)
        self.assertTrue(all("pixel_values" in mb for step in always for mb in step.microbatches))
        with self.assertRaisesRegex(dflop.ConfigError, "expected auto, always or never, found `no`"):
            self.loader(processor=dflop.Processor(blank_media="no"))

    def test_short_steps_and_dropped_samples_leave_valid_microbatches(self) -> None:
        for settings in (
            {"order": dflop.Order(shuffle="none", tail="short"), "epochs": 1, "global_batch_size": 40},
            {"order": dflop.Order(tail="short"), "epochs": 1, "global_batch_size": 40},
            {"processor": dflop.Processor(long_sample="drop:40"), "steps": 3},
            {"processor": dflop.Processor(long_sample="drop:1"), "steps": 1},
        ):
            with self.subTest(settings):
                for step in self.loader(**settings):
                    for mb in step.microbatches:
                        self.assertGreater(mb["input_ids"].size, 0)
                        self.assertEqual(mb.max_seqlen, int(np.diff(mb.cu_seqlens).max()))

    def test_a_model_without_a_tokenizer_is_pointed_out(self) -> None:
        with self.assertWarnsRegex(UserWarning, "no tokenizer"):
            dflop.BalancedLoader(self.directory / "shards", model="qwen2.5-vl-7b", global_batch_size=16)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.loader()


class PixelTypes(WithExample):
    def pixels(self, dtype: str, array_type: str = "numpy") -> list[dflop.Microbatch]:
        loader = dflop.BalancedLoader(
            self.shards,
            model=self.model,
            global_batch_size=16,
            microbatches=4,
            processor=dflop.Processor(dtype=dtype),
            array_type=array_type,
        )
        return [mb for mb in next(iter(loader)).microbatches if "pixel_values" in mb]

    def test_bytes_are_normalized_to_the_pixels_of_single_precision(self) -> None:
        for bytes_, floats in zip(self.pixels("uint8"), self.pixels("float32"), strict=True):
            self.assertEqual(bytes_["pixel_values"].dtype, np.uint8)
            self.assertIsNone(floats.pixel_normalization)
            self.assertIs(floats.normalized(), floats)
            made = bytes_.normalized()
            self.assertEqual(made["pixel_values"].dtype, np.float32)
            np.testing.assert_allclose(made["pixel_values"], floats["pixel_values"], atol=1e-6)
            self.assertIsNone(made.normalized().pixel_normalization)
            self.assertEqual(made.sample_keys, floats.sample_keys)
            self.assertEqual(bytes_["pixel_values"].dtype, np.uint8)

    def test_half_precision_is_the_upper_half_of_single_precision(self) -> None:
        for halves, floats in zip(self.pixels("bfloat16", "dlpack"), self.pixels("float32"), strict=True):
            bits = np.frombuffer(halves["pixel_values"], np.uint16).reshape(floats["pixel_values"].shape)
            rounded = (bits.astype(np.uint32) << 16).view(np.float32)
            np.testing.assert_allclose(rounded, floats["pixel_values"], rtol=2**-8)
            self.assertEqual(bits.nbytes * 2, floats["pixel_values"].nbytes)

    def test_types_that_cannot_be_delivered_are_refused(self) -> None:
        for dtype, reason in (
            ("bfloat16", "NumPy has no bfloat16"),
            ("float16", "expected float32, bfloat16, uint8 or none, found `float16`"),
        ):
            with self.assertRaisesRegex(dflop.ConfigError, reason):
                self.pixels(dtype)


class Steps(WithExample):
    def loader(self, **settings: object) -> dflop.BalancedLoader:
        settings = {"model": self.model, "global_batch_size": 16, "microbatches": 4} | settings
        return dflop.BalancedLoader(self.shards, **settings)

    def test_microbatches_are_a_sequence(self) -> None:
        step = next(iter(self.loader()))
        with self.assertWarnsRegex(UserWarning, "read and decoded again"):
            last = step.microbatches[-1]
        self.assertIs(last, step.microbatches[3])
        place = None
        for place, mb in enumerate(step.microbatches):
            self.assertEqual(mb is step.microbatches[-1], place == 3)
            self.assertIs(mb, step.microbatches[place])
        self.assertEqual((place, len(step.microbatches)), (3, 4))
        with self.assertRaisesRegex(IndexError, "index 4 of 4 microbatches"):
            step.microbatches[4]
        with self.assertRaises(TypeError):
            step.microbatches["first"]
        self.assertIn("len=4", repr(step.microbatches))

    def test_going_over_a_step_again_reads_the_same(self) -> None:
        steps = iter(self.loader(dp_rank=1, dp_size=2))
        step = next(steps)
        first = [(mb.sample_keys, mb["input_ids"].tobytes()) for mb in step.microbatches]
        next(steps)
        with self.assertWarnsRegex(UserWarning, "step 0 are read"):
            again = [(mb.sample_keys, mb["input_ids"].tobytes()) for mb in step.microbatches]
        self.assertEqual(first, again)
        with self.assertWarns(UserWarning):
            self.assertEqual(
                [mb.sample_keys for mb in step.microbatches[1:3]], [keys for keys, _ in first[1:3]]
            )

    def test_a_step_that_is_left_early_is_passed_over(self) -> None:
        loader = self.loader(steps=3)
        wanted = [step.digest for step in loader]
        taken = []
        for step in self.loader(steps=3):
            taken.append(step.digest)
            for _ in step.microbatches:
                break
        self.assertEqual(taken, wanted)

    def test_steps_are_copied_and_pickled_with_their_microbatches(self) -> None:
        step = next(iter(self.loader(array_type="numpy")))
        held = step.hold()
        keys = [mb.sample_keys for mb in held.microbatches]
        self.assertEqual((len(keys), held.digest), (4, step.digest))
        self.assertEqual([mb.sample_keys for mb in held.microbatches], keys)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            microbatches = pickle.loads(pickle.dumps(step.microbatches))
            self.assertEqual([mb.sample_keys for mb in microbatches], keys)
            self.assertEqual([mb.sample_keys for mb in copy.deepcopy(step.microbatches)], keys)

    def test_arguments_of_flash_attention_are_those_of_a_packed_row_without_media(self) -> None:
        names, kinds = ["cu_seq_lens_k", "cu_seq_lens_q", "max_length_k", "max_length_q"], set()
        for layout in ("packed", "padded"):
            step = next(iter(self.loader(microbatches=16, processor=dflop.Processor(layout=layout))))
            for mb in step.microbatches:
                # Encoders have boundaries of their own, and padded rows a mask.
                is_taken = layout == "packed" and "pixel_values" not in mb
                kinds.add((layout, is_taken))
                arguments = mb.flash_attention
                self.assertEqual(sorted(arguments), names if is_taken else [])
                if is_taken:
                    self.assertIs(arguments["cu_seq_lens_q"], mb.cu_seqlens)
                    self.assertEqual(arguments["max_length_k"], mb.max_seqlen)
        self.assertEqual(kinds, {("packed", True), ("packed", False), ("padded", False)})

    def test_a_batch_larger_than_the_data_is_refused_unless_asked_for(self) -> None:
        with self.assertRaisesRegex(dflop.ConfigError, "97 samples are more than the 96 .*repeat"):
            self.loader(global_batch_size=97)
        loader = self.loader(global_batch_size=97, order=dflop.Order(tail="repeat"), steps=1)
        keys = [key for step in loader for mb in step.microbatches for key in mb.sample_keys]
        self.assertEqual((len(keys), len(set(keys))), (97, 96))

    def test_memory_of_a_large_step_is_that_of_a_few_microbatches(self) -> None:
        program = f"""
import resource, sys, dflop
loader = dflop.BalancedLoader({str(self.shards)!r}, model={str(self.model)!r}, global_batch_size=2000,
    microbatches=250, steps=1, order=dflop.Order(tail="repeat"), read=dflop.Read(buffered_bytes=8 << 20),
    plan=dflop.Plan(strategy="lpt"))
bytes = 0
for step in loader:
    for number, microbatch in enumerate(step.microbatches):
        if number == 9:
            early = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        bytes += sum(value.nbytes for value in microbatch.values() if hasattr(value, "nbytes"))
print(bytes >> 10, early, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
        printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        whole, early, late = map(int, printed.stdout.split())
        # Kibibytes: what is held does not grow with what was delivered.
        self.assertGreater(whole, 100 << 10)
        self.assertLess(late - early, whole // 4)


if __name__ == "__main__":
    unittest.main()
