"""Shares a loader among the ranks of a process group that run on one machine."""

from __future__ import annotations

import os
import secrets
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dflop.errors import SharedError
from dflop.shared import SharedLoader


def shared_loader(
    make: Callable[[], Any],
    group: dist.ProcessGroup | None = None,
    *,
    ahead: int = 2,
    timeout: float = 300.0,
) -> SharedLoader:
    """Creates one loader per machine for the ranks of a group, which all need the same data.

    Collective: every rank of the group calls it. On each machine the lowest rank of the group reads and
    decodes, and the others get its microbatches from shared memory; a rank alone on its machine has a loader
    of its own.

    Args:
        make: creates the loader; called on the ranks that read.
        group: ranks that need the same data: of tensor and context parallelism, of pipeline stages. Default:
            all ranks.
        ahead: microbatches that wait in shared memory for the slowest rank.
        timeout: seconds that ranks wait for each other when an iteration starts.

    Raises:
        SharedError: ``make`` failed on another rank.
        Exception: those of ``make``.

    Examples:
        >>> import torch
        >>> store = torch.distributed.HashStore()  # ``torchrun`` sets up a real job
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> loader = dflop.torch.shared_loader(
        ...     lambda: dflop.BalancedLoader("shards/", model="model/", global_batch_size=8, steps=2),
        ...     group=torch.distributed.group.WORLD,  # in a job ``mesh["tp"].get_group()``
        ... )
        >>> [step.step for step in loader]
        [0, 1]
        >>> loader.close()
        >>> torch.distributed.destroy_process_group()
    """
    mine: list[Any] = [None] * dist.get_world_size(group)
    # The lowest rank of a machine chooses the name and the token, which others of the machine must not know.
    dist.all_gather_object(mine, (_machine(), uuid.uuid4().hex, secrets.token_hex(32)), group)
    machine = mine[dist.get_rank(group)][0]
    here = [rank for rank, (other, _, _) in enumerate(mine) if other == machine]
    rank, failure, loader = here.index(dist.get_rank(group)), None, None
    try:
        loader = SharedLoader(
            make,
            rank=rank,
            size=len(here),
            name=mine[here[0]][1],
            ahead=ahead,
            timeout=timeout,
            token=mine[here[0]][2],
        )
    except Exception as error:  # noqa: BLE001 - raised below, after all ranks know
        failure = error
    texts: list[Any] = [None] * len(mine)
    text = None if failure is None else f"{type(failure).__name__}: {failure}"
    dist.all_gather_object(texts, text, group)
    if failure is not None:
        raise failure
    failed = next((place for place, text in enumerate(texts) if text is not None), None)
    if failed is not None or loader is None:
        if loader is not None:
            loader.close()
        message = f"rank {failed} of the group could not create its loader: {texts[failed or 0]}"
        raise SharedError(message, "shared_failure")
    return loader


def _machine() -> tuple[str, int, int]:
    """Identifies processes that can share memory: one boot, one network namespace, one user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot, os.stat("/proc/self/ns/net").st_ino, os.geteuid()
