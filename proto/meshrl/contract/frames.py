"""A frame: columns of several rows of one group in one block of bytes, as payload is written, stored, sent and read.

    frame        = xxh3_64 of the body (8 bytes, little-endian) + body
    body         = rows u32, columns u16, bytes of the next part u16,
                   per column: name length u8, name, dtype u8, rank u8, sizes of the axes after the first u32 …;
                   zeros to 8
                   per column of rank 1 or more: its length in each row, u32 x rows; zeros to 8
                   per column: the rows' little-endian bytes, concatenated; zeros to 8

A writer packs once; the queue checks the layout, keeps the bytes and hands out the same ones, so the checksum holds
from end to end. A reader copies nothing: arrays are read-only views of the frame. Never pickle.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from meshrl.contract.errors import CorruptError, UserError

Array: TypeAlias = npt.NDArray[Any]
Columns: TypeAlias = Mapping[str, Array]

DTYPES: Final = ("<i4", "|u1", "<f4", "<i8", "<f8", "<f2", "|i1", "<i2", "<u2", "<u4", "<u8", "|b1")
"""Code is the position; append only."""
MAX_RANK: Final = 4
FRAME_BYTES: Final = 4 << 20
"""Bytes of arrays in one frame. Rows beyond it start another."""
_CODES: Final = {name: code for code, name in enumerate(DTYPES)}
_DTYPES: Final = tuple(np.dtype(name) for name in DTYPES)
_LONG_BYTES: Final = 4096
"""Arrays that are longer are not put together first, which would copy them once more."""
_SUM: Final = struct.Struct("<Q")
_HEAD: Final = struct.Struct("<IHH")
_LENGTHS: Final = np.dtype("<u4")
_PADDING: Final = tuple(bytes(-size % 8) for size in range(8))
_MALFORMED: Final = (ValueError, IndexError, struct.error, OverflowError, TypeError)


def with_checksum(*parts: bytes | memoryview) -> bytes:
    """The concatenation of C-contiguous `parts`, with its checksum in front."""
    if len(parts) == 1:
        return _SUM.pack(xxhash.xxh3_64_intdigest(parts[0])) + parts[0]
    checksum = xxhash.xxh3_64()
    for part in parts:
        checksum.update(part)
    return b"".join([_SUM.pack(checksum.intdigest()), *parts])


def checksum_of(value: bytes) -> int:
    """The checksum that a value with a checksum carries. Raises CorruptError for what is too short to carry one."""
    if len(value) < _SUM.size:
        raise CorruptError(f"{len(value)} bytes are too short for a checksum")
    checksum: int = _SUM.unpack_from(value)[0]
    return checksum


def strip_checksum(value: bytes, what: str) -> memoryview:
    """The body of a value with a checksum.

    Raises:
        CorruptError: the checksum does not fit; names `what`.
    """
    body = memoryview(value)[_SUM.size :]
    if value[: _SUM.size] != _SUM.pack(xxhash.xxh3_64_intdigest(body)):
        raise CorruptError(f"{what}: {len(value)} bytes do not match their checksum")
    return body


@dataclass(frozen=True, slots=True)
class Flat:
    """One column of n rows: the rows' arrays on end along their first axis."""

    values: Array
    """[sum(lengths), *axes after the first]; of rank-0 columns [n]."""
    lengths: npt.NDArray[np.uint32] | None
    """uint32[n]: entries of each row; None for a column of rank 0."""


class Entry(NamedTuple):
    """One column's description in the head of a frame, the same for any number of rows."""

    name: str
    dtype: np.dtype[Any]
    rank: int
    tail: tuple[int, ...]
    """Sizes of the axes after the first."""
    step: int
    """Bytes of one entry along the first axis."""
    encoded: bytes
    """All of this, encoded as in the head."""


class Column(NamedTuple):
    """A column of a frame, whose bytes `values` and `flat` view."""

    entry: Entry
    lengths: tuple[int, ...] | None
    """Entries of each row; None for rank 0."""
    total: int
    """Entries of all rows."""
    body: memoryview
    """The body of the whole frame."""
    at: int
    """Offset of the column's values in the body, in bytes."""
    lengths_at: int
    """Offset of the column's lengths in the body, in bytes; meaningless for rank 0."""

    @property
    def values(self) -> Array:
        """[total, *axes after the first], read-only."""
        entry, total = self.entry, self.total
        if not entry.tail:
            return np.frombuffer(self.body, entry.dtype, total, self.at)
        found = np.frombuffer(self.body, entry.dtype, total * math.prod(entry.tail), self.at)
        return found.reshape(total, *entry.tail)

    @property
    def flat(self) -> Flat:
        """The same with its lengths as an array, read-only."""
        if self.lengths is None:
            return Flat(self.values, None)
        own = np.frombuffer(self.body, _LENGTHS, len(self.lengths), self.lengths_at)
        return Flat(self.values, own)


_column = partial(tuple.__new__, Column)
"""`Column._make` in C: a frame of three columns is read three times on its way through the queue."""


@lru_cache(maxsize=256)
def _encoded_entry(name: str, dtype: str, rank: int, tail: tuple[int, ...]) -> bytes:
    """One column's description, encoded for the head of a frame."""
    encoded = name.encode()
    entry = bytes([len(encoded)]) + encoded + bytes([_CODES[dtype], rank])
    return entry + struct.pack(f"<{len(tail)}I", *tail)


@lru_cache(maxsize=256)
def _entries(head: bytes, count: int) -> tuple[tuple[Entry, ...], int]:
    """Descriptions of the columns in a head, and how many columns have lengths."""
    at = 0
    entries: list[Entry] = []
    for _ in range(count):
        start = at
        end = at + 1 + head[at]
        name = str(head[at + 1 : end], "utf-8")
        dtype, rank = _DTYPES[head[end]], head[end + 1]
        tail = struct.unpack_from(f"<{max(0, rank - 1)}I", head, end + 2)
        at = end + 2 + 4 * len(tail)
        step = dtype.itemsize * math.prod(tail)
        entries.append(Entry(name, dtype, rank, tail, step, head[start:at]))
    if at + -at % 8 != len(head) or len({entry.name for entry in entries}) != count:
        raise ValueError(f"{len(head)} bytes describe {count} columns in {at}")
    return tuple(entries), sum([entry.rank > 0 for entry in entries])


def pack_flat(rows: int, columns: Mapping[str, Flat]) -> bytes:
    """Columns that lie on end already as one frame: the quick way for a writer of many rows."""
    arrays = {name: [column.values] for name, column in columns.items()}
    return _pack(rows, arrays, {name: column.lengths for name, column in columns.items()})


def pack(rows: Sequence[Columns]) -> bytes:
    """Rows whose arrays have the same `signature` as one frame."""
    columns: dict[str, Sequence[Array]] = {}
    lengths: dict[str, npt.NDArray[np.uint32] | None] = {}
    for name in rows[0]:
        arrays = [row[name] for row in rows]
        lengths[name] = None
        if not arrays[0].ndim:
            arrays = [np.stack(arrays)]
        else:
            lengths[name] = np.fromiter(map(len, arrays), np.uint32, len(arrays))
            if len(arrays) > 1 and arrays[0].nbytes < _LONG_BYTES:
                arrays = [np.concatenate(arrays)]
        columns[name] = arrays
    return _pack(len(rows), columns, lengths)


def _pack(
    rows: int,
    columns: Mapping[str, Sequence[Array]],
    lengths: Mapping[str, npt.NDArray[np.uint32] | None],
) -> bytes:
    """A frame of columns, each in pieces that follow each other; their bytes are copied once."""
    entries: list[bytes] = []
    sizes: list[bytes] = []
    bodies: list[bytes | memoryview] = []
    for name, pieces in columns.items():
        first, own = pieces[0], lengths[name]
        dtype = _DTYPES[_CODES[first.dtype.newbyteorder("<").str]]
        entries.append(
            _encoded_entry(name, dtype.str, 0 if own is None else first.ndim, first.shape[1:])
        )
        if own is not None:
            sizes.append(np.ascontiguousarray(own, "<u4").tobytes())
        size = 0
        for piece in pieces:
            if piece.dtype is dtype and piece.flags.c_contiguous and piece.size:
                body = piece.data.cast("B")
            else:
                body = np.ascontiguousarray(piece, dtype).reshape(-1).view(np.uint8).data
            bodies.append(body)
            size += len(body)
        bodies.append(_PADDING[size % 8])
    return _frame(rows, entries, sizes, bodies)


def _frame(
    rows: int,
    entries: Sequence[bytes],
    lengths: Sequence[bytes | memoryview],
    bodies: Sequence[bytes | memoryview],
) -> bytes:
    """A frame of its parts; `bodies` are padded."""
    head, sizes = b"".join(entries), b"".join(lengths)
    head += _PADDING[len(head) % 8]
    start = _HEAD.pack(rows, len(entries), len(head)) + head + sizes
    return with_checksum(start + _PADDING[len(sizes) % 8], *bodies)


def signature(columns: Columns) -> tuple[tuple[str, str, int, tuple[int, ...]], ...]:
    """The properties that all rows of one frame share: names, dtypes, ranks, and axes after the first.

    Raises:
        UserError: an array that no frame can hold; names the column.
    """
    found: list[tuple[str, str, int, tuple[int, ...]]] = []
    for name, array in columns.items():
        dtype = array.dtype.newbyteorder("<").str if isinstance(array, np.ndarray) else ""
        if dtype not in _CODES or array.ndim > MAX_RANK or len(name.encode()) > 255:
            raise UserError(f"column {name} is {described(array)}, which cannot be stored")
        found.append((name, dtype, array.ndim, array.shape[1:]))
    return tuple(found)


def described(array: object) -> str:
    """Dtype and shape, for people."""
    if isinstance(array, np.ndarray):
        return f"{array.dtype.name}{list(array.shape)}"
    return type(array).__name__


class Frame:
    """A frame: bytes that are checked and read at the first access, which raises CorruptError.

    Its row i is row `places[i]` of the block that it belongs to. None: it has all rows of that, in order.
    """

    __slots__ = ("_checked", "_head", "_what", "places", "value")

    def __init__(
        self,
        value: bytes,
        places: tuple[int, ...] | None = None,
        *,
        what: str = "frame",
        checked: bool = False,
    ) -> None:
        """Errors name it as `what`. With `checked` its checksum was compared before."""
        self.value = value
        self.places = places
        self._what = what
        self._checked = checked
        self._head: tuple[int, dict[str, Column]] | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Frame):
            return NotImplemented
        return self.value == other.value and self.places == other.places

    def __hash__(self) -> int:
        return hash((self.value, self.places))

    def __repr__(self) -> str:
        return f"Frame({len(self.value)} bytes, {self.places})"

    @property
    def head(self) -> dict[str, Column]:
        """The columns by name, before their bytes are compared with the checksum."""
        return self._read()[1]

    @property
    def columns(self) -> dict[str, Column]:
        """The columns by name, checked."""
        if not self._checked:
            strip_checksum(self.value, self._what)
            self._checked = True
        return self._read()[1]

    @property
    def rows(self) -> int:
        """How many it has."""
        return self._read()[0]

    def _read(self) -> tuple[int, dict[str, Column]]:
        if self._head is None:
            try:
                self._head = _read(memoryview(self.value)[_SUM.size :])
            except _MALFORMED as error:
                raise CorruptError(
                    f"{self._what}: {len(self.value)} bytes are not a frame: {error}"
                ) from error
        return self._head

    def row(self, position: int, names: Iterable[str] | None = None) -> dict[str, Array]:
        """The columns of one row (all, or those of `names` that it has). For many rows take `split`."""
        found: dict[str, Array] = {}
        for name in self.columns if names is None else names:
            column = self.columns.get(name)
            if column is None:
                continue
            if column.lengths is None:
                found[name] = column.values[position]
                continue
            start = sum(column.lengths[:position])
            found[name] = column.values[start : start + column.lengths[position]]
        return found

    def split(self, name: str) -> list[Array]:
        """One column, an array per row."""
        column = self.columns[name]
        values = column.values
        if column.lengths is None:
            return [values[row : row + 1].reshape(()) for row in range(self.rows)]
        found: list[Array] = []
        at = 0
        for length in column.lengths:
            found.append(values[at : at + length])
            at += length
        return found

    def select(self, names: Iterable[str], positions: Sequence[int] | None = None) -> bytes:
        """A frame of some columns, and of some rows; this one where that is all it has."""
        own = self.columns
        selected = [name for name in names if name in own]
        whole = positions is None or list(positions) == list(range(self.rows))
        if whole and len(selected) == len(own):
            return self.value
        if positions is not None and not whole:
            split = {name: self.split(name) for name in selected}
            return pack([{name: of[row] for name, of in split.items()} for row in positions])
        # Whole columns: their bytes as they lie here.
        heads, lengths, bodies = [], [], []
        for entry, of_rows, total, body, at, lengths_at in map(own.__getitem__, selected):
            heads.append(entry.encoded)
            if of_rows is not None:
                lengths.append(body[lengths_at : lengths_at + 4 * self.rows])
            nbytes = total * entry.step
            bodies.append(body[at : at + nbytes + -nbytes % 8])
        return _frame(self.rows, heads, lengths, bodies)


def _read(body: memoryview) -> tuple[int, dict[str, Column]]:
    rows, count, size = _HEAD.unpack_from(body)
    lengths_at = _HEAD.size + size
    entries, ragged = _entries(bytes(body[_HEAD.size : lengths_at]), count)
    if ragged * rows * 4 > len(body):
        raise ValueError(f"{rows} rows in {len(body)} bytes")
    lengths = struct.unpack_from(f"<{ragged * rows}I", body, lengths_at)
    at = lengths_at + 4 * len(lengths) + -4 * len(lengths) % 8
    columns: dict[str, Column] = {}
    first = 0
    for entry in entries:
        own: tuple[int, ...] | None = None
        total = rows
        own_at = lengths_at + 4 * first
        if entry.rank:
            own = lengths[first : first + rows]
            total = sum(own)
            first += rows
        columns[entry.name] = _column((entry, own, total, body, at, own_at))
        nbytes = total * entry.step
        at += nbytes + -nbytes % 8
    if at != len(body):
        raise ValueError(f"{len(body)} bytes of body, {at} described")
    return rows, columns
