"""Tests tokenizers as a file, a directory, objects of two libraries, a name in the Hugging Face cache."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import dflop
import numpy as np
import tokenizers
import transformers


class Tokenizers(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.directory = dflop.example.directory(samples=32, shards=1)
        cls.expected = cls.ids(None)

    @classmethod
    def ids(cls, tokenizer: object) -> list[np.ndarray]:
        settings = {"global_batch_size": 8, "steps": 2, "array_type": "numpy", "tokenizer": tokenizer}
        loader = dflop.BalancedLoader(cls.directory / "shards", model=cls.directory / "model", **settings)
        return [mb["input_ids"] for step in loader for mb in step.microbatches]

    def test_a_file_and_a_directory_are_the_tokenizer_of_the_model(self) -> None:
        for tokenizer in (self.directory / "model", self.directory / "model" / "tokenizer.json"):
            np.testing.assert_equal(self.ids(tokenizer), self.expected)

    def test_a_tokenizer_of_transformers_is_taken_with_its_special_tokens(self) -> None:
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.directory / "model")
        np.testing.assert_equal(self.ids(tokenizer), self.expected)

    def test_a_tokenizer_of_tokenizers_is_taken(self) -> None:
        tokenizer = tokenizers.Tokenizer.from_file(str(self.directory / "model" / "tokenizer.json"))
        np.testing.assert_equal(self.ids(tokenizer), self.expected)

    def test_what_is_no_tokenizer_is_refused(self) -> None:
        with self.assertRaisesRegex(TypeError, "found int"):
            self.ids(3)

    def test_a_name_is_found_in_the_cache_of_hugging_face(self) -> None:
        with tempfile.TemporaryDirectory() as cache:
            checkpoint = Path(cache, "models--dflop--example")
            (checkpoint / "refs").mkdir(parents=True)
            (checkpoint / "refs" / "main").write_text("0123abc")
            (checkpoint / "snapshots").mkdir()
            (checkpoint / "snapshots" / "0123abc").symlink_to(self.directory / "model")
            code = f"""
import dflop
loader = dflop.BalancedLoader({str(self.directory / "shards")!r}, model="dflop/example", global_batch_size=8, steps=1)
print(next(iter(loader)).microbatches[0]["input_ids"].shape[1])
"""
            found = subprocess.run(
                [sys.executable, "-c", code],
                env=os.environ | {"HF_HUB_CACHE": cache},
                check=True,
                capture_output=True,
                text=True,
                timeout=120,
            )
        self.assertEqual(int(found.stdout), self.expected[0].shape[1])


if __name__ == "__main__":
    unittest.main()
