"""The tensors in what modules take and return."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in tuples, lists and mappings, nested in any way."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from tensors_of(one)
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from tensors_of(one)
