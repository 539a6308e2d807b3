"""Settings of the loaders, in frozen dataclasses: planning, order, model inputs, reading."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Self

from dflop._hints import similar

if TYPE_CHECKING:
    from dflop._native import Augment
    from dflop.batches import Sample


class _Settings:
    """Prints the fields that do not have their defaults, and refuses those of earlier versions."""

    def __new__(cls, **given: Any) -> Self:
        for name in given:
            if replacement := MOVED.get((cls.__name__, name)):
                raise TypeError(f"{cls.__name__}() has no `{name}`: replaced by {replacement}")
            names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
            if hint := similar(name, names):
                raise TypeError(f"{cls.__name__}() has no `{name}`: {hint}")
        return super().__new__(cls)

    def __repr__(self) -> str:
        own: tuple[Field[Any], ...] = fields(self)  # type: ignore[arg-type]
        given = ((field, getattr(self, field.name)) for field in own)
        shown = [f"{field.name}={value!r}" for field, value in given if not _is_default(field, value)]
        return f"{type(self).__name__}({', '.join(shown)})"


def _is_default(field: Field[Any], value: object) -> bool:
    return field.default is not MISSING and type(value) is type(field.default) and value == field.default


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(_Settings):
    """Assignment of the samples of a global batch to ranks and microbatches.

    Attributes:
        strategy: ``search``, ``multi_lpt``, ``kk``, ``lpt``, ``random``, or ``data-blind``. ``search:UNITS``
            sets the work units per step, 20,000 unless they are given; the same units give the same plan on
            every machine.
        stages: Pipeline stages of every module, in the order of the modules of the model. Default: no
            pipeline; all modules of a rank run one after the other on its device, as with DDP and FSDP.
        schedule: Schedule of a step. With ``stages``, that of the pipeline: ``gpipe``, ``1f1b``, ``zb-h1``,
            ``1f1b-ahead:R`` with encoders R rounds ahead, or ``interleaved:V`` with V stages per pipeline
            rank. Without, when ranks wait for each other: at the end of a ``step``, as in DDP with
            accumulated gradients; in every ``microbatch``, as in FSDP; or in every microbatch within groups
            of N ranks, ``microbatch:N``, as in HSDP. Default: ``1f1b`` with stages, ``step`` without.
        context: Maximum number of ranks that share a sample (context parallelism), a power of two. A long
            sample is split over 2, 4, 8, … ranks where that shortens the step, or where it is above
            ``tokens_max``; messages count as a ring over the ``NVLink`` of an H100. Default: every sample is
            whole on one rank.
        tokens_max: Maximum tokens of a microbatch. Default: about a quarter above the mean of the step.
        bytes_max: Maximum payload bytes of a microbatch. Default: no limit.
        cost: function that returns the costs of samples in place of the cost model. It is called with the
            samples of a global batch, a list of dictionaries (``key``, ``dataset``, ``sample``,
            ``text_tokens``, ``target_tokens``, ``images``, ``audio``, ``videos``, ``tokens``, ``seconds``),
            and returns a list with the seconds of each module, as a dictionary or in the order of
            ``BalancedLoader.modules``. It must be pure and the same on all ranks.

    Examples:
        >>> plan = dflop.Plan(stages=[1, 3], schedule="1f1b", tokens_max=4096)
        >>> settings = {"model": "model/", "global_batch_size": 16, "microbatches": 4}
        >>> loader = dflop.BalancedLoader("shards/", plan=plan, **settings)
        >>> next(iter(loader)).makespan_seconds > 0
        True

        Costs of your own, in place of the model's:

        >>> def cost(samples):
        ...     return [{"vision": 0.0, "llm": 1e-6 * sample["tokens"]} for sample in samples]
        >>> loader = dflop.BalancedLoader("shards/", plan=dflop.Plan(cost=cost), **settings)
        >>> [round(1e6 * microbatch.cost_seconds) for microbatch in next(iter(loader)).microbatches]
        [239, 243, 243, 240]
    """

    strategy: str = "search"
    stages: Sequence[int] | None = None
    schedule: str | None = None
    context: int | None = None
    tokens_max: int | None = None
    bytes_max: int | None = None
    cost: Callable[[list[dict[str, Any]]], Sequence[Any]] | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class Order(_Settings):
    """Order of the samples of a run, and the ends of its epochs.

    Attributes:
        shuffle: Shuffle in an epoch: ``global``; ``blocks``, which permutes runs of at most 1,024 neighbors
            and shuffles 64 runs with each other, or ``blocks:SAMPLES:RUNS``, for media that are slow to seek;
            or ``none``.
        tail: Treatment of the samples at the end of an epoch that do not fill a global batch: ``carry``
            starts the batch that the next epoch fills, ``repeat`` does so even if a global batch is larger
            than the data and has samples several times, ``drop`` leaves them out, ``short`` makes a short
            batch. With ``shuffle`` none and one epoch, ``short`` reads every sample exactly once, in order,
            as validation does.

    Examples:
        A validation loader reads every sample exactly once, in order:

        >>> loader = dflop.BalancedLoader(
        ...     "shards/000.tar",
        ...     model="model/",
        ...     global_batch_size=25,
        ...     epochs=1,
        ...     order=dflop.Order(shuffle="none", tail="short"),
        ... )
        >>> [sum(len(microbatch.samples) for microbatch in step.microbatches) for step in loader]
        [25, 25, 14]

        >>> dflop.Order(shuffle="blocks:512:64", tail="drop")
        Order(shuffle='blocks:512:64', tail='drop')
    """

    shuffle: str = "global"
    tail: Literal["carry", "repeat", "drop", "short"] = "carry"


@dataclass(frozen=True, kw_only=True, repr=False)
class Processor(_Settings):
    """Built-in processor, which turns media and texts into the tensors that the model takes.

    Attributes:
        chat_template: Jinja source of the chat template. Default: the tokenizer's, else the published one of
            the model family.
        caption_prompt: Prompt that captions answer. Default: captions are trained on without a chat template.
        layout: ``packed`` puts all samples into one row, one after another, with ``cu_seqlens``, and
            ``packed:N`` pads each to a multiple of N, twice the degree of context parallelism; ``padded`` and
            ``padded_left`` give each sample a row. Attention must not cross packed samples: microbatches have
            ``use_cache=False``, because that of ``transformers`` crosses them with a cache. ``split:N`` and
            ``fit:N`` make every microbatch one row of N tokens, and the global batch counts rows: ``split``
            cuts documents at row ends, ``fit`` fills rows by best fit from windows of 16,384 documents, or of
            as many as ``fit:N:DOCUMENTS`` names.
        length_buckets: Pads each row up to one of few lengths, so that ``torch.compile`` makes few graphs: a
            number, to its multiples; a list, to the next in it; ``ladder``, to one of eight lengths between
            powers of two. ``fixed:N`` pads the tensors of all microbatches to N tokens, for pipelines that
            need equal shapes, and plans for that; padding is masked from the loss and has a cost.
        media_buckets: The same for the patches, or tiles, of a microbatch, by a blank image, without
            ``fixed:N``.
        long_sample: Treatment of samples with more tokens than a microbatch may have, or than a number:
            ``error`` or ``error:N`` (skipped as bad), ``truncate`` or ``truncate:N`` (the text is truncated),
            ``drop`` or ``drop:N``.
        require_targets: Whether a step in which no token is a training target is an error. Without it such
            steps, whose documents mostly have a layout that is not read, are delivered with a loss scale of
            0.
        token_counts: ``exact`` counts texts with the tokenizer, once, and keeps the counts in the index, so
            that plans and loss scales are exact; ``estimated`` uses estimates from headers, unless the index
            has counts: loss scales are then off by one factor per step, counted over planned tokens.
        dtype: Type of the pixels: ``float32``; ``bfloat16``, half the memory; ``uint8``, a quarter, to be
            normalized on the device; ``none`` counts the tokens of media and delivers no pixels, for ranks
            that run the LLM only.
        blank_media: Gives microbatches without an image (or a clip) a blank one, so that every rank runs the
            encoder, without which DDP lacks gradients and FSDP waits for ever: ``auto`` with several ranks,
            if the data has such media, ``always``, or ``never``. It is not in planned costs, and takes some
            tokens of a fixed length.

    Examples:
        >>> processor = dflop.Processor(layout="padded", length_buckets=64, long_sample="error:512")
        >>> loader = dflop.BalancedLoader(
        ...     "shards/", model="model/", global_batch_size=16, microbatches=4, processor=processor
        ... )
        >>> [microbatch["input_ids"].shape for microbatch in next(iter(loader)).microbatches]
        [(4, 128), (4, 128), (5, 128), (3, 64)]
    """

    chat_template: str | None = None
    caption_prompt: str | None = None
    layout: str = "packed"
    length_buckets: int | Sequence[int] | str | None = None
    media_buckets: int | Sequence[int] | Literal["ladder"] | None = None
    long_sample: str = "error"
    require_targets: bool = True
    token_counts: Literal["exact", "estimated"] = "exact"
    dtype: Literal["float32", "bfloat16", "uint8", "none"] = "float32"
    blank_media: Literal["auto", "always", "never"] = "auto"


@dataclass(frozen=True, kw_only=True, repr=False)
class CustomProcessor(_Settings):
    """Your own processor, for any model: ``batch``, or ``inputs`` and ``collate``.

    Attributes:
        inputs: makes of a `Sample` what you like, on ``Read.python_threads`` threads, while earlier
            microbatches are trained on; an exception makes the sample bad.
        collate: makes of a list of these the mapping that the model takes; its ``labels`` (-100 where there
            is no target) are counted. A microbatch without samples gets the tensors of an earlier sample,
            with all labels -100.
        batch: makes the mapping of all samples of a microbatch in one call, on ``Read.python_threads``
            threads, a microbatch on each; `dflop.hugging_face.Inputs` calls a processor of ``transformers``
            so. If it raises, the samples are tried one by one, and those for which it raises again are bad.

    Raises:
        TypeError: ``inputs``, ``collate`` or ``batch`` is not a function, or they do not go together.

    Examples:
        >>> import numpy
        >>> def inputs(sample):
        ...     words = [word for turn in sample["json"]["conversations"] for word in turn["value"].split()]
        ...     return [len(word) for word in words]
        >>> def collate(rows):
        ...     ids = numpy.array([sum(rows, [])])
        ...     return {"input_ids": ids, "labels": ids}
        >>> processor = dflop.CustomProcessor(inputs=inputs, collate=collate)
        >>> loader = dflop.BalancedLoader("shards/", model="model/", global_batch_size=8, processor=processor)
        >>> microbatch = next(iter(loader)).microbatches[0]
        >>> microbatch["input_ids"].shape, microbatch.target_tokens
        ((1, 299), 299)
    """

    inputs: Callable[[Sample], Any] | None = None
    collate: Callable[[list[Any]], Mapping[str, Any]] | None = None
    batch: Callable[[list[Sample]], Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        names = ("inputs", "collate") if self.batch is None else ("batch",)
        for name in names:
            if not callable(function := getattr(self, name)):
                raise TypeError(f"expected `{name}` to be a function, found {type(function).__name__}")
        if self.batch is not None and (self.inputs, self.collate) != (None, None):
            raise TypeError("expected `batch`, or `inputs` and `collate`, found both")


@dataclass(frozen=True, kw_only=True, repr=False)
class Read(_Settings):
    """Reading and decoding of samples, in `Loader` and `BalancedLoader`.

    Attributes:
        fields: Names of the fields to read: extensions, several of them as ``jpg;png``, patterns
            (``img_*.png``), or ``images``, ``audio``, ``video``, ``text``. An extension that no sample has is
            an error. Default: all fields, or the images where images become one array.
        decode: ``media`` decodes every field by its extension; a medium that ends too early makes its sample
            bad, and other damage does not, as for Pillow without ``LOAD_TRUNCATED_IMAGES``. With ``strict``
            any damage does. ``raw`` delivers fields as stored.
        augment: random augmentation of images that keep their size, unless ``decode`` is ``raw``.
        workers: Number of decoder threads. Default: the environment variable ``DFLOP_WORKERS``, else one per
            core.
        python_threads: number of threads that call your functions: ``transforms``, and those of a
            `CustomProcessor`.
        buffered_bytes: Maximum bytes in memory. Default: a loader in shard order lets 64 MiB of payload wait
            for the decoders; in a balanced loader 256 MiB of samples wait, decoded and prepared, and a larger
            microbatch is loaded alone.
        error_budget: Tolerated fraction of bad samples, 0 to 1, checked after the first 1,000 and at the end;
            0 tolerates none, from the first sample on. ``FRACTION:SAMPLES`` tolerates at most this number,
            too.
        stall_seconds: Ends the stream with an error after this many seconds without progress. Default: never.
        steps_ahead: Number of steps that are planned, read and decoded before they are asked for, as far as
            ``buffered_bytes`` allows; balanced loader only. Default: 2.

    Examples:
        >>> read = dflop.Read(fields=["images", "cls"], workers=2, error_budget=0.0)
        >>> batch = next(iter(dflop.Loader("shards/", batch_size=4, read=read)))
        >>> list(batch), batch["cls"]
        (['cls', '0.png', '1.png'], [6, 3, 4, 3])
    """

    fields: str | Sequence[str] | None = None
    decode: Literal["media", "strict", "raw"] = "media"
    augment: Augment | None = None
    workers: int | None = None
    python_threads: int = 1
    buffered_bytes: int | None = None
    error_budget: float | str = 0.05
    stall_seconds: float | None = None
    steps_ahead: int | None = None


# Dataclasses by the keyword that takes them, in the order in which fields are looked for.
GROUPS: Mapping[str, Mapping[str, Sequence[type[Any]]]] = {
    "Loader": {"order": [Order], "read": [Read]},
    "BalancedLoader": {
        "plan": [Plan],
        "order": [Order],
        "processor": [Processor, CustomProcessor],
        "read": [Read],
    },
}
# Names of settings as other loaders spell them.
RENAMED = {
    "rank": "dp_rank",
    "world": "dp_size",
    "input_threads": "python_threads",
    "num_workers": "workers",
}
# What replaces settings of PyTorch's ``DataLoader``.
FOREIGN = {
    "sampler": "`filter=` selects samples, and `seed` orders them",
    "collate_fn": "`transforms=` changes fields, and dflop makes the batches",
    "weights": "`dflop.mix` weighs datasets, classes and samples",
    "pin_memory": "`dflop.torch.pin` page-locks what a loader delivers",
}
MODEL_SETTINGS = ("device", "profile_tp", "freeze", "recompute")
_COUNTED = "`Dataset(…).count_tokens(tokenizer, model=…, chat_template=…, caption_prompt=…)`"

# Settings of earlier versions, by class, and what replaces them.
MOVED = {
    ("Dataset", "splits"): "`split=(NAME, FILE)`",
    ("Dataset", "repeat"): "`Dataset(…).repeat(epochs)`",
    ("Dataset", "cache_bytes"): "the environment variable `DFLOP_CACHE_BYTES`",
    ("Dataset", "requests_max"): "the environment variable `DFLOP_REQUESTS_MAX`",
    ("Dataset", "retry_seconds"): "the environment variable `DFLOP_RETRY_SECONDS`",
    ("Dataset", "read"): "the environment variable `DFLOP_READ`",
    ("Dataset", "allow_pipe"): '`allow="pipe"`',
    ("Dataset", "allow_outside"): '`allow="outside"`',
    ("Dataset", "tokenizer"): _COUNTED,
    ("Dataset", "model"): _COUNTED,
    ("Dataset", "chat_template"): _COUNTED,
    ("Dataset", "caption_prompt"): _COUNTED,
    ("Dataset", "rebuild"): "`Dataset(…).reindex()`",
    ("Dataset", "verify"): "`Dataset(…).reindex(verify=True)`",
    ("CostModel", "profile"): "`device=PROFILE`, a path or a name",
    ("CostModel", "profile_check"): "nothing: measure the profile again, or remove its `# held-out` lines",
    ("Augment", "crop_scale"): "`crop=(LEAST, MOST)`",
    ("Augment", "crop_ratio"): "`crop=(LEAST, MOST, NARROWEST, WIDEST)`",
    ("Plan", "search_effort"): '`strategy="search:UNITS"`',
    ("Plan", "synchronize"): '`schedule="step"`, `"microbatch"` or `"microbatch:N"`',
    ("Plan", "correction_interval"): "`interval=…` where times are reported: in "
    "`dflop.torch.StageTimer`, `report_stage_seconds`, `report_microbatch_seconds`",
    ("Order", "validation"): '`Order(shuffle="none", tail="short")` and `epochs=1`',
    ("Order", "block_samples"): '`shuffle="blocks:SAMPLES:RUNS"`',
    ("Order", "open_blocks"): '`shuffle="blocks:SAMPLES:RUNS"`',
    ("Order", "repeat_samples"): '`tail="repeat"`',
    ("Order", "first_epoch"): "`loader.set_epoch(epoch)`",
    ("Order", "accept_changed_data"): "`loader.load_state_dict(state, accept_changed_data=True)`",
    ("Processor", "pad_to_tokens"): '`length_buckets="fixed:N"`',
    ("Processor", "sample_multiple_of"): '`layout="packed:N"`',
    ("Processor", "sample_tokens_max"): '`long_sample="error:N"`, `"truncate:N"` or `"drop:N"`',
    ("Processor", "skip_media_tensors"): '`dtype="none"`',
    ("CustomProcessor", "threads"): "`Read(python_threads=…)`",
    ("Read", "transform_threads"): "`python_threads=…`",
    ("Read", "strict"): '`decode="strict"`',
    ("Read", "error_count"): '`error_budget="FRACTION:SAMPLES"`, such as `"0.05:100"`',
    ("Read", "microbatch_bytes"): "nothing: the available memory is the limit",
}
# Settings of earlier versions that nothing replaces.
GONE = {"foreign": "`foreign` is gone and not needed: index files of other tools are not opened"}


def refuse_keywords(loader: str, keywords: Iterable[str]) -> None:
    """Refuses keywords that a class does not have, with the place of the setting if it has one.

    Raises:
        TypeError: there is a keyword.
    """
    for keyword in keywords:
        hint = _place_of(loader, keyword) or FOREIGN.get(keyword) or _similar_to(loader, keyword)
        hint = hint or _place_in_balanced(loader, keyword)
        message = f"{loader}() got an unexpected keyword argument {keyword!r}"
        raise TypeError(f"{message}: {hint}" if hint else message)


def _calls(loader: str) -> dict[str, tuple[type[Any], str]]:
    """Returns the group of each setting of a class that is in one, and the argument that passes it."""
    return {
        field.name: (group, f"{taken_by}=dflop.{group.__name__}({field.name}=…)")
        for taken_by, classes in reversed(GROUPS.get(loader, {}).items())
        for group in reversed(classes)
        for field in fields(group)
    }


def _similar_to(loader: str, keyword: str) -> str:
    """Returns the keyword of a class, or the field of its groups, that is similar; empty without one."""
    from dflop import _native

    own = list(inspect.signature(getattr(_native, loader)).parameters)
    calls = _calls(loader)
    hint = similar(keyword, own) or similar(keyword, calls)
    for name, (_, call) in calls.items():
        hint = hint.replace(f"`{name}`", f"`{call}`")
    return hint


def _place_in_balanced(loader: str, keyword: str) -> str:
    """Returns the place of a setting that `Loader` lacks: tokens, models and plans are `BalancedLoader`'s."""
    from dflop import _native

    name = RENAMED.get(keyword, keyword)
    places = {own: f"{own}=…" for own in inspect.signature(_native.BalancedLoader).parameters}
    places |= {field: call for field, (_, call) in _calls("BalancedLoader").items()}
    if loader != "Loader" or name not in places:
        return ""
    reason = "a `Loader` delivers samples, a `BalancedLoader` model inputs, on one rank as on many"
    return f"{reason}: dflop.BalancedLoader(…, {places[name]})"


def _place_of(loader: str, keyword: str) -> str | None:
    if loader not in GROUPS:
        moved = MOVED.get((loader, keyword))
        return f"replaced by {moved}" if moved else GONE.get(keyword)
    name = RENAMED.get(keyword, keyword)
    if found := _calls(loader).get(name):
        group, call = found
        return f"`{name}` is a field of `dflop.{group.__name__}`: {call}"
    for group in (group for classes in GROUPS[loader].values() for group in classes):
        if moved := MOVED.get((group.__name__, name)):
            return f"replaced by {moved}"
    if loader == "BalancedLoader" and keyword in MODEL_SETTINGS:
        return f"`{keyword}` is a setting of `dflop.CostModel`: model=dflop.CostModel(…, {keyword}=…)"
    if loader == "BalancedLoader" and (moved := MOVED.get(("CostModel", keyword))):
        return f"replaced by {moved}"
    return f"its name is `{name}`" if name in ("dp_rank", "dp_size") else None
