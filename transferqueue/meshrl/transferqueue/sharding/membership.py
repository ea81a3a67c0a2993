"""Which shards a run is on, a note on shard 0: `<run>.shards`."""

from __future__ import annotations

from meshrl.contract.errors import ConflictError, NotFoundError, UserError
from meshrl.contract.ports import Queue
from meshrl.contract.types import RunState
from meshrl.transferqueue.sharding.placement import Members
from meshrl.transferqueue.sharding.port import Shard

SUFFIX = ".shards"


async def recorded(first: Queue, run: str) -> Members:
    """The shards of an open run. One without a record began before there were shards."""
    record = await _state(first, run + SUFFIX)
    return Members.parse(record.cursor) if record and record.cursor else Members(1, 1)


async def join(first: Shard, run: str, available: int) -> Members:
    """The shards of a run that is about to be opened: all that are available. Written before anything is on them.

    Raises:
        UserError: the run is on more shards than are available.
    """
    while True:
        # The run is asked for before its record: whoever opens it writes the record first.
        opened = await _state(first, run) is not None
        text = (await first.note(run + SUFFIX)).text
        began = 1 if opened else available
        members = Members.parse(text) if text else Members(began, began)
        check(run, members, available)
        members = Members(members.began, available)
        try:
            await first.write_note(run + SUFFIX, str(members), instead_of=text)
        except ConflictError:
            continue  # somebody else opened the run, or made it larger
        return members


async def check_alone(queue: Queue, run: str) -> None:
    """Raises UserError when `queue` is only one of the shards of the run."""
    if await _state(queue, run) is not None:
        check(run, await recorded(queue, run), 1)


def check(run: str, members: Members, available: int) -> None:
    """Raises UserError when a run is on more shards than are available."""
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
