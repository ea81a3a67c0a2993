"""The roll of a queue: its shards by number, and where each was reached when the last one was added.

Written on shard 0 it is the truth; every other shard has a line that says which one it is, so that a shard that is
reached by an address of the roll can be known for the one that is meant. A queue that never grew has no roll.

    shard 0: the roll as it is ──▶ the others: who they are ──▶ the new shard: who it is ──▶ shard 0: one more

The last write adds the shard. A kill before it has changed nothing: whoever adds the shard again goes on. After
it everybody who works with the queue hears of the shard (watcher.py, roster.py), whoever wrote it.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from meshrl.contract.errors import ConflictError, CorruptError, UserError
from meshrl.transferqueue.sharding.port import Shard

SHARD_LIST = ".shards"
"""The note that holds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardList:
    """What is written on one shard."""

    queue: str
    """Made with the roll, the same for ever."""
    number: int
    """Of this shard."""
    shard: str
    """This shard under whatever address: no other has the same."""
    addresses: tuple[str, ...] = ()
    """On shard 0 those of all shards, in their order."""

    @classmethod
    def begin(cls, queue: str = "", number: int = 0) -> Self:
        """A line for a shard that has none."""
        return cls(queue=queue or uuid.uuid4().hex, number=number, shard=uuid.uuid4().hex)

    def __str__(self) -> str:
        return " ".join([self.queue, str(self.number), self.shard, *self.addresses])

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of `str`. Raises CorruptError."""
        try:
            queue, number, shard, *addresses = text.split()
            return cls(queue=queue, number=int(number), shard=shard, addresses=tuple(addresses))
        except ValueError:
            raise CorruptError(f"not the roll of a queue: {text!r}") from None


async def read(shard: Shard) -> ShardList | None:
    """What is written on a shard; None where nobody enrolled it."""
    text = (await shard.note(SHARD_LIST)).text
    return ShardList.parse(text) if text else None


async def check_known_as(shard: Shard, address: str, number: int, roll: ShardList) -> None:
    """Raises UserError unless the queue at `address` is the shard of that number."""
    found = await read(shard)
    if found is None or (found.queue, found.number) != (roll.queue, number):
        raise UserError(
            f"the queue at {address} is not shard {number} of this one: give the addresses of all"
            f" {len(roll.addresses)} shards, in order"
        )


async def check_named_as(shard: Shard, number: int, roll: ShardList) -> None:
    """Raises UserError when somebody named a shard in another place than its own."""
    found = await read(shard)
    if found is not None and (found.queue, found.number) != (roll.queue, number):
        raise UserError(
            f"shard {found.number} of a queue is named as shard {number}:"
            " give the addresses of the shards in their order"
        )


async def enrol(
    shards: Sequence[Shard], addresses: Sequence[str], added: Shard, address: str
) -> None:
    """Make `added`, which is at `address`, the next of `shards`, which are at `addresses`.

    Raises:
        UserError: `added` is one of the shards, holds runs, or belongs to another queue; `shards` are not in order.
        ConflictError: another shard was added at the same time.
    """
    first, *others = shards
    before = await read(first)
    roll = before or ShardList.begin()
    if len(roll.addresses) > len(addresses):
        raise ConflictError(f"another shard was added at the same time: add {address} again")
    await _check_empty(shards, added, address, roll.queue)
    if before is None:
        roll = replace(roll, addresses=tuple(addresses))
        await _write(first, roll, None)
    for number, shard in enumerate(others, start=1):
        await check_named_as(shard, number, roll)
    for number, shard in enumerate((*others, added), start=1):
        await _claim(shard, roll.queue, number)
    await _write(first, replace(roll, addresses=(*addresses, address)), roll)


async def _check_empty(shards: Sequence[Shard], added: Shard, address: str, queue: str) -> None:
    """Raises UserError when the queue at `address` cannot become a shard of `queue`."""
    note = await added.note(SHARD_LIST)
    line = ShardList.parse(note.text) if note.text else None
    if line is not None and line.queue != queue:
        raise UserError(f"the queue at {address} is a shard of another queue")
    if line is not None and line.number < len(shards):
        # Itself, or one whose number another was faster to get.
        known = await read(shards[line.number])
        if known is not None and known.shard == line.shard:
            raise UserError(f"the queue at {address} is shard {line.number} of this one already")
    if note.runs:
        raise UserError(
            f"the queue at {address} holds runs ({', '.join(note.runs)}):"
            " a shard that is added must be empty"
        )


async def _claim(shard: Shard, queue: str, number: int) -> None:
    """Write on a shard which one it is."""
    line = await read(shard)
    if line is None or (line.queue, line.number) != (queue, number):
        await _write(shard, ShardList.begin(queue, number), line)


async def _write(shard: Shard, roll: ShardList, instead_of: ShardList | None) -> None:
    try:
        await shard.write_note(SHARD_LIST, str(roll), instead_of=str(instead_of or ""))
    except ConflictError as error:
        raise ConflictError("another shard is added at the same time: try again") from error
