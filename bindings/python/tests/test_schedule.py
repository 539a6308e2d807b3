"""Schedules and routes as data: every list of actions runs, and every row arrives once."""

import itertools
import pickle
import random
import unittest
from collections.abc import Iterator
from typing import Any

import dflop
from step_interpreter import Deadlock, Wait, run_all, run_in_order, run_launches, run_rows

KINDS = ("gpipe", "1f1b", "1f1b-ahead:2", "zb-h1", "interleaved:2")
SHARED = ("gpipe", "1f1b", "zb-h1")
ENCODERS = ("vision", "audio")


def layouts() -> Iterator[tuple[dict[str, dict[str, Any]], str, str]]:
    """Yields modules, schedules and placements of every kind that runs."""
    sizes = [
        {"stages": pp, "dp": dp, "tp": tp} for pp, dp, tp in itertools.product((1, 2), (1, 2, 3), (1, 2))
    ]
    for number, (encoder, llm) in enumerate(itertools.product(sizes, sizes)):
        kind = KINDS[number % 4]
        yield {"vision": encoder, "llm": llm}, kind, "disaggregated"
        if number % 5 == 0:
            yield {"vision": encoder, "audio": sizes[number % len(sizes)], "llm": llm}, kind, "disaggregated"
        ranks = [size["stages"] * size["dp"] * size["tp"] for size in (encoder, llm)]
        if ranks[0] == ranks[1]:
            yield {"vision": encoder, "llm": llm}, SHARED[number % 3], "colocated"
    for number, llm in enumerate(sizes):
        kind = SHARED[number % 3]
        yield {"vision": {}, "llm": llm}, kind, "joint"
        cut = {"stages": 2, "layers": [1, 2]}
        yield {"vision": {"layers": [2, 1]}, "llm": {**llm, **cut, "layers": [0, 3]}}, kind, "joint"
        yield {"vision": {}, "audio": {}, "llm": llm}, kind, "joint"
        yield {"llm": {**llm, "stages": 4}}, KINDS[4], "disaggregated"
        yield {"llm": llm}, KINDS[number % 4], "disaggregated"


def schedules(microbatches: int = 3) -> Iterator[dflop.Schedule]:
    for modules, kind, placement in layouts():
        yield dflop.Schedule(modules, microbatches=microbatches, schedule=kind, placement=placement)


def step(schedule: dflop.Schedule, encoders: list[str], seed: int) -> list[list[dflop.MicrobatchRows]]:
    """Draws media of uneven numbers and sizes; some microbatches have none."""
    draw, keys = random.Random(seed), itertools.count()

    def microbatch() -> dflop.MicrobatchRows:
        media = [
            dflop.MediumRows(module, rows, seconds=rows + 0.5, encoder_rows=4 * rows, key=next(keys))
            for module in encoders
            for rows in [draw.randrange(4) for _ in range(draw.randrange(4))]
        ]
        draw.shuffle(media)
        return dflop.MicrobatchRows(2 + sum(medium.rows for medium in media), media)

    return [[microbatch() for _ in range(schedule.microbatches)] for _ in range(schedule.dp_size)]


def encoders_of(schedule: dflop.Schedule) -> list[str]:
    roles = [role for rank in range(schedule.world_size) for role in schedule.roles(rank)]
    return [name for name in ENCODERS if any(role.module == name for role in roles)]


class Schedules(unittest.TestCase):
    def test_all_lists_run_in_order_and_every_receive_has_its_send(self) -> None:
        count = 0
        for schedule in schedules():
            with self.subTest(schedule):
                self.assertEqual(run_in_order(schedule), [])
                count += 1
        self.assertGreater(count, 200)

    def test_messages_in_one_queue_launch_without_waiting_for_themselves(self) -> None:
        for number, schedule in enumerate(schedules()):
            with self.subTest(schedule):
                run_launches(schedule, is_host_waiting=number % 2 == 0)

    def test_launches_are_all_messages_once(self) -> None:
        for schedule in schedules(2):
            for rank in range(schedule.world_size):
                actions, launches = schedule.actions(rank), schedule.launches(rank)
                messages = [place for place, action in enumerate(actions) if action.peer is not None]
                self.assertEqual(sorted(place for place, _ in launches), messages)
                places = [before for _, before in launches]
                self.assertEqual(places, sorted(places))

    def test_another_order_waits_for_itself(self) -> None:
        class Backwards:
            """The launches of rank 0, the last two swapped."""

            def __init__(self, schedule: dflop.Schedule) -> None:
                self._schedule = schedule

            def __getattr__(self, name: str) -> Any:
                return getattr(self._schedule, name)

            def launches(self, rank: int) -> list[tuple[int, int]]:
                launches = self._schedule.launches(rank)
                if rank == 0:
                    launches[0], launches[1] = launches[1], launches[0]
                return launches

        schedule = dflop.Schedule({"llm": {"stages": 2}}, microbatches=3, schedule="gpipe")
        with self.assertRaises(Deadlock):
            run_launches(Backwards(schedule), is_host_waiting=False)  # type: ignore[arg-type]

    def test_the_interpreter_finds_ranks_that_wait_for_each_other(self) -> None:
        with self.assertRaises(Deadlock):
            run_all({0: iter([Wait("a message", lambda: False)])})

    def test_every_rank_runs_its_microbatches_forward_and_backward_once(self) -> None:
        for schedule in schedules():
            for rank in range(schedule.world_size):
                passes = [action for action in schedule.actions(rank) if action.peer is None]
                with self.subTest(schedule, rank=rank):
                    for role in schedule.roles(rank):
                        for stage in role.stages:
                            replicas = len(schedule.stage_ranks(stage))
                            own = {k * replicas + role.replica for k in range(schedule.microbatches)}
                            of_stage = [action for action in passes if action.stage == stage]
                            for kinds in ("forward", "backward backward_input", "backward backward_weight"):
                                found = [own.microbatch for own in of_stage if own.kind in kinds.split()]
                                self.assertEqual(sorted(found), sorted(own))  # type: ignore[type-var]
                            self.assertEqual(of_stage[-1].kind, "reduce_gradients")

    def test_ranks_stages_and_roles_agree(self) -> None:
        for schedule in schedules(1):
            for stage in range(schedule.stages):
                for replica, ranks in enumerate(schedule.stage_ranks(stage)):
                    for tp_rank, rank in enumerate(ranks):
                        roles = [role for role in schedule.roles(rank) if stage in role.stages]
                        found = [(role.replica, role.tp_rank) for role in roles]
                        self.assertEqual(found, [(replica, tp_rank)])

    def test_the_digest_names_the_step(self) -> None:
        modules = {"vision": {"dp": 2}, "llm": {"stages": 2}}
        schedule = dflop.Schedule(modules, microbatches=4)
        same = pickle.loads(pickle.dumps(schedule))
        self.assertEqual((schedule.digest, repr(schedule)), (same.digest, repr(same)))
        others = [
            dflop.Schedule(modules, microbatches=5),
            dflop.Schedule(modules, microbatches=4, schedule="gpipe"),
            dflop.Schedule({**modules, "llm": {"stages": 3}}, microbatches=4),
            dflop.Schedule({**modules, "vision": {"dp": 1}}, microbatches=4),
        ]
        self.assertEqual(len({schedule.digest, *(other.digest for other in others)}), 5)

    def test_what_does_not_run_is_refused(self) -> None:
        llm: dict[str, Any] = {"llm": {}}
        for modules, settings, expected in [
            ({}, {}, "modules"),
            ({"vision": {}}, {}, "modules"),
            ({"text": {}, **llm}, {}, "found `text`"),
            ({"llm": {"pp": 2}}, {}, "pp"),
            ({"llm": {"dp": -1}}, {}, "modules"),
            ({"llm": {"dp": 0}}, {}, "above 0"),
            ({"llm": {"stages": 0}}, {}, "0 stages"),
            ({"llm": {"stages": 10**9}}, {}, "at most"),
            ({"llm": {"dp": 10**9}}, {}, "at most"),
            ({"llm": {"layers": [1, 0]}}, {}, "layers"),
            (llm, {"microbatches": 0}, "microbatches"),
            (llm, {"microbatches": 10**12}, "microbatches"),
            (llm, {"schedule": "2f2b"}, "2f2b"),
            (llm, {"schedule": "interleaved:2"}, "multiple of 2"),
            (llm, {"placement": "beside"}, "beside"),
            ({"vision": {}, "llm": {"stages": 2}}, {"schedule": "interleaved:2"}, "interleaved:2"),
            ({"vision": {}, "llm": {}}, {"placement": "joint", "schedule": "1f1b-ahead:2"}, "joint"),
            ({"vision": {"dp": 2}, "llm": {}}, {"placement": "colocated"}, "ranks"),
            ({"vision": {"dp": 2}, "llm": {"stages": 2}}, {"placement": "joint"}, "joint placement"),
            (
                {"vision": {"layers": [1, 1]}, "llm": {"layers": [1, 1]}},
                {"placement": "joint"},
                "after the LLM",
            ),
        ]:
            with self.subTest(modules, **settings), self.assertRaises(dflop.ConfigError) as caught:
                dflop.Schedule(modules, **{"microbatches": 2, **settings})
            self.assertIn(expected, str(caught.exception))
        schedule = dflop.Schedule(llm, microbatches=1)
        for method in (schedule.actions, schedule.roles, schedule.launches, schedule.stage_ranks):
            with self.assertRaisesRegex(dflop.ConfigError, "expected below 1, found 1"):
                method(1)


class Routes(unittest.TestCase):
    def test_every_row_arrives_once_and_its_gradient_comes_back(self) -> None:
        for seed, schedule in enumerate(schedules()):
            with self.subTest(schedule):
                microbatches = step(schedule, encoders_of(schedule), seed)
                route = dflop.Route(schedule, microbatches)
                ranks = run_rows(schedule, microbatches, route)
                self.assertEqual(len(ranks), schedule.world_size)

    def test_every_medium_is_encoded_by_one_replica(self) -> None:
        for seed, schedule in enumerate(schedules()):
            microbatches = step(schedule, encoders_of(schedule), seed)
            route = dflop.Route(schedule, microbatches)
            media = [medium for own in microbatches for microbatch in own for medium in microbatch.media]
            keys = [routed.medium.key for routed in route.media]
            self.assertCountEqual(keys, [medium.key for medium in media])
            for routed in route.media:
                replica, rounds = divmod(routed.llm_microbatch, schedule.dp_size)[::-1]
                self.assertIn(routed.medium, microbatches[replica][rounds].media)

    def test_replicas_share_a_round_by_predicted_time(self) -> None:
        schedule = dflop.Schedule({"vision": {"dp": 2}, "llm": {"dp": 3}}, microbatches=1)
        media = [dflop.MediumRows("vision", 1, seconds=seconds) for seconds in (5.0, 4.0, 3.0, 3.0, 3.0)]
        shares = [[dflop.MicrobatchRows(9, own)] for own in (media[:2], media[2:], [])]
        loads = [0.0, 0.0]
        for routed in dflop.Route(schedule, shares).media:
            loads[routed.encoder_ranks[0]] += routed.medium.seconds or 0.0
        self.assertEqual(loads, [9.0, 9.0])

    def test_the_digest_names_the_routes(self) -> None:
        schedule = dflop.Schedule({"vision": {"dp": 2}, "llm": {}}, microbatches=1)

        def digest(*rows: int) -> str:
            media = [dflop.MediumRows("vision", count) for count in rows]
            return dflop.Route(schedule, [[dflop.MicrobatchRows(20, media)]]).digest

        self.assertEqual(digest(1, 2, 3), digest(1, 2, 3))
        self.assertNotEqual(digest(1, 2, 3), digest(1, 3, 2))

    def test_what_does_not_fit_the_schedule_is_refused(self) -> None:
        schedule = dflop.Schedule({"vision": {}, "llm": {"dp": 2}}, microbatches=1)
        text, medium = dflop.MicrobatchRows(4), dflop.MediumRows

        def with_media(*media: dflop.MediumRows) -> list[list[dflop.MicrobatchRows]]:
            return [[text], [dflop.MicrobatchRows(4, media)]]

        for microbatches, expected in [
            ([], "found 0 replicas"),
            ([[text], []], "found 0 for replica 1"),
            ([[text], [text, text]], "found 2 for replica 1"),
            (with_media(medium("audio", 1)), "microbatch 0 of replica 1 has medium 0 for audio"),
            (with_media(medium("llm", 1)), "microbatch 0 of replica 1 has medium 0"),
            (with_media(medium("sight", 1)), "found `sight`"),
            (with_media(medium("vision", 5)), "has 4 tokens, its media 5"),
            (with_media(medium("vision", -1)), "whole number"),
            (with_media(medium("vision", 1.5)), "whole number"),  # type: ignore[arg-type]
            (with_media(medium("vision", 1, encoder_rows=-4)), "encoder_rows"),
            (with_media(medium("vision", 1, seconds=float("nan"))), "finite"),
            (with_media(medium("vision", 1, seconds=-1.0)), "at least 0"),
            (with_media(medium("vision", 1, seconds=1.0), medium("vision", 1)), "or for none"),
        ]:
            with self.subTest(expected), self.assertRaises(dflop.ConfigError) as caught:
                dflop.Route(schedule, microbatches)
            self.assertIn(expected, str(caught.exception))
        route = dflop.Route(schedule, [[text], [text]])
        wrong = [dflop.Action("recv", 1, 7, 0, 0, 0), dflop.Action("recv", 1, 0, 0, 9, 0)]
        for action in (schedule.actions(0)[0], *wrong):
            with self.assertRaisesRegex(dflop.ConfigError, "expected a message"):
                route.rows(action)


if __name__ == "__main__":
    unittest.main()
