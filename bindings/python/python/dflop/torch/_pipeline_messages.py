"""Messages of a rank in a step, launched in the order of the schedule.

Both ends know the rows from the route. Row shape and type are sent once per link, on the host; between stages
of one encoder the number of rows too, with every message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from dflop.errors import ConfigError
from dflop.schedule import Action
from dflop.torch._pipeline_layout import RankLayout

# Receives that wait for their rows before the actions that need them.
RECEIVES_AHEAD = 4
# Sends whose rows are kept before the oldest has to end.
SENDS_AHEAD = 8
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DIMENSIONS = 6
TAGS = 1 << 31

Spans = Sequence[range] | None
"""Rows of a message at one end; None for all of them."""


class Rows(Protocol):
    """Rows of a rank that messages have."""

    def spans(self, action: Action) -> Spans:
        """Returns the rows of a message at this end; none if it is not sent."""

    def to_send(self, action: Action, spans: Spans) -> torch.Tensor:
        """Returns the rows to send."""

    def output(self, action: Action) -> torch.Tensor | None:
        """Returns the output that a gradient is received for."""


class Links:
    """Row shapes and types by link, kept for all steps; launches of a rank."""

    def __init__(
        self, layout: RankLayout, group: dist.ProcessGroup, host: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.layout, self.group, self.host, self.device = layout, group, host, device
        self.actions = layout.schedule.actions(layout.rank)
        self.launches = layout.schedule.launches(layout.rank)
        self.formats: dict[tuple[str, int, int, int], tuple[torch.dtype, tuple[int, ...]]] = {}
        replicas = max(len(layout.schedule.stage_ranks(stage)) for stage in range(layout.schedule.stages))
        self._numbers = layout.schedule.microbatches * replicas
        self._announced: set[tuple[str, int, int, int]] = set()

    def tag(self, action: Action) -> int:
        """Returns a number that both ends of a message compute."""
        own = action.stage * self._numbers + (action.microbatch or 0)
        peer = (action.peer_stage or 0) * self._numbers + (action.peer_microbatch or 0)
        ends = (own, peer) if action.kind.startswith("send") else (peer, own)
        flow = int(action.kind.endswith("gradient"))
        return (2 * (ends[0] * self._numbers * self.layout.schedule.stages + ends[1]) + flow) % TAGS

    def announce(self, action: Action, rows: torch.Tensor, is_counted: bool) -> dist.Work | None:
        """Sends shape and type of rows, if the receiver does not know them."""
        link = self._link(action)
        found = (rows.dtype, tuple(rows.shape[1:]))
        known = self.formats.setdefault(link, found)
        if known != found:
            raise ConfigError(
                f"the rows of stage {action.stage} are {found[0]} of shape {list(found[1])}, in an earlier "
                f"message {known[0]} of shape {list(known[1])}",
                "config",
            )
        if link in self._announced and not is_counted:
            return None
        if rows.dtype not in DTYPES or len(found[1]) > DIMENSIONS:
            raise ConfigError(f"rows cannot be {rows.dtype} of {rows.ndim} dimensions", "config")
        self._announced.add(link)
        header = torch.zeros(3 + DIMENSIONS, dtype=torch.int64)
        numbers = [len(rows), DTYPES.index(rows.dtype), len(found[1]), *found[1]]
        header[: len(numbers)] = torch.tensor(numbers)
        return dist.isend(header, action.peer, group=self.host, tag=self.tag(action))

    def buffer(self, action: Action, count: int | None) -> torch.Tensor:
        """Creates the buffer of a message with rows of an output; waits for their shape if it is not known.

        - `count`: number of rows; None if the sender announces it
        """
        link = self._link(action)
        if link not in self.formats or count is None:
            header = torch.zeros(3 + DIMENSIONS, dtype=torch.int64)
            dist.recv(header, action.peer, group=self.host, tag=self.tag(action))
            numbers = header.tolist()
            self.formats[link] = (DTYPES[numbers[1]], tuple(numbers[3 : 3 + numbers[2]]))
            count = numbers[0] if count is None else count
        dtype, shape = self.formats[link]
        return torch.empty(count, *shape, dtype=dtype, device=self.device)

    def is_known(self, action: Action) -> bool:
        """Returns whether the buffer of a message can be created without waiting."""
        is_counted = self.layout.is_encoder_link(action.stage, action.peer_stage or 0)
        return self._link(action) in self.formats and not is_counted

    @staticmethod
    def _link(action: Action) -> tuple[str, int, int, int]:
        return (action.kind, action.stage, action.peer or 0, action.peer_stage or 0)


class StepMessages:
    """Messages of a rank in one step.

    - `is_sent`: whether a message is sent at all; the same at both ends
    - `at`: called with the action of each message that is launched
    """

    def __init__(
        self, links: Links, rows: Rows, is_sent: Callable[[Action], bool], at: Callable[[Action], None]
    ) -> None:
        self._links, self._rows, self._is_sent, self._at = links, rows, is_sent, at
        self._next = 0
        self._received: dict[int, tuple[Spans, torch.Tensor, dist.Work]] = {}
        self._sends: deque[tuple[torch.Tensor | None, dist.Work]] = deque()

    def launch(self, position: int) -> None:
        """Launches the messages that an action needs, and receives behind them."""
        launches, actions = self._links.launches, self._links.actions
        while self._next < len(launches):
            place, before = launches[self._next]
            if before > position and not self._is_early(actions[place]):
                return
            self._next += 1
            self._at(actions[place])
            if actions[place].kind.startswith("send"):
                self._send(actions[place])
            else:
                self._receive(place, actions[place])

    def take(self, place: int) -> tuple[Spans, torch.Tensor] | None:
        """Waits for a message; returns its rows and their places, or None if it is not sent."""
        if place not in self._received:
            return None
        spans, buffer, work = self._received.pop(place)
        work.wait()
        return spans, buffer

    def finish(self) -> None:
        """Waits for all sends."""
        while self._sends:
            self._sends.popleft()[1].wait()

    def _is_early(self, action: Action) -> bool:
        if len(self._received) >= RECEIVES_AHEAD:
            return False
        if action.kind == "recv_gradient":
            return not self._is_sent(action) or self._rows.output(action) is not None
        return action.kind == "recv" and self._links.is_known(action)

    def _send(self, action: Action) -> None:
        spans = self._rows.spans(action)
        if spans == [] or not self._is_sent(action):
            return
        rows = self._rows.to_send(action, spans).contiguous()
        if action.kind == "send":
            announced = self._links.announce(action, rows, is_counted=spans is None)
            if announced is not None:
                self._sends.append((None, announced))
        work = dist.isend(rows, action.peer, group=self._links.group, tag=self._links.tag(action))
        self._sends.append((rows, work))
        while len(self._sends) > SENDS_AHEAD:
            self._sends.popleft()[1].wait()

    def _receive(self, place: int, action: Action) -> None:
        spans = self._rows.spans(action)
        if spans == [] or not self._is_sent(action):
            return
        count = None if spans is None else sum(map(len, spans))
        if action.kind == "recv_gradient":
            output = self._rows.output(action)
            if output is None:
                raise RuntimeError("a gradient is received before the output is computed")
            buffer = output.new_empty((len(output) if count is None else count, *output.shape[1:]))
        else:
            buffer = self._links.buffer(action, count)
        work = dist.irecv(buffer, action.peer, group=self._links.group, tag=self._links.tag(action))
        self._received[place] = (spans, buffer, work)
