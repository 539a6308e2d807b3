"""The loss of a microbatch that weighs all target tokens of a global batch alike, of any model."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from dflop.batches import Microbatch, Step

IGNORED = -100
CHUNK_VALUES = 1 << 27
"""Logits that are converted to float32 at a time: 512 MiB."""
TOLERANCE, TOLERANCE_HALF = 1e-3, 2e-2
"""Relative difference of a model's own loss from the cross entropy, in float32 and in half precision."""
WRAPPED = ("_orig_mod", "module", "_fsdp_wrapped_module")
"""Names of the model in modules that wrap it."""


class _Form(Enum):
    """How the loss of a model is read."""

    LOGITS = 1
    """The cross entropy of its logits; `labels` are kept from the model."""
    OWN_MEAN = 2
    """The model's own mean over the targets, where logits and labels differ in length, or none come."""


# By model, since its first microbatch with targets.
_forms: weakref.WeakKeyDictionary[Any, _Form] = weakref.WeakKeyDictionary()


def loss(
    model: Callable[..., Any],
    microbatch: Microbatch,
    step: Step | None = None,
    **arguments: Any,
) -> torch.Tensor:
    """Runs a model on a microbatch and returns its share of the loss of the global batch.

    Gradients of all microbatches, summed over a step and averaged over the data-parallel ranks as DDP and
    FSDP do, are those of the mean cross entropy over all target tokens of the global batch, whatever the
    partition. The value is the sum over the microbatch's targets times ``microbatch.loss_scale_sum``:
    multiply it by nothing, but by the steps of gradient accumulation where a trainer divides by them. A
    microbatch without targets has the loss 0, with gradients of 0, never NaN.

    It is the same for every model with ``logits``, whatever its ``forward`` makes of ``num_items_in_batch``:
    the cross entropy is computed here, in float32 and in parts, from logits that the model returns without
    labels. The first microbatch with targets is run with its labels, and the model's own loss must be the
    mean cross entropy over them. Where logits and labels have unequal lengths, or a fused loss returns no
    logits, the model's own mean is used, times the number of its targets.

    The auxiliary loss of a router (``output_router_logits``) is a mean over tokens: it is added with the
    model's coefficient and the weight ``microbatch.loss_scale``, the microbatch's share of the targets.

    Args:
        model: model of ``transformers``, or any other that returns ``logits`` and, with labels, ``loss``. It
            may be wrapped: by PEFT, DDP, FSDP, DeepSpeed or ``torch.compile``.
        microbatch: microbatch of the loader, on the device of the model.
        step: step of the microbatch, which is compared with it.
        **arguments: further arguments of the model.

    Returns:
        torch.Tensor: the loss, float32 without dimensions.

    Raises:
        TypeError: the model returns neither ``logits`` nor ``loss``, or the microbatch is another mapping.
        ValueError: the microbatch has no labels, it is of another step, its plan counts no targets although
            it has some, or the model's own loss is no mean cross entropy.

    Examples:
        >>> import torch
        >>> from transformers import AutoConfig, AutoModelForImageTextToText
        >>> model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained("model/"))
        >>> loader = dflop.BalancedLoader("shards/", model="model/", global_batch_size=8, microbatches=2)
        >>> step = next(iter(loader))
        >>> for microbatch in step.microbatches:
        ...     dflop.torch.loss(model, microbatch, step).backward()
    """
    labels, scale = _labels(microbatch), _scale(microbatch, step)
    base = unwrapped(model)
    form = _known(base)
    has_targets = microbatch.target_tokens > 0
    if form is not _Form.LOGITS and has_targets and "shift_labels" not in microbatch:
        return _with_labels(model, base, microbatch, arguments) * scale
    inputs = {name: value for name, value in microbatch.items() if name not in ("labels", "shift_labels")}
    outputs = model(**inputs, **arguments)
    logits = _attribute(outputs, "logits")
    if logits is None:
        raise _unreadable(base, outputs)
    if "shift_labels" in microbatch:
        if not _is_aligned(logits, labels):
            raise ValueError("slices of samples need a model with a logit for each of their tokens")
        targets = microbatch["shift_labels"].flatten().to(logits.device)
        own = summed_over_targets(logits.flatten(0, 1), targets)
        return (own + _router_sum(base, outputs, microbatch)) * scale
    if _is_aligned(logits, labels):
        return (summed_cross_entropy(logits, labels) + _router_sum(base, outputs, microbatch)) * scale
    if not has_targets:
        return _zero_of(logits)
    # The model lengthens some inputs only: its own loss knows where their labels went.
    _remember(base, _Form.OWN_MEAN)
    return _with_labels(model, base, microbatch, arguments) * scale


def backward(
    model: torch.nn.Module,
    step: Step,
    *,
    device: torch.device | str | None = None,
    group: Any = None,
    **arguments: Any,
) -> torch.Tensor:
    """Adds the gradients of a step to the parameters and returns the loss of the global batch.

    Runs `loss` and its backward pass for one microbatch after the other, on the device of the model. DDP
    averages gradients over the ranks once, with the last microbatch; FSDP with every microbatch, so that a
    rank never holds whole gradients. Clipping and the step of the optimizer follow. Losses that are scaled
    (``GradScaler``) need a loop over `loss`.

    Args:
        model: model as for `loss`.
        step: a delivered step.
        device: device of the inputs. Default: that of the model's first parameter.
        group: process group whose ranks have the step's microbatches. Default: all processes, where there
            are several.
        **arguments: further arguments of the model.

    Returns:
        torch.Tensor: the mean loss over all target tokens of the global batch, the same on all ranks;
        float32 without dimensions or gradients.

    Raises:
        TypeError: the arrays are not PyTorch's, or see `loss`.
        ValueError: see `loss`.

    Examples:
        >>> import torch
        >>> from transformers import AutoConfig, AutoModelForImageTextToText
        >>> model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained("model/"))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> settings = {"model": "model/", "global_batch_size": 8, "microbatches": 2, "steps": 2}
        >>> for step in dflop.BalancedLoader("shards/", **settings):
        ...     total = dflop.torch.backward(model, step)
        ...     optimizer.step()
        ...     optimizer.zero_grad()
    """
    device = next(model.parameters()).device if device is None else device
    # Kept by `torch.compile` inside of its own module.
    averaging = getattr(model, "_orig_mod", model)
    total = torch.zeros((), device=device)
    for place, microbatch in enumerate(step.microbatches, 1):
        is_kept = isinstance(averaging, DistributedDataParallel) and place < len(step.microbatches)
        with averaging.no_sync() if is_kept else nullcontext():
            found = loss(model, microbatch.to(device), step, **arguments)
            found.backward()
        total += found.detach()
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(total, group=group)
        # Each rank's share is multiplied by their number, for gradients that are averaged.
        total /= dist.get_world_size(group)
    return total


def count_targets(step: Step, group: Any = None) -> Step:
    """Returns a step whose losses are divided by the targets that were counted, on all ranks.

    A plan knows targets from the index, a `CustomProcessor` makes them: where the two differ, `loss` is off
    by one factor per step, the same for every partition. This counts the labels of a whole step, which is in
    memory for it as after ``hold()``, and sums them over the ranks.

    Args:
        step: a delivered step.
        group: process group of the data-parallel ranks. Default: all processes, where there are several.

    Returns:
        Step: the step in memory, with `target_tokens` as counted and microbatches with their `loss_scale` and
        `loss_scale_sum`.

    Raises:
        ValueError: the loader has another ``dp_size`` than the group has ranks.

    Examples:
        >>> import torch
        >>> loader = dflop.BalancedLoader("shards/", model="model/", global_batch_size=8, microbatches=2)
        >>> step = dflop.torch.count_targets(next(iter(loader)))
        >>> sum(mb.target_tokens for mb in step.microbatches) == step.target_tokens
        True
    """
    held = step.hold()
    counts: list[int] = [sum(one.target_tokens for one in held.microbatches)]
    if dist.is_available() and dist.is_initialized():
        counts *= dist.get_world_size(group)
        dist.all_gather_object(counts, counts[0], group)
    total = sum(counts)
    microbatches = []
    for one in held.microbatches:
        planned_ranks = round(one.loss_scale_sum * step.target_tokens)
        if planned_ranks not in (0, len(counts)):
            raise ValueError(
                f"the process group has {len(counts)} ranks, but the loader has dp_size={planned_ranks}: "
                "pass the group of the data-parallel ranks"
            )
        counted = copy.copy(one)
        counted.loss_scale_sum = len(counts) / total if total else 0.0
        counted.loss_scale = counted.target_tokens * counted.loss_scale_sum
        microbatches.append(counted)
    return replace(held, microbatches=microbatches, target_tokens=total)


def summed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the cross entropy in float32, summed over the targets; 0 where there are none.

    - `logits`: `[rows, tokens, vocabulary]`, of any floating-point type
    - `labels`: `[rows, tokens]`, each the target of the position before it, or -100
    """
    targets = functional.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten().to(logits.device)
    return summed_over_targets(logits.flatten(0, 1), targets)


def summed_over_targets(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the cross entropy in float32, summed over the rows with a target; 0 where there are none.

    - `logits`: `[rows, vocabulary]`, of any floating-point type
    - `targets`: `[rows]`, the target of each row, or -100
    """
    rows = max(CHUNK_VALUES // max(logits.shape[-1], 1), 1)
    chunks = list(zip(logits.split(rows), targets.split(rows), strict=True))
    if len(chunks) == 1:
        return _summed(*chunks[0])
    # Recomputed in the backward pass, so that no more than a chunk is in memory in float32.
    parts = [checkpoint(_summed, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.stack(parts).sum()


def unwrapped(model: Any) -> Any:
    """Returns the model inside the wrappers of ``torch.compile``, DDP, FSDP, DeepSpeed and PEFT."""
    while True:
        modules = getattr(model, "_modules", {})
        inner = next((modules[name] for name in WRAPPED if modules.get(name) is not None), None)
        if inner is None and hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
            inner = model.get_base_model()
        if inner is None or inner is model:
            return model
        model = inner


def _with_labels(
    model: Callable[..., Any], base: Any, microbatch: Microbatch, arguments: Mapping[str, Any]
) -> torch.Tensor:
    """Returns the summed loss of a microbatch with targets, and settles how the loss of the model is read."""
    labels = microbatch["labels"]
    outputs = model(**microbatch, **arguments)
    own, logits = _attribute(outputs, "loss"), _attribute(outputs, "logits")
    targets = int((labels[:, 1:] != IGNORED).sum())
    if logits is not None and _is_aligned(logits, labels) and _known(base) is None:
        router = _router_sum(base, outputs, microbatch)
        own = None if own is None else own.detach()
        # Frees what the model keeps for the gradient of its own loss.
        del outputs
        summed = summed_cross_entropy(logits, labels)
        if targets > 0:
            if own is not None:
                router_mean = torch.as_tensor(router).detach() / microbatch.target_tokens
                _compare(base, own, (summed.detach() / targets + router_mean).item())
            _remember(base, _Form.LOGITS)
        return summed + router
    if own is None:
        raise _unreadable(base, outputs)
    if targets == 0 and logits is not None:
        return _zero_of(logits)
    _remember(base, _Form.OWN_MEAN)
    return own.float() * targets


def _summed(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")


def _zero_of(logits: torch.Tensor) -> torch.Tensor:
    """Returns 0 with gradients of 0, whatever the logits are."""
    return logits.flatten()[:0].float().sum()


def _is_aligned(logits: torch.Tensor, labels: torch.Tensor) -> bool:
    return logits.ndim == 3 and logits.shape[:2] == labels.shape


def _labels(microbatch: Microbatch) -> torch.Tensor:
    labels = microbatch.get("labels")
    if labels is None:
        raise ValueError(f"the microbatch has no `labels`, only {', '.join(microbatch) or 'decoded samples'}")
    if not isinstance(labels, torch.Tensor) or labels.ndim != 2:
        found = f"{type(labels).__name__} of shape {tuple(labels.shape)}"
        raise TypeError(
            f'expected `labels` to be a tensor [rows, tokens], found {found}: use array_type="torch"'
        )
    return labels


def _scale(microbatch: Microbatch, step: Step | None) -> float:
    """Returns the factor for a summed loss: DP ranks by the targets of the global batch."""
    scale: float | None = getattr(microbatch, "loss_scale_sum", None)
    if scale is None:
        raise TypeError(
            f"expected a microbatch of the loader, found {type(microbatch).__name__} without its attributes: "
            "a library has rebuilt the mapping; move it with `microbatch.to(device)`"
        )
    if scale == 0 and microbatch.target_tokens > 0:
        raise ValueError(
            f"the plan counts no target in this step, the microbatch has {microbatch.target_tokens}: pass "
            "the step and its microbatches through `dflop.torch.count_targets`"
        )
    if step is not None:
        ranks = scale * step.target_tokens
        if abs(ranks - round(ranks)) > 1e-6 * ranks:
            raise ValueError(
                f"the microbatch is not of step {step.step}, which has {step.target_tokens} targets: its own "
                f"has {1 / scale:.0f} for each data-parallel rank"
            )
    return scale


def _router_sum(base: Any, outputs: Any, microbatch: Microbatch) -> torch.Tensor | float:
    """Returns the auxiliary loss of a router, as a sum over the targets; 0 without one."""
    router = _attribute(outputs, "aux_loss")
    if not isinstance(router, torch.Tensor):
        return 0.0
    config = getattr(base, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    places = (getattr(place, "router_aux_loss_coef", None) for place in (base, config, text))
    coefficient = next((found for found in places if found is not None), None)
    if coefficient is None:
        raise ValueError(
            f"{type(base).__name__} returns an `aux_loss`, but its config has no `router_aux_loss_coef`: "
            "set it"
        )
    return router.float() * (coefficient * microbatch.target_tokens)


def _compare(base: Any, own: torch.Tensor, wanted: float) -> None:
    """Refuses a model whose own loss is no mean cross entropy."""
    tolerance = TOLERANCE if own.dtype in (torch.float32, torch.float64) else TOLERANCE_HALF
    found = own.item()
    if not abs(found - wanted) <= tolerance * max(1.0, abs(wanted)):
        raise ValueError(
            f"{type(base).__name__} has a loss of its own, {found:.6g}, where the mean cross entropy over "
            f"its labels, each the target of the position before it, is {wanted:.6g}: dflop.torch.loss would "
            "train on the latter; multiply a loss that is summed over targets by `microbatch.loss_scale_sum`"
        )


def _unreadable(base: Any, outputs: Any) -> TypeError:
    return TypeError(
        f"{type(base).__name__} returned {type(outputs).__name__} without `logits` or `loss`: multiply a "
        "loss that is summed over targets by `microbatch.loss_scale_sum`"
    )


def _attribute(outputs: Any, name: str) -> torch.Tensor | None:
    if isinstance(outputs, Mapping):
        return outputs.get(name)
    return None if isinstance(outputs, torch.Tensor) else getattr(outputs, name, None)


def _known(base: Any) -> _Form | None:
    return _forms.get(base) if _is_remembered(base) else None


def _remember(base: Any, form: _Form) -> None:
    if _is_remembered(base):
        _forms[base] = form


def _is_remembered(base: Any) -> bool:
    # Other callables are looked at with every microbatch.
    return isinstance(base, torch.nn.Module)
