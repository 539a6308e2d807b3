"""Classes that loaders deliver: samples, batches, steps and microbatches.

Mappings are dictionaries with attributes, so that they work wherever a dictionary does:
``model(**microbatch)``, collators, ``Accelerator``, ``Trainer``.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

# Words in the names of tensors of media, of all families and of custom processors.
MEDIA = ("pixel", "image", "video", "audio", "speech", "input_features", "input_values")


class Sample(dict[str, Any]):
    """A sample: its fields by extension, decoded or as stored.

    Images are uint8 arrays ``[height, width, 3]``, audio is `Audio`, video is `Video`, text is ``str``, JSON
    its Python value, NumPy files are arrays, and every other field is an `Array` of its bytes as stored.
    Numbers are ``int``: the fields ``cls``, ``cls2``, ``class``, ``count``, ``index``, ``inx`` and ``id``.

    Attributes:
        key: path of the sample's entries up to the first dot of the file name.
        shard: URL of the shard.
        offset: position of the sample's first header in the decompressed shard, in bytes.
        epoch: epoch that the sample was drawn in, from 0.
        bytes: encoded payload bytes that were read for the sample.

    Examples:
        >>> sample = dflop.Dataset("shards/")[3]
        >>> sample
        Sample(key='000003', fields=['0.png', 'json', 'cls'])
        >>> sample["0.png"].shape, sample["cls"]
        ((112, 56, 3), 3)
        >>> sample.shard, sample.offset, sample.epoch
        ('shards/000.tar', 9728, 0)
    """

    __slots__ = ("bytes", "epoch", "key", "offset", "shard")

    key: str
    shard: str
    offset: int
    epoch: int
    bytes: int

    def __repr__(self) -> str:
        return f"Sample(key={self.key!r}, fields={list(self)})"

    def _repr_html_(self) -> str:
        """Returns HTML for notebooks: the conversation with its images and players, and all other fields."""
        from dflop import _html

        return _html.sample(self)


class Batch(dict[str, Any]):
    """Samples that are delivered together.

    With ``image=`` the images are one array under ``"image"``, float32 ``[images, 3, size, size]``. All other
    fields are lists by extension, one entry per sample, ``None`` for a sample without the field.

    Attributes:
        samples: the samples, in order.
        image_rows: start and end of each sample's rows in ``"image"``; empty without ``image=``.
        sources: names of the datasets that the samples are from, in the same order, where they are drawn
            through an index; see `dflop.mix`.

    Examples:
        >>> read = dflop.Read(fields=["images", "cls"])
        >>> loader = dflop.Loader("shards/", batch_size=4, image=dflop.Image(32), read=read)
        >>> batch = next(iter(loader))
        >>> batch
        Batch(samples=4, fields=['image', 'cls'])
        >>> batch["image"].shape, batch.image_rows
        ((4, 3, 32, 32), [(0, 0), (0, 2), (2, 3), (3, 4)])
        >>> batch.sample_keys, batch["cls"], batch.samples[1]["cls"]
        (['000000', '000001', '000002', '000003'], [6, 3, 4, 3], 3)
    """

    __slots__ = ("image_rows", "samples", "sources")

    samples: list[Sample]
    image_rows: list[tuple[int, int]]
    sources: list[str]

    @property
    def sample_keys(self) -> list[str]:
        """Keys of the samples, in order."""
        return [sample.key for sample in self.samples]

    def __repr__(self) -> str:
        return f"Batch(samples={len(self.samples)}, fields={list(self)})"

    def _repr_html_(self) -> str:
        """Returns HTML for notebooks: a grid of the first 12 samples."""
        from dflop import _html

        return _html.batch(self)


class Microbatch(dict[str, Any]):
    """Samples of one forward and backward pass, as the arguments of the model: ``model(**microbatch)``.

    Every microbatch is an input that the model can run. One whose samples were all skipped, or that has
    none, is a row of padding; with ``blank_media`` it has a blank medium for every encoder that the other
    ranks run. Padding and blank media have the label -100 everywhere.

    `dflop.torch.loss` is its loss, for every model and every partition, and a number without targets too::

        loss = dflop.torch.loss(model, microbatch, step)

    Gradients of a step, averaged over ranks as in DDP and FSDP, are those of the mean over the global batch.
    By hand, sum the loss over targets and multiply it by ``loss_scale_sum``. ``loss_scale`` gives the same
    from a mean, but the mean over no targets is NaN, and stays NaN times 0.

    The mapping has ``use_cache=False``: with a cache, which is their default, Hugging Face models attend
    across the samples of a packed row. Without a tokenizer it is empty, and there are only the decoded
    `samples`.

    Attributes:
        samples: the samples, with the fields that did not become tensors.
        sample_keys: keys of the samples, in the order of the tensors.
        sources: names of the datasets that the samples are from, in the same order; see `dflop.mix`.
        tokens: LLM positions of the samples, without padding.
        target_tokens: tokens that the loss is taken over: labels that are not -100.
        padding_tokens: tokens of padding and blank media in the tensors.
        planned_tokens: `tokens` as planned, from the index.
        cost_seconds: predicted forward and backward time, in seconds: the sum of all modules if they share a
            device, the slowest module with ``stages``.
        module_seconds: predicted forward and backward time of each module: ``vision``, ``audio``, ``llm``.
        loss_scale: factor for the **mean** loss over this microbatch's target tokens: the sum over
            microbatches, averaged over DP ranks, has the gradient of the mean loss over all target tokens of
            the global batch.
        loss_scale_sum: the factor for a loss that is **summed** over target tokens.
        cu_seqlens: int32, first token of each sequence, then the number of tokens; padding and blank media
            are sequences after the samples. ``None`` without tensors.
        max_seqlen: tokens of the longest sequence.
        context: `Context` with the samples that this rank shares, whose slices are in the tensors; ``None``
            without ``Plan(context=...)``. Tokens are then counted in slices, and ``shift_labels`` has the
            target of each position, which may be on another rank.
        pixel_normalization: scale, mean and standard deviation by color that make pixels of the bytes that
            ``dtype="uint8"`` delivers, ``(byte * scale - mean) / deviation``; else ``None``. See
            `normalized`.

    Examples:
        >>> loader = dflop.BalancedLoader("shards/", model="model/", global_batch_size=16, microbatches=4)
        >>> microbatch = next(iter(loader)).microbatches[0]
        >>> list(microbatch)[:4]
        ['input_ids', 'labels', 'position_ids', 'mm_token_type_ids']
        >>> microbatch["input_ids"].shape, microbatch.tokens, microbatch.target_tokens
        ((1, 232), 232, 118)
        >>> microbatch.sample_keys, microbatch.cu_seqlens.tolist()
        (['000204', '000125', '000176', '000182'], [0, 46, 105, 178, 232])
    """

    __slots__ = (
        "__weakref__",
        "context",
        "cost_seconds",
        "cu_seqlens",
        "loss_scale",
        "loss_scale_sum",
        "max_seqlen",
        "module_seconds",
        "padding_tokens",
        "pixel_normalization",
        "planned_tokens",
        "sample_keys",
        "samples",
        "sources",
        "target_tokens",
        "tokens",
    )

    samples: list[Sample]
    sample_keys: list[str]
    sources: list[str]
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
    context: Context | None
    pixel_normalization: tuple[float, list[float], list[float]] | None

    @property
    def flash_attention(self) -> dict[str, Any]:
        """Arguments that keep FlashAttention within the samples of a packed row, as ``transformers`` names
        them: ``model(**microbatch, **microbatch.flash_attention)``.

        ``cu_seq_lens_q`` and ``cu_seq_lens_k`` are int32 ``[sequences + 1]``, ``max_length_q`` and
        ``max_length_k`` are ``int``. They spare the model to find the boundaries in ``position_ids``, which
        it does without them.

        Empty where a model must not have them: with media, because versions of ``transformers`` hand them on
        to encoders, which have boundaries of their own; and without packed rows, whose boundaries are in the
        ``attention_mask``.

        Examples:
            >>> loader = dflop.BalancedLoader("shards/", model="model/", global_batch_size=8, microbatches=8)
            >>> microbatches = next(iter(loader)).hold().microbatches
            >>> {("pixel_values" in one) == bool(one.flash_attention) for one in microbatches}
            {False}
        """
        context = getattr(self, "context", None)
        is_packed = "attention_mask" not in self and not (context and context.groups)
        if self.cu_seqlens is None or not is_packed or any(word in name for name in self for word in MEDIA):
            return {}
        lengths, longest = self.cu_seqlens, self.max_seqlen
        return {
            "cu_seq_lens_q": lengths,
            "cu_seq_lens_k": lengths,
            "max_length_q": longest,
            "max_length_k": longest,
        }

    def to(self, device: Any = None, dtype: Any = None, *, non_blocking: bool = False) -> Microbatch:
        """Returns a copy of this microbatch with its tensors, including `cu_seqlens`, on a PyTorch device.

        Lightning and Accelerate call it, which keeps the attributes of the microbatches that they move.

        Args:
            device: device as in ``torch.Tensor.to``, or a data type in its place.
            dtype: floating-point type of the pixels and mel spectrograms. Ids, labels, positions and grids
                stay integers.
            non_blocking: copies from page-locked memory asynchronously.

        Raises:
            TypeError: the arrays are not PyTorch's; create the loader with ``array_type="torch"``. Or the
                data type is no floating-point type of PyTorch.

        Examples:
            >>> import torch
            >>> settings = {"model": "model/", "global_batch_size": 8, "array_type": "torch"}
            >>> loader = dflop.BalancedLoader("shards/", **settings)
            >>> microbatch = next(iter(loader)).microbatches[0].to("cpu", torch.bfloat16, non_blocking=True)
            >>> microbatch["pixel_values"].dtype, microbatch["input_ids"].dtype
            (torch.bfloat16, torch.int64)
        """
        if hasattr(device, "is_floating_point"):
            device, dtype = None, device
        if not getattr(dtype, "is_floating_point", dtype is None):
            raise TypeError(f"expected a floating-point type of PyTorch, found {dtype}")
        moved = copy.copy(self)
        tensors: dict[str, Any] = {**self, "cu_seqlens": self.cu_seqlens}
        for name, tensor in tensors.items():
            if tensor is None or isinstance(tensor, bool):
                continue
            if not hasattr(tensor, "pin_memory"):
                raise TypeError(
                    f'expected `{name}` to be a PyTorch tensor: create the loader with array_type="torch"'
                )
            to_type = dtype if tensor.is_floating_point() else None
            tensors[name] = tensor.to(device=device, dtype=to_type, non_blocking=non_blocking)
        moved.cu_seqlens = tensors.pop("cu_seqlens")
        if context := getattr(self, "context", None):
            moved.context = context.to(device, non_blocking=non_blocking)
        moved.update(tensors)
        return moved

    def normalized(self, dtype: Any = None) -> Microbatch:
        """Returns a copy of this microbatch with normalized pixels, computed where they are.

        With ``dtype="uint8"`` the loader delivers bytes, so that a quarter of the memory is copied to the
        device: ``microbatch.to("cuda").normalized(torch.bfloat16)``. Pixels that are normalized already are
        not changed.

        Args:
            dtype: type of the pixels; ``float32`` by default. PyTorch's and NumPy's arrays are supported.

        Examples:
            >>> settings = {"model": "model/", "processor": dflop.Processor(dtype="uint8")}
            >>> loader = dflop.BalancedLoader("shards/", global_batch_size=8, **settings)
            >>> microbatch = next(iter(loader)).microbatches[0]
            >>> microbatch["pixel_values"].dtype, microbatch.normalized("float32")["pixel_values"].dtype
            (dtype('uint8'), dtype('float32'))
        """
        if self.pixel_normalization is None:
            return self
        scale, mean, deviation = self.pixel_normalization
        made = copy.copy(self)
        made.pixel_normalization = None
        for name in ("pixel_values", "pixel_values_videos"):
            if name in self:
                made[name] = _normalized(self[name], scale, mean, deviation, dtype)
        return made

    def __repr__(self) -> str:
        # Libraries that rebuild a mapping by its class keep the tensors only.
        if not hasattr(self, "samples"):
            return f"Microbatch(tensors={list(self)})"
        return f"Microbatch(samples={len(self.samples)}, tokens={self.tokens}, tensors={list(self)})"

    def _repr_html_(self) -> str:
        """Returns HTML for notebooks: tokens, predicted time by module, and the tensors with their shapes."""
        from dflop import _html

        return _html.microbatch(self)


@dataclass(frozen=True)
class ContextMedium:
    """A medium of a sample that ranks share, or a part of one, and the rank that encodes it.

    Attributes:
        sample: index of the sample in the microbatch.
        kind: ``"image"``, ``"video"`` or ``"audio"``.
        index: index among the media of this kind of the sample, in the order in which they occur.
        rank: data-parallel rank that encodes the part, and has its rows of pixels.
        parts: first part, and the part after the last: tiles, frames, or layers of patches.
        parts_in_medium: number of parts; 1 for a medium that is not divided.
        tokens: LLM positions that the features of the part take. Families that arrange the features of all
            tiles together have them in the first part.
    """

    sample: int
    kind: str
    index: int
    rank: int
    parts: tuple[int, int]
    parts_in_medium: int
    tokens: int


@dataclass(frozen=True)
class ContextGroup:
    """Samples that the same ranks share. Rank ``r`` of ``k`` has the chunks ``r`` and ``2 k - 1 - r`` of every
    sample, which is padded to ``2 k`` equal chunks, as Transformer Engine and Megatron cut packed rows.

    Attributes:
        ranks: data-parallel ranks of the group, in order.
        samples: indices of the samples in ``microbatch.samples``.
        rows: first row of the slices in the tensors of this rank, and the row after the last.
        cu_seqlens: int32, first token of each whole sample, with padding, then the number of tokens.
        lengths: tokens of each whole sample, without padding.
        positions: int64 ``[rows]``, the place of each row among the tokens of the whole samples.
        order: int64 ``[tokens]``, the row of each token if the rows of all ranks follow each other:
            ``gathered[order]`` are the whole samples after an all-gather.
        features: int64 ``[rows]``, the feature that each row takes from the encoders, counted over `media`;
            -1 for text.
        media: media of the samples in the order of features.
    """

    ranks: list[int]
    samples: list[int]
    rows: tuple[int, int]
    cu_seqlens: Any
    lengths: list[int]
    positions: Any
    order: Any
    features: Any
    media: list[ContextMedium]

    @property
    def packed_seq_params(self) -> dict[str, Any]:
        """Arguments of Megatron-LM's ``PackedSeqParams`` for the whole samples, without the process group."""
        lengths = self.cu_seqlens[1:] - self.cu_seqlens[:-1]
        cut = self.cu_seqlens * 0
        total = 0
        for at, length in enumerate(self.lengths):
            total += length
            cut[at + 1] = total
        longest = int(lengths.max())
        return {
            "qkv_format": "thd",
            "cu_seqlens_q": cut,
            "cu_seqlens_kv": cut,
            "cu_seqlens_q_padded": self.cu_seqlens,
            "cu_seqlens_kv_padded": self.cu_seqlens,
            "max_seqlen_q": longest,
            "max_seqlen_kv": longest,
            "local_cp_size": len(self.ranks),
        }


@dataclass(frozen=True)
class Context:
    """Samples of a microbatch that this rank shares with others: context parallelism by sample.

    Attributes:
        groups: groups of ranks, the largest first. All ranks of a group list it, and exchange keys and values
            in this order in every layer; small groups are inside of large ones. Rows of whole samples follow
            the rows of all groups.

    Examples:
        >>> plan = dflop.Plan(context=2, schedule="microbatch")
        >>> settings = {"model": "model/", "global_batch_size": 2, "dp_size": 2, "plan": plan}
        >>> loaders = [dflop.BalancedLoader("shards/", dp_rank=rank, **settings) for rank in range(2)]
        >>> first, second = (next(iter(loader)).microbatches[0] for loader in loaders)
        >>> [group.ranks for group in first.context.groups] == [group.ranks for group in second.context.groups]
        True
    """

    groups: list[ContextGroup]

    def to(self, device: Any = None, *, non_blocking: bool = False) -> Context:
        """Returns a copy whose arrays are on a PyTorch device."""
        names = ("cu_seqlens", "positions", "order", "features")
        moved = [
            replace(
                group,
                **{name: getattr(group, name).to(device=device, non_blocking=non_blocking) for name in names},
            )
            for group in self.groups
        ]
        return Context(moved)


def _normalized(pixels: Any, scale: float, mean: list[float], deviation: list[float], dtype: Any) -> Any:
    """Normalizes patches ``[patches, 3 * values]`` or tiles ``[..., 3, side, side]``."""
    shape = tuple(pixels.shape)
    channels = (shape[0], 3, -1) if len(shape) == 2 else (*shape[:-2], shape[-2] * shape[-1])
    by_channel = pixels.reshape(channels)
    if hasattr(pixels, "new_tensor"):
        values = by_channel.float()
        of_channels = [values.new_tensor(numbers)[:, None] for numbers in (mean, deviation)]
        values = ((values * scale - of_channels[0]) / of_channels[1]).reshape(shape)
        return values if dtype is None else values.to(dtype)
    import numpy as np

    of_channels = [np.asarray(numbers, np.float32)[:, None] for numbers in (mean, deviation)]
    values = (by_channel.astype(np.float32) * np.float32(scale) - of_channels[0]) / of_channels[1]
    return values.reshape(shape).astype(dtype or np.float32, copy=False)


@dataclass(frozen=True)
class Step:
    """One data-parallel rank's share of a global batch.

    Attributes:
        step: number of the step, from 0.
        microbatches: microbatches in the order in which a pipeline runs them: a sequence that is read as it
            is iterated, so that a step is never in memory as a whole; see `hold`.
        target_tokens: tokens of the whole global batch, over all ranks, that the loss is taken over.
        digest: digest of the plan of all ranks, 16 hex digits; equal digests mean equal plans.
        makespan_seconds: predicted time of the slowest rank.
        lower_bound_seconds: lower bound on the makespan of every partition of this global batch.
        plan: `StepPlan` of all ranks.

    Examples:
        >>> loader = dflop.BalancedLoader("shards/", model="model/", global_batch_size=64, microbatches=8)
        >>> step = next(iter(loader))
        >>> step.step, len(step.microbatches), step.target_tokens, len(step.digest)
        (0, 8, 2066, 16)
        >>> f"{step.makespan_seconds / step.lower_bound_seconds - 1:.2%} over the bound"
        '0.00% over the bound'
    """

    step: int
    microbatches: Sequence[Microbatch]
    target_tokens: int
    digest: str
    makespan_seconds: float
    lower_bound_seconds: float
    plan: Any = field(repr=False, compare=False, default=None)

    def hold(self) -> Step:
        """Returns this step with a list of all its microbatches, in memory as a whole.

        For loops that go over a step several times, or keep steps for later.

        Examples:
            >>> loader = dflop.BalancedLoader("shards/", model="model/", global_batch_size=16, microbatches=4)
            >>> step = next(iter(loader)).hold()
            >>> sum(microbatch.target_tokens for microbatch in step.microbatches) == step.target_tokens
            True
            >>> [len(microbatch.samples) for microbatch in step.microbatches]
            [4, 4, 5, 3]
        """
        return replace(self, microbatches=list(self.microbatches))

    def _repr_html_(self) -> str:
        """Returns HTML for notebooks: a timeline of all ranks, by predicted times; reads no microbatch."""
        from dflop import _html

        return _html.step(self)


@dataclass(frozen=True)
class Medium:
    """An image, a video or an audio clip of a sample, see `BalancedLoader.media_shares`.

    Attributes:
        key: key of the sample.
        kind: ``"image"``, ``"video"`` or ``"audio"``.
        index: index among the media of this kind of the sample, in the order in which they occur.
        seconds: predicted time in the whole encoder, forward and backward.

    Examples:
        >>> loader = dflop.BalancedLoader("shards/", model="model/", global_batch_size=8)
        >>> mine, others = loader.media_shares(next(iter(loader)), 0, ranks=2)
        >>> mine[0].key, mine[0].kind, mine[0].index, mine[0].seconds > 0
        ('000138', 'image', 0, True)
    """

    key: str
    kind: str
    index: int
    seconds: float


@dataclass(frozen=True)
class ExchangedMedium:
    """A medium in a microbatch and the rank that encodes it, see `BalancedLoader.media_exchange`.

    Attributes:
        key: key of the sample.
        kind: ``"image"``, ``"video"`` or ``"audio"``.
        index: index among the media of this kind of the sample, in the order in which they occur.
        sample: index of the sample in the global batch.
        rank: data-parallel rank whose microbatch has the medium.
        encoder_rank: data-parallel rank that encodes the medium.
        rows: rows of the medium in the tensor of pixels: patches, or tiles.
        grid: layers, rows and columns of patches; ``None`` for tiles.
        seconds: predicted time in the whole encoder, forward and backward.

    Examples:
        >>> loader = dflop.BalancedLoader("shards/", model="model/", global_batch_size=8)
        >>> medium = loader.media_exchange(next(iter(loader)), 0)[0]
        >>> layers, rows, columns = medium.grid
        >>> medium.kind, medium.rank, medium.encoder_rank, medium.rows == layers * rows * columns
        ('image', 0, 0, True)
    """

    key: str
    kind: str
    index: int
    sample: int
    rank: int
    encoder_rank: int
    rows: int
    grid: tuple[int, int, int] | None
    seconds: float


@dataclass(frozen=True)
class Audio:
    """Decoded audio.

    Attributes:
        samples: float32 ``[frames, channels]``, -1 to 1.
        sample_rate_hz: frames per second.
        is_truncated: whether the file ended early, or frames are missing.

    Examples:
        >>> import io, wave
        >>> file = io.BytesIO()
        >>> with wave.open(file, "wb") as clip:
        ...     clip.setparams((1, 2, 16_000, 0, "NONE", ""))
        ...     clip.writeframes(bytes(2 * 8000))
        >>> with dflop.Writer("clips/") as writer:
        ...     writer.write({"wav": file.getvalue()})
        >>> audio = writer.dataset()[0]["wav"]
        >>> audio, audio.samples.shape
        (Audio(sample_rate_hz=16000, is_truncated=False), (8000, 1))

        A transform returns audio, here half as loud:

        >>> def quieter(clips):
        ...     return [dflop.Audio(0.5 * clip.samples, clip.sample_rate_hz) for clip in clips]
        >>> batch = next(iter(dflop.Loader("clips/", transforms={"audio": quieter})))
    """

    samples: Any = field(repr=False)
    sample_rate_hz: int
    is_truncated: bool = False


@dataclass(frozen=True)
class Video:
    """Sampled frames of a video.

    Attributes:
        frames: uint8 ``[frames, height, width, 3]``.
        times_seconds: presentation time of each frame, float64 ``[frames]``.
        frames_per_second: frame rate of the whole video.

    Examples:
        Loaders deliver it where the package was built with the feature ``video``; here a transform makes one:

        >>> import numpy
        >>> def still(images):
        ...     return [dflop.Video(numpy.stack([image] * 4), numpy.arange(4) / 2, 2.0) for image in images]
        >>> read = dflop.Read(fields="0.png")
        >>> loader = dflop.Loader("shards/", batch_size=4, read=read, transforms={"images": still})
        >>> video = next(iter(loader)).samples[1]["0.png"]
        >>> video, video.times_seconds.tolist(), video.frames.shape[0]
        (Video(frames_per_second=2.0), [0.0, 0.5, 1.0, 1.5], 4)
    """

    frames: Any = field(repr=False)
    times_seconds: Any = field(repr=False)
    frames_per_second: float = 0.0
