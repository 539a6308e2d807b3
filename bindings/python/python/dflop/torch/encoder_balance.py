"""Assigns media to ranks by predicted cost, for trainers that exchange encoder inputs between ranks.

VeOmni sorts the rows of a table, `[media, columns]`, into one list per data-parallel rank: its functions
take the table, the number of ranks, the column of lengths and, optionally, a `cost_fn` that maps lengths to
costs. `assign_media` is such a function, and `encoder_cost_fn` makes such costs from a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dflop import CostModel, balance
from dflop.errors import ConfigError

CostFunction = Callable[[torch.Tensor], "torch.Tensor | Sequence[float]"]

# Largest cost of a medium as an integer: sums of millions of them fit into 63 bits.
_COST_MAX = 1 << 40


def encoder_cost_fn(model: Any, *, module: str = "vision", **settings: Any) -> CostFunction:
    """Returns a function from lengths of media, in encoder tokens, to predicted nanoseconds of encoding them.

    Attention makes a long medium dearer than its length, and layers make it cheaper than its square.

    Args:
        model: a preset, a checkpoint's directory, or a `dflop.CostModel`.
        module: ``vision`` or ``audio``.
        settings: settings of `dflop.CostModel`, such as ``device`` and ``profile``.

    Returns:
        Callable: the ``cost_fn`` of `assign_media`.

    Raises:
        ModelError: the model is unknown.
        ConfigError: it has no such module.

    Examples:
        >>> import torch
        >>> cost_fn = dflop.torch.encoder_cost_fn("qwen3-vl-8b", device="h100")
        >>> short, long = cost_fn(torch.tensor([1024, 16_384])).tolist()
        >>> round(long / short, 1)  # 16 times the tokens
        45.6
    """
    costs = model if isinstance(model, CostModel) else CostModel(model, **settings)
    costs.sequence_times(module, [])  # a model without the module is refused here

    def cost_fn(lengths: torch.Tensor) -> torch.Tensor:
        known = {int(length): 0 for length in lengths.flatten().tolist()}
        known = dict(zip(known, costs.sequence_times(module, list(known)), strict=True))
        times = [known[int(length)] for length in lengths.flatten().tolist()]
        return torch.tensor(times, dtype=torch.int64, device=lengths.device).view(lengths.shape)

    return cost_fn


def assign_media(
    all_data_lengths: torch.Tensor,
    num_replicas: int,
    dim: int,
    cost_fn: CostFunction | None = None,
    *,
    search_effort: int | None = None,
) -> list[list[torch.Tensor]]:
    """Assigns media to ranks so that the largest sum of costs of one rank is small.

    All ranks that pass the same table get the same answer.

    Args:
        all_data_lengths: ``[media, columns]``, one row for each medium of all ranks.
        num_replicas: number of ranks, at least 1.
        dim: column of the lengths.
        cost_fn: maps the lengths, ``[media]``, to their costs. Default: the squares of the lengths.
        search_effort: work units of the search. Default: 20,000.

    Returns:
        list[list[Tensor]]: the rows of every rank, each rank's in their order in the table.

    Raises:
        ConfigError: there is no rank, or costs are negative, not finite, or not one for each medium.

    Examples:
        >>> import torch
        >>> table = torch.tensor([[0, 0, 900], [0, 1, 300], [1, 0, 400], [1, 1, 200]])  # rank, place, length
        >>> cost_fn = dflop.torch.encoder_cost_fn("qwen3-vl-8b")
        >>> assigned = dflop.torch.assign_media(table, num_replicas=2, dim=2, cost_fn=cost_fn)
        >>> [[row.tolist() for row in rows] for rows in assigned]
        [[[0, 0, 900]], [[0, 1, 300], [1, 0, 400], [1, 1, 200]]]
    """
    if num_replicas < 1:
        raise ConfigError(f"num_replicas: expected at least 1, found {num_replicas}")
    lengths = all_data_lengths[:, dim].detach().clone()  # a function may change what it gets
    costs = lengths.double() ** 2 if cost_fn is None else torch.as_tensor(cost_fn(lengths)).double()
    costs = costs.flatten().cpu()
    if len(costs) != len(all_data_lengths):
        raise ConfigError(f"cost_fn: expected {len(all_data_lengths)} costs, found {len(costs)}")
    if not bool(torch.isfinite(costs).all()) or bool((costs < 0).any()):
        raise ConfigError("cost_fn: expected costs that are finite and not negative")
    rows = list(all_data_lengths)
    if len(rows) <= num_replicas:
        return [[row] for row in rows] + [[] for _ in range(num_replicas - len(rows))]
    largest = float(costs.max())
    factor = (
        1.0 if largest <= 0 else min(_COST_MAX / largest, 1.0 if bool((costs % 1 == 0).all()) else _COST_MAX)
    )
    times = [[round(cost * factor)] for cost in costs.tolist()]
    instance = {"n": len(times), "m": num_replicas, "c": 1, "d": times}
    groups = balance(instance, search_effort=search_effort)["groups"]
    return [[rows[index] for index in sorted(group)] for group in groups]
