"""Small modules for pipelines, equal in every layout, and their run in one process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import dflop
import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
import itertools

LAYERS = {"vision": 2, "llm": 4}
# Modules whose rows are divided over TP ranks.
ROWS = ("merge", "blocks.1", "blocks.3")
WIDTH, VISION_WIDTH, PATCH, MERGED, WORDS = 24, 16, 1176, 4, 640


def made(seed: int, kind: type[torch.nn.Module], *sizes: int) -> torch.nn.Module:
    """Creates a module whose weights only depend on the seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return kind(*sizes)


class Vision(torch.nn.Module):
    """Patches through blocks; the last stage merges four to a row of the LLM."""

    def __init__(self, layers: range, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.patch = made(1, torch.nn.Linear, PATCH, VISION_WIDTH) if is_first else None
        sizes = (VISION_WIDTH, VISION_WIDTH)
        blocks = {str(layer): made(10 + layer, torch.nn.Linear, *sizes) for layer in layers}
        self.blocks = torch.nn.ModuleDict(blocks)
        self.merge = made(2, torch.nn.Linear, MERGED * VISION_WIDTH, WIDTH) if is_last else None

    def forward(self, rows: torch.Tensor | None, microbatch: Any) -> torch.Tensor:
        hidden = rows if self.patch is None else self.patch(microbatch["pixel_values"])
        for block in self.blocks.values():
            hidden = hidden + torch.tanh(block(hidden))
        return hidden if self.merge is None else self.merge(hidden.view(-1, MERGED * VISION_WIDTH))


class Language(torch.nn.Module):
    """Blocks that see the mean of the earlier tokens of a sample; the last stage returns the summed loss."""

    def __init__(self, layers: range, is_first: bool, is_last: bool, is_recomputed: bool = False) -> None:
        super().__init__()
        self.words = made(3, torch.nn.Embedding, WORDS, WIDTH) if is_first else None
        blocks = {str(layer): made(20 + layer, torch.nn.Linear, WIDTH, WIDTH) for layer in layers}
        self.blocks = torch.nn.ModuleDict(blocks)
        self.head = made(4, torch.nn.Linear, WIDTH, WORDS) if is_last else None
        self.is_recomputed = is_recomputed

    def forward(self, rows: torch.Tensor | None, microbatch: Any) -> torch.Tensor:
        hidden = rows
        if self.words is not None:
            hidden = self.words(microbatch["input_ids"][0])
            if rows is not None:
                hidden = hidden.index_copy(0, microbatch.media_rows, rows)
        for block in self.blocks.values():
            run = (block, hidden, microbatch.cu_seqlens.tolist())
            hidden = checkpoint(mixed, *run, use_reentrant=False) if self.is_recomputed else mixed(*run)
        if self.head is None:
            return hidden
        return cross_entropy(self.head(hidden)[:-1], microbatch["labels"][0, 1:], reduction="sum")


def mixed(block: torch.nn.Module, hidden: torch.Tensor, bounds: list[int]) -> torch.Tensor:
    means = []
    for start, end in itertools.pairwise(bounds):
        counts = torch.arange(1, end - start + 1)[:, None]
        means.append(hidden[start:end].cumsum(0) / counts)
    return hidden + torch.tanh(block(torch.cat(means)))


class Adapted(torch.nn.Module):
    """A frozen layer beside a trained one of low rank, as LoRA has them."""

    def __init__(self, base: torch.nn.Linear, seed: int) -> None:
        super().__init__()
        self.base = base
        self.down = made(seed, torch.nn.Linear, base.in_features, 2)
        self.up = made(seed + 1, torch.nn.Linear, 2, base.out_features)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.base(hidden) + self.up(self.down(hidden))


def adapt(stage: Any) -> Any:
    """Freezes a stage but for the adapters of its blocks."""
    stage.requires_grad_(False)
    for layer, block in stage.blocks.items():
        stage.blocks[layer] = Adapted(block, 100 + 2 * int(layer))
    return stage


def freeze(stage: torch.nn.Module, parts: tuple[str, ...]) -> torch.nn.Module:
    """Freezes the parameters whose name starts with one of `parts`."""
    for name, parameter in stage.named_parameters():
        if name.startswith(parts):
            parameter.requires_grad_(False)
    return stage


def parallelize(stage: torch.nn.Module, mesh: Any) -> torch.nn.Module:
    """Divides all weights of a stage over TP ranks: columns, but rows in every second block."""
    plan: dict[str, Any] = {}
    for name, one in stage.named_modules():
        if not isinstance(one, torch.nn.Linear | torch.nn.Embedding):
            continue
        if isinstance(one, torch.nn.Embedding) or name.removesuffix(".base") in ROWS:
            plan[name] = RowwiseParallel(input_layouts=Replicate())
        else:
            plan[name] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(stage, mesh, plan)
    return stage


def build(
    module: str,
    layers: range,
    is_first: bool,
    is_last: bool,
    *,
    frozen: Any = None,
    is_adapted: bool = False,
    is_recomputed: bool = False,
) -> Any:
    place = (layers, is_first, is_last)
    stage = Vision(*place) if module == "vision" else Language(*place, is_recomputed)
    stage = adapt(stage) if is_adapted else stage
    return freeze(stage, (frozen or {}).get(module, ()))


def update(parameters: Any) -> None:
    """Changes weights by their gradients, so that the next step has others."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter -= 0.5 * parameter.grad
                parameter.grad = None


def one_process(
    directory: Path,
    settings: dict[str, Any],
    *,
    layers: dict[str, int] = LAYERS,
    optimizer_of: Any = None,
    norm_max: float | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Trains in one process, a microbatch per step; returns what each step leaves: loss, norm, gradients.

    - `optimizer_of`: creates an optimizer of parameters, whose weights are returned too. Default: `update`
    - `norm_max`: largest norm of the gradients
    """
    vision = build("vision", range(layers["vision"]), True, True, **options)
    language = build("llm", range(layers["llm"]), True, True, **options)
    named = [(f"vision.{name}", one) for name, one in vision.named_parameters()]
    named += [(f"llm.{name}", one) for name, one in language.named_parameters()]
    optimizer = None if optimizer_of is None else optimizer_of([one for _, one in named])
    processor, found = dflop.Processor(blank_media="never"), []
    loader = dflop.BalancedLoader(
        directory / "shards", model=directory / "model", processor=processor, array_type="torch", **settings
    )
    for step in loader:
        (microbatch,) = step.hold().microbatches
        microbatch_rows = torch.nonzero(microbatch["mm_token_type_ids"][0])[:, 0]
        whole = Whole(microbatch)
        whole.media_rows, whole.cu_seqlens = microbatch_rows, microbatch.cu_seqlens
        rows = vision(None, whole) if "pixel_values" in whole else None
        loss = language(rows, whole) / step.target_tokens
        if loss.requires_grad:
            loss.backward()
        gradients = {name: one.grad.clone() for name, one in named if one.grad is not None}
        norm = sum(float(one.double().square().sum()) for one in gradients.values()) ** 0.5
        found.append({"loss": loss.item(), "norm": norm, "gradients": gradients})
        if optimizer is None:
            update(one for _, one in named)
            continue
        torch.nn.utils.clip_grad_norm_((one for _, one in named), norm_max or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        found[-1]["weights"] = {name: one.detach().clone() for name, one in named}
    return found


class Whole(dict[str, Any]):
    """A microbatch as a stage reads it."""

    media_rows: Any
    cu_seqlens: Any
