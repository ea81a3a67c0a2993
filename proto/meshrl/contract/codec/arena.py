"""Frames between processes of one host through memory that the client lends: bytes go once, around gRPC.

    client                                            queue
    Arena: a file in /dev/shm, mapped                 Lent: opens it by name, pread and pwrite, never maps
    write:  put(frame) ── Slot in the message ──────▶ take(slot): a copy, checked against its seal, then as ever:
            free(slot) ◀────────── acknowledged ───── stored as durably as the run asks, before the answer
    fetch:  reserve(bytes) ── Region in the request ▶ give(region, frames): Slots in the answer; what does not
            copy(slot), checked as well ◀──────────── fit comes inline
            free(region) once the answer is parsed

**Who owns what.** The client owns all of it; the queue keeps nothing but open files, so a queue that is killed
leaves nothing behind, and nothing has to be counted across processes. A client that is killed leaves its file; its
lock on it ends with it (`flock`), so `sweep`, at the start of every queue and every arena, knows it and unlinks it.

**Who may believe what.** A slot names the frame's seal (xxh3_64), so bytes that were overwritten, cut or never
written are CorruptError, never another row's. After a call whose end is unknown the other side may still write: such
a region is abandoned, not reused. Files are 0600 and of the caller's own user. The queue never maps them, since a
file that shrinks would kill it with SIGBUS; the client's pages are allocated ahead, since a full /dev/shm would too.

**Same host?** The client offers `Arena.offer`: boot id, name, and it knows a secret in the file's head. The queue
answers with what `Lent.accept` read there. Equal secrets mean one kernel and one /dev/shm, containers included.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import struct
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from meshrl.contract.errors import CapacityError, CorruptError, UserError
from meshrl.contract.frames import unseal

FOLDER: Final = Path("/dev/shm")
ARENA_BYTES: Final = 256 << 20
HEAD_BYTES: Final = 64
SECRET_BYTES: Final = 16
ALIGNMENT: Final = 64
_NAME: Final = re.compile(r"meshrl-[0-9a-f]{16}\.arena")
_SEAL: Final = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """Bytes of an arena: where the other side may write."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a frame lies, and its seal."""

    offset: int
    size: int
    seal: int


@dataclass(frozen=True, slots=True)
class Offer:
    """What a client tells a queue that may be on its host."""

    boot_id: str
    name: str

    @classmethod
    def here(cls, name: str) -> Self:
        """Of an arena on this very host."""
        return cls(boot_id(), name)


def boot_id() -> str:
    """Of the running kernel; empty where there is none to be read."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def arena_name(arena: bytes) -> str:
    """The file of an arena, by its eight bytes."""
    return f"meshrl-{arena.hex()}.arena"


def arena_id(name: str) -> bytes:
    """The inverse of `arena_name`. Raises UserError."""
    if not _NAME.fullmatch(name):
        raise UserError(f"{name!r} is no name of an arena")
    return bytes.fromhex(name[len("meshrl-") : -len(".arena")])


class Arena:
    """Memory that this process lends. Made by `create`; use it as a context manager, or `close` it."""

    def __init__(self, path: Path, descriptor: int, size: int) -> None:
        self._path = path
        self.size = size
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, size)
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._map[:SECRET_BYTES] = self._secret
        self._free = [Region(HEAD_BYTES, size - HEAD_BYTES)]
        self._used: dict[int, Region] = {}
        self._abandoned = 0

    @classmethod
    def create(cls, size: int = ARENA_BYTES, folder: Path = FOLDER) -> Self:
        """A new arena, after sweeping those of the dead.

        Raises:
            CapacityError: there is no such folder, or no room in it.
        """
        sweep(folder)
        path = folder / arena_name(secrets.token_bytes(8))
        size = _aligned(size) + HEAD_BYTES
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise CapacityError(f"no shared memory in {folder}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # at most a sweeper's moment
            # All pages now: one that is missing later would be a SIGBUS.
            os.posix_fallocate(descriptor, 0, size)
            return cls(path, descriptor, size)
        except OSError as error:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise CapacityError(
                f"no room for {size} bytes of shared memory in {folder}: {error.strerror}"
            ) from error

    @property
    def offer(self) -> Offer:
        """For the queue's `Lent.accept`."""
        return Offer.here(self._path.name)

    def is_proved_by(self, answer: bytes) -> bool:
        """Whether a queue that answered the offer so has read this file."""
        return secrets.compare_digest(answer, self._secret)

    @property
    def lost_bytes(self) -> int:
        """Abandoned after calls whose end is unknown; a large part of the arena is a reason to make another."""
        return self._abandoned

    def put(self, frame: bytes | memoryview) -> Slot | None:
        """Copy a sealed frame in; None when it does not fit now, and has to travel inline."""
        region = self.reserve(len(frame))
        if region is None:
            return None
        self._map[region.offset : region.offset + len(frame)] = bytes(frame)
        return Slot(region.offset, len(frame), _SEAL.unpack_from(frame)[0])

    def reserve(self, size: int) -> Region | None:
        """Memory for `size` bytes, first fit; None when there is none."""
        wanted = _aligned(max(1, size))
        for index, region in enumerate(self._free):
            if region.size >= wanted:
                rest = Region(region.offset + wanted, region.size - wanted)
                self._free[index : index + 1] = [rest] if rest.size else []
                used = Region(region.offset, wanted)
                self._used[used.offset] = used
                return used
        return None

    def copy(self, slot: Slot) -> bytes:
        """The frame in a slot of any region that is in use. Raises CorruptError."""
        if slot.offset < HEAD_BYTES or slot.size < 0 or slot.offset + slot.size > self.size:
            raise CorruptError(f"{slot} is outside of the arena")
        return _checked(self._map[slot.offset : slot.offset + slot.size], slot)

    def free(self, held: Slot | Region) -> None:
        """The memory may be used again: the call was answered. Twice is once."""
        region = self._used.pop(held.offset, None)
        if region is None:
            return
        insort(self._free, region)
        merged: list[Region] = []
        for each in self._free:
            if merged and merged[-1].offset + merged[-1].size == each.offset:
                merged[-1] = Region(merged[-1].offset, merged[-1].size + each.size)
            else:
                merged.append(each)
        self._free = merged

    def abandon(self, held: Slot | Region) -> None:
        """The call's end is unknown: the other side may still write there, so nobody else ever may."""
        region = self._used.pop(held.offset, None)
        self._abandoned += region.size if region else 0

    def close(self) -> None:
        """Unlink; idempotent."""
        if self._descriptor < 0:
            return
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = -1
        self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Lent:
    """An arena of somebody else, by its file. Made by `accept`."""

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor = descriptor
        self._name = name

    @classmethod
    def accept(cls, offer: Offer, folder: Path = FOLDER) -> tuple[Self, bytes] | None:
        """The arena and the proof that it is the one; None where it cannot be reached from here.

        Raises:
            UserError: the name is none of an arena.
        """
        arena_id(offer.name)
        if not offer.boot_id or offer.boot_id != boot_id():
            return None
        try:
            flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(folder / offer.name, flags)
        except OSError:
            return None
        if os.fstat(descriptor).st_uid != os.geteuid():
            os.close(descriptor)
            return None
        return cls(descriptor, offer.name), os.pread(descriptor, SECRET_BYTES, 0)

    def take(self, slot: Slot) -> bytes:
        """A copy of the frame in a slot.

        Raises:
            CorruptError: other bytes are there.
        """
        if slot.size < 0 or slot.offset < HEAD_BYTES:
            raise CorruptError(f"{self._name}: {slot} is outside of the arena")
        # Not more than there is: a size is the sender's word.
        size = min(slot.size, os.fstat(self._descriptor).st_size)
        return _checked(os.pread(self._descriptor, size, slot.offset), slot)

    def check(self, region: Region) -> None:
        """Raises CorruptError for a region outside of the arena."""
        end = region.offset + region.size
        if (
            region.offset < HEAD_BYTES
            or region.size < 0
            or end > os.fstat(self._descriptor).st_size
        ):
            raise CorruptError(f"{self._name}: {region} is outside of the arena")

    def give(
        self, region: Region, frames: Iterable[bytes | memoryview]
    ) -> tuple[list[Slot | bytes | memoryview], Region]:
        """Write frames into a region, one after the other; those that do not fit come back as they are.

        Returns:
            For each frame its slot or itself, and what is left of the region.

        Raises:
            CorruptError: the region is outside of the arena.
        """
        self.check(region)
        end = region.offset + region.size
        given: list[Slot | bytes | memoryview] = []
        at = region.offset
        for frame in frames:
            if at + len(frame) > end:
                given.append(frame)
                continue
            os.pwrite(self._descriptor, frame, at)
            given.append(Slot(at, len(frame), _SEAL.unpack_from(frame)[0]))
            at += _aligned(len(frame))
        return given, Region(at, end - at)

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def sweep(folder: Path = FOLDER, pattern: str = "meshrl-*.arena") -> list[str]:
    """Unlink the files of this user whose owner, who held a lock on each, is dead; their names. Never raises."""
    gone = []
    for path in folder.glob(pattern):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # One that is being made is locked right after: an empty one is left to the next sweep.
            if os.fstat(descriptor).st_size:
                path.unlink(missing_ok=True)
                gone.append(path.name)
        except OSError:
            pass
        finally:
            os.close(descriptor)
    return gone


def _aligned(size: int) -> int:
    return size + -size % ALIGNMENT


def _checked(frame: bytes, slot: Slot) -> bytes:
    if (
        len(frame) != slot.size
        or slot.size < _SEAL.size
        or _SEAL.unpack_from(frame)[0] != slot.seal
    ):
        raise CorruptError(f"{slot} holds other bytes than were written there")
    unseal(memoryview(frame), str(slot))
    return frame
