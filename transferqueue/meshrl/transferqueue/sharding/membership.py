"""Which shards a run is on, kept on shard 0 as the cursor of a run beside it: `<run>.shards`."""

from __future__ import annotations

from meshrl.contract.errors import NotFoundError, UserError
from meshrl.contract.nouns import RunSpec, RunState
from meshrl.contract.ports import Queue
from meshrl.transferqueue.sharding.placing import Members

SUFFIX = ".shards"


async def read(first: Queue, run: str) -> Members | None:
    """The shards of a run; None when the run is not open. A run without a record began before there were shards."""
    if await _state(first, run) is None:
        return None
    record = await _state(first, run + SUFFIX)
    return Members.parse(record.cursor) if record and record.cursor else Members(1, 1)


async def join(first: Queue, run: str, available: int) -> Members:
    """The shards of a run that is about to be opened: all that are available. Written before anything is on them.

    Raises:
        UserError: the run is on more shards than are available.
    """
    # The run is asked for before its record: whoever opens it writes the record first.
    opened = await _state(first, run) is not None
    record = await _state(first, run + SUFFIX)
    if record and record.cursor:
        members = Members.parse(record.cursor)
    else:
        members = Members(1, 1) if opened else Members(available, available)
    _check(run, members, available)
    members = Members(members.began, available)
    if not record or record.cursor != str(members):
        await first.open_run(
            RunSpec(run=run + SUFFIX, group_size=1, batch_groups=1, max_staleness=0)
        )
        await first.admit(run + SUFFIX, [], cursor=str(members), wait_s=0)
    return members


async def check_alone(queue: Queue, run: str) -> None:
    """Raises UserError when `queue` is only one of the shards of the run."""
    members = await read(queue, run)
    if members is not None:
        _check(run, members, 1)


def _check(run: str, members: Members, available: int) -> None:
    if members.count > available:
        raise UserError(
            f"run {run} is on {members.count} queue shards, not on {available}:"
            f" name all of them, in the same order (queue.shards={members.count})"
        )


async def _state(first: Queue, run: str) -> RunState | None:
    try:
        return await first.run_state(run)
    except NotFoundError:
        return None
