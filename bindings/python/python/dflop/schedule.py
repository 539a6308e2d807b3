"""Parts of a step as data: actions and roles of ranks, and the rows that messages have.

`dflop.Schedule` lists what every rank does in a step, `dflop.Route` which rows every message has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from dflop._native import Route, Schedule


@dataclass(frozen=True, slots=True)
class RankRole:
    """Role of a rank in a module, which a `BalancedLoader` can read for: ``role=``. A rank has one role, or
    several if modules share ranks.

    Attributes:
        rank: the rank.
        module: ``vision``, ``audio`` or ``llm``.
        replica: data-parallel rank of the replica in the module.
        tp_rank: index among the ranks that share the stages of the replica by tensor parallelism.
        stages: stages that the rank runs, ascending; numbered over all modules, encoders first.
        schedule: the schedule.

    Examples:
        >>> modules = {"vision": {"dp": 2}, "llm": {"stages": 2}}
        >>> dflop.Schedule(modules, microbatches=4).roles(3)
        [RankRole(rank=3, module='llm', replica=0, tp_rank=0, stages=(2,))]
    """

    rank: int
    module: str
    replica: int
    tp_rank: int
    stages: tuple[int, ...]
    schedule: Schedule = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Action:
    """An action of a rank: a pass, one end of a message, or a sum of gradients.

    - ``forward`` computes a microbatch in a stage; ``backward`` all of its gradients, or ``backward_input``
      the gradient of the input and later ``backward_weight`` that of the weights;
    - ``recv`` receives rows of the input of a stage, and ``send`` sends rows of its output;
    - ``recv_gradient`` receives the gradient of rows that were sent, ``send_gradient`` sends that of rows
      that were received;
    - ``reduce_gradients`` sums the gradients of a stage over its replicas.

    Attributes:
        kind: what the rank does.
        stage: stage, numbered over all modules, encoders first.
        microbatch: microbatch in the stage, ``k * D + d`` for the ``k``-th one of replica ``d`` of ``D`` in
            the module; ``None`` for ``reduce_gradients``.
        peer: rank at the other end of a message; else ``None``.
        peer_stage: stage at the other end of a message; else ``None``.
        peer_microbatch: microbatch in the stage at the other end of a message; else ``None``.

    Examples:
        >>> actions = dflop.Schedule({"llm": {"stages": 2}}, microbatches=2).actions(1)
        >>> actions[0].kind, actions[0].microbatch, actions[0].peer, actions[0].peer_stage
        ('recv', 0, 0, 0)
        >>> print(actions[0], actions[1], actions[-1], sep="; ")
        recv 0 in stage 1 from 0; forward 0 in stage 1; reduce_gradients in stage 1
    """

    kind: Literal[
        "recv",
        "forward",
        "send",
        "recv_gradient",
        "backward",
        "backward_input",
        "backward_weight",
        "send_gradient",
        "reduce_gradients",
    ]
    stage: int
    microbatch: int | None = None
    peer: int | None = None
    peer_stage: int | None = None
    peer_microbatch: int | None = None

    def __str__(self) -> str:
        number = "" if self.microbatch is None else f" {self.microbatch}"
        way = "" if self.peer is None else f" {'from' if self.kind.startswith('recv') else 'to'} {self.peer}"
        return f"{self.kind}{number} in stage {self.stage}{way}"


@dataclass(frozen=True, slots=True)
class MediumRows:
    """An image, a video or an audio clip of a microbatch, as far as its rows go.

    Attributes:
        module: the encoder, ``vision`` or ``audio``.
        rows: rows that the encoder sends to the LLM, one for each LLM token of the medium.
        seconds: predicted time in the encoder; only ratios matter. Default: in proportion to ``rows``. All
            media of a step have it, or none.
        encoder_rows: rows between two stages of the encoder, such as patches before merging. Default:
            ``rows``.
        key: anything that names the medium, such as the key of its sample and its index there.

    Examples:
        >>> dflop.MediumRows("vision", rows=64, encoder_rows=256, key=("000138", 0)).rows
        64
    """

    module: str
    rows: int
    seconds: float | None = None
    encoder_rows: int | None = None
    key: object = None


@dataclass(frozen=True, slots=True)
class MicrobatchRows:
    """A microbatch of the LLM, as far as its rows go.

    Attributes:
        rows: rows of the microbatch, one for each LLM token, media included.
        media: the media, in the order in which their rows occur in the microbatch.

    Examples:
        >>> dflop.MicrobatchRows(100, [dflop.MediumRows("vision", 64)]).rows
        100
    """

    rows: int
    media: Sequence[MediumRows] = ()


@dataclass(frozen=True, slots=True)
class RoutedMedium:
    """The way of a medium from an encoder to the LLM, and of its gradient back.

    Attributes:
        medium: the medium.
        encoder_microbatch: microbatch of the encoder that has the medium, ``k * E + e`` for replica ``e`` of
            ``E`` in round ``k``; its media are encoded in the order of ``encoder_row``.
        encoder_ranks: ranks that run the last stage of the encoder on it, by TP rank.
        encoder_row: first row of the medium in the output of the encoder microbatch.
        llm_microbatch: microbatch of the LLM that reads the medium.
        llm_ranks: ranks that run the first stage of the LLM on it, by TP rank.
        llm_row: first row of the medium among the media rows of the microbatch: if ``0``, they go to the
            first tokens that stand for media.

    Examples:
        >>> schedule = dflop.Schedule({"vision": {}, "llm": {"dp": 2}}, microbatches=1)
        >>> media = [dflop.MediumRows("vision", 3, key="a"), dflop.MediumRows("vision", 5, key="b")]
        >>> route = dflop.Route(schedule, [[dflop.MicrobatchRows(4)], [dflop.MicrobatchRows(9, media)]])
        >>> for routed in route.media:
        ...     print(routed.medium.key, routed.encoder_ranks, routed.llm_ranks, routed.llm_row)
        a (0,) (2,) 0
        b (0,) (2,) 3
    """

    medium: MediumRows
    encoder_microbatch: int
    encoder_ranks: tuple[int, ...]
    encoder_row: int
    llm_microbatch: int
    llm_ranks: tuple[int, ...]
    llm_row: int


class RoleMicrobatch(dict[str, Any]):
    """Samples of a microbatch for one role: for the LLM the arguments of the text, for an encoder its media.

    Samples are packed without padding; a microbatch without samples is not delivered.

    Attributes:
        sample_keys: keys of the samples, in the order of the tensors.
        tokens: LLM positions of the samples; 0 for an encoder.
        cu_seqlens: int32, first token of each sample, then the number of tokens; ``None`` for an encoder.
        max_seqlen: tokens of the longest sample; 0 for an encoder.
        media_rows: int64, positions in the packed row that media rows go to, in the order of ``llm_row`` in
            `RoutedMedium`; ``None`` for an encoder.
        media_runs: kind (``image``, ``video`` or ``audio``) and rows of the media that the module reads, in
            the order of the rows: for each sample images, then videos, then audio clips. An encoder that
            encodes one kind after the other, over all samples, puts the rows into this order.

    Examples:
        >>> schedule = dflop.Schedule({"vision": {}, "llm": {}}, microbatches=2)
        >>> settings = {"model": "model/", "global_batch_size": 8}
        >>> roles = [*schedule.roles(0), *schedule.roles(1)]
        >>> steps = [next(iter(dflop.BalancedLoader("shards/", role=role, **settings))) for role in roles]
        >>> counts = steps[0].counts + steps[1].counts
        >>> vision, llm = [step.inputs(counts).microbatches[0] for step in steps]
        >>> "pixel_values" in vision, "pixel_values" in llm, llm["input_ids"].shape == (1, llm.tokens)
        (True, False, True)
    """

    __slots__ = ("cu_seqlens", "max_seqlen", "media_rows", "media_runs", "sample_keys", "tokens")

    sample_keys: list[str]
    tokens: int
    cu_seqlens: Any
    max_seqlen: int
    media_rows: Any
    media_runs: list[tuple[str, int]]

    def __repr__(self) -> str:
        return f"RoleMicrobatch(samples={len(self.sample_keys)}, tensors={list(self)})"


@dataclass(frozen=True, slots=True)
class RoleInputs:
    """Inputs of a rank for one role in a step, see `RoleStep.inputs`.

    Attributes:
        route: rows of every message, the same on all ranks; all media of a sample for an encoder are one
            medium, whose ``key`` is the key of the sample.
        microbatches: microbatches of the role by number; those without samples are missing.
        target_tokens: tokens that the loss of the step is taken over, on all ranks: its gradient is that of
            the mean if each rank divides the sum of its losses by them.
        skipped: keys and reasons of samples that a rank could not prepare, which all ranks leave out.

    Examples:
        >>> schedule = dflop.Schedule({"vision": {}, "llm": {}}, microbatches=2, placement="joint")
        >>> settings = {"model": "model/", "global_batch_size": 8}
        >>> loaders = [dflop.BalancedLoader("shards/", role=role, **settings) for role in schedule.roles(0)]
        >>> steps = [next(iter(loader)) for loader in loaders]
        >>> inputs = steps[1].inputs(steps[0].counts + steps[1].counts)
        >>> list(inputs.microbatches), inputs.skipped
        ([0, 1], [])
    """

    route: Route
    microbatches: dict[int, RoleMicrobatch]
    target_tokens: int
    skipped: list[tuple[str, str]]
