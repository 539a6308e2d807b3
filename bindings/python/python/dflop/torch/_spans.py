"""Marks the forward and backward passes of one module by hooks, which do not outlive the tensors.

A backward pass starts when the first gradient of an output arrives. It ends when the gradient of an input has
been computed. If no input needs a gradient, as for an encoder of pixels, it ends when the gradient of the
parameter that comes last has been accumulated, which the first pass finds out. Otherwise it ends with the
whole backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dflop.torch._clock import Clock, Mark
from dflop.torch._launches import Launches
from dflop.torch._layers import is_in_backward
from dflop.torch._tensors import tensors_of

Span = tuple[Mark, Mark]


class Pass:
    """The spans of one call of a module.

    - `spans`: the forward pass, and each backward pass; `wants_backward`: whether an output needs a gradient
    """

    def __init__(self, index: int | None, start: Mark) -> None:
        self.index = index
        self.start = start
        self.spans: list[Span] = []
        self.wants_backward = False

    @property
    def is_complete(self) -> bool:
        return len(self.spans) > int(self.wants_backward)


class ModuleSpans:
    """Takes marks around one module.

    - `passes`: calls of the module since they were last taken; `index`: microbatch of the next call, if it
      was set
    - `launches`: takes the ends of the passes of all modules
    """

    def __init__(self, module: torch.nn.Module, clock: Clock, launches: Launches) -> None:
        self._module, self._clock, self._launches = module, clock, launches
        self.passes: list[Pass] = []
        self.index: int | None = None
        self.is_paused = False
        self._open: Pass | None = None
        self._backward_start: Mark = None
        self._backward_end: Mark = None
        self._last_parameter: int | None = None
        self._hooks: list[Any] = [
            module.register_forward_pre_hook(self._before_forward),
            module.register_forward_hook(self._after_forward, with_kwargs=True),
        ]
        self._parameter_hooks: dict[int, Any] = {}

    def close(self) -> None:
        """Removes all hooks."""
        for hook in [*self._hooks, *self._parameter_hooks.values()]:
            hook.remove()
        self._hooks, self._parameter_hooks = [], {}

    def _before_forward(self, _module: torch.nn.Module, _args: Any) -> None:
        if not self.is_paused and not is_in_backward():
            self._launches.begins()
            self.passes.append(Pass(self.index, self._clock.mark()))

    def _after_forward(self, _module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.is_paused or is_in_backward() or not self.passes:
            return
        one = self.passes[-1]
        one.spans.append((one.start, self._clock.mark()))
        self._launches.ends(one.spans[-1][1])
        outputs = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
        one.wants_backward = bool(outputs)
        inputs = [tensor for tensor in tensors_of((args, kwargs)) if tensor.requires_grad]
        for tensor in outputs:
            _on_gradient(tensor, lambda: self._begin_backward(one))
        for tensor in inputs:
            _on_gradient(tensor, self._mark_end)
        if outputs and not inputs and self._last_parameter is None and not self._parameter_hooks:
            self._hook_parameters()

    def _hook_parameters(self) -> None:
        for at, parameter in enumerate(self._module.parameters()):
            if parameter.requires_grad:
                register: Any = parameter.register_post_accumulate_grad_hook
                self._parameter_hooks[at] = register(lambda _parameter, at=at: self._mark_end(at))

    def _begin_backward(self, one: Pass) -> None:
        if self._open is None:
            self._launches.begins()
            self._open, self._backward_start, self._backward_end = one, self._clock.mark(), None
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _mark_end(self, parameter: int | None = None) -> None:
        if self._open is not None:
            self._backward_end = self._clock.mark()
            self._last_parameter = parameter

    def _end_backward(self) -> None:
        if self._open is None:
            return
        end = self._clock.mark() if self._backward_end is None else self._backward_end
        self._open.spans.append((self._backward_start, end))
        self._launches.ends(end)
        self._open = None
        if self._last_parameter in self._parameter_hooks:
            for at in [at for at in self._parameter_hooks if at != self._last_parameter]:
                self._parameter_hooks.pop(at).remove()


def _on_gradient(tensor: torch.Tensor, do: Callable[[], None]) -> None:
    register: Any = tensor.register_hook
    register(lambda _gradient: do())
