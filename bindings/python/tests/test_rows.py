"""Tests rows of a fixed number of tokens: documents that are split or fitted, and resume inside a document."""

import itertools
import json
import random
import re
from typing import Any

import dflop
import numpy as np
from dflop import example
from support import InFolder

TOKENS = 64


class Rows(InFolder):
    def setUp(self) -> None:
        super().setUp()
        example.write_model(self.directory / "model")
        rng = random.Random(3)
        lengths = [rng.choice([1, 5, 20, 60, 200]) for _ in range(80)]
        self.words = {
            f"{number:03}": [f"w{rng.randrange(512)}" for _ in range(length)]
            for number, length in enumerate(lengths)
        }
        with dflop.Writer(self.directory / "texts", shard_samples=30) as writer:
            for key, words in self.words.items():
                writer.write({"__key__": key, "txt": " ".join(words)})

    def loader(self, layout: str, *, dp_size: int = 1, **settings: Any) -> dflop.BalancedLoader:
        settings = {"global_batch_size": 4, "microbatches": 4 // dp_size, "epochs": 1, "seed": 5} | settings
        processor = settings.pop("processor", dflop.Processor(layout=layout))
        return dflop.BalancedLoader(
            self.directory / "texts",
            model=self.directory / "model",
            dp_size=dp_size,
            processor=processor,
            **settings,
        )

    def rows(self, step: dflop.Step) -> list[list[list[int]]]:
        """Sequences of every row of a step, without padding."""
        rows = []
        for mb in step.microbatches:
            self.assertEqual(mb["input_ids"].shape, (1, TOKENS))
            self.assertEqual(mb.tokens + mb.padding_tokens, TOKENS)
            ids, ends = mb["input_ids"][0], mb.cu_seqlens
            starts = ends[:-1][np.diff(ends) > 0]
            self.assertTrue((mb["labels"][0][starts] == -100).all())
            self.assertTrue((mb["position_ids"][0].reshape(-1, TOKENS)[0][starts] == 0).all())
            self.assertEqual(int((mb["labels"] != -100).sum()), mb.target_tokens)
            pairs = list(itertools.pairwise(ends))[: len(mb.samples)]
            rows.append([ids[start:end].tolist() for start, end in pairs])
        return rows

    def test_split_rows_are_all_words_in_order(self) -> None:
        loader = self.loader(
            "split:64", order=dflop.Order(shuffle="none"), plan=dflop.Plan(strategy="data-blind")
        )
        steps = [self.rows(step) for step in loader]
        ids = [token for step in steps for row in step for piece in row for token in piece]
        expected = []
        for words in self.words.values():
            expected += [int(word[1:]) for word in words] + [515]
        self.assertEqual(ids, expected)
        self.assertEqual(len(loader), -(-len(expected) // (4 * TOKENS)))
        self.assertEqual((loader.global_batch_size, loader.steps_per_epoch), (4, len(loader)))

    def test_fitted_rows_hold_every_document_once(self) -> None:
        documents = [tuple(int(word[1:]) for word in words) + (515,) for words in self.words.values()]
        pieces = [tuple(piece) for step in self.loader("fit:64") for row in self.rows(step) for piece in row]
        short = sorted(document for document in documents if len(document) <= TOKENS)
        whole = sorted(piece for piece in pieces if piece in set(short))
        self.assertEqual(whole, short)
        self.assertEqual(sum(map(len, pieces)), sum(map(len, documents)))

    def test_a_run_resumes_inside_a_document_on_other_ranks(self) -> None:
        for layout in ("split:64", "fit:64", "fit:64:16"):
            with self.subTest(layout):
                whole = [sorted(self.rows(step)) for step in self.loader(layout)]
                self.assertGreater(len(whole), 8)
                steps = iter(first := self.loader(layout))
                for at in range(1, len(whole)):
                    next(steps)
                    state = json.loads(json.dumps(first.state_dict()))
                    ranks = [self.loader(layout, dp_size=2, dp_rank=rank) for rank in range(2)]
                    for rank in ranks:
                        rank.load_state_dict(state)
                    rest = [
                        sorted(row for share in shares for row in self.rows(share))
                        for shares in zip(*ranks, strict=True)
                    ]
                    self.assertEqual(rest, whole[at:])

    def test_settings_that_do_not_go_with_rows_are_refused(self) -> None:
        for settings, reason in (
            ({"global_batch_size": 8}, "a microbatch is one row of 64.* have 4, found 8"),
            ({"order": dflop.Order(tail="drop")}, "use the tail `carry`"),
            ({"plan": dflop.Plan(tokens_max=64)}, "leave it out"),
            (
                {"processor": dflop.Processor(layout="split")},
                "split:N, fit:N or fit:N:DOCUMENTS, found `split`",
            ),
            (
                {"processor": dflop.Processor(layout="fit:64", long_sample="truncate")},
                "invalid `long_sample`",
            ),
            ({"processor": dflop.Processor(layout="fit:64", length_buckets=64)}, "invalid `length_buckets`"),
            ({"processor": dflop.Processor(layout="fit:64", token_counts="estimated")}, "exact counts"),
            ({"tokenizer": False}, "needs a tokenizer"),
        ):
            with self.subTest(settings), self.assertRaisesRegex(dflop.ConfigError, reason):
                self.loader("fit:64", **settings)
        with self.assertRaisesRegex(dflop.Error, "no index|cannot be indexed"):
            pipe = dflop.Dataset(f"pipe:cat {self.directory / 'texts' / '000000.tar'}", allow="pipe")
            dflop.BalancedLoader(
                pipe,
                model=self.directory / "model",
                processor=dflop.Processor(layout="split:64"),
                global_batch_size=1,
            )
        for keyword, place in (
            ("layout", "processor=dflop.Processor(layout=…)"),
            ("processor", "processor=…"),
            ("tokenizer", "tokenizer=…"),
        ):
            hint = re.escape(f"dflop.BalancedLoader(…, {place})")
            with self.subTest(keyword), self.assertRaisesRegex(TypeError, hint):
                dflop.Loader(self.directory / "texts", **{keyword: "split:64"})
        state = self.loader("fit:64").state_dict()
        with self.assertRaisesRegex(
            dflop.StateError, "it has rows, `fit:64`, and this run packs whole samples"
        ):
            self.loader("packed").load_state_dict(state)
