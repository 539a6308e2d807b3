"""Tests the settings of the loaders: their keywords, their dataclasses, and a cost model given as a whole."""

import copy
import dataclasses
import inspect
import json
import os
import pickle
import re
import unittest
import unittest.mock

import dflop
from dflop import _native
from dflop.settings import GROUPS, MODEL_SETTINGS, MOVED
from support import WithExample

LOADERS = {"Loader": dflop.Loader, "BalancedLoader": dflop.BalancedLoader}
# Fields that differ between the loaders with good reason: a pass has an end, a run of steps has none.
DIFFERENT = {"epochs"}


def keywords(loader: type) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(loader).parameters.values()
    return {each.name: each for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}


class Settings(WithExample):
    def balanced(self, **settings: object) -> dflop.BalancedLoader:
        settings = {"model": self.model, "global_batch_size": 16, "microbatches": 4} | settings
        return dflop.BalancedLoader(self.shards, **settings)

    def loader(self, **settings: object) -> dflop.Loader:
        return dflop.Loader(self.shards, **settings)


class Signatures(Settings):
    def test_loaders_have_at_most_seventeen_keywords(self) -> None:
        for name, loader in LOADERS.items():
            self.assertLessEqual(len(keywords(loader)), 17, name)
            kinds = {each.kind for each in inspect.signature(loader).parameters.values()}
            self.assertNotIn(inspect.Parameter.VAR_KEYWORD, kinds)

    def test_loaders_agree_on_what_they_share(self) -> None:
        stream, balanced = (keywords(loader) for loader in LOADERS.values())
        shared = stream.keys() & balanced.keys() - DIFFERENT
        self.assertLessEqual({"dp_rank", "dp_size", "seed", "read", "transforms", "array_type"}, shared)
        for name in shared:
            self.assertEqual(stream[name].default, balanced[name].default, name)

    def test_a_setting_in_the_wrong_place_is_shown_its_class(self) -> None:
        makers = {"Loader": self.loader, "BalancedLoader": self.balanced}
        for name, groups in GROUPS.items():
            for keyword, classes in groups.items():
                for group in classes:
                    for field in dataclasses.fields(group):
                        hint = rf"{keyword}=dflop\.{group.__name__}\({field.name}=…\)"
                        with self.subTest(name, field=field.name), self.assertRaisesRegex(TypeError, hint):
                            makers[name](**{field.name: None})
        for setting in MODEL_SETTINGS:
            with self.assertRaisesRegex(TypeError, rf"model=dflop\.CostModel\(…, {setting}=…\)"):
                self.balanced(**{setting: None})
        for old, new in (("rank", "dp_rank"), ("world", "dp_size")):
            for make in makers.values():
                with self.assertRaisesRegex(TypeError, f"'{old}': its name is `{new}`"):
                    make(**{old: 1})
        with self.assertRaisesRegex(TypeError, r"read=dflop\.Read\(python_threads=…\)"):
            self.balanced(input_threads=2)
        with self.assertRaisesRegex(
            TypeError, r"^Dataset\(\) .* 'foreign': `foreign` is gone and not needed"
        ):
            dflop.Dataset(self.shards, foreign="check")
        makers["Dataset"] = lambda **keywords: dflop.Dataset(self.shards, **keywords)
        makers["CostModel"] = lambda **keywords: dflop.CostModel("tiny", **keywords)
        makers["Augment"] = dflop.Augment
        groups = {group.__name__: group for classes in GROUPS["BalancedLoader"].values() for group in classes}
        for (name, old), new in MOVED.items():
            hint = re.escape(f"replaced by {new}")
            with self.subTest(name, old=old), self.assertRaisesRegex(TypeError, hint):
                {**makers, **groups}[name](**{old: None})
            if name in groups or name == "CostModel":
                with self.assertRaisesRegex(TypeError, hint):
                    self.balanced(**{old: None})
        for name, make in makers.items():
            message = rf"^{name}\(\) got an unexpected keyword argument 'stratagem'$"
            with self.assertRaisesRegex(TypeError, message):
                make(stratagem=1)


class Groups(Settings):
    def test_every_field_is_read_and_named_where_it_is_wrong(self) -> None:
        for keyword, group in (
            ("plan", dflop.Plan),
            ("order", dflop.Order),
            ("processor", dflop.Processor),
            ("read", dflop.Read),
        ):
            for field in dataclasses.fields(group):
                settings = {keyword: group(**{field.name: object()})}
                message = rf"`{field.name}`.* of `dflop\.{group.__name__}`|`{field.name}` to be"
                with self.subTest(field.name), self.assertRaisesRegex(TypeError, message):
                    self.balanced(**settings)
        for field in dataclasses.fields(dflop.Read):
            with self.subTest(field.name), self.assertRaisesRegex(TypeError, f"`{field.name}`"):
                self.loader(read=dflop.Read(**{field.name: object()}))

    def test_numbers_out_of_range_name_their_field(self) -> None:
        with self.assertRaisesRegex(OverflowError, r"`tokens_max` of `dflop\.Plan`"):
            self.balanced(plan=dflop.Plan(tokens_max=-1))

    def test_wrong_values_name_their_field(self) -> None:
        for settings, setting in [
            ({"plan": dflop.Plan(strategy="best")}, "strategy"),
            ({"plan": dflop.Plan(schedule="2f2b")}, "schedule"),
            ({"plan": dflop.Plan(stages=[1, 1], schedule="zb-h1")}, "schedule"),
            ({"plan": dflop.Plan(stages=[1, 2], schedule="interleaved:2")}, "schedule"),
            ({"plan": dflop.Plan(stages=[1])}, "stages"),
            ({"plan": dflop.Plan(strategy="lpt:5")}, "strategy"),
            ({"order": dflop.Order(tail="cut")}, "tail"),
            ({"order": dflop.Order(shuffle="all")}, "shuffle"),
            ({"order": dflop.Order(shuffle="blocks:0:64")}, "shuffle"),
            ({"processor": dflop.Processor(layout="dense")}, "layout"),
            ({"processor": dflop.Processor(token_counts="few")}, "token_counts"),
            ({"processor": dflop.Processor(long_sample="cut")}, "long_sample"),
            ({"processor": dflop.Processor(length_buckets="stairs")}, "length_buckets"),
            ({"processor": dflop.Processor(dtype="int8")}, "dtype"),
            ({"read": dflop.Read(decode="pixels")}, "decode"),
            ({"read": dflop.Read(error_budget=2.0)}, "error_budget"),
            ({"read": dflop.Read(workers=0)}, "workers"),
            ({"read": dflop.Read(steps_ahead=0)}, "steps_ahead"),
        ]:
            with self.subTest(settings), self.assertRaises(dflop.ConfigError) as caught:
                self.balanced(**settings)
            self.assertIn(setting, caught.exception.setting)

    def test_variables_hold_defaults_of_the_machine(self) -> None:
        with unittest.mock.patch.dict(os.environ, {"DFLOP_DEVICE": "a100", "DFLOP_WORKERS": "1"}):
            costs = dflop.CostModel(self.model)
            self.assertEqual(dflop.stats(self.shards, model=self.model).device, "a100")
            self.assertEqual(dflop.Custom({"llm": 1e6}, tokens=len).device, "a100")
            loader, balanced = self.loader(), self.balanced()
        self.assertEqual(
            costs.cost(text_tokens=9), dflop.CostModel(self.model, device="a100").cost(text_tokens=9)
        )
        same = next(iter(self.balanced(model=costs)))
        self.assertEqual(next(iter(balanced)).makespan_seconds, same.makespan_seconds)
        self.assertNotEqual(next(iter(self.balanced())).makespan_seconds, same.makespan_seconds)
        list(loader)
        workers = {stage["stage"]: stage["workers"] for stage in loader.metrics()["stages"]}
        self.assertEqual(workers["decode"], 1)
        with unittest.mock.patch.dict(os.environ, {"DFLOP_WORKERS": "two"}):
            with self.assertRaisesRegex(dflop.ConfigError, "`DFLOP_WORKERS`: expected a number of threads"):
                self.loader()
            self.loader(read=dflop.Read(workers=1))

    def test_another_class_is_refused(self) -> None:
        with self.assertRaisesRegex(TypeError, r"expected `plan` to be a `dflop\.Plan`, found dict"):
            self.balanced(plan={"strategy": "lpt"})
        with self.assertRaisesRegex(
            TypeError, r"expected `processor` to be a `dflop\.Processor`, found Read"
        ):
            self.balanced(processor=dflop.Read())

    def test_settings_of_steps_are_refused_by_a_stream(self) -> None:
        with self.assertRaisesRegex(dflop.ConfigError, "steps_ahead.*balanced loader only"):
            self.loader(read=dflop.Read(steps_ahead=4))

    def test_settings_print_what_differs_pickle_and_copy(self) -> None:
        plan = dflop.Plan(strategy="lpt", stages=[1, 3])
        self.assertEqual(repr(plan), "Plan(strategy='lpt', stages=[1, 3])")
        self.assertEqual(repr(dflop.Order()), "Order()")
        self.assertEqual(repr(dflop.Read(error_budget=1)), "Read(error_budget=1)")
        for again in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan), copy.copy(plan)):
            self.assertEqual(again, plan)
        with self.assertRaises(dataclasses.FrozenInstanceError):
            plan.strategy = "kk"
        self.assertEqual(dataclasses.replace(plan, stages=None), dflop.Plan(strategy="lpt"))

    def test_a_loader_prints_and_pickles_its_groups(self) -> None:
        order = dflop.Order(shuffle="blocks", tail="drop")
        loader = self.balanced(plan=dflop.Plan(strategy="kk"), order=order, epochs=2, steps=1)
        self.assertIn("plan=Plan(strategy='kk')", repr(loader))
        self.assertIn("order=Order(shuffle='blocks', tail='drop')", repr(loader))
        again = pickle.loads(pickle.dumps(loader))
        self.assertEqual(repr(again), repr(loader))
        self.assertEqual(next(iter(again)).digest, next(iter(loader)).digest)


class Models(Settings):
    def digests(self, model: object, **plan: object) -> list[str]:
        """Returns the digests of three steps that are planned for pipeline stages, as the command plans."""
        settings = {"model": model, "tokenizer": False, "dp_size": 2, "microbatches": 2, "steps": 3}
        loader = self.balanced(plan=dflop.Plan(**{"stages": [1, 1]} | plan), **settings)
        return [step.digest for step in loader]

    def ordered(self, *flags: str) -> list[str]:
        shape = ["--global-batch-size", "16", "--dp-size", "2", "--microbatches", "2", "--steps", "3"]
        command = ["order", str(self.shards), "--model", str(self.model), *shape, "--json", *flags]
        return [json.loads(line)["digest"] for line in _native.command(command).splitlines()]

    def test_a_cost_model_as_a_whole_plans_as_its_ingredients(self) -> None:
        stages = ("--set", "plan.stages=1,1")
        self.assertEqual(self.digests(self.model), self.ordered(*stages))
        self.assertEqual(self.digests(dflop.CostModel(self.model)), self.ordered(*stages))
        model = dflop.CostModel(self.model, device="a100", freeze="vision", recompute="layers")
        flags = ("--device", "a100", "--set", "cost.freeze=vision", "--set", "cost.recompute=layers")
        found = self.digests(model)
        self.assertEqual(found, self.ordered(*stages, *flags))
        self.assertNotEqual(found, self.digests(self.model))

    def test_plans_are_made_for_the_schedule(self) -> None:
        of_schedules = {}
        for schedule in ("gpipe", "1f1b", "1f1b-ahead:2", "interleaved:2"):
            found = self.digests(self.model, stages=[1, 3], schedule=schedule)
            self.assertEqual(
                found,
                self.ordered("--set", "plan.stages=1,3", "--set", f"plan.schedule={schedule}"),
                schedule,
            )
            of_schedules[schedule] = tuple(found)
        self.assertNotEqual(of_schedules["1f1b"], of_schedules["interleaved:2"])

    def test_a_loader_of_a_cost_model_makes_model_inputs_and_pickles(self) -> None:
        loader = self.balanced(model=dflop.CostModel(self.model, device="a100"), steps=1)
        for one in (loader, pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader)):
            (step,) = (each.hold() for each in one)
            self.assertIn("input_ids", step.microbatches[0])
        self.assertIn("CostModel(", repr(loader))


if __name__ == "__main__":
    unittest.main()
