"""Models that no file describes: their modules, and a function that counts tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MODULES = ("vision", "audio", "llm")


@dataclass(frozen=True)
class Custom:
    """A model that dflop does not know, for ``BalancedLoader(model=…)``.

    The loader then balances by the tokens that you count, and your own processor makes the tensors
    (`CustomProcessor`).

    A token takes 6 FLOPs per parameter of its module, forward and backward, at the rate of the ``device``;
    attention over long sequences is not counted. ``Plan.cost`` replaces these times.

    Attributes:
        modules: parameters of each module by name: ``vision``, ``audio``, and ``llm``, which is required.
        tokens: called with a list of samples, dictionaries of ``key``, ``text_tokens``, ``target_tokens``,
            ``images`` (width and height of each), ``audio``, ``videos``; returns for each a dictionary with
            the tokens of each module: those inside the encoder, and all LLM positions. ``targets``, if it is
            there, are the tokens that the loss is taken over. It must be pure and the same on all ranks.
        device: device preset, whose stated FLOP rate gives seconds.

    Raises:
        ValueError: a module is unknown, there is no ``llm``, or a number of parameters is not positive.
        TypeError: ``tokens`` is not a function.
    """

    modules: Mapping[str, float]
    tokens: Callable[[list[dict[str, Any]]], Sequence[Mapping[str, int]]]
    device: str = "h100"

    def __post_init__(self) -> None:
        for name, parameters in self.modules.items():
            if name not in MODULES:
                raise ValueError(f"expected modules of {', '.join(MODULES)}, found {name!r}")
            if not parameters > 0:
                raise ValueError(f"expected a positive number of parameters of {name!r}, found {parameters}")
        if "llm" not in self.modules:
            raise ValueError("expected the parameters of 'llm' among the modules")
        if not callable(self.tokens):
            raise TypeError(f"expected `tokens` to be a function, found {type(self.tokens).__name__}")
