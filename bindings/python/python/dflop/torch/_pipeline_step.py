"""Passes of a rank in one step: forward and backward passes of its stages between their messages."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dflop._native import Route
from dflop.errors import ConfigError
from dflop.schedule import Action, RoleMicrobatch, RoutedMedium
from dflop.torch._pipeline_layout import LLM, RankLayout
from dflop.torch._pipeline_messages import Links, Spans, StepMessages

Part = tuple[int, int]
Pieces = list[tuple[Spans, torch.Tensor]]


class StepRun:
    """Runs the actions of a rank in a step, over rows that it receives and sends.

    - `stages`: modules by stage
    - `microbatches`: microbatches by module and number
    - `divisor`: number of targets in the global batch
    - `needs`: by stage, whether its output has a gradient
    - `reduce`: starts the sum of a stage's gradients over its replicas
    - `at`: called with each action that runs
    """

    def __init__(
        self,
        links: Links,
        stages: Mapping[int, torch.nn.Module],
        route: Route,
        microbatches: Mapping[str, Mapping[int, RoleMicrobatch]],
        *,
        divisor: int,
        needs: Sequence[bool],
        reduce: Callable[[int], None],
        at: Callable[[Action], None],
    ) -> None:
        self._links, self._stages, self._route = links, stages, route
        self._layout: RankLayout = links.layout
        self._microbatches, self._divisor, self._needs = microbatches, max(divisor, 1), needs
        self._reduce, self._at = reduce, at
        self._encoded: dict[tuple[str, int], list[RoutedMedium]] = defaultdict(list)
        self._read: dict[int, list[RoutedMedium]] = defaultdict(list)
        for routed in route.media:
            self._encoded[routed.medium.module, routed.encoder_microbatch].append(routed)
            self._read[routed.llm_microbatch].append(routed)
        self._inputs: dict[Part, torch.Tensor | None] = {}
        self._outputs: dict[Part, torch.Tensor] = {}
        self._gradients: dict[Part, torch.Tensor] = {}
        self._arrived: dict[tuple[bool, int, int], Pieces] = defaultdict(list)
        self._roots: dict[Part, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._gradient_sends = Counter(
            (action.stage, action.microbatch) for action in links.actions if action.kind == "send_gradient"
        )
        self._losses: list[torch.Tensor] = []
        self._messages = StepMessages(links, self, self._is_sent, at)

    def run(self) -> float:
        """Runs all actions; returns the summed loss of this rank, 0 without the last stage."""
        actions = self._links.actions
        for place, action in enumerate(actions):
            self._messages.launch(place)
            self._at(action)
            part = (action.stage, action.microbatch or 0)
            if action.kind.startswith("recv"):
                taken = self._messages.take(place)
                if taken is not None:
                    self._arrived[action.kind == "recv_gradient", *part].append(taken)
            elif action.kind == "forward":
                self._forward(*part)
            elif action.kind.startswith("backward"):
                self._backward(action.kind, part)
            elif action.kind == "reduce_gradients":
                self._reduce(action.stage)
        self._messages.launch(len(actions))
        self._messages.finish()
        return float(torch.stack(self._losses).sum(dtype=torch.float64)) if self._losses else 0.0

    def spans(self, action: Action) -> Spans:
        """Returns the rows of a message at this end; None for all, which the other end does not know."""
        module = self._layout.modules[action.stage]
        if self._layout.is_encoder_link(action.stage, action.peer_stage or 0):
            is_delivered = action.microbatch in self._microbatches[module]
            return None if is_delivered else []
        return self._route.rows(action)

    def to_send(self, action: Action, spans: Spans) -> torch.Tensor:
        """Returns the rows to send, and frees a gradient that nothing else needs."""
        part = (action.stage, action.microbatch or 0)
        if action.kind == "send":
            return _chosen(self._outputs[part].detach(), spans)
        rows = _chosen(self._gradients[part], spans)
        self._gradient_sends[part] -= 1
        if self._gradient_sends[part] == 0 and not self._has_local_source(action.stage):
            del self._gradients[part]
        return rows

    def output(self, action: Action) -> torch.Tensor | None:
        """Returns the output that a gradient is received for."""
        return self._outputs.get((action.stage, action.microbatch or 0))

    def _is_sent(self, action: Action) -> bool:
        """Returns whether a message is sent: a gradient only to a stage that needs it."""
        if not action.kind.endswith("gradient"):
            return True
        return self._needs[action.stage if action.kind == "recv_gradient" else action.peer_stage or 0]

    def _has_local_source(self, stage: int) -> bool:
        return any(source in self._stages for source in self._layout.sources(stage))

    def _forward(self, stage: int, number: int) -> None:
        microbatch = self._microbatches[self._layout.modules[stage]].get(number)
        if microbatch is None:
            return
        rows = self._input(stage, number)
        if rows is not None and any(self._needs[source] for source in self._layout.sources(stage)):
            rows.requires_grad_()
        output = self._stages[stage](rows, microbatch)
        self._check(stage, number, output, microbatch)
        if stage + 1 == len(self._layout.modules):
            self._losses.append(output.detach())
        self._inputs[stage, number], self._outputs[stage, number] = rows, output

    def _input(self, stage: int, number: int) -> torch.Tensor | None:
        """Returns the rows that a stage reads; None for the first stage of an encoder, or without media."""
        pieces = self._arrived.pop((False, stage, number), [])
        if stage == self._layout.first_llm:
            for routed in self._read[number]:
                encoder = self._layout.last_stage(routed.medium.module)
                local = self._outputs.get((encoder, routed.encoder_microbatch))
                if local is not None and self._layout.rank in routed.encoder_ranks and routed.medium.rows:
                    rows = local.detach()[routed.encoder_row : routed.encoder_row + routed.medium.rows]
                    pieces.append(([range(routed.llm_row, routed.llm_row + routed.medium.rows)], rows))
            count = sum(routed.medium.rows for routed in self._read[number])
            return _assembled(pieces, count, f"media rows of microbatch {number}") if count else None
        if self._layout.is_first(stage):
            return None
        if (stage - 1, number) in self._outputs:
            pieces.append((None, self._outputs[stage - 1, number].detach()))
        return _assembled(pieces, None, f"rows of microbatch {number}")

    def _check(self, stage: int, number: int, output: Any, microbatch: RoleMicrobatch) -> None:
        """Refuses an output that is not what the messages have."""
        module = self._layout.modules[stage]
        name = f"stage {self._layout.number(stage)} of `{module}`"
        if not isinstance(output, torch.Tensor):
            raise TypeError(f"{name} returned {type(output).__name__}, expected a tensor")
        if stage + 1 == len(self._layout.modules):
            if output.ndim:
                raise ValueError(f"{name} returned shape {list(output.shape)}, expected the summed loss")
        elif module == LLM or self._layout.is_last(stage):
            media = self._encoded[module, number]
            rows = microbatch.tokens if module == LLM else sum(own.medium.rows for own in media)
            if output.ndim == 0 or len(output) != rows:
                raise ValueError(f"{name} returned shape {list(output.shape)}, expected {rows} rows")
        if self._needs[stage] and not output.requires_grad:
            raise ValueError(f"the output of {name} has no gradient, but the stage or its inputs are trained")

    def _backward(self, kind: str, part: Part) -> None:
        if part not in self._outputs:
            return
        if not self._needs[part[0]]:
            del self._outputs[part], self._inputs[part]
            return
        if kind == "backward_weight":
            root, gradient = self._roots.pop(part)
            weights = [one for one in self._stages[part[0]].parameters() if one.requires_grad]
            if weights:
                torch.autograd.backward(root, gradient, inputs=weights)
            self._outputs.pop(part)
            return
        root, gradient = self._root(part)
        rows = self._inputs.pop(part)
        has_gradient = rows is not None and rows.requires_grad
        if kind == "backward":
            torch.autograd.backward(root, gradient)
            self._outputs.pop(part)
        else:
            if has_gradient:
                torch.autograd.backward(root, gradient, inputs=[rows], retain_graph=True)
            self._roots[part] = root, gradient
        if rows is not None and has_gradient:
            self._gradients[part] = torch.zeros_like(rows) if rows.grad is None else rows.grad

    def _root(self, part: Part) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns what the backward pass starts from: the loss, or the output and its gradient."""
        stage, number = part
        output = self._outputs[part]
        if stage + 1 == len(self._layout.modules):
            return output / self._divisor, None
        pieces = self._arrived.pop((True, stage, number), [])
        module = self._layout.modules[stage]
        if not self._layout.is_last(stage):
            if (stage + 1, number) in self._gradients:
                pieces.append((None, self._gradients.pop((stage + 1, number))))
        else:
            for routed in self._encoded[module, number]:
                read = self._gradients.get((self._layout.first_llm, routed.llm_microbatch))
                if read is not None and self._layout.rank in routed.llm_ranks and routed.medium.rows:
                    rows = read[routed.llm_row : routed.llm_row + routed.medium.rows]
                    place = range(routed.encoder_row, routed.encoder_row + routed.medium.rows)
                    pieces.append(([place], rows))
        if not len(output):
            return output, torch.zeros_like(output)
        return output, _assembled(pieces, len(output), f"gradient rows of microbatch {number}")


def move(microbatch: RoleMicrobatch, device: torch.device) -> RoleMicrobatch:
    """Moves the tensors of a microbatch to a device, NumPy arrays too."""

    def moved(value: Any) -> Any:
        return torch.as_tensor(value).to(device, non_blocking=True) if hasattr(value, "shape") else value

    for name, value in microbatch.items():
        microbatch[name] = moved(value)
    microbatch.cu_seqlens, microbatch.media_rows = moved(microbatch.cu_seqlens), moved(microbatch.media_rows)
    return microbatch


def _chosen(rows: torch.Tensor, spans: Spans) -> torch.Tensor:
    if spans is None:
        return rows
    parts = [rows[span.start : span.stop] for span in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _assembled(pieces: Pieces, count: int | None, name: str) -> torch.Tensor:
    """Joins pieces to rows that need nothing else.

    - `count`: number of rows; None for those of the only piece
    """
    found = sum(len(rows) for _, rows in pieces)
    if not pieces or found != (found if count is None else count):
        expected = "some" if count is None else count
        raise ConfigError(f"{found} {name} have arrived, expected {expected}", "config")
    spans, rows = pieces[0]
    if len(pieces) == 1 and (spans is None or list(spans) == [range(len(rows))]):
        return rows
    joined = rows.new_empty((found, *rows.shape[1:]))
    for spans, rows in pieces:
        start = 0
        for span in spans or [range(found)]:
            joined[span.start : span.stop] = rows[start : start + len(span)]
            start += len(span)
    return joined
