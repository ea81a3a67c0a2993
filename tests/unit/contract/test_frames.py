"""Frames come back as they were packed, or as a CorruptError; nothing is copied on the way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from meshrl.contract.errors import CorruptError, UserError
from meshrl.contract.frames import (
    DTYPES,
    FRAME_BYTES,
    Flat,
    Frame,
    pack,
    pack_flat,
    signature,
    strip_checksum,
    with_checksum,
)
from meshrl.contract.types import RowBlock, RowWrite, Uid, blocks_of, gathered, pack_rows


@st.composite
def rows_of_one_signature(draw: st.DrawFn) -> list[dict[str, np.ndarray]]:
    names = draw(st.lists(st.text(min_size=1, max_size=20), max_size=4, unique=True))
    shapes = {
        name: (
            draw(st.sampled_from(DTYPES)),
            draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0)),
        )
        for name in names
    }
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        row: dict[str, np.ndarray] = {}
        for name, (dtype, shape) in shapes.items():
            first = (draw(st.integers(0, 5)),) if shape else ()
            row[name] = draw(hnp.arrays(np.dtype(dtype), (*first, *shape[1:])))
        rows.append(row)
    return rows


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return left.keys() == right.keys() and all(
        (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
        for a, b in ((left[name], right[name]) for name in left)
    )


@given(rows_of_one_signature(), st.randoms())
@settings(deadline=None)
def test_rows_come_back_bit_by_bit_whole_and_in_part(rows: list[Any], random: Any) -> None:
    frame = Frame(pack(rows))
    assert frame.rows == len(rows)
    for at, row in enumerate(rows):
        assert same(row, frame.row(at)), (row, frame.row(at))
    some = random.sample(range(len(rows)), random.randint(1, len(rows)))
    names = random.sample(list(rows[0]), random.randint(0, len(rows[0])))
    part = Frame(frame.select(names, some))
    if names:
        wanted = [{name: rows[at][name] for name in names} for at in some]
        assert all(same(row, part.row(at)) for at, row in enumerate(wanted))
    y = np.ones((2, 4), np.float32)
    rows = [{"x": np.arange(3), "y": y}, {"x": np.arange(5), "y": y[:0]}]


def test_columns_that_lie_on_end_already_make_the_same_frame() -> None:
    rows = [
        {"x": np.arange(3), "y": np.ones((2, 4), np.float32)},
        {"x": np.arange(5), "y": np.ones((0, 4), np.float32)},
    ]
    flat = {
        "x": Flat(np.concatenate([row["x"] for row in rows]), np.array([3, 5], np.uint32)),
        "y": Flat(np.ones((2, 4), np.float32), np.array([2, 0], np.uint32)),
    }
    assert pack_flat(2, flat) == pack(rows)


@given(rows_of_one_signature(), st.randoms())
@settings(deadline=None)
def test_some_columns_of_a_frame_are_the_frame_that_packing_them_makes(
    rows: list[Any], random: Any
) -> None:
    frame = Frame(pack(rows))
    names = random.sample(list(rows[0]), random.randint(0, len(rows[0])))
    if len(names) < len(rows[0]):
        flat = {name: frame.columns[name].flat for name in names}
        assert frame.select(names) == pack_flat(len(rows), flat)


def test_reading_copies_nothing_and_arrays_are_aligned_and_read_only() -> None:
    frame = Frame(pack([{"a": np.arange(3, dtype=np.uint8), "b": np.arange(4)}]))
    flat = frame.columns["b"].flat
    for array in (frame.row(0)["b"], flat.values, flat.lengths):
        assert array is not None
        assert array.flags.aligned and not array.flags.owndata and not array.flags.writeable


def test_big_endian_and_strided_arrays_are_stored_little_endian() -> None:
    found = Frame(pack([{"x": np.arange(10, dtype=">i4")[::2]}])).row(0)["x"]
    assert (found.dtype.str, found.tolist()) == ("<i4", [0, 2, 4, 6, 8])


def test_objects_cannot_be_stored() -> None:
    with pytest.raises(UserError, match=r"column x is object\[1\], which cannot be stored"):
        signature({"x": np.array([object()])})
    with pytest.raises(UserError, match=r"column x is list, which cannot be stored"):
        signature({"x": [1]})  # type: ignore[dict-item]


@given(st.binary(max_size=200), st.integers(0, 10_000))
def test_any_flipped_bit_is_noticed(body: bytes, at: int) -> None:
    value = bytearray(with_checksum(body))
    assert bytes(strip_checksum(bytes(value), "x")) == body
    value[(at // 8) % len(value)] ^= 1 << at % 8
    with pytest.raises(CorruptError, match="row 7"):
        strip_checksum(bytes(value), "row 7")


@given(st.binary(max_size=7))
def test_a_value_cut_short_is_noticed(value: bytes) -> None:
    with pytest.raises(CorruptError):
        strip_checksum(value, "x")


@given(st.binary(max_size=120) | st.binary(max_size=60).map(lambda b: b"\x02\0\0\0\x01\0\0\0" + b))
@settings(max_examples=300)
def test_nonsense_with_a_checksum_is_a_corrupt_error_and_nothing_else(body: bytes) -> None:
    try:
        Frame(with_checksum(body), what="row 7").columns  # noqa: B018
    except CorruptError as error:
        assert "row 7" in str(error)


def write(task: str, index: int, **columns: np.ndarray) -> RowWrite:
    return RowWrite(uid=Uid("r", task, index), columns=columns)


def test_rows_are_packed_by_group_token_and_signature() -> None:
    rows = [
        write("a", 0, x=np.arange(2)),
        write("b", 0, x=np.arange(3)),
        write("a", 1, x=np.arange(4)),
    ]
    rows += [write("a", 2, x=np.arange(4.0)), write("a", 3, x=np.arange(1))]
    token_of = {row.uid: 7 for row in rows} | {rows[-1].uid: 8}
    found = pack_rows(token_of, rows)
    assert [(g.task, g.indices, g.token) for g in found] == [
        ("a", (0, 1), 7),
        ("b", (0,), 7),
        ("a", (2,), 7),
        ("a", (3,), 8),
    ]
    with pytest.raises(UserError, match=r"r/a/0\.0: no lease token"):
        pack_rows({}, rows)


def test_rows_beyond_the_size_of_a_frame_start_another_one() -> None:
    third = np.zeros(FRAME_BYTES // 3, np.uint8)
    rows = [write("a", index, x=third) for index in range(8)]
    found = pack_rows({row.uid: 1 for row in rows}, rows)
    assert sorted(index for group in found for index in group.indices) == list(range(8))
    assert [len(group) for group in found] == [3, 3, 2]


def test_a_column_is_gathered_over_groups_and_frames_in_the_order_of_the_rows() -> None:
    def frame(places: tuple[int, ...], *arrays: np.ndarray) -> Frame:
        return Frame(pack([{"x": array} for array in arrays]), places)

    whole = RowBlock(
        task="a",
        indices=(0, 1),
        attempts=(0, 0),
        frames=(frame((0, 1), np.arange(2), np.arange(3)),),
    )
    mixed = RowBlock(
        task="b",
        indices=(0, 1, 2),
        attempts=(0, 0, 0),
        frames=(frame((2, 0), np.full(1, 9), np.full(2, 7)), frame((1,), np.full(1, 8))),
    )
    flat = gathered([whole, mixed], ("x",))["x"]
    assert flat.values.tolist() == [0, 1, 0, 1, 2, 7, 7, 8, 9]
    assert flat.lengths is not None and flat.lengths.tolist() == [2, 3, 2, 1, 1]
    assert [row["x"].tolist() for row in mixed.columns()] == [[7, 7], [8], [9]]
    with pytest.raises(CorruptError, match="task b: not every row has column y"):
        mixed.column("y")


@pytest.mark.parametrize(("shape", "length"), [((), 1), ((3,), 3), ((3, 2), 3)])
def test_a_gathered_row_is_as_long_as_its_first_axis_however_its_frames_lie(
    shape: tuple[int, ...], length: int
) -> None:
    arrays = [np.full(shape, row, np.int32) for row in range(2)]
    rows = {"task": "a", "indices": (0, 1), "attempts": (0, 0)}
    together = Frame(pack([{"x": array} for array in arrays]))
    apart = tuple(Frame(pack([{"x": array}]), (row,)) for row, array in enumerate(arrays))
    groups = [RowBlock(**rows, frames=(together,)), RowBlock(**rows, frames=apart)]
    flat = gathered(groups, ("x",))["x"]
    assert flat.lengths is not None and flat.lengths.tolist() == [length] * 4
    assert flat.values.tolist() == np.concatenate([*map(np.atleast_1d, arrays)] * 2).tolist()


def test_columns_gathered_together_are_checked_and_as_gathered_one_by_one() -> None:
    def group(kind: str, *frames: bytes) -> RowBlock:
        return RowBlock(
            task=kind, indices=(0, 1), attempts=(0, 0), frames=tuple(map(Frame, frames))
        )

    def frame(name: str, kind: str) -> bytes:
        return pack([{name: np.arange(length, dtype=kind)} for length in (2, 3)])

    groups = [group(kind, frame("x", kind), frame("y", "u1")) for kind in ("i4", "f4")]
    together = gathered(groups, ("x", "y"))
    for name, flat in together.items():
        values = np.concatenate([array for group in groups for array in group.column(name)])
        assert flat.values.dtype == values.dtype
        assert flat.values.tolist() == values.tolist()
        assert flat.lengths is not None and flat.lengths.tolist() == [2, 3, 2, 3]
    damaged = bytearray(frame("y", "u1"))
    damaged[-8] ^= 1
    groups.append(group("bad", frame("x", "i4"), bytes(damaged)))
    assert len(gathered(groups, ("x",))["x"].values) == 15
    with pytest.raises(CorruptError, match="do not match their checksum"):
        gathered(groups, ("x", "y"))


def test_entries_of_different_shapes_are_refused_before_memory_is_taken_for_them() -> None:
    shapes = [(0, 1 << 31, 1 << 20), (2, 3, 1)]
    groups = [
        RowBlock(task="a", indices=(0,), attempts=(0,), frames=(Frame(frame),))
        for frame in (pack([{"x": np.empty(shape, np.uint8)}]) for shape in shapes)
    ]
    with pytest.raises(CorruptError, match="column x has entries of different shapes"):
        gathered(groups, ("x",))


def test_rows_are_named_by_their_groups() -> None:
    uids = [Uid("r", "a", 1), Uid("r", "a", 0, 2), Uid("r", "b", 0), Uid("r", "a", 3)]
    found = blocks_of("r", uids)
    assert [uid for group in found for uid in group.uids("r")] == uids
    assert [group.task for group in found] == ["a", "b", "a"]
    with pytest.raises(UserError, match="is not of run s"):
        blocks_of("s", uids)
