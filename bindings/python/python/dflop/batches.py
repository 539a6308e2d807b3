"""What loaders deliver: samples, batches, steps and microbatches.

Mappings here are plain dictionaries with attributes, so that everything which takes a dictionary takes them too:
``model(**microbatch)``, collators, ``Accelerator``, ``Trainer``.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any


class Sample(dict[str, Any]):
    """A sample: its fields by extension, decoded or as stored.

    Images are uint8 arrays ``[height, width, 3]``, audio is `Audio`, video is `Video`, text is ``str``, JSON what it
    says, NumPy files arrays, and everything else `Array`, the bytes as stored.

    Attributes:
        key: path of the sample's entries up to the first dot of the file name.
        shard: URL of the shard.
        offset: where the sample's first header is in the shard, in bytes, after decompression.
        epoch: epoch that the sample was drawn from, from 0.
        bytes: payload bytes that were read for it, encoded.
    """

    __slots__ = ("bytes", "epoch", "key", "offset", "shard")

    key: str
    shard: str
    offset: int
    epoch: int
    bytes: int

    def __repr__(self) -> str:
        return f"Sample(key={self.key!r}, fields={list(self)})"


class Batch(dict[str, Any]):
    """Samples that are delivered together.

    With ``image=`` the images are one array under ``"image"``, float32 ``[images, 3, size, size]``. All other fields
    are lists by extension, one entry for each sample, ``None`` where a sample has no such field.

    Attributes:
        samples: the samples, in order.
        image_rows: for each sample, start and end of its rows in ``"image"``; empty without ``image=``.
    """

    __slots__ = ("image_rows", "samples")

    samples: list[Sample]
    image_rows: list[tuple[int, int]]

    @property
    def sample_keys(self) -> list[str]:
        """Keys of the samples, in order."""
        return [sample.key for sample in self.samples]

    def __repr__(self) -> str:
        return f"Batch(samples={len(self.samples)}, fields={list(self)})"


class Microbatch(dict[str, Any]):
    """Samples of one forward and backward pass, as the tensors that the model takes: ``model(**microbatch)``.

    Models of Hugging Face keep the samples of a packed row apart by their positions, but only without a cache, which is
    on by default: ``model(**microbatch, use_cache=False)``, or ``config.text_config.use_cache = False`` for trainers.

    Without a tokenizer there are no tensors, and the decoded `samples` are all there is.

    Attributes:
        samples: the samples, with those fields that did not become tensors.
        sample_keys: keys of the samples, in the order of the tensors.
        tokens: LLM positions of the samples, padding not among them.
        target_tokens: tokens that the loss is computed on: labels that are not -100.
        padding_tokens: padding behind or around the samples, with ``pad_to_tokens`` or a padded layout.
        planned_tokens: `tokens` as planned, from what headers say.
        cost_seconds: predicted forward and backward time, in seconds: of all modules where they share a device, with
            ``stages`` of the slowest one.
        module_seconds: that of each module: ``vision``, ``audio``, ``llm``.
        loss_scale: factor for the **mean** loss over this microbatch's target tokens, so that summing over microbatches
            and averaging gradients over DP ranks gives the token-true gradient of the global batch.
        loss_scale_sum: the same factor for a loss that is **summed** over target tokens.
        cu_seqlens: int32 ``[samples + 1]``, first token of each sample, then the number of tokens; ``None`` without tensors.
        max_seqlen: tokens of the longest sample.
    """

    __slots__ = (
        "cost_seconds",
        "cu_seqlens",
        "loss_scale",
        "loss_scale_sum",
        "max_seqlen",
        "module_seconds",
        "padding_tokens",
        "planned_tokens",
        "sample_keys",
        "samples",
        "target_tokens",
        "tokens",
    )

    samples: list[Sample]
    sample_keys: list[str]
    tokens: int
    target_tokens: int
    padding_tokens: int
    planned_tokens: int
    cost_seconds: float
    module_seconds: dict[str, float]
    loss_scale: float
    loss_scale_sum: float
    cu_seqlens: Any
    max_seqlen: int

    def to(self, device: Any, *, non_blocking: bool = False) -> Microbatch:
        """Returns this microbatch with its tensors, `cu_seqlens` included, on a device of PyTorch.

        Lightning and Accelerate call it, and so keep the attributes of what they move.

        Args:
            device: as ``torch.Tensor.to`` takes it.
            non_blocking: copies from page-locked memory beside computing.

        Raises:
            TypeError: the arrays are not PyTorch's; make the loader with ``array_type="torch"``.
        """
        moved = copy.copy(self)
        tensors: dict[str, Any] = {**self, "cu_seqlens": self.cu_seqlens}
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            if not hasattr(tensor, "pin_memory"):
                raise TypeError(f'`{name}` is no tensor of PyTorch: make the loader with array_type="torch"')
            tensors[name] = tensor.to(device, non_blocking=non_blocking)
        moved.cu_seqlens = tensors.pop("cu_seqlens")
        moved.update(tensors)
        return moved

    def __repr__(self) -> str:
        # What other libraries make of a microbatch, by its class, has the tensors alone.
        if not hasattr(self, "samples"):
            return f"Microbatch(tensors={list(self)})"
        return f"Microbatch(samples={len(self.samples)}, tokens={self.tokens}, tensors={list(self)})"


@dataclass(frozen=True)
class Step:
    """One data-parallel rank's share of a global batch.

    Attributes:
        step: number of the step, from 0.
        microbatches: in the order in which a pipeline runs them.
        target_tokens: tokens of the whole global batch, over all ranks, that the loss is computed on.
        digest: of the plan of all ranks, 16 hex digits; equal digests mean equal plans.
        makespan_seconds: predicted time of the slowest rank.
        lower_bound_seconds: what no partition of this global batch can beat.
    """

    step: int
    microbatches: list[Microbatch]
    target_tokens: int
    digest: str
    makespan_seconds: float
    lower_bound_seconds: float
    plan: Any = field(repr=False, compare=False, default=None)


@dataclass(frozen=True)
class Audio:
    """A clip.

    Attributes:
        samples: float32 ``[frames, channels]``, -1 to 1.
        sample_rate_hz: frames of a second.
        is_truncated: whether the file ended early.
    """

    samples: Any = field(repr=False)
    sample_rate_hz: int
    is_truncated: bool = False


@dataclass(frozen=True)
class Video:
    """Sampled frames of a video.

    Attributes:
        frames: uint8 ``[frames, height, width, 3]``.
        times_seconds: when each frame is shown, float64 ``[frames]``.
        frames_per_second: of the whole video.
    """

    frames: Any = field(repr=False)
    times_seconds: Any = field(repr=False)
    frames_per_second: float = 0.0
