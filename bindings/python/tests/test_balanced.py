"""Tests `dflop.BalancedLoader`: microbatches, ranks, state, padding, corrections."""

import itertools
import json
import pickle
import unittest

import dflop
import numpy as np
from support import WithExample


class Balanced(WithExample):
    def loader(self, **settings: object) -> dflop.BalancedLoader:
        settings = {"model": self.model, "global_batch_size": 16, "microbatches": 2, "seed": 3} | settings
        return dflop.BalancedLoader(self.shards, **settings)

    def test_a_microbatch_is_what_the_model_takes(self) -> None:
        step = next(iter(self.loader()))
        self.assertEqual((step.step, len(step.microbatches)), (0, 2))
        microbatches = list(step.microbatches)
        for mb in microbatches:
            names = {
                "input_ids",
                "labels",
                "position_ids",
                "mm_token_type_ids",
                "pixel_values",
                "image_grid_thw",
                "use_cache",
            }
            self.assertEqual((set(mb), mb["use_cache"]), (names, False))
            self.assertEqual(mb["input_ids"].shape, (1, mb.tokens))
            self.assertEqual(mb["position_ids"].shape, (4, 1, mb.tokens))
            self.assertEqual(int((mb["labels"] != -100).sum()), mb.target_tokens)
            self.assertEqual(mb.cu_seqlens[-1], mb.tokens)
            self.assertEqual(mb.max_seqlen, int(np.diff(mb.cu_seqlens).max()))
            self.assertEqual(len(mb.sample_keys), len(mb.samples))
            self.assertEqual([sample.key for sample in mb.samples], mb.sample_keys)
            self.assertAlmostEqual(mb.cost_seconds, sum(mb.module_seconds.values()), places=12)
            self.assertEqual(set(mb.module_seconds), {"vision", "llm"})
        scales = sum(mb.loss_scale for mb in microbatches)
        counted = sum(mb.target_tokens for mb in microbatches)
        self.assertAlmostEqual(scales, counted / step.target_tokens)
        self.assertGreaterEqual(step.makespan_seconds, step.lower_bound_seconds)

    def test_with_a_pipeline_the_slowest_module_counts(self) -> None:
        for mb in next(iter(self.loader(plan=dflop.Plan(stages=[1, 1])))).microbatches:
            self.assertEqual(mb.cost_seconds, max(mb.module_seconds.values()))

    def test_ranks_share_each_global_batch_by_the_same_plan(self) -> None:
        ranks = [self.loader(dp_rank=rank, dp_size=3, steps=4) for rank in range(3)]
        whole = self.loader(plan=dflop.Plan(strategy="data-blind"), steps=4)
        for *shares, all_samples in zip(*ranks, whole, strict=True):
            self.assertEqual(len({share.digest for share in shares}), 1)
            keys = [key for share in shares for mb in share.microbatches for key in mb.sample_keys]
            expected = [key for mb in all_samples.microbatches for key in mb.sample_keys]
            self.assertEqual(sorted(keys), sorted(expected))

    def test_balance_beats_dealing_round(self) -> None:
        for meet in ("step", "microbatch", "microbatch:2"):
            predicted = {}
            for strategy in ("search", "data-blind"):
                plan = dflop.Plan(schedule=meet, strategy=strategy)
                loader = self.loader(dp_size=2, steps=5, plan=plan)
                predicted[strategy] = sum(step.makespan_seconds for step in loader)
            self.assertLess(predicted["search"], 0.95 * predicted["data-blind"], meet)

    def test_a_step_takes_what_its_slowest_rank_takes(self) -> None:
        loaders = [self.loader(dp_rank=rank, dp_size=2, steps=3) for rank in range(2)]
        for shares in zip(*loaders, strict=True):
            seconds = [sum(sum(mb.module_seconds.values()) for mb in share.microbatches) for share in shares]
            self.assertAlmostEqual(max(seconds), shares[0].makespan_seconds, places=12)

    def test_a_state_goes_on_exactly_with_other_ranks(self) -> None:
        loader = self.loader(dp_size=2)
        steps = iter(loader)
        for _ in range(7):
            next(steps)
        state = json.loads(json.dumps(loader.state_dict()))
        expected = [sorted(self.keys(dp_size=1, from_steps=steps)) for steps in (7, 8)]
        for dp_size in (1, 4):
            others = [self.loader(dp_rank=rank, dp_size=dp_size, steps=9) for rank in range(dp_size)]
            for other in others:
                other.load_state_dict(pickle.loads(pickle.dumps(state)))
            shares = zip(*others, strict=True)
            keys = [
                sorted(key for share in step for mb in share.microbatches for key in mb.sample_keys)
                for step in shares
            ]
            self.assertEqual(keys, expected)
        self.assertEqual(loader.step, 7)

    def keys(self, dp_size: int, from_steps: int) -> list[str]:
        for step in self.loader(dp_size=dp_size):
            if step.step == from_steps:
                return [key for mb in step.microbatches for key in mb.sample_keys]
        raise AssertionError

    def test_iterating_goes_on_and_a_run_that_ended_begins_again(self) -> None:
        for settings, expected in (({}, 6), ({"steps": 4}, 4), ({"steps": 9}, 6)):
            loader = self.loader(order=dflop.Order(shuffle="none", tail="short"), epochs=1, **settings)
            self.assertEqual(len(loader), expected)
            self.assertEqual([step.step for step in itertools.islice(loader, 3)], [0, 1, 2])
            self.assertEqual([step.step for step in loader], list(range(3, expected)))
            self.assertEqual([step.step for step in loader], list(range(expected)))

    def test_a_run_without_end_has_no_length(self) -> None:
        with self.assertRaisesRegex(TypeError, "no end"):
            len(self.loader())
        self.assertEqual(len(self.loader(steps=100)), 100)
        self.assertEqual(self.loader().steps_per_epoch, 6)

    def test_padding_gives_equal_shapes_and_is_no_target(self) -> None:
        loader = self.loader(processor=dflop.Processor(length_buckets="fixed:1024"), microbatches=4, steps=3)
        for step in loader:
            for mb in step.microbatches:
                self.assertEqual(mb["input_ids"].shape, (1, 1024))
                self.assertEqual(mb.tokens + mb.padding_tokens, 1024)
                self.assertTrue((mb["labels"][0, mb.tokens :] == -100).all())
        exact = self.loader(microbatches=4, steps=1)
        padded = self.loader(processor=dflop.Processor(length_buckets="fixed:4096"), microbatches=4, steps=1)
        cost = [
            sum(mb.module_seconds["llm"] for step in loader for mb in step.microbatches)
            for loader in (padded, exact)
        ]
        self.assertGreater(cost[0], cost[1])

    def test_too_short_a_fixed_length_is_an_error_before_the_step(self) -> None:
        loader = self.loader(processor=dflop.Processor(length_buckets="fixed:64"))
        with self.assertRaises(dflop.PlanError) as caught:
            next(iter(loader))
        self.assertRegex(str(caught.exception), "fixed length")
        self.assertEqual(caught.exception.step, 0)

    def test_without_a_tokenizer_samples_are_decoded(self) -> None:
        step = next(iter(self.loader(model="tiny", tokenizer=False)))
        mb = step.microbatches[0]
        self.assertEqual((dict(mb), mb.cu_seqlens), ({}, None))
        self.assertTrue(any("json" in sample for sample in mb.samples))
        self.assertTrue(any(sample.get("0.png") is not None for sample in mb.samples))

    def test_a_mixture_draws_by_weights(self) -> None:
        ones = dflop.Dataset(self.shards / "000.tar")
        others = dflop.Dataset([self.shards / "001.tar", self.shards / "002.tar"])
        loader = dflop.BalancedLoader(
            dflop.mix([(ones, 0.75), (others, 0.25)]), model=self.model, global_batch_size=40, steps=1
        )
        shards = [sample.shard for mb in next(iter(loader)).microbatches for sample in mb.samples]
        self.assertEqual(sum(shard.endswith("000.tar") for shard in shards), 30)

    def test_the_ranks_of_a_group_share_the_media_of_a_microbatch(self) -> None:
        loader = self.loader(microbatches=4)
        step = next(iter(loader))
        for microbatch in range(4):
            shares = loader.media_shares(step, microbatch, 2)
            self.assertEqual(shares, loader.media_shares(step, microbatch, 2))
            self.assertEqual(len(shares), 2)
            media = [medium for share in shares for medium in share]
            self.assertEqual(len({(medium.key, medium.kind, medium.index) for medium in media}), len(media))
            self.assertTrue(all(medium.seconds > 0 for medium in media))
            sums = [sum(medium.seconds for medium in share) for share in shares]
            longest = max((medium.seconds for medium in media), default=0.0)
            self.assertLessEqual(max(sums), sum(sums) / 2 + longest)
        for at, mb in enumerate(step.microbatches):
            keys = {sample.key for sample in mb.samples}
            [alone] = loader.media_shares(step, at, 1)
            self.assertTrue(alone)
            self.assertLessEqual({medium.key for medium in alone}, keys)
        for microbatch, ranks in [(4, 2), (0, 0)]:
            with self.assertRaises(dflop.errors.ConfigError):
                loader.media_shares(step, microbatch, ranks)

    def test_ranks_plan_the_same_exchange_of_media(self) -> None:
        # Dealt without regard to cost, so that ranks have unequal media.
        plan = dflop.Plan(strategy="data-blind")
        loaders = [self.loader(microbatches=2, dp_rank=rank, dp_size=4, plan=plan) for rank in range(4)]
        steps = [next(iter(loader)).hold() for loader in loaders]
        moved = 0
        for at in range(2):
            plans = [loader.media_exchange(step, at) for loader, step in zip(loaders, steps, strict=True)]
            self.assertEqual(plans, [plans[0]] * 4)
            moved += sum(medium.rank != medium.encoder_rank for medium in plans[0])
            for rank, step in enumerate(steps):
                own = [medium for medium in plans[0] if medium.rank == rank]
                grids = step.microbatches[at]["image_grid_thw"].tolist()[: len(own)]
                self.assertEqual([list(medium.grid) for medium in own], grids)
            pairs = [loader.media_exchange(steps[0], at, group_size=2) for loader in loaders]
            for rank, pair in enumerate(pairs):
                group = {0, 1} if rank < 2 else {2, 3}
                self.assertLessEqual({medium.rank for medium in pair}, group)
                self.assertLessEqual({medium.encoder_rank for medium in pair}, group)
        self.assertGreater(moved, 0)
        for settings, message in [
            ({"microbatch": 2}, "there is no 2"),
            ({"group_size": 3}, "expected a divisor of the 4 ranks, found 3"),
            ({"group_size": 0}, "found 0"),
            ({"module": "audio"}, "`audio`"),
        ]:
            with self.assertRaisesRegex(dflop.ConfigError, message):
                loaders[0].media_exchange(steps[0], **{"microbatch": 0} | settings)

    def test_stage_times_change_later_plans(self) -> None:
        loader = self.loader(microbatches=4)
        reports = []
        for step in loader:
            # Long microbatches take twice as long as predicted.
            seconds = [
                mb.module_seconds["llm"] * (2.0 if mb.tokens > 250 else 1.0) for mb in step.microbatches
            ]
            times = {"llm": [seconds], "vision": [[float("nan")] * 4]}
            reports.append(loader.report_stage_seconds(step, times, interval=4))
            if step.step == 23:
                break
        reported = [report for report in reports if report is not None]
        self.assertEqual([place for place, report in enumerate(reports) if report], [3, 7, 11, 15, 19, 23])
        self.assertEqual(reported[0]["observations"], 16)
        state = loader.state_dict()
        self.assertTrue(state["corrections"])
        again = self.loader(microbatches=4)
        again.load_state_dict(state)
        self.assertEqual(again.state_dict(), state)
        digests = []
        for one in (loader, again):
            steps = iter(one)
            digests.append([next(steps).digest for _ in range(12)])
        self.assertEqual(digests[0], digests[1])

    def test_stage_times_of_another_shape_are_refused(self) -> None:
        loader = self.loader()
        step = next(iter(loader))
        for seconds, reason in [
            ({"tail": [[1.0, 1.0]]}, "found `tail`"),
            ({"llm": [[1.0, 1.0]] * 2}, "1 DP ranks for `llm`, found 2"),
            ({"llm": [[1.0]]}, "2 microbatches for `llm` on DP rank 0, found 1"),
            ({"llm": [[1.0, -1.0]]}, "found -1 s"),
        ]:
            with self.subTest(reason), self.assertRaisesRegex(dflop.ConfigError, reason):
                loader.report_stage_seconds(step, seconds)

    def test_all_reports_name_one_interval(self) -> None:
        loader, times = self.loader(), {"llm": [[1.0, 1.0]]}
        step = next(iter(loader))
        with self.assertRaisesRegex(dflop.ModelError, "interval"):
            loader.report_stage_seconds(step, times, interval=0)
        loader.report_stage_seconds(step, times, interval=2)
        with self.assertRaisesRegex(dflop.ConfigError, "`interval`: expected 2 steps, as before, found 3"):
            loader.report_stage_seconds(step, times, interval=3)

    def test_settings_are_checked_at_once(self) -> None:
        for settings, error, reason in [
            ({"model": "no-such-model"}, dflop.ModelError, "unknown model"),
            ({"dp_rank": 2, "dp_size": 2}, dflop.ConfigError, "dp_rank"),
            ({"global_batch_size": 1}, dflop.ConfigError, "global"),
            ({"plan": dflop.Plan(strategy="best")}, dflop.ConfigError, "strategy"),
            ({"processor": dflop.Processor(layout="dense")}, dflop.ConfigError, "layout"),
            ({"tokenizer": self.directory / "none.json"}, dflop.ReadError, "none.json"),
            (
                {"model": "tiny", "processor": dflop.Processor(length_buckets="fixed:64")},
                dflop.ConfigError,
                "length_buckets.*needs a tokenizer",
            ),
            (
                {"model": "tiny", "processor": dflop.Processor(length_buckets="ladder")},
                dflop.ConfigError,
                "length_buckets.*needs a tokenizer",
            ),
            (
                {"model": "tiny", "processor": dflop.Processor(dtype="uint8")},
                dflop.ConfigError,
                "dtype.*needs a tokenizer",
            ),
            ({"plan": dflop.Plan(stages=[1, 1], schedule="step")}, dflop.ConfigError, "leave out `stages`"),
        ]:
            with self.subTest(settings), self.assertRaisesRegex(error, reason):
                self.loader(**settings)
        with self.assertRaisesRegex(dflop.ReadError, "no .csv"):
            dflop.CostModel(self.model, device=self.directory)
        with self.assertRaisesRegex(dflop.ReadError, "nowhere"):
            dflop.CostModel(self.model, device="nowhere/profile.csv")
        with self.assertRaisesRegex(dflop.ModelError, "unknown device `tpu`, known are .*h100"):
            dflop.CostModel(self.model, device="tpu")
        with self.assertRaisesRegex(dflop.ConfigError, "`profile_tp`: needs a measured profile"):
            dflop.CostModel(self.model, profile_tp=[1, 2])


class Costs(WithExample):
    def test_a_cost_function_takes_the_place_of_the_model(self) -> None:
        seen = []

        def cost(samples: list[dict]) -> list:
            seen.append(samples)
            return [{"vision": 0.0, "llm": 1.0 if sample["images"] else 0.0} for sample in samples]

        loader = dflop.BalancedLoader(
            self.shards,
            model=self.model,
            global_batch_size=16,
            microbatches=4,
            plan=dflop.Plan(cost=cost, tokens_max=100_000),
        )
        step = next(iter(loader))
        keys = {
            "audio",
            "dataset",
            "images",
            "key",
            "sample",
            "seconds",
            "target_tokens",
            "text_tokens",
            "tokens",
            "videos",
        }
        self.assertEqual(set(seen[0][0]), keys)
        self.assertEqual(len(seen[0]), 16)
        costs = sorted(mb.module_seconds["llm"] for mb in step.microbatches)
        self.assertLessEqual(costs[-1] - costs[0], 1.0)
        self.assertEqual(sum(costs), sum(bool(sample["images"]) for sample in seen[0]))

    def test_a_cost_function_that_fails_ends_the_run_with_its_error(self) -> None:
        for answer, reason in [
            (lambda samples: [[0.1, 0.1]], "returned 1 costs for 4 samples"),
            (lambda samples: [[0.1]] * len(samples), "of 1 modules"),
            (lambda samples: [[float("nan"), 0.1]] * len(samples), "NaN|nan"),
            (lambda samples: 1 / 0, "division by zero"),
        ]:
            loader = dflop.BalancedLoader(
                self.shards, model=self.model, global_batch_size=4, plan=dflop.Plan(cost=answer)
            )
            with self.subTest(reason), self.assertRaisesRegex(dflop.Error, reason):
                next(iter(loader))

    def test_the_cost_model_predicts_samples_and_datasets(self) -> None:
        model = dflop.CostModel("qwen2.5-vl-7b")
        self.assertEqual(model.modules, ["vision", "llm"])
        text = model.cost(text_tokens=100, target_tokens=40)
        self.assertEqual((text["tokens"], text["target_tokens"], text["seconds"]["vision"]), (100, 40, 0.0))
        image = model.cost(text_tokens=100, images=[(640, 480)])
        self.assertGreater(image["seconds"]["vision"], 0)
        self.assertGreater(image["tokens"], 300)
        with self.assertRaises(dflop.ModelError):
            model.cost(images=[(0, 4)])
        table = model.annotate(dflop.Dataset(self.shards))
        self.assertEqual(len(table), 96)
        self.assertIn("vision_ns", table.column_names)


if __name__ == "__main__":
    unittest.main()
