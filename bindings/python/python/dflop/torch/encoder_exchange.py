"""Exchanges media between data-parallel ranks, so that every rank encodes an equal share.

Under FSDP, ranks meet in every layer, so all wait for the rank with the most pixels. The plan of a step says
which rank encodes which medium, so that ranks know all sizes: pixels go there in one ``all_to_all_single``,
features come back in another, and gradients take the same way.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, Protocol

import torch
import torch.distributed as dist

from dflop.batches import ExchangedMedium, Microbatch, Step
from dflop.errors import ConfigError, PlanError

# Tensors of pixels and of their grids by kind of media, in the order in which models encode them.
_TENSORS = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}
_DIGEST_BYTES = 7  # a digest and its negative fit into int64


class ExchangeLoader(Protocol):
    """A `dflop.BalancedLoader`."""

    @property
    def dp_rank(self) -> int:
        """Data-parallel rank."""

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks."""

    def media_exchange(
        self, step: Any, microbatch: int, *, group_size: int | None = None
    ) -> Sequence[ExchangedMedium]:
        """Returns the media of a microbatch on all ranks of the group."""


class BalancedEncoder:
    """Makes an encoder exchange media with the other ranks, so that all encode about as long.

    For DDP and FSDP2, without a pipeline. The model stays as it is, with its parameter names: only
    ``forward`` of the encoder is replaced, and only inside `microbatches`; elsewhere, as in evaluation, the
    encoder encodes what it gets. Features, losses and gradients are those without the exchange.

    Each microbatch has two messages, and their gradients: pixels to the ranks that encode them, features
    back. Once per step, ranks compare their plans in a message between hosts; the device is never waited for.
    A medium of a sample that was skipped is replaced by zeros. Media that differ from the plan, such as those
    of a transform that resizes, are encoded where they are, with a warning.

    Every microbatch needs a medium on every rank, which ``Processor(blank_media="auto")`` ensures. The
    encoder takes pixels and, with ``grid_thw``, their grids. It returns rows in the order of the pixels: a
    tensor, or an output of ``transformers`` with ``pooler_output`` and possibly ``deepstack_features``.

    Args:
        encoder: module of the vision encoder, such as ``model.model.visual``, before or after
            ``fully_shard``.
        loader: the `dflop.BalancedLoader` of this rank, with ``Plan(schedule="microbatch")`` for FSDP.
        group: process group of consecutive data-parallel ranks that exchange media, such as those of a node.
            Default: all ranks.

    Raises:
        ConfigError: the group does not fit the loader's ranks.

    Examples:
        >>> import torch
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> processor = dflop.Processor(blank_media="always")
        >>> settings = {"model": "model/", "global_batch_size": 8, "processor": processor, "steps": 1}
        >>> loader = dflop.BalancedLoader("shards/", **settings)
        >>> visual = torch.nn.Linear(1176, 16)
        >>> encoder = dflop.torch.BalancedEncoder(visual, loader)
        >>> for step in loader:
        ...     for microbatch in encoder.microbatches(step):
        ...         print(visual(microbatch["pixel_values"]).shape[1])
        16
        >>> encoder.close()
        >>> dist.destroy_process_group()
    """

    def __init__(
        self, encoder: torch.nn.Module, loader: ExchangeLoader, *, group: dist.ProcessGroup | None = None
    ) -> None:
        if not dist.is_initialized():
            raise ConfigError("group: expected an initialized process group; call `init_process_group`")
        self._group = dist.group.WORLD if group is None else group
        self._size, rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        if loader.dp_size % self._size or loader.dp_rank % self._size != rank:
            raise ConfigError(
                f"group: expected consecutive ranks of the loader's {loader.dp_size}, found rank {rank} of "
                f"{self._size} for `dp_rank` {loader.dp_rank}"
            )
        self._encoder, self._loader = encoder, loader
        self._first = loader.dp_rank - rank
        self._forward = encoder.forward
        self._exchange: _Exchange | None = None
        self._is_warned = False
        self._hosts = self._group
        if dist.get_backend(self._group) != "gloo":
            ranks = dist.get_process_group_ranks(self._group)
            self._hosts = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        encoder.forward = self._encode  # type: ignore[method-assign]

    def microbatches(self, step: Step, dtype: torch.dtype | None = None) -> Iterator[Microbatch]:
        """Iterates the microbatches of a step on the encoder's device, and exchanges the pixels of each.

        Run the model on a microbatch, and its backward pass, before the next one. All ranks iterate.

        Args:
            step: step of the loader.
            dtype: floating-point type of pixels. Default: unchanged.

        Raises:
            PlanError: ranks have different plans of the step; on all ranks of the group.
            ConfigError: a microbatch has no media, not even blank ones.
        """
        plans = self._plans(step)
        device = next(self._encoder.parameters()).device
        try:
            for number, microbatch in enumerate(step.microbatches):
                exchange = _Exchange(plans[number], self._first, self._loader.dp_rank, self._size)
                found = {
                    kind: grids if (grids := microbatch.get(of_grids)) is None else grids.tolist()
                    for kind, (pixels, of_grids) in _TENSORS.items()
                    if pixels in microbatch
                }
                moved = microbatch.to(device, dtype, non_blocking=True).normalized(dtype)
                self._exchange = None
                if exchange.media:
                    if not found:
                        raise ConfigError(
                            f"microbatch {number} of step {step.step} has no pixels, which other ranks wait "
                            'for: expected `Processor(blank_media="auto")`'
                        )
                    pixels = {kind: moved[_TENSORS[kind][0]] for kind in found}
                    self._warn(exchange.match(microbatch.sample_keys, pixels, found))
                    exchange.send_pixels(self._group)
                    self._exchange = exchange
                yield moved
        finally:
            self._exchange = None

    def close(self) -> None:
        """Restores ``forward`` of the encoder."""
        self._encoder.forward = self._forward  # type: ignore[method-assign]

    def _plans(self, step: Step) -> list[Sequence[ExchangedMedium]]:
        """Returns the media by microbatch, once all ranks have the same."""
        failure, plans = None, []
        try:
            for number in range(len(step.microbatches)):
                plans.append(self._loader.media_exchange(step, number, group_size=self._size))
        except Exception as error:  # noqa: BLE001  Raised below, when the other ranks know.
            failure = error
        digest = hashlib.blake2b(repr((step.step, plans)).encode(), digest_size=_DIGEST_BYTES).digest()
        value = int.from_bytes(digest, "big")
        numbers = torch.tensor([value, -value, int(failure is not None)])
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._hosts)
        largest, smallest, is_failed = numbers.tolist()
        if failure is not None:
            raise failure
        if is_failed:
            raise PlanError(f"another rank could not plan the exchange of step {step.step}; see its error")
        if largest != -smallest:
            raise PlanError(
                f"ranks have different plans of step {step.step}: expected the same shards, model, seed and "
                "settings on all ranks"
            )
        return plans

    def _warn(self, problem: str | None) -> None:
        if problem is None or self._is_warned:
            return
        self._is_warned = True
        warnings.warn(f"{problem}: they are encoded where they are", UserWarning, stacklevel=3)

    def _encode(self, pixels: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Replaces ``forward`` of the encoder."""
        if self._exchange is None:
            return self._forward(pixels, *args, **kwargs)
        return self._exchange.features(self._forward, self._group, pixels, *args, **kwargs)


class _Exchange:
    """Exchange of the media of one microbatch.

    ``media`` are those of all ranks of the group: a list by rank, the same everywhere.
    """

    def __init__(self, media: Sequence[ExchangedMedium], first: int, rank: int, size: int) -> None:
        self.media = media
        ranks = range(first, first + size)
        own = [place for place, medium in enumerate(media) if medium.rank == rank]
        # Places in ``media``: sent to each rank, and received from each.
        self._sent = [[place for place in own if media[place].encoder_rank == to] for to in ranks]
        encoded = [place for place, medium in enumerate(media) if medium.encoder_rank == rank]
        self._received = [[place for place in encoded if media[place].rank == of] for of in ranks]
        self._own = own
        self._present: dict[str, list[int]] = {}
        self._pixels: dict[str, torch.Tensor] = {}
        self._grids: dict[str, list[list[int]] | None] = {}
        self._input = torch.empty(0)
        self._waiting: list[str] = []
        self._encoded: tuple[torch.Tensor, torch.Tensor, Fraction, Callable[[torch.Tensor], Any]] | None
        self._encoded = None

    def match(
        self,
        sample_keys: Sequence[str],
        pixels: dict[str, torch.Tensor],
        grids: dict[str, list[list[int]] | None],
    ) -> str | None:
        """Finds the planned media in this rank's pixels; returns what differs from the plan."""
        self._pixels, self._grids = pixels, grids
        planned: defaultdict[str, deque[int]] = defaultdict(deque)
        for place in self._own:
            medium = self.media[place]
            if medium.sample not in planned[medium.key]:
                planned[medium.key].append(medium.sample)
        samples = {planned[key].popleft() for key in sample_keys if planned[key]}
        problem = None
        for kind in _TENSORS:
            own = [place for place in self._own if self.media[place].kind == kind]
            own = [place for place in own if self.media[place].sample in samples]
            found, wanted = grids.get(kind), [self.media[place].grid for place in own]
            rows = 0 if kind not in pixels else pixels[kind].shape[0]
            is_planned = rows >= self._rows(own)
            if found is not None and None not in wanted:
                is_planned &= [tuple(grid) for grid in found[: len(own)]] == wanted
            if not is_planned:
                keys = ", ".join(sorted({self.media[place].key for place in own}))
                problem = f"{kind}s of the samples {keys} differ in size from the plan"
                own = []
            self._present[kind] = own
        return problem

    def send_pixels(self, group: dist.ProcessGroup | None) -> None:
        """Sends pixels to the ranks that encode them."""
        like = next(iter(self._pixels.values()))
        rows: dict[int, torch.Tensor] = {}
        for kind, pixels in self._pixels.items():
            if pixels.shape[1:] != like.shape[1:] or pixels.dtype != like.dtype:
                raise ConfigError(
                    f"`{_TENSORS[kind][0]}` has rows of {list(pixels.shape[1:])} {pixels.dtype}, images of "
                    f"{list(like.shape[1:])} {like.dtype}: one encoder cannot exchange both"
                )
            present = self._present[kind]
            rest = pixels.shape[0] - self._rows(present)
            parts = pixels.split([*(self.media[place].rows for place in present), rest])
            rows.update(zip(present, parts, strict=False))
        # Skipped media are zeros, so that every message has its planned size.
        sent = [
            rows[place] if place in rows else like.new_zeros((self.media[place].rows, *like.shape[1:]))
            for to in self._sent
            for place in to
        ]
        buffer = torch.cat(sent) if sent else like[:0]
        self._input = _all_to_all(buffer, self._counts(self._sent), self._counts(self._received), group)

    def features(
        self,
        forward: Callable[..., Any],
        group: dist.ProcessGroup | None,
        pixels: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Returns the features of the media of one kind on this rank; encodes this rank's share first."""
        if self._encoded is None:
            self._waiting = list(self._pixels)
        kind = next((one for one in self._waiting if self._pixels[one].shape[0] == pixels.shape[0]), None)
        if kind is None:
            rows = {one: self._pixels[one].shape[0] for one in self._waiting}
            raise ConfigError(
                f"the encoder got {pixels.shape[0]} rows of pixels, the microbatch has {rows}: expected "
                "the tensors of the microbatch as they are"
            )
        if self._encoded is None:
            self._encoded = self._encode(forward, group, pixels.dtype, *args, **kwargs)
        received, local, ratio, rebuild = self._encoded
        self._waiting.remove(kind)
        if not self._waiting:
            self._encoded = None  # a second pass over the microbatch encodes again
        starts, end = {}, 0
        for to in self._sent:
            for place in to:
                starts[place] = end
                end += self._feature_rows(place, ratio)
        parts = [
            received.narrow(0, starts[place], self._feature_rows(place, ratio))
            for place in self._present[kind]
        ]
        first = sum(self._local_rows(one) for one in self._before(kind)) * ratio
        parts.append(local.narrow(0, int(first), int(self._local_rows(kind) * ratio)))
        # An empty part of what was received leads the backward pass of ranks without media to the exchange.
        return rebuild(torch.cat([*parts, received[:0]]))

    def _encode(
        self,
        forward: Callable[..., Any],
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, Fraction, Callable[[torch.Tensor], Any]]:
        """Returns features received, features of local rows, features per row, and a function that makes the
        encoder's output of features."""
        local = [pixels[pixels.shape[0] - self._local_rows(kind) :] for kind, pixels in self._pixels.items()]
        places = [place for of in self._received for place in of]
        grids: list[Any] = [self.media[place].grid for place in places]
        for kind, found in self._grids.items():
            grids += (found or [])[len(self._present[kind]) :]
        rows = torch.cat([self._input, *local])
        if rows.shape[0] == 0:
            # All ranks run the encoder: a rank without media encodes zeros, whose features nobody reads.
            smallest = min(self.media, key=lambda medium: medium.rows)
            rows = rows.new_zeros((smallest.rows, *rows.shape[1:]))
            grids = [smallest.grid]
        args, kwargs = _with_grids(grids, args, kwargs)
        features, rebuild = _features(forward(rows.to(dtype), *args, **kwargs))
        ratio = Fraction(features.shape[0], rows.shape[0])
        sent = [[self._feature_rows(place, ratio) for place in of] for of in self._received]
        returned = [[self._feature_rows(place, ratio) for place in to] for to in self._sent]
        count = sum(map(sum, sent))
        received = _AllToAll.apply(features[:count], [*map(sum, sent)], [*map(sum, returned)], group)
        return received, features[count:], ratio, rebuild

    def _rows(self, places: Sequence[int]) -> int:
        return sum(self.media[place].rows for place in places)

    def _counts(self, places: Sequence[Sequence[int]]) -> list[int]:
        return [self._rows(of_rank) for of_rank in places]

    def _local_rows(self, kind: str) -> int:
        """Number of rows that are encoded where they are: blank media, media that differ from the plan."""
        return self._pixels[kind].shape[0] - self._rows(self._present[kind])

    def _before(self, kind: str) -> list[str]:
        kinds = list(self._pixels)
        return kinds[: kinds.index(kind)]

    def _feature_rows(self, place: int, ratio: Fraction) -> int:
        rows = self.media[place].rows * ratio
        if rows.denominator != 1:
            raise ConfigError(
                f"the encoder returns {ratio} features per row of pixels, which is no whole number for "
                f"{self.media[place].rows} rows"
            )
        return int(rows)


class _AllToAll(torch.autograd.Function):
    """Sends rows to other ranks, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: Any) -> Any:
        ctx.sizes = (received, sent, group)
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _all_to_all(gradients[0], *ctx.sizes), None, None, None


def _all_to_all(rows: torch.Tensor, sent: list[int], received: list[int], group: Any) -> torch.Tensor:
    """Sends ``sent`` rows to each rank of the group, in order, and receives ``received`` from each."""
    out = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


def _with_grids(
    grids: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replaces the grids in the arguments of the encoder by those of the media that it encodes."""
    given = args[0] if args else kwargs.get("grid_thw")
    others = [*args[1:], *(value for name, value in kwargs.items() if name != "grid_thw")]
    if any(isinstance(value, torch.Tensor) for value in others):
        raise ConfigError("the encoder got tensors besides pixels and `grid_thw`, which are not exchanged")
    if given is None:
        return args, kwargs
    if any(grid is None for grid in grids):
        raise ConfigError("the encoder needs `grid_thw`, which the model's files do not give for its media")
    replaced = torch.tensor(grids, dtype=given.dtype)
    if given.is_cuda:  # a copy from pinned memory does not wait for the device
        replaced = replaced.pin_memory().to(given.device, non_blocking=True)
    return ((replaced, *args[1:]), kwargs) if args else (args, kwargs | {"grid_thw": replaced})


def _features(output: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    """Returns the features of an encoder as one tensor, ``[rows, ...]``, and a function that makes an output
    of others."""
    if isinstance(output, torch.Tensor):
        return output, lambda rows: rows
    pooled, deep = getattr(output, "pooler_output", None), getattr(output, "deepstack_features", None)
    if not isinstance(pooled, torch.Tensor):
        raise ConfigError(
            f"expected an encoder that returns a tensor or `pooler_output`, found {type(output).__name__}"
        )
    parts = [pooled, *(deep or ())]

    def rebuild(rows: torch.Tensor) -> Any:
        whole = rows.split([part.shape[-1] for part in parts], dim=-1)
        fields = {"pooler_output": whole[0]}
        return type(output)(**fields, **({} if deep is None else {"deepstack_features": list(whole[1:])}))

    return torch.cat(parts, dim=-1) if len(parts) > 1 else pooled, rebuild
