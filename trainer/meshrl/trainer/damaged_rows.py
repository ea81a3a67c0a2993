"""Rows of a batch that the store has damaged since they were taken: they become dead letters, the rest is trained."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping

import numpy as np

from meshrl.contract.errors import CorruptError
from meshrl.contract.ports import Queue
from meshrl.contract.rows import DAMAGED
from meshrl.contract.types import Batch, Uid
from meshrl.trainer.compute import Compute
from meshrl.trainer.distributed import World


async def unreadable(
    read: Callable[[list[Uid]], Awaitable[object]], uids: Iterable[Uid]
) -> dict[Uid, str]:
    """Those of the rows at which `read` raises CorruptError, with what is wrong; each is read by itself."""
    found: dict[Uid, str] = {}
    for uid in uids:
        try:
            await read([uid])
        except CorruptError as error:
            found[uid] = error.message
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
    """Tell the queue which rows of its batches cannot be read."""
    by_fault: defaultdict[str, list[Uid]] = defaultdict(list)
    for uid, fault in damaged.items():
        by_fault[fault].append(uid)
    for fault, uids in by_fault.items():
        await queue.filter(run, epoch=epoch, uids=uids, reason=f"{DAMAGED}: {fault}")


def without(batch: Batch, damaged: Iterable[Uid]) -> Batch:
    """The batch without the groups of `damaged` rows."""
    tasks = {uid.task for uid in damaged}
    rows = [row for row in batch.rows if row.uid.task not in tasks]
    return Batch.of_rows(rows, batch_id=batch.batch_id, run=batch.run, step=batch.step)
