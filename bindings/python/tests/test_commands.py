"""Tests plans, simulations, statistics and partitions as functions."""

import copy
import csv
import json
import pickle
import random
import unittest

import dflop
from support import WithExample


class Commands(WithExample):
    def test_stats_are_those_of_the_dataset(self) -> None:
        for dataset in (self.shards, dflop.Dataset(self.shards)):
            stats = dflop.stats(dataset, model=self.model)
            self.assertIn("quantiles", stats)

    def test_simulate_compares_strategies(self) -> None:
        report = dflop.simulate(
            self.shards,
            model=self.model,
            global_batch_size=16,
            dp_size=2,
            microbatches=2,
            stages=[1, 2],
            steps=3,
        )
        names = [strategy["name"] for strategy in report["strategies"]]
        self.assertEqual(names, ["data-blind", "lpt", "dflop"])
        self.assertGreaterEqual(report["strategies"][2]["speedup"], 1.0)

    def test_simulate_runs_whole_models_on_gpus(self) -> None:
        for schedule, layout in (("microbatch", "FSDP over 2 GPUs"), ("step", "DDP over 2 GPUs")):
            report = dflop.simulate(
                self.shards, model=self.model, gpus=2, steps=2, plan={"schedule": schedule}
            )
            self.assertEqual(report["layout"], layout)
            names = [strategy["name"] for strategy in report["strategies"]]
            self.assertEqual(names, ["data-blind", "tokens", "lpt", "dflop"])
            self.assertGreaterEqual(report["strategies"][3]["speedup"], 1.0)

    def test_plan_finds_a_parallelism(self) -> None:
        shapes = self.directory / "shapes.csv"
        dice = random.Random(0)
        with shapes.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["tiles", "seq_len"])
            rows.writerows([dice.randint(1, 10), dice.randint(100, 4000)] for _ in range(300))
        plan = dflop.plan_parallelism(
            shapes=shapes, gpus=8, global_batch_size=64, model="llava-ov-qwen2.5-7b", device="h100", batches=4
        )
        self.assertLessEqual(plan["gpus_used"], 8)
        self.assertLessEqual(set(dflop.ParallelismPlan.__annotations__) - {"_parts", "trainer"}, set(plan))
        self.assertEqual((plan.llm.tp, plan.data_parallel[0].layout), (plan["llm"]["tp"], "DDP over 8 GPUs"))
        llm = plan["llm"]
        self.assertLessEqual(llm["tp"] * llm["pp"] * llm["dp"], plan["gpus_used"])
        self.assertGreater(plan["step_seconds"], plan["lower_bound_seconds"] * 0.99)
        path = self.directory / "plan.json"
        path.write_text(json.dumps(plan))
        job = {
            "shapes": shapes,
            "gpus": 8,
            "global_batch_size": 64,
            "model": "llava-ov-qwen2.5-7b",
            "steps": 2,
        }
        by_plan, by_file = (dflop.simulate(plan=one, **job) for one in (plan, path))
        self.assertEqual(by_plan.strategies, by_file.strategies)
        self.assertEqual(by_plan.plan.modules, plan.modules)
        degrees = dflop.simulate(plan=["llm=tp1,pp2,dp2", "vision=dp4"], microbatches=16, **job)
        self.assertEqual((degrees.plan.llm.pp, degrees.plan.encoder.dp), (2, 4))

    def test_answers_are_dictionaries_with_attributes(self) -> None:
        answer = dflop.simulate(self.shards, model=self.model, gpus=2, steps=2)
        self.assertIsInstance(answer, dflop.Simulation)
        self.assertEqual(answer.layouts[0].layout, answer["layouts"][0]["layout"])
        self.assertEqual(answer.strategies[-1].speedup, answer["strategies"][-1]["speedup"])
        self.assertIn("strategies", dir(answer))
        with self.assertRaisesRegex(AttributeError, "`Simulation` has no `strategy`; it has .*strategies"):
            _ = answer.strategy
        plain = json.loads(json.dumps(answer))
        self.assertEqual((type(plain), plain), (dict, answer))
        for copied in (pickle.loads(pickle.dumps(answer)), copy.deepcopy(answer)):
            self.assertEqual((type(copied), copied), (dflop.Simulation, answer))
            self.assertEqual(copied.strategies[0].name, "data-blind")
        stats = dflop.stats(self.shards, model=self.model)
        self.assertEqual(stats.quantiles["tokens"].p50, stats["quantiles"]["tokens"]["p50"])
        self.assertEqual(sum(stats.histograms["tokens"].counts), stats.samples)
        self.assertEqual(dflop.models(self.model).modules[0].module, "vision")
        # Every documented field is in an answer.
        for one in (answer, stats, dflop.models(self.model)):
            named = set(type(one).__annotations__) - {"families", "_parts", "_parts_by_name"}
            self.assertLessEqual(named, set(one))

    def test_misuse_is_a_config_error(self) -> None:
        with self.assertRaisesRegex(dflop.ConfigError, "no-such-flag"):
            dflop.stats(self.shards, no_such_flag=1)
        with self.assertRaisesRegex(dflop.ConfigError, "unknown model"):
            dflop.stats(self.shards, model="none")
        with self.assertRaisesRegex(dflop.ConfigError, "expected carry, repeat, drop or short, found `keep`"):
            dflop.simulate(self.shards, global_batch_size=4, dp_size=1, order={"tail": "keep"})
        with self.assertRaises(dflop.Error):
            dflop.stats(self.directory / "missing.tar")

    def test_old_names_are_refused_with_the_new_one(self) -> None:
        with self.assertRaisesRegex(dflop.ConfigError, r"--set space\.placement="):
            dflop.plan_parallelism(shapes="x.csv", gpus=8, global_batch_size=8, model="tiny", placement="any")
        with self.assertRaisesRegex(AttributeError, "plan_parallelism"):
            _ = dflop.plan
        with self.assertRaisesRegex(TypeError, r'shuffle="none", tail="short"'):
            dflop.Order(validation=True)

    def test_groups_of_settings_are_those_of_the_loader(self) -> None:
        common = {"model": self.model, "global_batch_size": 16, "dp_size": 2, "steps": 2}
        plain = dflop.simulate(self.shards, **common)
        other = dflop.simulate(self.shards, order={"shuffle": "none"}, plan={"tokens_max": 100_000}, **common)
        self.assertNotEqual(plain["strategies"], other["strategies"])


class Partitions(unittest.TestCase):
    def instance(self, items: int, groups: int) -> dict:
        dice = random.Random(1)
        times = [[dice.randint(0, 900), dice.randint(100, 1000)] for _ in range(items)]
        return {
            "name": "random",
            "n": items,
            "m": groups,
            "c": 2,
            "d": times,
            "tok": [row[1] for row in times],
        }

    def test_groups_hold_every_item_once(self) -> None:
        instance = self.instance(64, 8)
        found = dflop.balance(instance)
        self.assertEqual(sorted(item for group in found["groups"] for item in group), list(range(64)))
        sums = [
            [sum(instance["d"][item][module] for item in group) for module in (0, 1)]
            for group in found["groups"]
        ]
        self.assertEqual(found["makespan_ns"], max(map(max, sums)))
        self.assertLessEqual(found["lower_bound_ns"], found["makespan_ns"])
        blind = dflop.balance(instance, strategy="data-blind")
        self.assertLess(found["makespan_ns"], blind["makespan_ns"])

    def test_pipelines_order_microbatches(self) -> None:
        found = dflop.balance(self.instance(64, 8), dp=2, stages=[1, 3])
        self.assertEqual([len(rank) for rank in found["ranks"]], [4, 4])

    def test_what_makes_no_sense_is_an_error(self) -> None:
        with self.assertRaises(dflop.ConfigError):
            dflop.balance({"n": 2})
        with self.assertRaises(dflop.PlanError) as caught:
            dflop.balance(self.instance(64, 8), tokens_max=10)
        self.assertEqual((caught.exception.unit, caught.exception.max), ("tokens", 10))
        with self.assertRaisesRegex(dflop.ConfigError, "both `dp` and `stages`"):
            dflop.balance(self.instance(64, 8), dp=2)


if __name__ == "__main__":
    unittest.main()
