"""Rows of a batch that cannot be read, or not be computed with: they become dead letters, the rest is trained.

The store has damaged them since they were taken, or values got in that no row may have: those would end the step of
the whole batch, of this trainer and of each one after it.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping

import numpy as np

from meshrl.contract.errors import CorruptError
from meshrl.contract.ports import Queue
from meshrl.contract.row_values import row_fault
from meshrl.contract.rows import DAMAGED, UNTRAINABLE, trajectory
from meshrl.contract.types import Batch, Columns, Trajectory, Uid
from meshrl.trainer.ranks.compute import Compute
from meshrl.trainer.ranks.world import World

log = logging.getLogger(__name__)

MALFORMED = (CorruptError, ValueError, TypeError, LookupError, RecursionError)
"""Errors of reading columns of another form."""


class UntrainableError(CorruptError):
    """A row came as it was written, and no step can be computed from it."""


def trainable(uid: Uid, columns: Columns, *, vocabulary: int) -> Trajectory:
    """A row's columns as a Trajectory that a step can be computed from. Raises UntrainableError."""
    if fault := row_fault(columns, vocabulary=vocabulary):
        raise UntrainableError(f"row {uid}: {fault}")
    try:
        row = trajectory(uid, columns)
    except MALFORMED as error:
        raise UntrainableError(f"row {uid}: {error}") from error
    if row.reward is None:
        raise UntrainableError(f"row {uid}: it has no reward")
    for start in {0, *(part.start for part in row.parts)}:
        if row.loss_mask[start : start + 1].any():
            # Nothing stands before it that it could have been sampled from.
            raise UntrainableError(
                f"row {uid}: column loss_mask holds 1 at {start}, where a sequence begins: want 0"
            )
    return row


async def unreadable(
    read: Callable[[list[Uid]], Awaitable[object]], uids: Iterable[Uid]
) -> dict[Uid, str]:
    """Those of the rows at which `read` raises CorruptError, with the reason that is kept; each is read by itself."""
    found: dict[Uid, str] = {}
    for uid in uids:
        try:
            await read([uid])
        except CorruptError as error:
            kind = UNTRAINABLE if isinstance(error, UntrainableError) else DAMAGED
            found[uid] = f"{kind}: {error.message}"
    return found


async def of_all_ranks(
    world: World, compute: Compute, damaged: Mapping[Uid, str], away: str
) -> tuple[dict[Uid, str], str]:
    """The damaged rows of all ranks, and why any rank could not read now (else empty); on every rank."""
    own = ({str(uid): fault for uid, fault in damaged.items()}, away)
    text = np.frombuffer(json.dumps(own).encode(), np.uint8)
    parts = await compute.run(lambda: world.all_gather(text))
    all_ranks = [json.loads(bytes(part)) for part in parts]
    faults = {Uid.parse(uid): fault for rank, _ in all_ranks for uid, fault in rank.items()}
    return faults, next((why for _, why in all_ranks if why), "")


async def dead_letter(queue: Queue, run: str, epoch: int, damaged: Mapping[Uid, str]) -> None:
    """Tell the queue which rows of its batches cannot be read or computed with, and why."""
    by_reason: defaultdict[str, list[Uid]] = defaultdict(list)
    for uid, reason in damaged.items():
        log.error("%s", reason)
        by_reason[reason].append(uid)
    for reason, uids in by_reason.items():
        await queue.filter(run, epoch=epoch, uids=uids, reason=reason)


def without(batch: Batch, damaged: Iterable[Uid]) -> Batch:
    """The batch without the groups of `damaged` rows."""
    tasks = {uid.task for uid in damaged}
    rows = [row for row in batch.rows if row.uid.task not in tasks]
    return Batch.of_rows(rows, batch_id=batch.batch_id, run=batch.run, step=batch.step)
