"""Tests the choice of sizes to measure, with functions of Python as the source of times."""

import signal
import threading
import time
import traceback
import unittest
from collections.abc import Callable

from dflop._native import TimeCurve, check_predictions, choose_sizes


def bent(size: int) -> float:
    return 50.0 + 3.0 * size + 2.5 * max(size - 1000, 0)


class Source:
    """A source of times by a function; each call may have an effect."""

    def __init__(self, time_of: Callable[[int], float] = bent, effect: Callable[[str], None] = print) -> None:
        self.time_of, self.effect = time_of, effect

    def choose(self, **settings: object) -> tuple[list[int], float | None, int]:
        settings = {"snap": self.snap, "measure": self.measure, "is_spent": self.is_spent, **settings}
        return choose_sizes(16, 8192, error_bound=0.02, **settings)

    def snap(self, size: int) -> int:
        self.effect("snap")
        return size

    def measure(self, sizes: list[int]) -> list[float]:
        self.effect("measure")
        return [self.time_of(size) for size in sizes]

    def is_spent(self) -> bool:
        self.effect("is_spent")
        return False

    def predict(self, points: list[tuple[int, float]], sizes: list[int]) -> list[float]:
        self.effect("predict")
        curve = TimeCurve(points)
        return [curve.at(size) for size in sizes]


def nothing(function: str) -> None:
    return None


class Choosing(unittest.TestCase):
    def test_sizes_are_denser_where_the_time_bends(self) -> None:
        sizes, error_max, open_ = Source(effect=nothing).choose()
        self.assertEqual(sizes, sorted(set(sizes)))
        self.assertEqual((sizes[0], sizes[-1]), (16, 8192))
        self.assertTrue(open_ > 0 or error_max <= 0.02)
        near = [size for size in sizes if 700 <= size < 1500]
        far = [size for size in sizes if 4000 <= size < 8000]
        self.assertGreater(len(near), len(far), sizes)

    def test_an_own_prediction_replaces_the_curve(self) -> None:
        source = Source(effect=nothing)
        self.assertEqual(source.choose(predict=source.predict), source.choose())
        exact = source.choose(predict=lambda points, sizes: [bent(size) for size in sizes])
        self.assertEqual((len(exact[0]), exact[1:]), (11, (0.0, 0)))

    def test_a_spent_budget_leaves_the_first_grid(self) -> None:
        sizes, error_max, open_ = Source(effect=nothing).choose(is_spent=lambda: True)
        self.assertEqual((len(sizes), error_max, open_), (6, None, 5))

    def test_an_exception_of_each_function_arrives_unchanged(self) -> None:
        for name in ("snap", "measure", "is_spent", "predict"):
            raised = LookupError(name)

            def effect(function: str, name: str = name, raised: LookupError = raised) -> None:
                if function == name:
                    raise raised

            source = Source(effect=effect)
            try:
                source.choose(predict=source.predict)
            except LookupError as caught:
                names = [frame.name for frame in traceback.extract_tb(caught.__traceback__)]
                self.assertIs(caught, raised)
                self.assertIsNone(caught.__cause__)
                self.assertEqual(names[-2:], [name, "effect"], "the traceback reaches the function")
            else:
                self.fail(f"the exception of {name} was lost")

    def test_answers_of_a_wrong_length_or_type_are_refused(self) -> None:
        source = Source(effect=nothing)
        with self.assertRaisesRegex(ValueError, "expected the times of 6 sizes, found 1"):
            source.choose(measure=lambda sizes: [1.0])
        with self.assertRaisesRegex(ValueError, "expected the times of 5 sizes, found 0"):
            source.choose(predict=lambda points, sizes: [])
        with self.assertRaises(TypeError):
            source.choose(snap=lambda size: "7")
        with self.assertRaisesRegex(ValueError, "at least one point"):
            TimeCurve([])

    def test_ctrl_c_ends_the_choice(self) -> None:
        def interrupt(function: str) -> None:
            if function == "measure":
                signal.raise_signal(signal.SIGINT)

        with self.assertRaises(KeyboardInterrupt):
            Source(effect=interrupt).choose()

    def test_ctrl_c_ends_a_choice_whose_functions_run_no_bytecode(self) -> None:
        # Every measurement is an interval that is not within the bound, so only the signal is early.
        timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
        timer.start()
        try:
            with self.assertRaises(KeyboardInterrupt):
                for _ in range(100_000):
                    choose_sizes(1, 1 << 30, error_bound=0.0, snap=int, measure=list, is_spent=bool)
        finally:
            timer.cancel()
            timer.join()

    def test_other_threads_run_while_a_size_is_measured(self) -> None:
        counted = []
        done = threading.Event()

        def count() -> None:
            while not done.is_set():
                counted.append(None)
                time.sleep(0.001)

        def effect(function: str) -> None:
            if function == "measure":
                before = len(counted)
                time.sleep(0.05)
                self.assertGreater(len(counted), before)

        thread = threading.Thread(target=count)
        thread.start()
        try:
            Source(effect=effect).choose()
        finally:
            done.set()
            thread.join()


class Checking(unittest.TestCase):
    def test_predictions_are_compared_with_medians_of_runs(self) -> None:
        report = check_predictions([110.0, 190.0], [[100.0, 90.0, 400.0], [200.0, 200.0]])
        self.assertEqual(report["measured"], [100.0, 200.0])
        self.assertAlmostEqual(report["spreads"][0], 0.14826)
        self.assertAlmostEqual(report["bias"], 0.025)
        self.assertAlmostEqual(report["median"], 0.075)
        self.assertAlmostEqual(report["p95"], 0.1)
        self.assertAlmostEqual(report["p95_bound"], 1.5 * 0.14826)
        self.assertEqual((report["median_bound"], report["is_within"]), (0.05, False))
        with self.assertRaisesRegex(ValueError, "expected runs of 1 settings, found 0"):
            check_predictions([1.0], [])


if __name__ == "__main__":
    unittest.main()
