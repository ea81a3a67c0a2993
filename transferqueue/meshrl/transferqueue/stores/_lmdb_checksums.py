"""A checksum of what an LMDB file holds, stored with every commit: it shows pages that are lost, old or swapped.

    commit:  records and payload change ──▶ the checksum changes by what was put and deleted ──▶ one transaction
    open:    everything that is there ──added up again──▶ the same checksum, the same commit? else CorruptError

LMDB's pages carry no checksums. A write that the disk lost, or put elsewhere, leaves a page that is valid and too
old: records that read as they once were, or are missing. Each record carries its own checksum, so a sum over key
and checksum of all records costs a few nanoseconds a change. Of the payload only the keys are added up: each value
is checked when it is read, against the checksum that its group's record holds.

The store's checksum lies in LMDB's main table, whose page every commit writes anyway. It cannot show that the file
as a whole went back to an earlier commit; the file `commits` beside it shows that, unless it went back as well.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Self

import lmdb
import xxhash

from meshrl.contract.errors import CorruptError
from meshrl.contract.frames import strip_checksum, with_checksum
from meshrl.transferqueue.stores._lmdb_walk import Walked

KEY: Final = b"tally"
"""The key of the checksum in the main table, beside the names of the other tables."""
COMMIT_NUMBER_FILE: Final = "commits"
_FIELDS: Final = struct.Struct("<QQQQQ")
_NUMBER: Final = struct.Struct("<Q")
_CHECKSUM_BYTES: Final = 8
_WRAP: Final = (1 << 64) - 1
_digest: Final = xxhash.xxh3_64_intdigest


class StoreChecksum:
    """The checksum as of one commit, with what the next commit needs. Used by the commit thread alone."""

    __slots__ = (
        "_deleted",
        "_put",
        "_sums",
        "number",
        "record_sum",
        "records",
        "value_sum",
        "values",
    )

    def __init__(self) -> None:
        """Of an empty store."""
        self.number = 0
        """Of the commit, as LMDB counts them."""
        self.records = self.record_sum = 0
        self.values = self.value_sum = 0
        """Of PAYLOAD."""
        self._sums: dict[bytes, int] = {}
        """By key: what a record has added. RAM, not the file, says what to subtract when it is overwritten."""
        self._put: dict[bytes, int] = {}
        self._deleted: list[bytes] = []

    @classmethod
    def of(cls, items: Iterable[tuple[bytes, bytes]], walked: Walked, number: int) -> Self:
        """Added up from what a store holds. Raises ValueError for records that are out of order."""
        checksum = cls()
        last = b""
        for key, value in items:
            if key <= last:
                raise ValueError(f"record {key.hex()} comes after {last.hex()}")
            checksum.put(key, value)
            last = key
        checksum.number = number
        checksum.values, checksum.value_sum = walked
        return checksum.committed()

    def following(self, number: int) -> StoreChecksum:
        """A copy to change for commit `number`, each key once; this one stays valid if the commit fails."""
        after = StoreChecksum()
        after.number = number
        after.records, after.record_sum = self.records, self.record_sum
        after.values, after.value_sum = self.values, self.value_sum
        after._sums = self._sums
        return after

    def put(self, key: bytes, value: bytes) -> None:
        """A record is put."""
        self._put[key] = new = _digest(key + value[:_CHECKSUM_BYTES])
        old = self._sums.get(key)
        if old is None:
            self.records += 1
            self.record_sum += new
        else:
            self.record_sum += new - old

    def delete(self, key: bytes) -> None:
        """A record is deleted, if it is there."""
        old = self._sums.get(key)
        if old is not None:
            self.records -= 1
            self.record_sum -= old
            self._deleted.append(key)

    def value(self, key: bytes, count: int) -> None:
        """A payload value came (1) or went (-1)."""
        self.values += count
        self.value_sum += count * _digest(key)

    def committed(self) -> Self:
        """The commit is done."""
        self._sums.update(self._put)
        for key in self._deleted:
            del self._sums[key]
        self._put, self._deleted = {}, []
        return self

    def encode(self) -> bytes:
        """As stored, with a checksum of its own."""
        # Sums are cut to 64 bits here and not at each change.
        records, values = self.record_sum & _WRAP, self.value_sum & _WRAP
        return with_checksum(_FIELDS.pack(self.number, self.records, records, self.values, values))

    def differs(self, stored: bytes) -> str:
        """How a stored checksum differs from this one, in words; empty where it does not. Raises CorruptError."""
        number, records, record_sum, values, value_sum = _FIELDS.unpack(
            strip_checksum(stored, "store checksum")
        )
        if number != self.number:
            return f"the checksum is of commit {number}, the file of commit {self.number}"
        if (self.records, self.record_sum & _WRAP) != (records, record_sum):
            return f"its {self.records} records are not the {records} of the last commit"
        if (self.values, self.value_sum & _WRAP) != (values, value_sum):
            return f"its {self.values} payload values are not the {values} of the last commit"
        return ""


def check(
    path: Path,
    transaction: lmdb.Transaction,
    items: Iterable[tuple[bytes, bytes]],
    walked: Walked | None,
) -> StoreChecksum:
    """The checksum of an opened store. Raises CorruptError where its content is not what was committed."""
    stored = transaction.get(KEY)
    try:
        if stored is None or walked is None:
            raise ValueError("its last commit left no checksum, or the file cannot be walked")
        actual = StoreChecksum.of(items, walked, transaction.id())
        if different := actual.differs(bytes(stored)):
            raise ValueError(different)
        lost = _last_acknowledged(path) - actual.number
        if lost > 0:
            raise ValueError(f"the last {lost} commits are not in it (file {COMMIT_NUMBER_FILE})")
    except (ValueError, struct.error) as error:
        raise CorruptError(
            f"queue store {path}: pages of data.mdb are lost, older than others, or in another's place"
            f" ({error}): restore a backup (meshrl queue restore)"
        ) from error
    return actual


def _last_acknowledged(path: Path) -> int:
    """The last acknowledged commit, as its file says. The file is not synced, so it may be behind."""
    try:
        number: int = _NUMBER.unpack(
            strip_checksum((path / COMMIT_NUMBER_FILE).read_bytes(), COMMIT_NUMBER_FILE)
        )[0]
    except (OSError, struct.error, CorruptError):
        return 0
    return number


def forget(path: Path) -> None:
    """Delete the file: the store goes back to an earlier commit on purpose."""
    (path / COMMIT_NUMBER_FILE).unlink(missing_ok=True)


class CommitNumberFile:
    """A file beside LMDB's that holds the number of the last acknowledged commit."""

    def __init__(self, path: Path) -> None:
        self._file: int | None = None
        try:
            self._file = os.open(path / COMMIT_NUMBER_FILE, os.O_WRONLY | os.O_CREAT, 0o600)
        except OSError:
            # A full disk: the store can still be read, and rows can leave.
            return

    def write(self, number: int) -> None:
        """Note commit `number`. If the disk refuses (it is full), the store goes on without the file."""
        if self._file is None:
            return
        try:
            os.pwrite(self._file, with_checksum(_NUMBER.pack(number)), 0)
        except OSError:
            self.close()

    def close(self) -> None:
        """Idempotent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
