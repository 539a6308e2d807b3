"""Runs a model whose weights are on the meta device: shapes are computed, weights and activations are not.

Models read some values, such as image grids and sequence lengths, to decide on shapes. Everything that does
not depend on a weight is therefore computed on the CPU, although the model asks for the device of its
weights; an operation with a weight, or with a tensor that depends on one, runs on the meta device.

Experts that run one by one read which tokens are routed to them, which depends on weights. `made_up_routes`
routes tokens to experts in turn: as many as weights would, so that counts are the same.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

META = torch.device("meta")
# Operations that create a tensor from numbers: they stay on the CPU whatever their type.
_RANGES = ("arange", "linspace", "scalar_tensor", "tril_indices", "triu_indices")
_routes = contextvars.ContextVar("are_routes_made_up", default=False)
_PYTHON_RANGES = frozenset({torch.tensor, torch.as_tensor, torch.arange, torch.linspace})


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and not value.is_meta:
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=META)
    return value


def _is_floating(dtype: torch.dtype | None) -> bool:
    return (dtype or torch.get_default_dtype()).is_floating_point


class _Creation(TorchFunctionMode):
    """Keeps tensors that are made from numbers on the CPU, before PyTorch moves them out of reach."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _PYTHON_RANGES and kwargs.get("device") is not None:
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class _Computation(TorchDispatchMode):
    """Runs each operation on the CPU if all its tensors are there, else on the meta device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)]
        name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else str(func)
        has_meta = any(tensor.is_meta for tensor in tensors)
        if "device" in kwargs and kwargs["device"] is not None:
            if torch.device(kwargs["device"]).type == "meta" and not has_meta:
                kwargs["device"] = self._device(name, tensors, kwargs)
            elif torch.device(kwargs["device"]).type == "cpu" and has_meta:
                # A result that the model reads as numbers, which depend on weights.
                kwargs["device"] = META
        if has_meta and name.startswith("new_") and not _is_floating(kwargs.get("dtype") or tensors[0].dtype):
            kwargs["device"] = torch.device("cpu")
        if name == "topk" and has_meta and _routes.get():
            values, places = func(*args, **kwargs)
            return values, _in_turn(places.shape, args[0].shape[-1])
        if not has_meta or all(tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)
        if name in ("index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"):
            args = (args[0], self._whole_indices(args[1]), *args[2:])
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if name.endswith("_") and first is not None and not first.is_meta:
            # Its values now depend on weights: no shape may be read from them, and none has been.
            return first
        args, kwargs = tree_map(_on_meta, (args, kwargs))
        return func(*args, **kwargs)

    @staticmethod
    def _device(name: str, tensors: list[torch.Tensor], kwargs: dict[str, Any]) -> torch.device:
        if tensors or name in _RANGES or not _is_floating(kwargs.get("dtype")):
            return torch.device("cpu")
        return META

    @staticmethod
    def _whole_indices(indices: Any) -> list[Any]:
        """Replaces masks by the positions they select, which the meta device cannot count."""
        found: list[Any] = []
        for index in indices:
            if isinstance(index, torch.Tensor) and index.dtype == torch.bool and not index.is_meta:
                found.extend(index.nonzero().unbind(1))
            else:
                found.append(index)
        return found


def _in_turn(shape: torch.Size, experts: int) -> torch.Tensor:
    """Returns experts by token, each as often as the others: ``[tokens, experts per token]``."""
    return (torch.arange(math.prod(shape)) % experts).reshape(shape)


@contextlib.contextmanager
def made_up_routes() -> Iterator[None]:
    """Has the largest scores of a token be those of the experts in turn, in `shapes_only`."""
    token = _routes.set(True)
    try:
        yield
    finally:
        _routes.reset(token)


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Computes shapes only, for a model whose weights are on the meta device."""
    autocast = torch.autocast
    # Rotary embeddings disable automatic casting, which the meta device does not have.
    torch.autocast = lambda *_, **__: contextlib.nullcontext()  # type: ignore[assignment, misc]
    try:
        with _Creation(), _Computation():
            yield
    finally:
        torch.autocast = autocast  # type: ignore[misc]
