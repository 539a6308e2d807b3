"""The user's own processor in the loader: samples to model inputs, ahead of the training loop."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from dflop.errors import Error, UserCodeError

if TYPE_CHECKING:
    from dflop._native import MicrobatchIterator
    from dflop.batches import Microbatch
    from dflop.settings import CustomProcessor

IGNORED = -100
# A microbatch is made while the one before it is trained on.
MICROBATCHES_AHEAD = 2


class Inputs:
    """Makes model inputs of samples by the functions of a `dflop.CustomProcessor`."""

    def __init__(self, processor: CustomProcessor) -> None:
        self._inputs, self._collate = processor.inputs, processor.collate
        self._pool = ThreadPoolExecutor(processor.threads, thread_name_prefix="dflop-inputs")
        # Tensors of one sample, from which microbatches without samples are made.
        self._template: dict[str, Any] | None = None

    def of(self, microbatches: MicrobatchIterator) -> Iterator[Microbatch]:
        """Iterates over microbatches with their inputs; those of the next one are made meanwhile."""
        begun: deque[tuple[Microbatch, list[Future[Any]]]] = deque()
        try:
            while True:
                while len(begun) < MICROBATCHES_AHEAD:
                    microbatch = next(microbatches, None)
                    if microbatch is None:
                        break
                    made = [self._pool.submit(self._inputs, sample) for sample in microbatch.samples]
                    begun.append((microbatch, made))
                if not begun:
                    return
                microbatch, made = begun.popleft()
                self._fill(microbatch, made, microbatches, begun)
                yield microbatch
        finally:
            for _, made in begun:
                for future in made:
                    future.cancel()

    def _fill(
        self,
        microbatch: Microbatch,
        made: list[Future[Any]],
        microbatches: MicrobatchIterator,
        later: deque[tuple[Microbatch, list[Future[Any]]]],
    ) -> None:
        """Gives a microbatch its inputs; samples that raise are skipped."""
        results, kept = [], []
        for sample, future in zip(microbatch.samples, made, strict=True):
            error = future.exception()
            if error is None:
                results.append(future.result())
                kept.append(sample)
                continue
            if not isinstance(error, Exception):
                raise error
            try:
                microbatches.skip(sample, f"{type(error).__name__}: {error}")
            except Error as too_many:
                raise too_many from error
        if results:
            tensors = dict(self._collate(results))
            if self._template is None:
                self._template = _without_targets(dict(self._collate(results[:1])))
        else:
            tensors = self._blank(later)
        microbatch.update(tensors)
        microbatch.samples, microbatch.sample_keys = kept, [sample.key for sample in kept]
        if "labels" in tensors:
            microbatch.target_tokens = int((tensors["labels"] != IGNORED).sum())
            microbatch.loss_scale = microbatch.target_tokens * microbatch.loss_scale_sum

    def _blank(self, later: deque[tuple[Microbatch, list[Future[Any]]]]) -> dict[str, Any]:
        """Returns tensors without targets, of an earlier sample or of the next one."""
        if self._template is None:
            futures = [future for _, made in later for future in made]
            good = next((future for future in futures if future.exception() is None), None)
            if good is None:
                message = "the first microbatches have no sample of which inputs could be made, and so nothing to fill them"
                raise UserCodeError(message, "no_inputs")
            self._template = _without_targets(dict(self._collate([good.result()])))
        return dict(self._template)


def _without_targets(tensors: dict[str, Any]) -> dict[str, Any]:
    """Returns tensors with all labels ignored."""
    if "labels" in tensors:
        labels = copy.copy(tensors["labels"])
        labels = labels.clone() if hasattr(labels, "clone") else labels.copy()
        labels[...] = IGNORED
        tensors["labels"] = labels
    return tensors
