"""Long frames in memory that a service shares with its callers on this machine: a message only says where they lie.

    service  grants regions ──▶ a caller copies frames into them, one behind the other ──▶ Reference
    service  keeps a frame where it lies, and answers with a Reference ──▶ a caller reads it where it lies

A region is granted again once its writer has given it back and nobody holds a frame of it: not the service, and no
caller. So what a caller reads does not change for as long as it holds a view of it, and what dies with a caller is
freed when its link ends. Where there is no region left, frames go as bytes. What a reference says is compared with
what lies there; the bytes themselves are checked by whoever reads them, as those of any frame are.

    link (a socket of packets, one a client)     caller ──▶ its key, then words: a Word and a number, 64 bits each
                                                 caller ◀── the memory's size and its file, then regions granted
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import mmap
import os
import socket
import struct
import weakref
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from google.protobuf.message import DecodeError

from meshrl.contract.codec.bulk import Bulk, Frame
from meshrl.contract.codec.compression import MAGIC
from meshrl.contract.frames import Shared, checksum_of
from meshrl.rpc.local_socket.wire import Kind, Wire, WireError

Parsed = TypeVar("Parsed")

SHARED_BYTES: Final = 512 << 20
REGION_BYTES: Final = 4 << 20
PAGE_BYTES: Final = 4096
"""Frames begin with a page, so that a store can write them to its disk from where they lie."""
LEAST_BYTES: Final = 128 << 10
"""Shorter frames go as bytes, which costs no more."""
LARGER: Final = 16
"""So many times the bytes of a page (codec/bulk.py) are in a message that only refers to them."""
SHARE: Final = 4
"""One caller has at most this part of all regions to write to."""
MOST_AT_ONCE: Final = 8
"""Regions in one answer: for each new one, the kernel clears 4 MiB, which takes it a millisecond or three."""
MOST_STRANGERS: Final = 64
"""Links of which no call was let in yet."""
MOST_PACKETS: Final = 256
"""More is not looked for before something is freed: it stays until the link ends."""
KEY_BYTES: Final = 16
_POPULATE_READ: Final = 22
_POPULATE_WRITE: Final = 23
"""MADV_POPULATE_READ and _WRITE, which the module mmap does not name."""
_PACKET_BYTES: Final = 1 << 15
_HEAD: Final = struct.Struct("<QI")
_MOST_REFERENCES: Final = 4096


def address_of_link(name: str) -> str:
    """Of the socket for links, by the name of the service's socket for calls."""
    return f"\0{name}-memory"


class Word(IntEnum):
    """What a caller says, in the first byte of 64 bits; the number is in the others."""

    MAPPED = 0
    """It has mapped the memory."""
    WANT = 1
    """So many regions; answered with those that are granted, which may be none."""
    GIVE_BACK = 2
    """What it was granted under this number: it is written no more."""
    RECEIVED = 3
    """This answer: its frames are held from now on."""
    DONE = 4
    """With this answer: none of its frames is held."""


class Reference(NamedTuple):
    """What a message has of a frame."""

    number: int
    """Among the frames of the message."""
    size: int
    at: int
    checksum: int
    """As the frame carries it, so that a reference to what lay there before is noticed."""
    grant: int
    """The number of the grant under which it was written; of a caller's, the service looks for it."""


_REFERENCE: Final = struct.Struct("<IIQQQ")


def placed(frame: Frame, owner: object) -> Shared | None:
    """A frame as it lies in the memory of `owner`; None if it lies elsewhere."""
    shared: Any = frame.obj if type(frame) is memoryview else None
    here = type(shared) is Shared and shared.owner is owner and len(shared) == len(frame)
    return shared if here else None


async def send_message(
    wire: Wire, message: Bulk[Any], place: Callable[[Frame], Shared | None], answer: int = 0
) -> None:
    """Send a message, of frames with a `place` only that. `answer` is to be confirmed. Raises as Wire.send."""
    places = [(number, place(frame)) for number, frame in enumerate(message.frames)]
    references = [
        Reference(number, len(at), at.at, checksum_of(frame), at.grant)
        for (number, at), frame in zip(places, message.frames, strict=True)
        if at is not None
    ]
    if not references:
        await wire.send(Kind.MESSAGE, message.parts())
        return
    head = [_REFERENCE.pack(*reference) for reference in references]
    head.insert(0, _HEAD.pack(answer, len(references)))
    parts = message.parts({reference.number for reference in references})
    await wire.send(Kind.REFERRING, [b"".join(head), *parts])


def parsed(
    data: memoryview, parse: Callable[[Any], Parsed], view: Callable[[int, Reference], memoryview]
) -> Parsed:
    """A message of kind REFERRING; `view` finds a frame of an answer. Raises WireError, and as `parse` does."""
    try:
        answer, count = _HEAD.unpack_from(data)
        if not 0 < count <= _MOST_REFERENCES:
            raise WireError(f"a message with {count} references to frames")
        end = _HEAD.size + count * _REFERENCE.size
        references = [Reference(*found) for found in _REFERENCE.iter_unpack(data[_HEAD.size : end])]
    except struct.error as error:
        raise WireError(f"a message with references: {error}") from None
    message = parse(data[end:])
    if not isinstance(message, Bulk) or len(references) != count:
        raise WireError(f"a message without the {count} references to frames that it announces")
    frames = {reference.number: view(answer, reference) for reference in references}
    try:
        message.insert(frames)
    except DecodeError as error:
        raise WireError(f"a message with references: {error}") from None
    return message


class Mapping:
    """Shared memory, as one process has it."""

    def __init__(self, file: int, size: int, *, writes: bool) -> None:
        """`size`: bytes. Raises OSError, and ValueError for a file of another size."""
        self._populate = _POPULATE_WRITE if writes else _POPULATE_READ
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writes else 0)
        self._map = mmap.mmap(file, size, prot=protection)
        self.everything: Final = np.frombuffer(self._map, np.uint8)
        self._touched: set[int] = set()

    def touch(self, number: int) -> None:
        """Have the pages of a region at hand: at once, which takes less time than one after the other."""
        if number not in self._touched:
            self._touched.add(number)
            with contextlib.suppress(OSError):  # a kernel before Linux 5.14
                self._map.madvise(self._populate, number * REGION_BYTES, REGION_BYTES)

    def region(self, number: int) -> Shared:
        """One region."""
        self.touch(number)
        start = number * REGION_BYTES
        return self.everything[start : start + REGION_BYTES].view(Shared)


class Grant(NamedTuple):
    """Leave to write to a region."""

    number: int
    """None is used twice: so a reference from before a region was given back is noticed."""
    region: int


class Copier:
    """Copies frames into regions, one behind the other."""

    def __init__(self, owner: object, take: Callable[[], tuple[Grant, Shared] | None]) -> None:
        """`take`: another region, if there is one. `owner`: see Shared."""
        self._owner = owner
        self._take = take
        self._region: Shared | None = None
        self._grant = Grant(0, 0)
        self._used = 0

    def room(self, size: int) -> Shared | None:
        """For a frame of `size` bytes; None if that is short, or there is no room."""
        if not LEAST_BYTES <= size <= REGION_BYTES:
            return None
        if self._region is None or self._used + size > REGION_BYTES:
            if (taken := self._take()) is None:
                return None
            self._grant, self._region = taken
            self._used = 0
        start = self._used
        self._used += size + -size % PAGE_BYTES
        at = self._grant.region * REGION_BYTES + start
        return self._region.room(start, size, self._owner, at, self._grant.number)

    def copy(self, frame: Frame) -> Frame:
        """The copy; the frame itself if it is compressed, in the memory already, or there is no room."""
        # What is compressed is decompressed with the message that it is in.
        if frame[: len(MAGIC)] == MAGIC or placed(frame, self._owner) is not None:
            return frame
        room = self.room(len(frame))
        if room is None:
            return frame
        room[:] = np.frombuffer(frame, np.uint8)
        return room.frame()


def check(frame: memoryview, reference: Reference) -> None:
    """Raises WireError if another frame lies where a reference says."""
    if len(frame) < LEAST_BYTES or checksum_of(frame) != reference.checksum:
        raise WireError("a reference to a frame that does not lie there")


class SharedMemory:
    """The service's end. Nothing else grants or frees a region."""

    def __init__(self, size: int) -> None:
        """`size`: bytes, cut to whole regions. Memory is taken when a region is granted first. Raises OSError."""
        self.regions: Final = size // REGION_BYTES
        size = self.regions * REGION_BYTES
        self._file = os.memfd_create("meshrl", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._file, size)
            # A caller that cut it short would end this process with a SIGBUS.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, seals)
            self._mapping = Mapping(self._file, size, writes=True)
        except OSError:
            os.close(self._file)
            raise
        self._free = list(range(self.regions - 1, -1, -1))
        """The last one is granted first: its pages are there, and perhaps in a cache of the processor."""
        self._copier: Copier | None = Copier(self, self.grant)
        self._taken: set[int] = set()
        """Those whose pages are there."""
        self.callers: dict[bytes, Caller] = {}
        """By their keys."""
        self.links: dict[Caller, None] = {}
        """Also those that have not said their key."""
        self._grants = 0

    @property
    def used_bytes(self) -> int:
        """Of regions that are granted, or of which a frame is held."""
        return (self.regions - len(self._free)) * REGION_BYTES

    def admit(self, connection: socket.socket) -> None:
        """A link. It gets nothing before a call that was let in has shown its key."""
        strangers = [link for link in self.links if not link.handed_out]
        if len(strangers) >= MOST_STRANGERS:  # a client that waited too long makes another
            strangers[0].end()
        self.links[Caller(self, connection)] = None

    def grant(self) -> tuple[Grant, Shared] | None:
        """A region, until all that is cut from it is gone; None if there is none."""
        if not self._free:
            return None
        number = self._free.pop()
        if number not in self._taken:
            try:  # here, where it can fail: a write to memory that is not there ends a process
                os.posix_fallocate(self._file, number * REGION_BYTES, REGION_BYTES)
            except OSError:
                self._free.append(number)
                return None
            self._taken.add(number)
        found = self._mapping.region(number)
        weakref.finalize(found, self._free.append, number).atexit = False
        self._grants += 1
        return Grant(self._grants, number), found

    def copied(self, frame: Frame) -> Frame:
        """A frame that came as bytes, as columns of one or from a disk, for somebody who reads it here."""
        return frame if self._copier is None else self._copier.copy(frame)

    def hand_out(self, connection: socket.socket) -> None:
        """Give a caller the memory. Raises OSError."""
        size = (self.regions * REGION_BYTES).to_bytes(8, "little")
        socket.send_fds(connection, [size], [self._file])

    def close(self) -> None:
        """Grant nothing more, so that what is read stays as it is. Idempotent."""
        self._free = []
        self._copier = None
        for caller in list(self.links):
            caller.end()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class Caller:
    """A client, as the service knows it."""

    def __init__(self, memory: SharedMemory, link: socket.socket) -> None:
        self._memory = memory
        self._link = link
        self._key = b""
        self.handed_out = False
        """It has the memory: until then it has nothing to say but its key."""
        self.maps = False
        """It can follow references."""
        self._granted: dict[int, tuple[int, Shared]] = {}
        """Region by the number of the grant."""
        self._answers: dict[int, list[Frame]] = {}
        """The frames that it may be reading, by the number of the answer."""
        self._unconfirmed: set[int] = set()
        """Answers that it may not have received."""
        self._last_answer = 0
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(link, self.read)

    def let_in(self) -> None:
        """One of its calls has a role that may make it."""
        if not self.handed_out:
            self.handed_out = True
            with contextlib.suppress(OSError):
                self._memory.hand_out(self._link)

    def adopt(self, _: int, reference: Reference) -> memoryview:
        """A frame that it wrote, read-only. Raises WireError."""
        number, start = divmod(reference.at, REGION_BYTES)
        granted, region = self._granted.get(reference.grant, (-1, None))
        if region is None or granted != number or start + reference.size > REGION_BYTES:
            raise WireError("a reference to memory that was not granted")
        frame = region.room(start, reference.size, self._memory, reference.at).frame()
        check(frame, reference)
        return frame

    def new_answer(self) -> int:
        """The number under which frames are held for it."""
        self._last_answer += 1
        return self._last_answer

    def hold(self, answer: int, frame: Frame) -> Shared | None:
        """Where a frame lies, as it is until the caller is done with the answer; None: it is to go as bytes."""
        if not self.maps:
            return None
        frame = self._memory.copied(frame)
        found = placed(frame, self._memory)
        if found is not None:
            self._answers.setdefault(answer, []).append(frame)
            self._unconfirmed.add(answer)
        return found

    def cut_off(self, answer: int) -> None:
        """The caller has closed the connection of an answer: it holds that only if it said so before."""
        if answer in self._unconfirmed and self.read(MOST_PACKETS):
            self.not_received(answer)

    def not_received(self, answer: int) -> None:
        """The caller will never hold an answer."""
        if answer in self._unconfirmed:
            self._unconfirmed.discard(answer)
            self._answers.pop(answer, None)

    def read(self, packets: int = 8) -> bool:
        """At most so many packets of what it has said; True if that was all."""
        for _ in range(packets):
            if self._link.fileno() < 0:
                return True
            try:
                packet = self._link.recv(_PACKET_BYTES)
            except (BlockingIOError, InterruptedError):
                return True
            except OSError:
                packet = b""
            if not packet:
                self.end()
            elif self.handed_out:
                for word in np.frombuffer(packet, "<u8", len(packet) // 8).tolist():
                    self._hear(word >> 56, word & (1 << 56) - 1)
            elif self._key or len(packet) != KEY_BYTES or packet in self._memory.callers:
                self.end()
            else:
                self._key = packet
                self._memory.callers[packet] = self
        return False

    def _hear(self, word: int, number: int) -> None:
        if word == Word.MAPPED:
            self.maps = True
        elif word == Word.WANT:
            self._grant(number)
        elif word == Word.GIVE_BACK:
            self._granted.pop(number, None)
        elif word == Word.RECEIVED:
            self._unconfirmed.discard(number)
        elif word == Word.DONE and number not in self._unconfirmed:
            self._answers.pop(number, None)

    def _grant(self, wanted: int) -> None:
        found: dict[int, tuple[int, Shared]] = {}
        share = max(1, self._memory.regions // SHARE)
        most = min(MOST_AT_ONCE, share - len(self._granted))
        while len(found) < min(wanted, most) and (region := self._memory.grant()):
            found[region[0].number] = region[0].region, region[1]
        said = [0, 0]  # also where there is none, it is waited for
        for granted, (number, _) in found.items():
            said += granted, number
        try:
            self._link.send(np.array(said, "<u8").tobytes())
        except OSError:  # it does not listen, or is gone
            return
        self._granted |= found

    def end(self) -> None:
        """It is gone: nothing is held for it any more. Idempotent."""
        if self._link.fileno() < 0:
            return
        self._loop.remove_reader(self._link)
        self._link.close()
        self._memory.links.pop(self, None)
        self._memory.callers.pop(self._key, None)
        self.maps = False
        self._granted.clear()
        self._answers.clear()
        self._unconfirmed.clear()
