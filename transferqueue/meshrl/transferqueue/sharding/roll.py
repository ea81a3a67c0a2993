"""The roll of a queue: its shards by number, and where each was reached when the last one was added.

Written on shard 0 it is the truth; on every other shard it says which one that is, so that a shard that is reached
by an address of the roll can be known for the one that is meant. A queue that never grew has no roll.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from meshrl.contract.errors import ConflictError, CorruptError, UserError
from meshrl.transferqueue.sharding.port import Shard

ROLL = ".shards"
"""The note that holds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roll:
    """All shards of one queue."""

    queue: str
    """Made with the roll, the same for ever."""
    number: int
    """Of the shard that it is written on."""
    addresses: tuple[str, ...]
    """Of the shards in their order; only shard 0 has those of all that there are."""

    @classmethod
    def begin(cls, addresses: Sequence[str]) -> Self:
        """The first roll of a queue."""
        return cls(queue=uuid.uuid4().hex, number=0, addresses=tuple(addresses))

    def of(self, number: int) -> Roll:
        """As it is written on shard `number`."""
        return replace(self, number=number, addresses=())

    def __str__(self) -> str:
        return " ".join([self.queue, str(self.number), *self.addresses])

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of `str`. Raises CorruptError."""
        try:
            queue, number, *addresses = text.split()
            return cls(queue=queue, number=int(number), addresses=tuple(addresses))
        except ValueError:
            raise CorruptError(f"not the roll of a queue: {text!r}") from None


async def read(shard: Shard) -> Roll | None:
    """What is written on a shard; None where nobody enrolled it."""
    text = (await shard.note(ROLL)).text
    return Roll.parse(text) if text else None


async def check_known_as(shard: Shard, address: str, number: int, roll: Roll) -> None:
    """Raises UserError unless the queue at `address` is the shard of that number."""
    found = await read(shard)
    if found is None or (found.queue, found.number) != (roll.queue, number):
        raise UserError(
            f"the queue at {address} is not shard {number} of this one: give the addresses of all"
            f" {len(roll.addresses)} shards, in order"
        )


async def enrol(
    shards: Sequence[Shard], addresses: Sequence[str], added: Shard, address: str
) -> None:
    """Make `added`, which is at `address`, the next shard of a queue. The last write, on shard 0, makes it one.

        shard 0: the roll as it is ──▶ the others: who they are ──▶ the new shard: who it is ──▶ shard 0: one more

    Repeating it after a kill goes on where it stopped: what is written twice is written once.

    Raises:
        UserError: `added` is one of the shards, holds runs, or belongs to another queue; `shards` are not those of
            the roll. ConflictError: another shard was added at the same time.
    """
    first, *others = shards
    found = await read(first)
    roll = replace(found, addresses=tuple(addresses)) if found else Roll.begin(addresses)
    if found is not None and len(found.addresses) > len(addresses):
        raise ConflictError(f"another shard was added at the same time; add {address} again")
    await _check_empty(added, address, roll)
    if found is None:
        await _write(first, roll, "")
    for number, shard in enumerate(others, start=1):
        await _write(shard, roll.of(number), "")
    await _write(added, roll.of(len(shards)), "")
    before = str(found or roll)
    await _write(first, replace(roll, addresses=(*addresses, address)), before)


async def _check_empty(added: Shard, address: str, roll: Roll) -> None:
    """Raises UserError when the queue at `address` cannot become a shard."""
    note = await added.note(ROLL)
    claim = Roll.parse(note.text) if note.text else None
    number = len(roll.addresses)
    if claim is not None and claim.queue == roll.queue and claim.number < number:
        raise UserError(f"the queue at {address} is shard {claim.number} of this one already")
    if claim is not None and (claim.queue, claim.number) != (roll.queue, number):
        raise UserError(f"the queue at {address} is a shard of another queue")
    if note.runs and claim is None:
        raise UserError(
            f"the queue at {address} holds runs ({', '.join(note.runs)}):"
            " a shard that is added must be empty"
        )


async def _write(shard: Shard, roll: Roll, instead_of: str) -> None:
    try:
        await shard.write_note(ROLL, str(roll), instead_of=instead_of)
    except ConflictError as error:
        raise ConflictError(
            "another shard was added at the same time, or the addresses are not in the order of the"
            " shards: look, and try again"
        ) from error
