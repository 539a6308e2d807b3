"""Tests that a state after any step resumes with the rest of the run, and after the last one with nothing."""

import itertools
import json
import pickle
import unittest
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import dflop
from support import WithExample

Steps = list[list[str]]


class Resume(WithExample):
    def balanced(self, data: object = None, **settings: object) -> dflop.BalancedLoader:
        settings = {"model": self.model, "global_batch_size": 20, "microbatches": 2, "seed": 3} | settings
        return dflop.BalancedLoader(self.shards if data is None else data, **settings)

    def plain(self, **settings: object) -> dflop.Loader:
        return dflop.Loader(self.shards, batch_size=20, read=dflop.Read(fields=["json"]), **settings)

    @staticmethod
    def keys(steps: Iterator[Any]) -> Steps:
        """Keys of every step or batch."""
        keys = []
        for step in steps:
            if isinstance(step, dflop.Step):
                keys.append([key for mb in step.microbatches for key in mb.sample_keys])
            else:
                keys.append([sample.key for sample in step.samples])
        return keys

    def mixture(self) -> dflop.Mixture:
        return dflop.mix([(self.shards, 0.7), (self.shards, 0.3)])

    def runs(self) -> dict[str, Callable[..., Any]]:
        """Ways to make a loader whose run ends."""
        short, drop = dflop.Order(tail="short"), dflop.Order(tail="drop")
        return {
            "epochs": lambda **more: self.balanced(epochs=2, **more),
            "steps": lambda **more: self.balanced(steps=7, **more),
            "steps before the epochs end": lambda **more: self.balanced(steps=3, epochs=1, **more),
            "epochs end before the steps": lambda **more: self.balanced(steps=30, epochs=1, **more),
            "short": lambda **more: self.balanced(epochs=2, order=short, **more),
            "drop": lambda **more: self.balanced(epochs=2, order=drop, **more),
            "validation": lambda **more: self.balanced(
                order=dflop.Order(shuffle="none", tail="short"), epochs=1, **more
            ),
            "mixture": lambda **more: self.balanced(self.mixture(), steps=5, **more),
            "epochs of a mixture": lambda **more: self.balanced(self.mixture(), epochs=1, **more),
            "filter": lambda **more: self.balanced(
                epochs=1, filter=lambda samples: [sample["bytes"] % 2 == 0 for sample in samples], **more
            ),
        }

    def rest(self, loader: Any, state: dict[str, Any]) -> Steps:
        """Steps after a state, which a checkpoint held as JSON."""
        loader.load_state_dict(json.loads(json.dumps(state)))
        with warnings.catch_warnings(), loader:
            warnings.simplefilter("ignore")
            return self.keys(iter(loader))

    def test_every_state_resumes_with_the_rest_on_any_number_of_ranks(self) -> None:
        for name, make in self.runs().items():
            with make() as loader:
                steps, states, whole = iter(loader), [loader.state_dict()], []
                for step in steps:
                    whole += self.keys(iter([step]))
                    states.append(loader.state_dict())
                self.assertEqual(len(loader), len(whole), name)
                self.assertEqual(states[-1], loader.state_dict(), name)
            for delivered, state in enumerate(states):
                with self.subTest(name, delivered=delivered):
                    self.assertEqual(self.rest(make(), state), whole[delivered:])
            for delivered in (0, 1, len(states) - 1):
                shares = [self.rest(make(dp_rank=rank, dp_size=2), states[delivered]) for rank in range(2)]
                together = [sorted(itertools.chain(*share)) for share in zip(*shares, strict=True)]
                with self.subTest(name, delivered=delivered, ranks=2):
                    self.assertEqual(together, [sorted(keys) for keys in whole[delivered:]])

    def test_every_state_of_a_plain_loader_resumes_with_the_rest(self) -> None:
        for settings in (
            {"epochs": 2},
            {"epochs": 2, "shuffle_buffer": 9},
            {"epochs": 1, "dp_size": 2},
            {"epochs": 2, "dp_size": 2, "order": dflop.Order(), "drop_last": True},
        ):
            with self.plain(**settings) as loader:
                states, whole = [], []
                for batch in loader:
                    whole += self.keys(iter([batch]))
                    states.append(loader.state_dict())
            for delivered, state in enumerate(states, 1):
                with self.subTest(settings, delivered=delivered):
                    self.assertEqual(self.rest(self.plain(**settings), state), whole[delivered:])

    def test_a_run_that_has_ended_says_so_and_the_next_iteration_starts_it_again(self) -> None:
        with self.balanced(steps=2) as loader:
            whole = self.keys(iter(loader))
            ended = loader.state_dict()
        with self.balanced(steps=2) as resumed:
            resumed.load_state_dict(ended)
            for _ in range(2):
                with self.assertWarnsRegex(UserWarning, "has ended: this iteration delivers nothing"):
                    steps = iter(resumed)
            self.assertEqual((list(steps), resumed.state_dict()), ([], ended))
            self.assertEqual(self.keys(iter(resumed)), whole)
            self.assertEqual(self.keys(iter(resumed)), whole)
        with self.balanced(steps=3) as longer:
            longer.load_state_dict(ended)
            self.assertEqual([step.step for step in longer], [2])
        copy = pickle.loads(pickle.dumps(resumed_at(self.balanced(steps=2), ended)))
        with copy, self.assertWarns(UserWarning):
            self.assertEqual(list(copy), [])

    def test_a_resumed_run_that_starts_again_starts_at_its_first_step(self) -> None:
        with self.balanced(steps=4) as loader:
            steps = iter(loader)
            next(steps)
            state = loader.state_dict()
        with self.balanced(steps=4) as resumed:
            resumed.load_state_dict(state)
            self.assertEqual([step.step for step in resumed], [1, 2, 3])
            self.assertEqual([step.step for step in resumed], [0, 1, 2, 3])

    def test_a_shared_loader_resumes_at_the_end_with_nothing(self) -> None:
        with self.balanced(steps=2) as loader:
            self.keys(iter(loader))
            ended = loader.state_dict()
        with dflop.SharedLoader(
            lambda: self.balanced(steps=2), rank=0, size=1, name="alone-at-end"
        ) as shared:
            self.assertEqual(self.rest(shared, ended), [])


def resumed_at(loader: dflop.BalancedLoader, state: dict[str, Any]) -> dflop.BalancedLoader:
    """Loads a state."""
    loader.load_state_dict(state)
    return loader


if __name__ == "__main__":
    unittest.main()
