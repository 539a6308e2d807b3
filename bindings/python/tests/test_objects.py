"""Tests that loaders and their settings print, pickle, copy and close."""

import copy
import itertools
import json
import pickle
import threading
import time
import unittest

import dflop
from support import WithExample


def keep(values: list[object]) -> list[object]:
    return values


def keys(loader: dflop.Loader) -> list[str]:
    return [key for batch in loader for key in batch.sample_keys]


class Objects(WithExample):
    def balanced(self, **settings: object) -> dflop.BalancedLoader:
        settings = {"global_batch_size": 8, "epochs": 1, "microbatches": 2, **settings}
        return dflop.BalancedLoader(self.shards, model=self.model, **settings)

    def test_settings_print_as_they_are_made(self) -> None:
        augment = dflop.Augment(crop=(0.25, 1.0), flip=0.5)
        shard = min(self.shards.glob("*.tar"))
        dataset, name = dflop.Dataset(shard).repeat(3), json.dumps(str(shard))
        cases = {
            "Augment(crop=(0.25, 1.0), flip=0.5)": augment,
            "Augment()": dflop.Augment(),
            "Image(64, augment=Augment(flip=0.1))": dflop.Image(64, augment=dflop.Augment(flip=0.1)),
            "Image()": dflop.Image(),
            f"Dataset({name}).repeat(3)": dataset,
            "CostModel(['tiny'], device='a100')": dflop.CostModel("tiny", device="a100"),
            f"Loader(Dataset({name}).repeat(3), batch_size=4, seed=7, read=Read(fields=['cls', 'txt']))": dflop.Loader(
                dataset, batch_size=4, read=dflop.Read(fields=["cls", "txt"]), seed=7
            ),
        }
        for text, made in cases.items():
            self.assertEqual(repr(made), text)
        transform = repr(dflop.Transform("txt", keep, has_context=True))
        self.assertRegex(
            transform, r"^Transform\(\['txt'\], function=<function keep .*>, has_context=True\)$"
        )
        mixture = repr(dflop.mix([(dataset, 2.0)], stop="all_exhausted"))
        self.assertEqual(mixture, f"Mixture([(Dataset({name}).repeat(3), 2.0)], stop='all_exhausted')")
        loader = self.balanced(dp_size=2, dp_rank=1)
        self.assertRegex(
            repr(loader), r"^BalancedLoader\(Dataset\(.*global_batch_size=8.*dp_rank=1, dp_size=2"
        )

    def test_settings_pickle_and_copy(self) -> None:
        dataset = dflop.Dataset(self.shards)
        made = [
            dflop.Image(32, augment=dflop.Augment(crop=(0.1, 0.9, 0.5, 2.0))),
            dflop.Augment(flip=0.5, color_jitter=(0.1, 0.2, 0.3, 0.4)),
            dflop.Transform(["txt", "json"], keep, decodes=True),
            dflop.CostModel("tiny", freeze="vision", recompute="layers"),
            dflop.mix([(dataset, 1.0), (dataset, 3.0)], weights_from=[(5, [1.0, 1.0])]),
            dflop.mix([(dataset, 1.0), (dataset, 1.0)], choose=[0, 0, 1]),
        ]
        for one in made:
            for again in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one), copy.copy(one)):
                self.assertEqual(repr(again), repr(one))

    def test_a_loader_pickles_with_its_state(self) -> None:
        loader = dflop.Loader(
            self.shards,
            batch_size=7,
            order=dflop.Order(),
            seed=3,
            image=dflop.Image(8),
            dp_rank=1,
            dp_size=2,
        )
        self.assertEqual(keys(pickle.loads(pickle.dumps(loader))), keys(loader))
        loader.set_epoch(4)
        batches = iter(loader)
        first = [next(batches).sample_keys for _ in range(2)]
        again = pickle.loads(pickle.dumps(loader))
        copied = copy.deepcopy(loader)
        rest = [key for batch in batches for key in batch.sample_keys]
        self.assertEqual(keys(again), rest)
        self.assertEqual(keys(copied), rest)
        self.assertEqual(len([key for part in first for key in part]) + len(rest), 48)

    def test_a_balanced_loader_pickles_with_its_state(self) -> None:
        loader = self.balanced(seed=5)
        steps = iter(loader)
        next(steps)
        again = pickle.loads(pickle.dumps(loader))
        self.assertEqual(again.state_dict(), loader.state_dict())
        self.assertEqual(repr(again), repr(loader))
        self.assertEqual(next(iter(again)).digest, next(steps).digest)

    def test_the_plan_of_a_step_pickles(self) -> None:
        loader = self.balanced()
        step = next(iter(loader))
        plan = pickle.loads(pickle.dumps(step.plan))
        self.assertEqual((repr(plan), plan.ranks, plan.refused), (repr(step.plan), step.plan.ranks, []))
        with self.assertRaises(dflop.ConfigError):
            type(plan)("{}")

    def test_states_are_loaded_by_the_name_that_torch_gives_them(self) -> None:
        for loader in (dflop.Loader(self.shards), self.balanced()):
            loader.load_state_dict(state_dict=loader.state_dict())

    def test_a_balanced_loader_starts_at_an_epoch(self) -> None:
        def delivered(loader: dflop.BalancedLoader) -> list[list[str]]:
            return [sorted(key for mb in step.microbatches for key in mb.sample_keys) for step in loader]

        loader = self.balanced()
        first = delivered(loader)
        third = delivered(self.balanced(epochs=3))[2 * len(first) :]
        self.assertNotEqual(first, third)
        loader.set_epoch(2)
        self.assertEqual(delivered(loader), third)
        state = self.balanced()
        state.load_state_dict(loader.state_dict())

    def test_a_closed_loader_is_refused_and_ends_its_iterators(self) -> None:
        for make in (lambda: dflop.Loader(self.shards, batch_size=4), self.balanced):
            with make() as loader:
                iterator = iter(loader)
                next(iterator)
            uses = [
                lambda loader=loader: next(iter(loader)),
                lambda iterator=iterator: next(iterator),
                loader.state_dict,
                loader.metrics,
                lambda loader=loader: loader.set_epoch(0),
                lambda loader=loader: pickle.dumps(loader),
            ]
            for use in uses:
                with self.assertRaisesRegex(dflop.Error, "the loader is closed") as caught:
                    use()
                self.assertEqual(caught.exception.kind, "closed")
            loader.close()
            self.assertIn("Loader(", repr(loader))

    def test_a_closed_iterator_leaves_its_loader(self) -> None:
        for make in (lambda: dflop.Loader(self.shards, batch_size=4), self.balanced):
            loader = make()
            with iter(loader) as iterator:
                next(iterator)
            with self.assertRaisesRegex(dflop.Error, "closed"):
                next(iterator)
            self.assertIsNotNone(next(iter(loader)))

    def test_closing_wakes_a_thread_that_waits(self) -> None:
        piped = dflop.Dataset("pipe:sleep 60", allow="pipe")
        loader = dflop.Loader(piped)
        caught: list[BaseException] = []

        def wait() -> None:
            try:
                next(iter(loader))
            except dflop.Error as error:
                caught.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.2)
        loader.close()
        thread.join(10)
        self.assertEqual([error.kind for error in caught], ["closed"])

    def test_closing_ends_the_threads(self) -> None:
        def threads() -> int:
            with open("/proc/self/status") as status:
                (line,) = (line for line in status if line.startswith("Threads:"))
            return int(line.split()[1])

        next(iter(dflop.Loader(self.shards)))
        before = threads()
        loaders = [dflop.Loader(self.shards, batch_size=4, read=dflop.Read(workers=8)) for _ in range(4)]
        iterators = [iter(loader) for loader in loaders]
        for iterator in iterators:
            next(iterator)
        self.assertGreater(threads(), before + 16)
        for loader in loaders:
            loader.close()
        for _ in itertools.takewhile(lambda _: threads() > before + 8, range(100)):
            time.sleep(0.05)
        self.assertLessEqual(threads(), before + 8)


if __name__ == "__main__":
    unittest.main()
