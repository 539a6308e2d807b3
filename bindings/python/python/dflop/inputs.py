"""The user's own processor in the loader: samples to model inputs, ahead of the training loop."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflop._planned import PlannedTokens
from dflop.errors import Error, UserCodeError

if TYPE_CHECKING:
    from dflop._native import MicrobatchIterator
    from dflop.batches import Microbatch, Sample
    from dflop.settings import CustomProcessor

IGNORED = -100
# A microbatch is made while the one before it is trained on.
MICROBATCHES_AHEAD = 2


@dataclass
class Made:
    """Inputs of a microbatch.

    - `tensors`: ``None`` if there is no good sample
    - `template`: makes tensors of one good sample
    - `faults`: samples of which no inputs can be made, with their exceptions
    """

    tensors: dict[str, Any] | None
    template: Callable[[], Mapping[str, Any]] | None
    kept: Sequence[Sample]
    faults: Sequence[tuple[Sample, BaseException]]


class OneByOne:
    """Makes inputs of every sample on its own, and joins them where they are asked for."""

    def __init__(self, processor: CustomProcessor, pool: ThreadPoolExecutor) -> None:
        assert processor.inputs is not None and processor.collate is not None
        self._inputs, self._collate, self._pool = processor.inputs, processor.collate, pool

    def begin(self, samples: Sequence[Sample]) -> Sequence[Future[Any]]:
        return [self._pool.submit(self._inputs, sample) for sample in samples]

    def end(self, samples: Sequence[Sample], futures: Sequence[Future[Any]]) -> Made:
        pairs = list(zip(samples, futures, strict=True))
        faults = [(sample, error) for sample, future in pairs if (error := future.exception())]
        kept = [(sample, future.result()) for sample, future in pairs if future.exception() is None]
        results = [result for _, result in kept]
        if not results:
            return Made(None, None, [], faults)
        tensors = dict(self._collate(results))
        return Made(tensors, lambda: self._collate(results[:1]), [sample for sample, _ in kept], faults)


class Together:
    """Makes the inputs of a microbatch in one call; only after an exception, sample by sample."""

    def __init__(self, processor: CustomProcessor, pool: ThreadPoolExecutor) -> None:
        assert processor.batch is not None
        self._batch, self._pool = processor.batch, pool

    def begin(self, samples: Sequence[Sample]) -> Sequence[Future[Any]]:
        return [self._pool.submit(self._made, list(samples))] if samples else []

    def end(self, samples: Sequence[Sample], futures: Sequence[Future[Made]]) -> Made:
        return futures[0].result() if futures else Made(None, None, [], [])

    def _made(self, samples: list[Sample]) -> Made:
        faults: list[tuple[Sample, BaseException]] = []
        try:
            tensors = dict(self._batch(samples))
        except Exception:  # noqa: BLE001  # the user's code may raise anything
            kept = []
            for sample in samples:
                try:
                    self._batch([sample])
                    kept.append(sample)
                except Exception as error:  # noqa: BLE001
                    faults.append((sample, error))
            # Samples that are good alone but not together are no fault of a sample.
            samples = kept
            if not samples:
                return Made(None, None, [], faults)
            tensors = dict(self._batch(samples))
        return Made(tensors, lambda: self._batch(samples[:1]), samples, faults)


class Inputs:
    """Makes model inputs of samples by the functions of a `dflop.CustomProcessor`."""

    def __init__(self, processor: CustomProcessor, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="dflop-inputs")
        self._maker = (OneByOne if processor.batch is None else Together)(processor, self._pool)
        # As many microbatches as threads can be in one call each.
        self._ahead = MICROBATCHES_AHEAD if processor.batch is None else threads + 1
        # Tensors of one sample, from which microbatches without samples are made.
        self._template: dict[str, Any] | None = None
        # Exception of the last bad sample.
        self._fault: Exception | None = None
        self._planned = PlannedTokens()

    def report(self) -> dict[str, Any]:
        """Returns the account of planned and delivered tokens of this loader."""
        return self._planned.report()

    def of(self, microbatches: MicrobatchIterator) -> Iterator[Microbatch]:
        """Iterates over microbatches with their inputs; those of the next ones are made meanwhile."""
        begun: deque[tuple[Microbatch, Sequence[Future[Any]]]] = deque()
        try:
            while True:
                while len(begun) < self._ahead:
                    microbatch = next(microbatches, None)
                    if microbatch is None:
                        break
                    begun.append((microbatch, self._maker.begin(microbatch.samples)))
                if not begun:
                    return
                microbatch, futures = begun.popleft()
                self._fill(microbatch, futures, microbatches, begun)
                yield microbatch
        finally:
            for _, futures in begun:
                for future in futures:
                    future.cancel()

    def _fill(
        self,
        microbatch: Microbatch,
        futures: Sequence[Future[Any]],
        microbatches: MicrobatchIterator,
        later: deque[tuple[Microbatch, Sequence[Future[Any]]]],
    ) -> None:
        """Gives a microbatch its inputs; samples that raise are skipped."""
        made = self._maker.end(microbatch.samples, futures)
        for sample, error in made.faults:
            if not isinstance(error, Exception):
                raise error
            self._fault = error
            try:
                microbatches.skip(sample, f"{type(error).__name__}: {error}")
            except Error as too_many:
                raise too_many from error
        tensors = made.tensors
        self._keep_template(made)
        if tensors is None:
            tensors = self._blank(later)
        microbatch.update(tensors)
        # By identity: two samples may have equal keys.
        sources = {
            id(one): source for one, source in zip(microbatch.samples, microbatch.sources, strict=True)
        }
        microbatch.sources = [sources[id(sample)] for sample in made.kept]
        microbatch.samples, microbatch.sample_keys = list(made.kept), [sample.key for sample in made.kept]
        if "labels" in tensors:
            microbatch.target_tokens = int((tensors["labels"] != IGNORED).sum())
            microbatch.loss_scale = microbatch.target_tokens * microbatch.loss_scale_sum
        if made.kept:
            self._planned.add(microbatch, are_all=not made.faults)

    def _keep_template(self, made: Made) -> None:
        if self._template is None and made.template is not None:
            self._template = _without_targets(dict(made.template()))

    def _blank(self, later: deque[tuple[Microbatch, Sequence[Future[Any]]]]) -> dict[str, Any]:
        """Returns tensors without targets, of an earlier sample or of the next one."""
        for microbatch, futures in later:
            if self._template is None:
                self._keep_template(self._maker.end(microbatch.samples, futures))
        if self._template is None:
            reason = f"{type(self._fault).__name__}: {self._fault}" if self._fault else "they are empty"
            message = f"the first microbatches have no sample of which inputs could be made: {reason}"
            raise UserCodeError(message, "no_inputs") from self._fault
        return dict(self._template)


def _without_targets(tensors: dict[str, Any]) -> dict[str, Any]:
    """Returns tensors with all labels ignored."""
    if "labels" in tensors:
        labels = copy.copy(tensors["labels"])
        labels = labels.clone() if hasattr(labels, "clone") else labels.copy()
        labels[...] = IGNORED
        tensors["labels"] = labels
    return tensors
