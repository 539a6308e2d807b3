"""Models that no file describes: by their sizes and token rules, or by a function that counts tokens."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflop._native import CostModel

MODULES = ("vision", "audio", "llm")
Tokens = Mapping[str, int | Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """A model that dflop does not know, described by the sizes of its modules and a token rule per encoder.

    It stands wherever a model has a name: in `BalancedLoader`, `CostModel`, `stats`, `plan`; the file that
    `save` writes is a ``--model`` of every command. Ranks and threads that index need no Python for it. Your
    own processor makes the tensors (`CustomProcessor`).

    An encoder is a mapping of ``num_hidden_layers``, ``hidden_size``, ``num_attention_heads``,
    ``intermediate_size``, optionally ``gated``, ``class_tokens``, ``windowed_layers``, ``projector_size``,
    and its ``tokens``: a mapping of ``rule``, such as ``native``, and the settings of this rule.
    ``docs/any-model.md`` lists the rules.

    Attributes:
        llm: the fields of the language model's ``config.json``: ``model_type`` (default ``llama``: gated
            MLPs, grouped queries), ``num_hidden_layers``, ``hidden_size``, …
        vision: encoder of images and videos.
        audio: encoder of audio.
        name: name in messages and reports.

    Raises:
        TypeError: a value is nothing that JSON has.

    Examples:
        >>> sizes = {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16}
        >>> sizes["intermediate_size"] = 4096
        >>> rule = {"rule": "square", "tile_size": 336, "patch_size": 14, "merge_size": 2}
        >>> kite = dflop.ModelDescription(
        ...     name="kite", vision=sizes | {"tokens": rule}, llm=sizes | {"vocab_size": 32_000}
        ... )
        >>> dflop.CostModel(kite).cost(text_tokens=100, images=[(640, 480)])["tokens"]
        244
        >>> loader = dflop.BalancedLoader("shards/", model=kite, tokenizer=False, global_batch_size=16)
    """

    llm: Mapping[str, Any]
    vision: Mapping[str, Any] | None = None
    audio: Mapping[str, Any] | None = None
    name: str = "described"

    def __post_init__(self) -> None:
        self.to_json()

    def to_json(self) -> str:
        """Returns the description as JSON, which ``--model`` takes in place of a file.

        Examples:
            >>> dflop.ModelDescription(llm={"num_hidden_layers": 2}).to_json()
            '{"model_type": "described", "name": "described", "llm": {"num_hidden_layers": 2}}'
        """
        fields: dict[str, Any] = {"model_type": "described", "name": self.name}
        for module in MODULES:
            sizes: Mapping[str, Any] | None = getattr(self, module)
            if sizes is not None:
                fields[module] = dict(sizes)
        return json.dumps(fields)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the description to a file, for ``--model PATH``.

        Raises:
            OSError: the file cannot be written.

        Examples:
            >>> sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
            >>> llm = sizes | {"intermediate_size": 128, "vocab_size": 600}
            >>> dflop.ModelDescription(llm=llm).save("small.json")
            >>> dflop.CostModel("small.json").modules
            ['llm']
        """
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.to_json() + "\n")


def _device() -> str:
    return os.environ.get("DFLOP_DEVICE") or "h100"


@dataclass(frozen=True)
class Custom:
    """A model that dflop does not know, for ``BalancedLoader(model=…)``, whose tokens a function counts.

    For token rules that `ModelDescription` does not have. The loader then balances by the tokens that you
    count, and your own processor makes the tensors (`CustomProcessor`).

    With numbers of parameters, a token takes 6 FLOPs per parameter of its module, forward and backward, at
    the rate of the ``device``, and attention is not counted. With a `CostModel`, of a description or of a
    model like yours, its sizes or its measured profile give the times, attention included. ``Plan.cost``
    replaces these times.

    Attributes:
        modules: parameters of each module by name: ``vision``, ``audio``, and ``llm``, which is required; or
            a `CostModel`.
        tokens: called with a list of samples, dictionaries of ``key``, ``text_tokens``, ``target_tokens``,
            ``images`` (width and height of each), ``audio``, ``videos``; returns for each a dictionary with
            the tokens of each module: those inside the encoder, and all LLM positions. A list of numbers has
            the lengths of sequences that do not attend to each other, such as images. ``targets``, if it is
            there, are the tokens that the loss is taken over. It must be pure and the same on all ranks: the
            digest of a step differs where it is not.
        device: device preset, whose stated FLOP rate gives seconds; unused with a `CostModel`. Default: the
            environment variable ``DFLOP_DEVICE``, else ``h100``.

    Raises:
        ValueError: a module is unknown, there is no ``llm``, or a number of parameters is not positive.
        TypeError: ``tokens`` is not a function.

    Examples:
        >>> def tokens(samples):
        ...     seen = [[width // 28 * (height // 28) for width, height in one["images"]] for one in samples]
        ...     return [
        ...         {"vision": [4 * count for count in counts], "llm": one["text_tokens"] + sum(counts)}
        ...         for one, counts in zip(samples, seen)
        ...     ]
        >>> model = dflop.Custom(modules={"vision": 4e8, "llm": 4e9}, tokens=tokens)
        >>> settings = {"tokenizer": False, "global_batch_size": 16, "microbatches": 4}
        >>> loader = dflop.BalancedLoader("shards/", model=model, **settings)
        >>> [microbatch.planned_tokens for microbatch in next(iter(loader)).microbatches]
        [287, 320, 347, 304]
    """

    modules: Mapping[str, float] | CostModel
    tokens: Callable[[list[dict[str, Any]]], Sequence[Tokens]]
    device: str = field(default_factory=_device)

    def __post_init__(self) -> None:
        if not callable(self.tokens):
            raise TypeError(f"expected `tokens` to be a function, found {type(self.tokens).__name__}")
        if not isinstance(self.modules, Mapping):
            return
        for name, parameters in self.modules.items():
            if name not in MODULES:
                raise ValueError(f"expected modules of {', '.join(MODULES)}, found {name!r}")
            if not parameters > 0:
                raise ValueError(f"expected a positive number of parameters of {name!r}, found {parameters}")
        if "llm" not in self.modules:
            raise ValueError("expected the parameters of 'llm' among the modules")
