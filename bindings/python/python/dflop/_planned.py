"""Compares the tokens that the user's processor delivers with those that were planned from the index."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflop.batches import Microbatch

# Differences below are those of estimated text; above them, plans are noticeably worse.
TOLERATED = 0.1
# Microbatches after which the account is judged.
JUDGED_AFTER = 16
LISTED_MAX = 100


class PlannedTokens:
    """Account of planned and delivered tokens, over the microbatches of a loader."""

    def __init__(self) -> None:
        self._microbatches = self._tokens = self._planned = 0
        self._differing: list[dict[str, Any]] = []
        self._differing_count = 0
        self._is_judged = False

    def add(self, microbatch: Microbatch, *, are_all: bool) -> None:
        """Adds a microbatch, and sets its `tokens` and `padding_tokens`.

        - `are_all`: whether inputs were made of all its planned samples
        """
        delivered = delivered_tokens(microbatch)
        if delivered is None:
            return
        tokens, positions = delivered
        microbatch.tokens, microbatch.padding_tokens = tokens, positions - tokens
        # The plan counts samples that turned out to be bad, so such a microbatch proves nothing.
        if not are_all:
            return
        self._microbatches += 1
        self._tokens += tokens
        self._planned += microbatch.planned_tokens
        if tokens != microbatch.planned_tokens:
            self._differing_count += 1
            if len(self._differing) < LISTED_MAX:
                self._differing.append(
                    {
                        "keys": list(microbatch.sample_keys),
                        "tokens": tokens,
                        "planned_tokens": microbatch.planned_tokens,
                    }
                )
        if self._microbatches >= JUDGED_AFTER and not self._is_judged:
            self._judge()

    def report(self) -> dict[str, Any]:
        """Returns the account: microbatches, their tokens and planned tokens, and the first that differ."""
        return {
            "microbatches": self._microbatches,
            "tokens": self._tokens,
            "planned_tokens": self._planned,
            "differing_microbatches": self._differing_count,
            "differing": list(self._differing),
        }

    def _judge(self) -> None:
        """Warns once if the plan counts noticeably other tokens than are delivered."""
        self._is_judged = True
        if abs(self._tokens - self._planned) <= TOLERATED * self._tokens:
            return
        first = self._differing[0]
        warnings.warn(
            f"microbatches were planned with {self._planned} tokens, but the processor made {self._tokens}: "
            f"compare the token rule of the model with it, first at the samples "
            f"{', '.join(first['keys'][:4])}, planned {first['planned_tokens']}, made {first['tokens']}; "
            f"`BalancedLoader.prepare_report` lists more",
            UserWarning,
            stacklevel=2,
        )


def delivered_tokens(tensors: Any) -> tuple[int, int] | None:
    """Returns the tokens of a microbatch, without and with padding; ``None`` if there are no ids."""
    ids = tensors.get("input_ids")
    mask = tensors.get("attention_mask")
    if ids is None and mask is None:
        return None
    shape = (mask if ids is None else ids).shape
    positions = 1
    for length in shape:
        positions *= int(length)
    # A mask of another form, such as one by pairs, has no entry for each position.
    if mask is None or tuple(mask.shape) != tuple(shape):
        return positions, positions
    return int((mask != 0).sum()), positions
