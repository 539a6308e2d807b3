"""Runs one module forward and backward over sequences, and restores its state."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from dflop.torch._clock import Clock, Mark
from dflop.torch._inputs import MakeInputs
from dflop.torch._sequences import Sequences
from dflop.torch._tensors import tensors_of

Lengths = tuple[int, ...]
"""Tokens of every sequence or item that runs together."""


@dataclass(frozen=True)
class Run:
    """Times of one forward and backward pass.

    - `forward`, `backward`: microseconds; backward is 0 if nothing needs a gradient
    - `bytes`: rise of the allocator's peak during the forward pass; `None` off CUDA
    - `host`: microseconds until the host had queued both passes; `None` where nothing is queued
    """

    forward: float
    backward: float
    bytes: int | None
    host: float | None = None

    @property
    def total(self) -> float:
        return self.forward + self.backward


@dataclass
class Subject:
    """A module, and the settings to run it with.

    - `layers`: number of transformer layers
    - `cut`: cuts the module to a number of layers temporarily
    - `attention_layers`: returns how many of its layers have attention over whole sequences, if it is cut to
      a number
    - `agree`: converts times of this process to the times that all processes of its group use
    - `packs`: what becomes of the boundaries in packed rows, see `dflop.torch._metadata.packs_of`
    """

    name: str
    module: torch.nn.Module
    sequences: Sequences
    make_inputs: MakeInputs
    layers: int
    cut: Callable[[int], AbstractContextManager[None]]
    attention_layers: Callable[[int], int]
    clock: Clock
    device: torch.device
    autocast: torch.dtype | None
    loss: Callable[[Any], torch.Tensor] | None
    agree: Callable[[list[float]], list[float]]
    packs: str | None = None

    def runs(self, shapes: Sequence[Lengths]) -> list[Run]:
        """Runs every shape once, one after another, and waits for the last.

        Raises `RuntimeError` with module and shape if one does not fit into memory.
        """
        marked, hosts = [], []
        for lengths in shapes:
            start = time.perf_counter()
            marked.append(self._pass(lengths))
            hosts.append(1e6 * (time.perf_counter() - start) if self.clock.is_queued else None)
        self.clock.settle()
        times: list[float] = []
        for (begin, middle, turn, end), _ in marked:
            times.append(self.clock.microseconds(begin, middle))
            times.append(self.clock.microseconds(turn, end) if end is not None else 0.0)
        times = self.agree(times)
        return [
            Run(forward, backward, used, host)
            for forward, backward, (_, used), host in zip(times[::2], times[1::2], marked, hosts, strict=True)
        ]

    def _pass(self, lengths: Lengths) -> tuple[tuple[Mark, Mark, Mark, Mark], int | None]:
        try:
            return self._forward_backward(lengths)
        except torch.OutOfMemoryError as error:
            shape = f"{len(lengths)} sequences with {sum(lengths)} tokens in all"
            message = f"{self.name}: {shape} do not fit into the memory of {self.device}; lower tokens_max"
            raise RuntimeError(message) from error

    def _forward_backward(self, lengths: Lengths) -> tuple[tuple[Mark, Mark, Mark, Mark], int | None]:
        inputs = self.make_inputs(list(lengths))
        before = self._reset_peak()
        start = self.clock.mark()
        with self.casting():
            output = call_module(self.module, inputs)
            target = self.loss(output) if self.loss else differentiable(output)
        middle = self.clock.mark()
        used = None if before is None else torch.cuda.max_memory_allocated(self.device) - before
        if target is None or not target.requires_grad:
            return (start, middle, None, None), used
        gradient = torch.ones_like(target)
        turn = self.clock.mark()
        torch.autograd.backward(target, gradient)
        return (start, middle, turn, self.clock.mark()), used

    def _reset_peak(self) -> int | None:
        if self.device.type != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats(self.device)
        return int(torch.cuda.memory_allocated(self.device))

    def casting(self) -> AbstractContextManager[Any]:
        """Returns the context that passes run in."""
        return torch.autocast(self.device.type, self.autocast) if self.autocast else nullcontext()


def differentiable(output: Any) -> torch.Tensor | None:
    """Returns the tensor that the backward pass starts from: a `loss` if there is one, else the first
    floating-point tensor, preferably one that needs a gradient."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    tensors = [tensor for tensor in tensors_of(output) if tensor.is_floating_point()]
    wanting = [tensor for tensor in tensors if tensor.requires_grad]
    return next(iter(wanting or tensors), None)


@contextmanager
def borrowed(module: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Puts a module into training mode and restores modes, gradients, buffers and random states."""
    modes = {child: child.training for child in module.modules()}
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    module.train()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
            yield
    finally:
        for child, mode in modes.items():
            child.training = mode
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, former in buffers:
                buffer.copy_(former)


def call_module(module: torch.nn.Module, inputs: Any) -> Any:
    """Calls a module with the inputs that a `MakeInputs` returned."""
    if isinstance(inputs, Mapping):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, tuple) else module(inputs)
