"""Parts of a step as data: actions and roles of ranks, and the rows that messages have.

`dflop.Schedule` lists what every rank does in a step, `dflop.Route` which rows every message has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
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


@dataclass(frozen=True, slots=True)
class RankRole:
    """Role of a rank in a module. A rank has one role, or several if modules share ranks.

    Attributes:
        module: ``vision``, ``audio`` or ``llm``.
        replica: data-parallel rank of the replica in the module.
        tp_rank: index among the ranks that share the stages of the replica by tensor parallelism.
        stages: stages that the rank runs, ascending; numbered over all modules, encoders first.

    Examples:
        >>> modules = {"vision": {"dp": 2}, "llm": {"stages": 2}}
        >>> dflop.Schedule(modules, microbatches=4).roles(3)
        [RankRole(module='llm', replica=0, tp_rank=0, stages=(2,))]
    """

    module: str
    replica: int
    tp_rank: int
    stages: tuple[int, ...]


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

    kind: Kind
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
