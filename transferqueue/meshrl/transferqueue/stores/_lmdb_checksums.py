"""What an LMDB file must hold, kept beside it in every transaction: pages that are lost, older or swapped show.

    commit:  records and payload change ──▶ tally changes by what was put and deleted ──▶ one transaction
    open:    everything that is there ──added up anew──▶ the same tally, the same commit? else CorruptError

LMDB's pages carry no checksums. A write that the disk lost, or put elsewhere, leaves a page that is in order and too
old: records that read as they once were, or are not there. Records carry their seal, so a sum over key and seal of
all of them is a few nanoseconds a change. Of the payload the keys are added up alone: a value is known by the seal
that its group's record has of it, when it is read.

The tally lies in LMDB's main table, whose page every commit writes anyway. What it cannot see is that the file as a
whole went back to an earlier commit; that the file `commits` beside it shows, unless it went back as well.
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
"""In the main table, beside the names of the others."""
WITNESS: Final = "commits"
_FIELDS: Final = struct.Struct("<QQQQQ")
_NUMBER: Final = struct.Struct("<Q")
_SEAL_BYTES: Final = 8
_WRAP: Final = (1 << 64) - 1
_digest: Final = xxhash.xxh3_64_intdigest


class Tally:
    """As of one commit, with what is needed to go on to the next. Used by the commit thread alone."""

    __slots__ = ("_gone", "_put", "_sums", "number", "record_sum", "records", "value_sum", "values")

    def __init__(self) -> None:
        """Of an empty store."""
        self.number = 0
        """Of the commit, as LMDB counts them."""
        self.records = self.record_sum = 0
        self.values = self.value_sum = 0
        """Of PAYLOAD."""
        self._sums: dict[bytes, int] = {}
        """By key: what a record has added. RAM, not the file, says what goes when it is overwritten."""
        self._put: dict[bytes, int] = {}
        self._gone: list[bytes] = []

    @classmethod
    def of(cls, items: Iterable[tuple[bytes, bytes]], walked: Walked, number: int) -> Self:
        """Added up from what a store holds. Raises ValueError for records that are out of order."""
        tally = cls()
        last = b""
        for key, value in items:
            if key <= last:
                raise ValueError(f"record {key.hex()} comes after {last.hex()}")
            tally.put(key, value)
            last = key
        tally.number = number
        tally.values, tally.value_sum = walked
        return tally.committed()

    def following(self, number: int) -> Tally:
        """To be changed on the way to commit `number`, each key once; this one stays right if that fails."""
        after = Tally()
        after.number = number
        after.records, after.record_sum = self.records, self.record_sum
        after.values, after.value_sum = self.values, self.value_sum
        after._sums = self._sums
        return after

    def put(self, key: bytes, value: bytes) -> None:
        """A record is put."""
        self._put[key] = new = _digest(key + value[:_SEAL_BYTES])
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
            self._gone.append(key)

    def value(self, key: bytes, count: int) -> None:
        """A payload value came (1) or went (-1)."""
        self.values += count
        self.value_sum += count * _digest(key)

    def committed(self) -> Self:
        """The commit is done."""
        self._sums.update(self._put)
        for key in self._gone:
            del self._sums[key]
        self._put, self._gone = {}, []
        return self

    def encode(self) -> bytes:
        """For the file, sealed."""
        return with_checksum(_FIELDS.pack(self.number, *self._fields()))

    def differs(self, stored: bytes) -> str:
        """What of a stored tally is not as it is here, in words; nothing where all is. Raises CorruptError."""
        number, records, record_sum, values, value_sum = _FIELDS.unpack(
            strip_checksum(stored, "tally")
        )
        if number != self.number:
            return f"the tally is of commit {number}, the file of commit {self.number}"
        mine = self._fields()
        if mine[:2] != (records, record_sum):
            return f"its {self.records} records are not the {records} of the last commit"
        if mine[2:] != (values, value_sum):
            return f"its {self.values} payload values are not the {values} of the last commit"
        return ""

    def _fields(self) -> tuple[int, int, int, int]:
        # Sums are cut to 64 bits here and not at each change.
        return self.records, self.record_sum & _WRAP, self.values, self.value_sum & _WRAP


def check(
    path: Path,
    transaction: lmdb.Transaction,
    items: Iterable[tuple[bytes, bytes]],
    walked: Walked | None,
) -> Tally:
    """The tally of a store that was opened, if what is there is what was committed. Raises CorruptError."""
    stored = transaction.get(KEY)
    try:
        if stored is None or walked is None:
            raise ValueError("its last commit left no tally, or cannot be walked")
        found = Tally.of(items, walked, transaction.id())
        if different := found.differs(bytes(stored)):
            raise ValueError(different)
        lost = _told(path) - found.number
        if lost > 0:
            raise ValueError(f"the last {lost} commits are not in it (file {WITNESS})")
    except (ValueError, struct.error) as error:
        raise CorruptError(
            f"queue store {path}: pages of data.mdb are lost, older than others, or in another's place"
            f" ({error}): restore a backup (meshrl queue restore)"
        ) from error
    return found


def _told(path: Path) -> int:
    """The last commit that was acknowledged, as far as its file goes: it is not synced, so it may be behind."""
    try:
        number: int = _NUMBER.unpack(strip_checksum((path / WITNESS).read_bytes(), WITNESS))[0]
    except (OSError, struct.error, CorruptError):
        return 0
    return number


def forget(path: Path) -> None:
    """The store goes back on purpose."""
    (path / WITNESS).unlink(missing_ok=True)


class Witness:
    """Says outside of LMDB's file which commit was acknowledged last."""

    def __init__(self, path: Path) -> None:
        self._file: int | None = None
        try:
            self._file = os.open(path / WITNESS, os.O_WRONLY | os.O_CREAT, 0o644)
        except OSError:
            # A full disk: the store may still be read, and rows may leave.
            return

    def tell(self, number: int) -> None:
        """Commit `number` is done. A disk that does not take it (full) is no reason to refuse what is stored."""
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
