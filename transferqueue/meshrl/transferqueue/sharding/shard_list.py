"""The list of a queue's shards, by number, and the address of each when the last one was added.

Written on shard 0 it is the truth. Every other shard has a line that says which shard it is, so that a shard
reached by an address of the list can be checked. A queue that never got another shard has no list.

    shard 0: the list as it is ──▶ the others: who they are ──▶ the new shard: who it is ──▶ shard 0: one more

The last write adds the shard. A kill before it has changed nothing: repeating the addition goes on. After it every
router learns of the shard (watcher.py, directory.py), whoever wrote it.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from meshrl.contract.errors import ConflictError, CorruptError, UserError
from meshrl.transferqueue.sharding.port import Shard

SHARD_LIST = ".shards"
"""The name of the note that holds the list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardList:
    """What is written on one shard."""

    queue: str
    """An id made with the list; it never changes."""
    number: int
    """Of this shard."""
    shard: str
    """An id of this shard, whatever its address."""
    addresses: tuple[str, ...] = ()
    """On shard 0 the addresses of all shards, in their order; else none."""

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
            raise CorruptError(f"not a list of shards: {text!r}") from None


async def read(shard: Shard) -> ShardList | None:
    """What is written on a shard; None for a shard that was never enrolled."""
    text = (await shard.note(SHARD_LIST)).text
    return ShardList.parse(text) if text else None


async def check_known_as(shard: Shard, address: str, number: int, listed: ShardList) -> None:
    """Raises UserError unless the queue at `address` is the shard of that number."""
    found = await read(shard)
    if found is None or (found.queue, found.number) != (listed.queue, number):
        raise UserError(
            f"the queue at {address} is not shard {number} of this one: give the addresses of all"
            f" {len(listed.addresses)} shards, in order"
        )


async def check_named_as(shard: Shard, number: int, listed: ShardList) -> None:
    """Raises UserError when somebody named a shard in another place than its own."""
    found = await read(shard)
    if found is not None and (found.queue, found.number) != (listed.queue, number):
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
    listed = before or ShardList.begin()
    if len(listed.addresses) > len(addresses):
        raise ConflictError(f"another shard was added at the same time: add {address} again")
    await _check_empty(shards, added, address, listed.queue)
    if before is None:
        listed = replace(listed, addresses=tuple(addresses))
        await _write(first, listed, None)
    for number, shard in enumerate(others, start=1):
        await check_named_as(shard, number, listed)
    for number, shard in enumerate((*others, added), start=1):
        await _claim(shard, listed.queue, number)
    await _write(first, replace(listed, addresses=(*addresses, address)), listed)


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


async def _write(shard: Shard, listed: ShardList, instead_of: ShardList | None) -> None:
    try:
        await shard.write_note(SHARD_LIST, str(listed), instead_of=str(instead_of or ""))
    except ConflictError as error:
        raise ConflictError("another shard is added at the same time: try again") from error
