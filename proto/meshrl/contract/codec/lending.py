"""Frames by reference: what a message has in the place of its frames where these lie in an arena (arena.py).

reference = magic, arena 8 bytes, offset u64, bytes u64, checksum u64: of the frames, encoded as in the message

Lender (client)                                      Borrower (queue)
sending: frames into the arena, reference sent ────▶ fields: a copy of them, checked
answered: a region named in the request ───────────▶ Page.refer: frames into the region, reference answered
fields: a copy of them, checked ◀───────────────────
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from meshrl.contract.codec.arena import (
    Arena,
    Lent,
    Memory,
    Offer,
    Region,
    Slot,
    arena_id,
    arena_name,
)
from meshrl.contract.codec.bulk import Bulk, Frame
from meshrl.contract.errors import CorruptError, MeshError, UnavailableError, UserError
from meshrl.contract.frames import intact

ANSWER_BYTES: Final = 16 << 20
"""Of one answer; what does not fit comes inline."""
WORN: Final = 0.5
"""The part of an arena that may be lost to calls whose end is unknown before another one is made."""
OPEN_ARENAS: Final = 256
"""That a queue keeps open; one that is asked for again is opened again."""
_MAGIC: Final = b"ml2\0"
_REFERENCE: Final = struct.Struct("<4s8sQQQ")

M = TypeVar("M", bound=Message)


def reference(arena: bytes, slot: Slot) -> bytes:
    """What stands for the frames in `slot`."""
    return _REFERENCE.pack(_MAGIC, arena, slot.offset, slot.size, slot.checksum)


def referred(frame: Frame) -> tuple[bytes, Slot] | None:
    """The arena and the slot that `frame` stands for; None for a frame that is one itself."""
    if len(frame) != _REFERENCE.size or frame[:4] != _MAGIC or intact(frame):
        return None
    _, arena, *slot = _REFERENCE.unpack(frame)
    return arena, Slot(*slot)


class Lender:
    """The client's end. What it is answered is copied out, so no view of the arena ever outlives a call."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.arena = arena_id(arena.offer.name)

    @property
    def worn(self) -> bool:
        """Too much of the arena is lost: time for another one."""
        return self._arena.lost_bytes > WORN * self._arena.size

    @contextmanager
    def sending(self, bulks: Sequence[Bulk[M]]) -> Iterator[list[Bulk[M]]]:
        """The same messages with references for the frames that there is room for, until the call has ended.

        A queue that reads a slot later than that finds other bytes there.
        """
        slots: list[Slot] = []
        try:
            yield [self._put(bulk, slots) for bulk in bulks]
        finally:
            for slot in slots:
                self._arena.free(slot)

    def _put(self, bulk: Bulk[M], slots: list[Slot]) -> Bulk[M]:
        slot = self._arena.put(bulk.fields) if bulk.frames else None
        if slot is None:
            return bulk
        slots.append(slot)
        return Bulk(bulk.message, [reference(self.arena, slot)])

    @contextmanager
    def answered(self) -> Iterator[Region | None]:
        """Where an answer may lie, until it has been parsed; None while there is no room."""
        region = self._arena.reserve(ANSWER_BYTES)
        ended = False
        try:
            yield region
            ended = True
        except MeshError as error:
            ended = not isinstance(error, UnavailableError)
            raise
        finally:
            if region is not None:
                # Whoever has not answered may still write there.
                (self._arena.free if ended else self._arena.abandon)(region)

    def fields(self, frame: Frame) -> bytes | None:
        """What a reference stands for, None for a frame. Raises DecodeError for a reference to what is not there."""
        found = referred(frame)
        if found is None:
            return None
        arena, slot = found
        if arena != self.arena:
            raise DecodeError(f"frames in arena {arena.hex()}, which is not ours")
        return _taken(self._arena, slot)

    def close(self) -> None:
        """Unlink the arena; idempotent."""
        self._arena.close()


class Borrower:
    """The queue's end: the arenas of its clients, by name. They are the clients' to make and to unlink."""

    def __init__(self) -> None:
        self._open: OrderedDict[bytes, Lent] = OrderedDict()

    def accept(self, offer: Offer) -> bytes:
        """The proof that this process reads the arena; empty where it cannot. Raises UserError."""
        accepted = Lent.accept(offer)
        if accepted is None:
            return b""
        lent, proof = accepted
        self._keep(arena_id(offer.name), lent)
        return proof

    def fields(self, frame: Frame) -> bytes | None:
        """As `Lender.fields`."""
        found = referred(frame)
        if found is None:
            return None
        arena, slot = found
        lent = self._lent(arena)
        if lent is None:
            raise DecodeError(f"arena {arena.hex()} is not on this host")
        return _taken(lent, slot)

    def page(self, arena: bytes, region: Region) -> Page | None:
        """Where an answer goes; None for an arena that cannot be reached from here.

        Raises:
            UserError: what is lent is no part of an arena.
        """
        lent = self._lent(arena)
        if lent is None:
            return None
        try:
            lent.check(region)
        except CorruptError as error:
            raise UserError(str(error)) from error
        return Page(lent, arena, region)

    def close(self) -> None:
        """Close all files; idempotent."""
        while self._open:
            self._open.popitem()[1].close()

    def _lent(self, arena: bytes) -> Lent | None:
        found = self._open.get(arena)
        if found is not None:
            self._open.move_to_end(arena)
            return found
        accepted = Lent.accept(Offer.here(arena_name(arena)))
        if accepted is None:
            return None
        self._keep(arena, accepted[0])
        return accepted[0]

    def _keep(self, arena: bytes, lent: Lent) -> None:
        if (before := self._open.pop(arena, None)) is not None:
            before.close()
        self._open[arena] = lent
        if len(self._open) > OPEN_ARENAS:
            self._open.popitem(last=False)[1].close()


class Page:
    """One answer on its way into a region."""

    def __init__(self, lent: Lent, arena: bytes, region: Region) -> None:
        self._lent = lent
        self._arena = arena
        self._left = region

    def refer(self, bulk: Bulk[M]) -> Bulk[M]:
        """The same message with a reference for its frames, if they fit."""
        given = self._lent.give(self._left, bulk.fields) if bulk.frames else None
        if given is None:
            return bulk
        slot, self._left = given
        return Bulk(bulk.message, [reference(self._arena, slot)])


def _taken(memory: Memory, slot: Slot) -> bytes:
    try:
        return memory.take(slot)
    except CorruptError as error:
        raise DecodeError(str(error)) from error
