"""Tests that samples without a training target, and parts that nothing reads, are named."""

import contextlib
import io
import json
import unittest
import warnings
from collections.abc import Iterator

import dflop
from dflop import example
from support import InFolder


class Targets(InFolder):
    def setUp(self) -> None:
        super().setUp()
        self.model = self.directory / "model"
        example.write_model(self.model)

    def documents(self, *documents: dict[str, object], **fields: bytes) -> list[str]:
        """A shard of one document and some fields a sample."""
        entries = {}
        for number, document in enumerate(documents):
            entries |= {f"{number}.{extension}": content for extension, content in fields.items()}
            entries[f"{number}.json"] = json.dumps(document).encode()
        return [str(self.shard(entries))]

    def loader(self, shards: list[str], **settings: object) -> dflop.BalancedLoader:
        settings = {"model": self.model, "global_batch_size": 2, "epochs": 1} | settings
        return dflop.BalancedLoader(shards, **settings)

    @contextlib.contextmanager
    def warned(self) -> Iterator[list[str]]:
        """Texts of the warnings inside."""
        texts: list[str] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield texts
        texts += [str(warning.message) for warning in caught]

    def unknown(self) -> list[str]:
        """Images with a document of a layout that nobody has."""
        documents = [{"puzzle": f"w{number} w2", "solved": "w3", "width": 8} for number in range(4)]
        return self.documents(*documents, png=example._png(56, 56, 1))

    def test_a_step_without_a_target_is_an_error_that_names_the_keys(self) -> None:
        with self.warned() as texts:
            loader = self.loader(self.unknown())
        (text,) = texts
        self.assertIn("4 of 4 samples have no training target", text)
        for part in (
            '`json: puzzle` (4 samples, such as "w0 w2")',
            '`json: solved` (4 samples, such as "w3")',
        ):
            self.assertIn(part, text)
        with self.assertRaisesRegex(dflop.PlanError, "step 0 has no training target.*json: puzzle") as caught:
            next(iter(loader))
        self.assertEqual(caught.exception.kind, "no_targets")

    def test_a_run_may_confirm_that_it_needs_no_targets(self) -> None:
        with self.warned():
            loader = self.loader(self.unknown(), processor=dflop.Processor(require_targets=False))
        scales = [mb.loss_scale for step in loader for mb in step.microbatches]
        self.assertEqual(scales, [0.0, 0.0])

    def test_the_index_counts_what_is_not_used(self) -> None:
        dataset = dflop.Dataset(self.unknown())
        parts = {(part["field"], part["part"]): part for part in dataset.unused}
        self.assertEqual(set(parts), {("json", "puzzle"), ("json", "solved"), ("json", "width")})
        part = parts["json", "puzzle"]
        self.assertEqual((part["samples"], part["key"], part["example"]), (4, "0", '"w0 w2"'))
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            report = dflop.index(self.unknown())
        self.assertEqual(report["samples_without_target"], 4)
        self.assertEqual(len(report["unused"]), 3)

    def test_metadata_beside_a_text_is_not_warned_of(self) -> None:
        documents = [{"width": 8, "height": 9, "sha256": "ab", "id": f"{number}"} for number in range(4)]
        with self.warned() as texts:
            loader = self.loader(self.documents(*documents, txt=b"w1 w2 w3"))
        self.assertEqual(texts, [])
        self.assertEqual(sum(step.target_tokens > 0 for step in loader), 2)

    def test_media_that_the_model_does_not_take_are_warned_of(self) -> None:
        wav = b"RIFF\x28\0\0\0WAVEfmt \x10\0\0\0\1\0\1\0\x80\x3e\0\0\0\x7d\0\0\2\0\x10\0data\4\0\0\0\0\0\0\0"
        with self.warned() as texts:
            self.loader(self.documents({"caption": "w1 w2"}, {"caption": "w1 w2"}, wav=wav))
        (text,) = texts
        self.assertIn("the model takes no audio: that of 2 samples is not used", text)


if __name__ == "__main__":
    unittest.main()
