"""Runs the actions of `dflop.Schedule` on all ranks in one thread, with rows as lists of labels.

A rank goes on until it waits. If no rank can go on before all are done, the ranks wait for each other.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import dflop

GRADIENT = {"recv": False, "send": False, "recv_gradient": True, "send_gradient": True}
Rows = list[Any]


class Deadlock(Exception):
    """Ranks wait for each other; names the action that each of them waits in."""


def message(rank: int, action: dflop.Action) -> tuple[Any, ...]:
    """Names a message in the same way at both ends: sender and its part, receiver and its part, flow."""
    own, peer = (
        (rank, action.stage, action.microbatch),
        (action.peer, action.peer_stage, action.peer_microbatch),
    )
    ends = (own, peer) if action.kind.startswith("send") else (peer, own)
    return (*ends, GRADIENT[action.kind])


def run_all(ranks: dict[int, Iterator[Any]]) -> None:
    """Runs generators that yield what they wait for, until all have ended."""
    waiting: dict[int, Any] = dict.fromkeys(ranks)
    while waiting:
        moved = False
        for rank in list(waiting):
            wait = waiting[rank]
            while wait is None or wait.is_over():
                moved = True
                wait = next(ranks[rank], False)
                if wait is False:
                    break
            if wait is False:
                del waiting[rank]
            else:
                waiting[rank] = wait
        if not moved:
            raise Deadlock({rank: str(wait) for rank, wait in waiting.items()})


class Wait:
    """A condition that a rank waits for."""

    def __init__(self, name: object, is_over: Any) -> None:
        self.name, self.is_over = name, is_over

    def __str__(self) -> str:
        return str(self.name)


class Sums:
    """Sums of gradients over replicas: a sum ends when all ranks of its group have started it."""

    def __init__(self, schedule: dflop.Schedule) -> None:
        self._groups: dict[tuple[int, int], frozenset[int]] = {}
        for stage in range(schedule.stages):
            for group in zip(*schedule.stage_ranks(stage), strict=True):
                self._groups |= {(stage, rank): frozenset(group) for rank in group}
        self._started: set[tuple[int, int]] = set()

    def start(self, rank: int, stage: int) -> Wait:
        assert (stage, rank) not in self._started, f"stage {stage} is summed twice on rank {rank}"
        self._started.add((stage, rank))
        group = self._groups[stage, rank]
        return Wait(f"sum of stage {stage}", lambda: all((stage, other) in self._started for other in group))


def run_in_order(schedule: dflop.Schedule) -> list[str]:
    """Runs every rank's actions in order: a receive waits for its send, a sum for all ranks of its group.

    Returns the messages that were sent and not received.
    """
    sent: set[Any] = set()
    sums = Sums(schedule)

    def rank_run(rank: int) -> Iterator[Wait]:
        for action in schedule.actions(rank):
            if action.kind == "reduce_gradients":
                yield sums.start(rank, action.stage)
            elif action.kind.startswith("send"):
                assert message(rank, action) not in sent, action
                sent.add(message(rank, action))
            elif action.kind.startswith("recv"):
                own = message(rank, action)
                yield Wait(action, lambda own=own: own in sent)
                sent.remove(own)

    run_all({rank: rank_run(rank) for rank in range(schedule.world_size)})
    return [str(left) for left in sent]


def run_launches(schedule: dflop.Schedule, *, is_host_waiting: bool) -> None:
    """Runs messages in launch order, all messages of a rank in one queue, where a send ends with its receive.

    - ``is_host_waiting``: whether a rank goes on only after a message that it has launched has ended.
    """
    at: dict[int, Any] = {}
    done: set[tuple[int, Any]] = set()
    sums = Sums(schedule)

    def queue_run(rank: int, computed: list[int], queued: list[int]) -> Iterator[Wait]:
        actions = schedule.actions(rank)
        for number, (place, before) in enumerate(schedule.launches(rank)):
            yield Wait(f"launch of {actions[place]}", lambda before=before: computed[0] >= before)
            own, peer = message(rank, actions[place]), actions[place].peer
            at[rank] = own
            yield Wait(actions[place], lambda own=own, peer=peer: at.get(peer) == own or (peer, own) in done)
            done.add((rank, own))
            if (peer, own) not in done:
                yield Wait(actions[place], lambda own=own, peer=peer: (peer, own) in done)
            queued[0] = number + 1

    def compute_run(rank: int, computed: list[int], queued: list[int]) -> Iterator[Wait]:
        launches, started = schedule.launches(rank), []
        for number, action in enumerate(schedule.actions(rank)):
            computed[0] = number
            if is_host_waiting:
                count = sum(before <= number for _, before in launches)
                yield Wait(action, lambda count=count: queued[0] >= count)
            if action.kind.startswith("recv"):
                own = (rank, message(rank, action))
                yield Wait(action, lambda own=own: own in done)
            elif action.kind == "reduce_gradients":
                started.append(sums.start(rank, action.stage))
        computed[0] = len(schedule.actions(rank))
        yield from started

    runs: dict[int, Iterator[Wait]] = {}
    for rank in range(schedule.world_size):
        state = ([0], [0])
        runs[2 * rank] = compute_run(rank, *state)
        runs[2 * rank + 1] = queue_run(rank, *state)
    run_all(runs)


def module(schedule: dflop.Schedule, stage: int) -> str:
    """Returns the module of a stage."""
    roles = schedule.roles(schedule.stage_ranks(stage)[0][0])
    return next(role.module for role in roles if stage in role.stages)


class Rank:
    """Runs the passes of one rank over labels, and checks that each has its inputs."""

    def __init__(
        self, rank: int, schedule: dflop.Schedule, route: dflop.Route, rows: list[int], sent: dict[Any, Rows]
    ) -> None:
        self.rank, self.schedule, self.route, self.rows, self.sent = rank, schedule, route, rows, sent
        self.media = route.media
        self.stages = [module(schedule, stage) for stage in range(schedule.stages)]
        self.outputs: dict[tuple[int, int], Rows] = {}
        self.gradients: dict[tuple[int, int], Rows] = {}
        self.arrived: dict[Any, dict[int, Any]] = defaultdict(dict)

    def run(self) -> Iterator[Wait]:
        for action in self.schedule.actions(self.rank):
            part = (action.stage, action.microbatch)
            if action.kind.startswith("send"):
                is_gradient = GRADIENT[action.kind]
                rows = self.gradients[part] if is_gradient else self.outputs[part]
                taken = [rows[row] for span in self.route.rows(action) for row in span]
                self.sent[message(self.rank, action)] = taken
            elif action.kind.startswith("recv"):
                own = message(self.rank, action)
                yield Wait(action, lambda own=own: own in self.sent)
                self.put((GRADIENT[action.kind], *part), self.route.rows(action), self.sent.pop(own))
            elif action.kind == "forward":
                self.forward(*part)
            elif action.kind in ("backward", "backward_input"):
                self.backward(*part)

    def put(self, place: Any, spans: list[range], rows: Rows) -> None:
        """Puts rows into places that are free."""
        assert sum(len(span) for span in spans) == len(rows), place
        for row, value in zip((row for span in spans for row in span), rows, strict=True):
            assert row not in self.arrived[place], f"row {row} of {place} arrives twice"
            self.arrived[place][row] = value

    def take(self, place: Any) -> Rows:
        found = self.arrived.pop(place, {})
        assert sorted(found) == list(range(len(found))), f"rows of {place} are missing"
        return [found[row] for row in range(len(found))]

    def module(self, stage: int) -> str:
        return self.stages[stage]

    def is_first(self, stage: int) -> bool:
        return stage == 0 or self.module(stage) != self.module(stage - 1)

    def is_last(self, stage: int) -> bool:
        return stage + 1 == self.schedule.stages or self.module(stage) != self.module(stage + 1)

    def encoded(self, stage: int, microbatch: int) -> list[dflop.RoutedMedium]:
        found = [
            routed
            for routed in self.media
            if routed.medium.module == self.module(stage) and routed.encoder_microbatch == microbatch
        ]
        return sorted(found, key=lambda routed: routed.encoder_row)

    def read(self, microbatch: int) -> list[dflop.RoutedMedium]:
        found = [routed for routed in self.media if routed.llm_microbatch == microbatch]
        return sorted(found, key=lambda routed: routed.llm_row)

    def forward(self, stage: int, microbatch: int) -> None:
        if self.module(stage) == "llm":
            if self.is_first(stage):
                for routed in self.read(microbatch):
                    if self.rank in routed.encoder_ranks:
                        encoder = self.last_stage(routed.medium.module)
                        rows = self.outputs[encoder, routed.encoder_microbatch][routed.encoder_row :]
                        span = range(routed.llm_row, routed.llm_row + routed.medium.rows)
                        self.put((False, stage, microbatch), [span], rows[: routed.medium.rows])
            elif (stage - 1, microbatch) in self.outputs:
                rows = self.outputs[stage - 1, microbatch]
                self.put((False, stage, microbatch), [range(len(rows))], rows)
            rows = self.take((False, stage, microbatch))
            if self.is_first(stage):
                expected = [
                    (routed.medium.key, row)
                    for routed in self.read(microbatch)
                    for row in range(routed.medium.rows)
                ]
                assert rows == expected, f"media rows of microbatch {microbatch}: {rows}, expected {expected}"
                rows = [("llm", microbatch, row) for row in range(self.rows[microbatch])]
        else:
            media = self.encoded(stage, microbatch)
            if not self.is_first(stage):
                if (stage - 1, microbatch) in self.outputs:
                    rows = self.outputs[stage - 1, microbatch]
                    self.put((False, stage, microbatch), [range(len(rows))], rows)
                assert self.take((False, stage, microbatch)) == patches(media)
            is_last = self.is_last(stage)
            rows = [(routed.medium.key, row) for routed in media for row in range(routed.medium.rows)]
            rows = rows if is_last else patches(media)
        self.outputs[stage, microbatch] = rows

    def backward(self, stage: int, microbatch: int) -> None:
        """Takes the gradient of the output: of each row its label; passes on that of the input."""
        if stage + 1 < self.schedule.stages:
            if self.module(stage) == "llm" or not self.is_last(stage):
                if (stage + 1, microbatch) in self.gradients:
                    rows = self.gradients[stage + 1, microbatch]
                    self.put((True, stage, microbatch), [range(len(rows))], rows)
            else:
                for routed in self.encoded(stage, microbatch):
                    if self.rank in routed.llm_ranks:
                        rows = self.gradients[self.first_llm_stage(), routed.llm_microbatch][routed.llm_row :]
                        span = range(routed.encoder_row, routed.encoder_row + routed.medium.rows)
                        self.put((True, stage, microbatch), [span], rows[: routed.medium.rows])
            rows = self.take((True, stage, microbatch))
            assert rows == self.outputs[stage, microbatch], (
                f"gradient of {microbatch} in stage {stage}: {rows}"
            )
        if self.module(stage) == "llm" and self.is_first(stage):
            media = self.read(microbatch)
            rows = [(routed.medium.key, row) for routed in media for row in range(routed.medium.rows)]
        elif self.module(stage) == "llm":
            rows = [("llm", microbatch, row) for row in range(self.rows[microbatch])]
        else:
            rows = patches(self.encoded(stage, microbatch))
        self.gradients[stage, microbatch] = rows

    def last_stage(self, module: str) -> int:
        return max(stage for stage, own in enumerate(self.stages) if own == module)

    def first_llm_stage(self) -> int:
        return self.stages.index("llm")


def patches(media: list[dflop.RoutedMedium]) -> Rows:
    """Rows between two stages of an encoder."""
    return [(own.medium.key, "patch", row) for own in media for row in range(own.medium.encoder_rows or 0)]


def run_rows(
    schedule: dflop.Schedule, microbatches: list[list[dflop.MicrobatchRows]], route: dflop.Route
) -> list[Rank]:
    """Runs a step over labeled rows; checks that every row arrives where it belongs, once, and comes back."""
    sent: dict[Any, Rows] = {}
    rounds, replicas = range(schedule.microbatches), range(schedule.dp_size)
    rows = [microbatches[replica][number].rows for number in rounds for replica in replicas]
    ranks = [Rank(rank, schedule, route, rows, sent) for rank in range(schedule.world_size)]
    run_all({rank.rank: rank.run() for rank in ranks})
    assert not sent, f"messages that nobody received: {list(sent)}"
    for rank in ranks:
        assert not any(rank.arrived.values()), f"rows that nobody read on rank {rank.rank}"
    return ranks
