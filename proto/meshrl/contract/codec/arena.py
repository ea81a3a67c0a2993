"""Bytes between processes of one host through memory that the client lends: they go around gRPC, a page at a time.

    client                                            queue
    Arena: a file in /dev/shm                         Lent: opens it by name
    write:  put(page) ── Slot in the message ───────▶ take(slot): a copy, checked against its checksum, then as ever:
            free(slot) ◀────────── acknowledged ───── stored as durably as the run asks, before the answer
    fetch:  reserve(bytes) ── Region in the request ▶ give(region, page): a Slot in the answer; what does not
            take(slot) ◀───────────────────────────── fit comes inline
            free(region) once the answer is parsed

**Who owns what.** The client owns all of it; the queue keeps nothing but open files, so a queue that is killed
leaves nothing behind, and nothing has to be counted across processes. A client that is killed leaves its file; its
lock on it ends with it (`flock`), so `sweep`, at the start of every queue and every arena, knows it and unlinks it.

**Who may believe what.** A slot names the checksum of its bytes (xxh3_64), so those that were overwritten, cut or
never written are CorruptError, never another row's. After a call whose end is unknown the other side may still write:
such a region is abandoned, not reused. Files are 0600 and of the caller's own user. Both sides pread and pwritev, and
neither maps: a file that shrinks, or pages that a full /dev/shm has no room for, would be a SIGBUS.

**Same host?** The client offers `Arena.offer`: boot id, name, and it knows a secret in the file's head. The queue
answers with what `Lent.accept` read there. Equal secrets mean one kernel and one /dev/shm, containers included.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, TypeAlias

import xxhash

from meshrl.contract.errors import CapacityError, CorruptError, UserError

Parts: TypeAlias = Sequence[bytes | memoryview]
"""Bytes on end."""

FOLDER: Final = Path("/dev/shm")
ARENA_BYTES: Final = 256 << 20
HEAD_BYTES: Final = 64
SECRET_BYTES: Final = 16
ALIGNMENT: Final = 64
_NAME: Final = re.compile(r"meshrl-[0-9a-f]{16}\.arena")
_AT_ONCE: Final = 1024
"""Parts that one pwritev takes (IOV_MAX)."""


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """Bytes of an arena: where the other side may write."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Slot:
    """Where bytes lie, and their checksum."""

    offset: int
    size: int
    checksum: int


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


class Memory:
    """An open arena, whoever has made it."""

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor = descriptor
        self._name = name

    def take(self, slot: Slot) -> bytes:
        """A copy of what lies in a slot.

        Raises:
            CorruptError: other bytes are there.
        """
        if slot.size < 0 or slot.offset < HEAD_BYTES:
            raise CorruptError(f"{self._name}: {slot} is outside of the arena")
        # Not more than there is: a size is the sender's word.
        size = min(slot.size, os.fstat(self._descriptor).st_size)
        found = os.pread(self._descriptor, size, slot.offset)
        if len(found) != slot.size or xxhash.xxh3_64_intdigest(found) != slot.checksum:
            raise CorruptError(f"{self._name}: {slot} holds other bytes than were written there")
        return found

    def _write(self, offset: int, parts: Parts) -> Slot | None:
        """None where there was no room after all: somebody has cut the file."""
        checksum = xxhash.xxh3_64()
        for part in parts:
            checksum.update(part)
        written = 0
        try:
            for start in range(0, len(parts), _AT_ONCE):
                some = parts[start : start + _AT_ONCE]
                written += os.pwritev(self._descriptor, some, offset + written)
        except OSError:
            return None
        size = sum(map(len, parts))
        return Slot(offset, size, checksum.intdigest()) if written == size else None

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Arena(Memory):
    """Memory that this process lends. Made by `create`; use it as a context manager, or `close` it."""

    def __init__(self, path: Path, descriptor: int, size: int) -> None:
        super().__init__(descriptor, path.name)
        self._path = path
        self.size = size
        self._secret = secrets.token_bytes(SECRET_BYTES)
        os.pwrite(descriptor, self._secret, 0)
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
            # All pages now: whoever writes later has room.
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

    def put(self, parts: Parts) -> Slot | None:
        """Copy bytes in; None when they do not fit now, and have to travel inline."""
        region = self.reserve(sum(map(len, parts)))
        if region is None:
            return None
        slot = self._write(region.offset, parts)
        if slot is None:
            self.free(region)
        return slot

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
        if self._descriptor >= 0:
            self._path.unlink(missing_ok=True)
        super().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Lent(Memory):
    """An arena of somebody else, by its file. Made by `accept`."""

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

    def check(self, region: Region) -> None:
        """Raises CorruptError for a region outside of the arena."""
        end = region.offset + region.size
        if (
            region.offset < HEAD_BYTES
            or region.size < 0
            or end > os.fstat(self._descriptor).st_size
        ):
            raise CorruptError(f"{self._name}: {region} is outside of the arena")

    def give(self, region: Region, parts: Parts) -> tuple[Slot, Region] | None:
        """Write bytes at the start of a region: where they lie, and what is left of it; None when they do not fit.

        Raises:
            CorruptError: the region is outside of the arena.
        """
        self.check(region)
        size = _aligned(sum(map(len, parts)))
        if size > region.size:
            return None
        slot = self._write(region.offset, parts)
        return None if slot is None else (slot, Region(region.offset + size, region.size - size))


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
