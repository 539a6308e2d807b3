"""Tests arrays that share memory with Rust: NumPy, buffers, DLPack."""

import pickle
import sys
import types
import unittest
import unittest.mock

import dflop
import numpy as np
from dflop import example
from support import InFolder


class Arrays(InFolder):
    def setUp(self) -> None:
        super().setUp()
        self.path = self.shard({"a.png": example._png(20, 10, 3), "a.bin": b"some bytes"})

    def image(self, array_type: str) -> object:
        (batch,) = dflop.Loader(self.path, array_type=array_type)
        return batch["png"][0]

    def test_numpy_is_a_view_of_the_same_memory(self) -> None:
        array = self.image("dlpack")
        self.assertEqual((array.shape, array.dtype, array.nbytes), ((10, 20, 3), "uint8", 600))
        view = np.asarray(array)
        self.assertEqual(view.ctypes.data, array.data_ptr)
        self.assertTrue(view.flags.writeable and view.flags.c_contiguous)
        self.assertEqual(array.numpy().ctypes.data, array.data_ptr)
        self.assertEqual(memoryview(array).shape, (10, 20, 3))

    def test_dlpack_is_a_view_of_the_same_memory(self) -> None:
        array = self.image("dlpack")
        self.assertEqual(array.__dlpack_device__(), (1, 0))
        view = np.from_dlpack(array)
        self.assertEqual(view.ctypes.data, array.data_ptr)
        copy = np.from_dlpack(array, copy=True)
        self.assertNotEqual(copy.ctypes.data, array.data_ptr)
        np.testing.assert_array_equal(copy, view)

    def test_memory_outlives_the_batch_and_the_loader(self) -> None:
        array = self.image("numpy")
        expected = array.copy()
        for _ in range(20):
            list(dflop.Loader(self.path))
        np.testing.assert_array_equal(array, expected)

    def test_capsules_that_nobody_takes_let_go(self) -> None:
        array = self.image("dlpack")
        for version in (None, (1, 0)):
            for _ in range(1000):
                array.__dlpack__(max_version=version)

    def test_stored_bytes_are_read_only_views(self) -> None:
        (batch,) = dflop.Loader(self.path, read=dflop.Read(decode="raw"))
        stored = batch["bin"][0]
        self.assertEqual(bytes(stored), b"some bytes")
        self.assertTrue(stored.is_readonly and memoryview(stored).readonly)
        self.assertEqual(np.frombuffer(stored, np.uint8).ctypes.data, stored.data_ptr)
        with self.assertRaisesRegex(BufferError, "read-only"):
            stored.__dlpack__()

    def test_other_devices_are_refused(self) -> None:
        with self.assertRaisesRegex(BufferError, r"device \(1, 0\)"):
            self.image("dlpack").__dlpack__(dl_device=(2, 0))

    def test_arrays_travel_between_processes(self) -> None:
        (batch,) = dflop.Loader(self.path, read=dflop.Read(decode="raw"))
        self.assertEqual(pickle.loads(pickle.dumps(batch["bin"][0])), b"some bytes")
        array = self.image("dlpack")
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(array)), np.asarray(array))

    def test_pixels_are_one_aligned_array(self) -> None:
        (batch,) = dflop.Loader(self.path, image=dflop.Image(size=8), array_type="dlpack")
        pixels = batch["image"]
        self.assertEqual((pixels.shape, pixels.dtype), ((1, 3, 8, 8), "float32"))
        self.assertEqual(pixels.data_ptr % 64, 0)
        self.assertEqual(np.asarray(pixels).ctypes.data, pixels.data_ptr)

    @unittest.skipIf("torch" in sys.modules, "tests the choice without PyTorch")
    def test_the_library_is_chosen_when_the_loader_is_created(self) -> None:
        loader = dflop.Loader(self.path)
        with unittest.mock.patch.dict(sys.modules, {"torch": types.ModuleType("torch")}):
            (batch,) = loader
        self.assertIsInstance(batch["png"][0], np.ndarray)

    def test_an_unknown_library_is_refused(self) -> None:
        with self.assertRaisesRegex(dflop.ConfigError, "tensorflow") as caught:
            dflop.Loader(self.path, array_type="tensorflow")
        self.assertEqual(caught.exception.setting, "array_type")


if __name__ == "__main__":
    unittest.main()
