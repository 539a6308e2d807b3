"""Counts the FLOPs of a run on the meta device, forward and backward, and how they divide over modules."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode

from dflop._description.shape_mode import shapes_only


@dataclass
class Flops:
    """FLOPs of a pass forward and backward."""

    forward: int = 0
    backward: int = 0


@dataclass
class Counted:
    """FLOPs of a run.

    Attributes:
        total: of everything.
        modules: of each watched module, by its number.
        shapes: shape of the hidden states that each watched module received, run by run.
        output: what the run returned.
    """

    total: Flops
    modules: dict[int, Flops] = field(default_factory=lambda: defaultdict(Flops))
    shapes: dict[int, list[tuple[int, ...]]] = field(default_factory=lambda: defaultdict(list))
    output: Any = None


def tensors(value: Any) -> list[torch.Tensor]:
    """Returns the floating-point tensors in nested outputs or arguments."""
    found = [leaf for leaf in tree_iter(value) if isinstance(leaf, torch.Tensor)]
    return [tensor for tensor in found if tensor.is_floating_point()]


def is_states(value: Any) -> bool:
    """Whether an argument is hidden states: a tensor that depends on weights."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.is_meta


def count(run: Callable[[], Any], watched: Sequence[torch.nn.Module], parameters: Any) -> Counted:
    """Counts a forward pass and the backward pass from the sum of its outputs.

    Args:
        run: runs a part of the model and returns the outputs that the backward pass begins at.
        watched: modules whose FLOPs are counted separately.
        parameters: parameters, whose gradients are dropped afterwards.
    """
    counted = Counted(Flops())
    with shapes_only(), torch.enable_grad():
        with FlopCounterMode(display=False) as forward, contextlib.ExitStack() as hooks:
            marks = _Marks(counted, forward.get_total_flops)
            for number, module in enumerate(watched):
                marks.attach(number, module, hooks)
            counted.output = run()
        counted.total.forward = forward.get_total_flops()
        outputs = [tensor for tensor in tensors(counted.output) if tensor.requires_grad]
        with FlopCounterMode(display=False) as backward:
            marks.backward_total = backward.get_total_flops
            if outputs:
                torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])
        counted.total.backward = backward.get_total_flops()
        marks.end()
    for parameter in parameters:
        parameter.grad = None
    return counted


def forward_flops(run: Callable[[], Any], groups: Sequence[Sequence[torch.nn.Module]]) -> list[int]:
    """Counts a forward pass in groups of modules."""
    flops, counter = [0] * len(groups), FlopCounterMode(display=False)
    with shapes_only(), torch.enable_grad(), counter, contextlib.ExitStack() as hooks:
        for at, module in ((at, module) for at, group in enumerate(groups) for module in group):

            def enter(_: Any, __: Any, at: int = at) -> None:
                flops[at] -= counter.get_total_flops()

            def leave(_: Any, __: Any, ___: Any, at: int = at) -> None:
                flops[at] += counter.get_total_flops()

            hooks.callback(module.register_forward_pre_hook(enter).remove)
            hooks.callback(module.register_forward_hook(leave).remove)
        run()
    return flops


class _Marks:
    """Reads the counter where the forward pass and the backward pass enter and leave modules."""

    def __init__(self, counted: Counted, forward_total: Callable[[], int]) -> None:
        self.counted, self.forward_total = counted, forward_total
        self.backward_total: Callable[[], int] = lambda: 0
        self._entered: dict[int, int] = {}
        # Passes of modules whose input needs no gradient: their backward pass ends with the whole.
        self._first: list[tuple[int, dict[str, int]]] = []
        self._passes: list[tuple[int, dict[str, int]]] = []

    def attach(self, number: int, module: torch.nn.Module, hooks: contextlib.ExitStack) -> None:
        open_passes: list[dict[str, int]] = []

        def before(_: Any, args: Any, kwargs: Any) -> Any:
            self._entered[number] = self.forward_total()
            one: dict[str, int] = {}
            open_passes.append(one)
            named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
            states = [name for name, value in named.items() if is_states(value)]
            if states:
                self.counted.shapes[number].append(tuple(named[states[0]].shape))
            if not any(named[name].requires_grad for name in states):
                self._first.append((number, one))
                return None
            self._passes.append((number, one))
            for name in states:
                if named[name].requires_grad:
                    # A tensor of this module alone: the gradient is complete when the module has ended its
                    # part of the backward pass.
                    named[name] = named[name].view_as(named[name])
                    named[name].register_hook(lambda _: self._leave(one))
            return tuple(named[at] for at in range(len(args))), {key: named[key] for key in kwargs}

        def after(_: Any, args: Any, output: Any) -> None:
            self.counted.modules[number].forward += self.forward_total() - self._entered[number]
            one = open_passes.pop()
            # The backward pass begins at any of the outputs, such as those of the last medium.
            for tensor in tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: self._enter(one))

        for handle in (
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after),
        ):
            hooks.callback(handle.remove)

    def end(self) -> None:
        """Adds the backward passes up; those of modules whose input needs no gradient end with the whole."""
        for _, one in self._first:
            self._leave(one)
        for number, one in (*self._first, *self._passes):
            if "start" in one:
                self.counted.modules[number].backward += one.get("end", one["start"]) - one["start"]

    def _enter(self, one: dict[str, int]) -> None:
        one.setdefault("start", self.backward_total())

    def _leave(self, one: dict[str, int]) -> None:
        one["end"] = self.backward_total()


@contextlib.contextmanager
def executed(model: torch.nn.Module) -> Iterator[dict[str, int]]:
    """Collects the modules that run, by path, with the width of their output, in order of their start."""
    names = {id(module): path for path, module in model.named_modules()}
    found: dict[str, int] = {}

    def before(module: torch.nn.Module, _: Any) -> None:
        if id(module) in names:
            found.setdefault(names[id(module)], 0)

    def after(module: torch.nn.Module, _: Any, output: Any) -> None:
        states = tensors(output)
        if id(module) in names and states and states[0].dim():
            found[names[id(module)]] = int(states[0].shape[-1])

    register = torch.nn.modules.module
    handles = [
        register.register_module_forward_pre_hook(before),
        register.register_module_forward_hook(after),
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
