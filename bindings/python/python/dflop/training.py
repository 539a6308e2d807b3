"""Trains a model through the executor: `train`, the reports of its steps, and how a run ended."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from dflop import _native

LOGGER = logging.getLogger("dflop")


@dataclass(frozen=True)
class TrainStep:
    """Report of one training step, as rank 0 measured it.

    Attributes:
        step: number of the step, from 0.
        loss: mean loss over the target tokens, before the update.
        gradient_norm: norm of all gradients before clipping.
        learning_rate: learning rate of the update.
        samples: samples that were trained on.
        tokens: tokens of these samples, media included.
        seconds: time from the end of the step before to the end of this one.
        tokens_per_second: tokens per second of all ranks together.
        mfu: model FLOPs utilization, 0 to 1.
        data_wait_seconds: mean time in which a rank waited for samples.
        predicted_seconds: makespan of the passes as predicted.
        is_skipped: whether nothing was updated, because a loss or a gradient is not finite.
        dropped_samples: damaged samples that all ranks skipped.
        evaluation_loss: mean loss over the target tokens of the held-out samples, if an evaluation followed
            the step; ``report["evaluation"]`` also has its ``target_tokens``, ``samples`` and ``seconds``.
        report: every figure of the step, as ``steps.jsonl`` has it; for the first step of a run also
            ``start``, the time since the run began, by part.

    Examples:
        >>> config = {"model": {"directory": "model/"}, "data": {"shards": ["shards/"], "global_batch_size": 8}}
        >>> config |= {"steps": 1, "parallel": {"microbatches": 2}}
        >>> steps: list[dflop.TrainStep] = []
        >>> _ = dflop.train(config, on_step=steps.append)
        >>> steps[0].samples, steps[0].is_skipped, "update_seconds" in steps[0].report
        (8, False, True)
    """

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    samples: int
    tokens: int
    seconds: float
    tokens_per_second: float
    mfu: float
    data_wait_seconds: float
    predicted_seconds: float
    is_skipped: bool
    dropped_samples: int
    evaluation_loss: float | None
    report: Mapping[str, Any]


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Attributes:
        steps: steps taken, including those before a restored state.
        checkpoint: directory of the last saved state; ``None`` if the configuration names no directory.
        evaluation_loss: loss of the last evaluation; ``None`` if there was none, or on another rank than 0.

    Examples:
        >>> dflop.TrainResult(steps=2, checkpoint=None).steps
        2
    """

    steps: int
    checkpoint: str | None
    evaluation_loss: float | None = None


def train(
    config: str | os.PathLike[str] | Mapping[str, Any],
    *,
    on_step: Callable[[TrainStep], object] | None = None,
    until: int | None = None,
    resume: bool = False,
    record: str | os.PathLike[str] | None = None,
    trace: str | os.PathLike[str] | None = None,
) -> TrainResult:
    """Trains a model on shards: encoder and LLM stages on this machine's CPUs, fed by the balanced loader.

    Every rank of the job is a thread of this process. Under a launcher (``torchrun``, Slurm, Open MPI) this
    process is one rank instead, and rank 0 calls ``on_step``.

    Args:
        config: configuration file of ``dflop train``, TOML or JSON; or its tables as a ``dict``, in which
            paths are relative to the current directory.
        on_step: called with every step. An exception, such as ``KeyboardInterrupt`` of Ctrl-C, ends the run
            after the current step, with its state saved, and is raised then; a second one is raised at once.
        until: step to end before; the learning rate follows the ``steps`` of the configuration.
        resume: resume from the last complete state in the checkpoint directory.
        record: file that steps are recorded in, which ``dflop top`` shows. Default: ``steps.jsonl`` in the
            checkpoint directory.
        trace: file for the timeline of every action, measured and predicted, for Perfetto.

    Returns:
        `TrainResult`.

    Raises:
        ConfigError: the configuration is invalid.
        Error: the run failed; the message names the step.

    Examples:
        >>> config = {
        ...     "steps": 2,
        ...     "model": {"directory": "model/"},
        ...     "data": {"shards": ["shards/"], "global_batch_size": 8},
        ...     "parallel": {"microbatches": 2},
        ... }
        >>> result = dflop.train(config, on_step=lambda step: print(step.step, step.samples))
        0 8
        1 8
        >>> result.steps
        2
    """
    names = [field.name for field in fields(TrainStep) if field.name not in ("evaluation_loss", "report")]
    evaluated: list[float] = []

    def report(figures: dict[str, Any]) -> None:
        figures.setdefault("is_skipped", False)
        LOGGER.info("step %(step)d: loss %(loss).6g, %(seconds).3g s, %(samples)d samples", figures)
        loss = figures.get("evaluation", {}).get("loss")
        if loss is not None:
            evaluated.append(loss)
            LOGGER.info("evaluation after step %d: loss %.6g", figures["step"], loss)
        if on_step is not None:
            own = {name: figures[name] for name in names}
            on_step(TrainStep(**own, evaluation_loss=loss, report=figures))

    steps, checkpoint = _native.train(
        dict(config) if isinstance(config, Mapping) else os.fspath(config),
        until=until,
        resume=resume,
        record=record,
        trace=trace,
        on_step=report,
    )
    return TrainResult(steps, checkpoint, evaluated[-1] if evaluated else None)
