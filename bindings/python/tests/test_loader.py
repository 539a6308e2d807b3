"""Tests `dflop.Loader`: batches, passes, state, errors."""

import io
import json
import pickle
import struct
import unittest
import wave

import dflop
import numpy as np
from dflop import example
from support import InFolder, WithExample

# 8 x 8 pixels.
GRAY_JPEG = bytes.fromhex(
    "ffd8ffe000104a46494600010100000100010000ffdb004300100b0c0e0c0a100e0d0e1211101318281a181616183123251d"
    "283a333d3c3933383740485c4e404457453738506d51575f626768673e4d71797064785c656763ffc0000b08000800080101"
    "1100ffc40014000100000000000000000000000000000006ffc40014100100000000000000000000000000000000ffda0008"
    "010100003f0048ffd9"
)


def clip(frames: int, rate: int = 8000) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((2, 2, rate, 0, "NONE", ""))
        out.writeframes(struct.pack(f"<{2 * frames}h", *range(0, 20 * frames, 10)))
    return file.getvalue()


class Media(InFolder):
    def test_every_field_is_what_its_extension_says(self) -> None:
        values = io.BytesIO()
        np.save(values, np.arange(6, dtype=">i4").reshape(2, 3))
        path = self.shard(
            {
                "a.png": example._png(4, 3, 7),
                "a.wav": clip(50),
                "a.txt": "grüße".encode(),
                "a.json": b'{"x": [1, null, 2.5]}',
                "a.npy": values.getvalue(),
                "a.xyz": b"\x00\x01",
                "b.txt": b"alone",
            }
        )
        (batch,) = dflop.Loader(path)
        self.assertEqual(batch.sample_keys, ["a", "b"])
        self.assertEqual(batch["txt"], ["grüße", "alone"])
        self.assertEqual(batch["json"], [{"x": [1, None, 2.5]}, None])
        self.assertEqual(batch["png"][0].shape, (3, 4, 3))
        np.testing.assert_array_equal(batch["npy"][0], np.arange(6).reshape(2, 3))
        self.assertEqual(batch["npy"][0].dtype, ">i4")
        self.assertEqual(bytes(batch["xyz"][0]), b"\x00\x01")
        audio = batch["wav"][0]
        self.assertEqual(
            (audio.samples.shape, audio.sample_rate_hz, audio.is_truncated), ((50, 2), 8000, False)
        )
        np.testing.assert_allclose(audio.samples[:2].ravel(), np.array([0, 10, 20, 30]) / 32768)
        sample = batch.samples[0]
        self.assertEqual((sample.key, sample.epoch, sample.offset), ("a", 0, 0))
        self.assertEqual(list(sample), ["png", "wav", "txt", "json", "npy", "xyz"])
        self.assertIs(sample["json"], batch["json"][0])

    def test_images_become_one_array_beside_other_fields(self) -> None:
        path = self.shard(
            {
                "a.0.png": example._png(30, 20, 1),
                "a.1.png": example._png(20, 30, 2),
                "a.cls": b"3",
                "b.cls": b"4",
                "c.png": example._png(9, 9, 4),
                "c.cls": b"5",
            }
        )
        (batch,) = dflop.Loader(path, image=dflop.Image(size=16), read=dflop.Read(fields=["images", "cls"]))
        self.assertEqual(batch["image"].shape, (3, 3, 16, 16))
        self.assertEqual(batch.image_rows, [(0, 2), (2, 2), (2, 3)])
        self.assertEqual(batch["cls"], [3, 4, 5])
        (batch,) = dflop.Loader(path, image=dflop.Image(size=16))
        self.assertEqual(list(batch), ["image"])

    def test_images_have_the_type_and_layout_that_is_asked_for(self) -> None:
        path = self.shard({f"{name}.png": example._png(30, 20, place) for place, name in enumerate("abc")})
        images = {
            (dtype, layout): next(
                iter(dflop.Loader(path, image=dflop.Image(16, dtype=dtype, layout=layout)))
            )["image"]
            for dtype in ("float32", "uint8")
            for layout in ("nchw", "nhwc")
        }
        plain = images["float32", "nchw"]
        self.assertEqual((plain.shape, plain.dtype), ((3, 3, 16, 16), np.float32))
        np.testing.assert_array_equal(images["float32", "nhwc"], plain.transpose(0, 2, 3, 1))
        stored = images["uint8", "nchw"]
        self.assertEqual(stored.dtype, np.uint8)
        np.testing.assert_array_equal(images["uint8", "nhwc"], stored.transpose(0, 2, 3, 1))
        mean, std = (
            np.float32([[[0.485]], [[0.456]], [[0.406]]]),
            np.float32([[[0.229]], [[0.224]], [[0.225]]]),
        )
        np.testing.assert_allclose((stored / np.float32(255) - mean) / std, plain, atol=1e-5)
        image = dflop.Image(16, dtype="bfloat16", layout="nhwc")
        (batch,) = dflop.Loader(path, image=image, array_type="dlpack")
        bits = np.asarray(batch["image"]).astype(np.uint32) << 16
        np.testing.assert_allclose(bits.view(np.float32), images["float32", "nhwc"], rtol=2**-8)
        self.assertEqual(repr(pickle.loads(pickle.dumps(image))), repr(image))

    def test_types_and_layouts_are_checked(self) -> None:
        for settings, message in (
            ({"dtype": "float16"}, "expected float32, bfloat16 or uint8, found `float16`"),
            ({"layout": "hwc"}, "expected nchw or nhwc, found `hwc`"),
            ({"dtype": "uint8", "mean": (0.5, 0.5, 0.5)}, "uint8 values are not normalized"),
        ):
            with self.subTest(settings), self.assertRaisesRegex(dflop.ConfigError, message):
                dflop.Image(16, **settings)
        path = self.shard({"a.png": example._png(9, 9, 1)})
        with self.assertRaisesRegex(dflop.ConfigError, "NumPy has no bfloat16"):
            dflop.Loader(path, image=dflop.Image(16, dtype="bfloat16"), array_type="numpy")

    def test_transforms_run_beside_images(self) -> None:
        path = self.shard(
            {"a.png": example._png(9, 9, 1), "a.cls": b"3", "b.png": example._png(9, 9, 2), "b.cls": b"4"}
        )
        loader = dflop.Loader(
            path,
            image=dflop.Image(8),
            transforms={"cls": lambda labels: [10 * int(bytes(one)) for one in labels]},
        )
        (batch,) = loader
        self.assertEqual((batch["cls"], batch["image"].shape[0]), ([30, 40], 2))
        with self.assertRaisesRegex(dflop.ConfigError, "images that are decoded into one tensor"):
            dflop.Loader(path, image=dflop.Image(8), transforms={"images": lambda images: images})

    def test_a_bad_field_beside_images_is_accounted_for(self) -> None:
        path = self.shard(
            {"a.png": example._png(9, 9, 1), "a.json": b"{", "b.png": example._png(9, 9, 2), "b.json": b"[1]"}
        )
        loader = dflop.Loader(
            path, image=dflop.Image(size=8), read=dflop.Read(fields=["images", "json"], error_budget=1)
        )
        (batch,) = loader
        self.assertEqual((batch.sample_keys, batch["json"], batch["image"].shape[0]), (["b"], [[1]], 1))
        self.assertEqual([(bad["key"], bad["field"]) for bad in loader.skipped], [("a", "json")])

    def test_strict_reading_refuses_damage_that_costs_no_pixel(self) -> None:
        path = self.shard({"a.jpg": GRAY_JPEG[:-2] + bytes(30) + GRAY_JPEG[-2:], "b.jpg": GRAY_JPEG})
        (batch,) = dflop.Loader(path)
        self.assertTrue((batch["jpg"][0] == batch["jpg"][1]).all())
        strict = dflop.Loader(path, read=dflop.Read(decode="strict", error_budget=1))
        (batch,) = strict
        self.assertEqual(batch.sample_keys, ["b"])
        self.assertIn("unused data before the end marker", strict.skipped[0]["reason"])
        strict = dflop.Loader(path, image=dflop.Image(8), read=dflop.Read(decode="strict", error_budget=1))
        self.assertEqual([batch["image"].shape[0] for batch in strict], [1])

    def test_a_medium_without_a_decoder_is_named(self) -> None:
        heic = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"
        path = self.shard({"a.heic": heic, "a.txt": b"a kite", "b.jpg": GRAY_JPEG, "b.txt": b"a kite"})
        loader = dflop.Loader(path, read=dflop.Read(error_budget=1))
        self.assertEqual([batch.sample_keys for batch in loader], [["b"]])
        self.assertIn("it is HEIC", loader.skipped[0]["reason"])
        (batch,) = dflop.Loader(path, read=dflop.Read(fields=["txt"]))
        self.assertEqual(batch.sample_keys, ["a", "b"], "nobody asked for it")

    def test_augmentations_depend_on_the_epoch_alone(self) -> None:
        path = self.shard({"a.png": example._png(60, 60, 5)})
        image = dflop.Image(size=16, augment=dflop.Augment(crop=(0.1, 0.5), flip=0.5))
        one, two = (
            dflop.Loader(path, image=image, seed=3, read=dflop.Read(workers=workers), epochs=2)
            for workers in (1, 2)
        )
        first, second = list(one), list(two)
        np.testing.assert_array_equal(first[0]["image"], second[0]["image"])
        self.assertFalse(np.array_equal(first[0]["image"], first[0]["image"][:, :, ::-1]))


class Passes(WithExample):
    def keys(self, loader: dflop.Loader) -> list[str]:
        return [key for batch in loader for key in batch.sample_keys]

    def test_every_sample_is_delivered_once(self) -> None:
        keys = self.keys(dflop.Loader(self.shards, batch_size=10))
        self.assertEqual(len(keys), 96)
        self.assertEqual(len(set(keys)), 96)

    def test_every_pass_is_shuffled_anew_and_can_be_chosen(self) -> None:
        loader = dflop.Loader(self.shards, shuffle_buffer=50, shuffle_shards=True, seed=1)
        first, second = self.keys(loader), self.keys(loader)
        self.assertEqual(sorted(first), sorted(second))
        self.assertNotEqual(first, second)
        loader.set_epoch(0)
        self.assertEqual(self.keys(loader), first)
        self.assertEqual(self.keys(loader), second)

    def test_ranks_share_the_shards(self) -> None:
        parts = [self.keys(dflop.Loader(self.shards, dp_rank=rank, dp_size=3)) for rank in range(3)]
        self.assertEqual(
            sorted(key for part in parts for key in part), sorted(self.keys(dflop.Loader(self.shards)))
        )
        self.assertEqual([len(part) for part in parts], [32, 32, 32])

    def test_a_state_goes_on_exactly_in_another_process(self) -> None:
        def make() -> dflop.Loader:
            return dflop.Loader(
                self.shards,
                batch_size=7,
                shuffle_buffer=20,
                shuffle_shards=True,
                seed=5,
                epochs=2,
                image=dflop.Image(8),
            )

        whole = [(batch.sample_keys, batch["image"]) for batch in make()]
        loader = make()
        batches = iter(loader)
        for _ in range(9):
            next(batches)
        state = json.loads(json.dumps(loader.state_dict()))
        again = make()
        again.load_state_dict(pickle.loads(pickle.dumps(state)))
        self.assertEqual(again.state_dict(), state)
        rest = list(again)
        self.assertEqual(len(rest), len(whole) - 9)
        for batch, (keys, image) in zip(rest, whole[9:], strict=True):
            self.assertEqual(batch.sample_keys, keys)
            np.testing.assert_array_equal(batch["image"], image)

    def test_a_state_of_another_stream_is_refused(self) -> None:
        state = dflop.Loader(self.shards, shuffle_buffer=20).state_dict()
        loader = dflop.Loader(self.shards)
        with self.assertRaises(dflop.StateError):
            loader.load_state_dict(state)
        with self.assertRaisesRegex(dflop.StateError, "expected the state of a stream"):
            loader.load_state_dict({"version": "x"})

    def test_metrics_say_what_stages_did(self) -> None:
        loader = dflop.Loader(self.shards)
        self.keys(loader)
        stages = {stage["stage"]: stage for stage in loader.metrics()["stages"]}
        self.assertEqual(stages["deliver"]["items"], 96)
        self.assertGreater(loader.kernel_cpu_seconds + stages["decode"]["busy_seconds"], 0)

    def test_two_iterators_do_not_disturb_each_other(self) -> None:
        loader = dflop.Loader(self.shards, batch_size=32)
        one = iter(loader)
        first = next(one).sample_keys
        two = iter(loader)
        self.assertEqual(next(two).sample_keys, first)
        self.assertEqual([len(batch.samples) for batch in one], [32, 32])


class Errors(InFolder):
    def test_settings_are_checked_at_once(self) -> None:
        path = self.shard({"a.txt": b"x"})
        cases = {
            "batch_size": {"batch_size": 0},
            "workers": {"read": dflop.Read(workers=0)},
            "epochs": {"epochs": 0},
            "dp_rank": {"dp_rank": 3, "dp_size": 2},
            "decode": {"read": dflop.Read(decode="pixels")},
            "fields": {"read": dflop.Read(fields=[])},
            "error_budget": {"read": dflop.Read(error_budget=2.0)},
            "scaled_decode": {"image": dflop.Image(8, scaled_decode=True)},
        }
        for setting, settings in cases.items():
            with self.subTest(setting), self.assertRaises(dflop.ConfigError) as caught:
                dflop.Loader(path, **settings)
            self.assertEqual(caught.exception.setting, setting)
            self.assertIsInstance(caught.exception, ValueError)

    def test_missing_shards_are_named_at_once(self) -> None:
        for name in ("missing-{0..3}.tar", "missing", "missing-*.tar"):
            with (
                self.subTest(name),
                self.assertRaisesRegex(dflop.ConfigError, "missing.*(no such file|no file matches)"),
            ):
                dflop.Dataset(self.directory / name)
        self.assertEqual(len(dflop.Dataset("https://127.0.0.1:1/missing.tar").shards), 1)

    def test_fields_that_no_sample_has_are_an_error(self) -> None:
        path = self.shard({f"{number}.{kind}": b"1" for number in range(6) for kind in ("txt", "cls2")})
        message = "none of 6 samples has a field `jpg, cls`; they have: cls2, txt"
        wrong = {"read": dflop.Read(fields=["jpg", "cls"], decode="raw")}
        for settings in ({}, {"epochs": 5}, {"shuffle_buffer": 4, "epochs": 2}, {"batch_size": 2}):
            loader = dflop.Loader(path, **wrong, **settings)
            with self.subTest(settings), self.assertRaisesRegex(dflop.ConfigError, message) as caught:
                list(loader)
            self.assertEqual(caught.exception.setting, "fields")
        with self.assertRaisesRegex(dflop.ConfigError, message):
            dflop.Loader(path, **wrong, dp_size=2)
        half = "none of 6 samples has a field `jpg`; they have: cls2, txt"
        for settings in ({}, {"epochs": 2}, {"dp_size": 2}):
            with self.subTest(settings), self.assertRaisesRegex(dflop.ConfigError, half):
                list(dflop.Loader(path, read=dflop.Read(fields=["jpg", "cls2"]), **settings))
        (batch,) = dflop.Loader(path, read=dflop.Read(fields=["jpg;cls2", "images"]))
        self.assertEqual(batch["cls2"], [1] * 6)

    def test_too_many_bad_samples_end_the_pass_and_are_named(self) -> None:
        samples = {
            f"{number}.png": b"not an image" if number % 2 else example._png(9, 9, 1) for number in range(20)
        }
        loader = dflop.Loader(self.shard(samples), read=dflop.Read(error_budget="0.05:3"))
        with self.assertRaises(dflop.ErrorBudgetError) as caught:
            list(loader)
        self.assertEqual(caught.exception.most, 3)
        self.assertEqual(caught.exception.first["key"], "1")
        copy = pickle.loads(pickle.dumps(caught.exception))
        self.assertEqual((str(copy), copy.fields), (str(caught.exception), caught.exception.fields))
        tolerant = dflop.Loader(self.directory / "a.tar", read=dflop.Read(error_budget=1.0))
        self.assertEqual(sum(len(batch.samples) for batch in tolerant) + len(tolerant.skipped), 20)

    def test_an_error_knows_its_fields_and_no_others(self) -> None:
        with self.assertRaises(dflop.ConfigError) as caught:
            dflop.Loader(self.shard({"a.txt": b"x"}), batch_size=0)
        self.assertEqual(
            (caught.exception.kind, caught.exception.fields["setting"]), ("config", "batch_size")
        )
        with self.assertRaises(AttributeError):
            _ = caught.exception.shard


class Statistics(WithExample):
    def test_images_are_normalized_by_the_given_statistics(self) -> None:
        def images(**settings: object) -> np.ndarray:
            return next(iter(dflop.Loader(self.shards, image=dflop.Image(size=16, **settings))))["image"]

        standard, bare = images(), images(mean=(0, 0, 0), std=(1, 1, 1))
        self.assertTrue(0 <= bare.min() and bare.max() <= 1)
        mean, std = (
            [[[[value]] for value in values]] for values in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
        )
        np.testing.assert_allclose(standard, (bare - np.array(mean)) / np.array(std), atol=1e-5)
        self.assertIn("std=", repr(dflop.Image(std=(1, 1, 1))))

    def test_statistics_that_cannot_be_are_refused(self) -> None:
        for settings in ({"std": (1, 0, 1)}, {"mean": (float("nan"), 0, 0)}):
            with (
                self.subTest(settings),
                self.assertRaisesRegex(dflop.ConfigError, "standard deviation above 0"),
            ):
                dflop.Loader(self.shards, image=dflop.Image(**settings))


if __name__ == "__main__":
    unittest.main()
