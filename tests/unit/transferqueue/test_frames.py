"""Bytes at rest come back as they were, or as a CorruptError."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from meshrl.contract.errors import CorruptError, UserError
from meshrl.contract.nouns import Message, SamplingParams, Task
from meshrl.transferqueue.frames import (
    DTYPES,
    pack,
    pack_task,
    seal,
    storable,
    unpack,
    unpack_task,
    unseal,
)

ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(np.dtype(dtype), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0))
)


@given(st.dictionaries(st.text(min_size=1, max_size=20), ARRAYS, max_size=6))
def test_columns_come_back_bit_by_bit(columns: dict[str, np.ndarray]) -> None:
    found = unpack(pack(columns), "row")
    assert list(found) == list(columns)
    for name, array in columns.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()


def test_big_endian_and_strided_arrays_are_stored_little_endian() -> None:
    given_ = np.arange(10, dtype=">i4")[::2]
    found = unpack(pack({"x": given_}), "row")["x"]
    assert (found.dtype.str, found.tolist()) == ("<i4", [0, 2, 4, 6, 8])


def test_only_the_wanted_columns_are_read_and_none_is_copied() -> None:
    value = pack({"a": np.arange(3), "b": np.arange(4), "c": np.arange(5)})
    found = unpack(value, "row", ["c", "a", "absent"])
    assert set(found) == {"a", "c"}
    assert not found["c"].flags.owndata


def test_objects_cannot_be_stored() -> None:
    assert not storable(np.array([object()]))
    assert not storable(np.array(["text"]))


@given(st.binary(max_size=200), st.integers(0, 10_000))
def test_any_flipped_bit_is_noticed(body: bytes, at: int) -> None:
    value = bytearray(seal(body))
    assert bytes(unseal(bytes(value), "x")) == body
    value[(at // 8) % len(value)] ^= 1 << at % 8
    with pytest.raises(CorruptError, match="row 7"):
        unseal(bytes(value), "row 7")


@given(st.binary(max_size=7))
def test_a_value_cut_short_is_noticed(value: bytes) -> None:
    with pytest.raises(CorruptError):
        unseal(value, "x")


def test_a_task_comes_back_whole() -> None:
    task = Task(
        run="r",
        task_id="t",
        prompt_ids=np.arange(5, dtype=np.int32),
        messages=(Message(role="user", content="☃"),),
        ground_truth=["a", {"b": None}],
        extra_info={"n": 1.5},
        sampling=SamplingParams(stop=("x",), stop_token_ids=(1, 2), seed=3),
        group_size=4,
        priority=2,
    )
    found = unpack_task(pack_task(task), "t")
    assert found.prompt_ids.tolist() == task.prompt_ids.tolist()
    for name in ("messages", "ground_truth", "extra_info", "sampling", "group_size", "priority"):
        assert getattr(found, name) == getattr(task, name)


def test_a_task_that_is_not_json_is_refused_by_name() -> None:
    task = Task(run="r", task_id="t9", prompt_ids=np.zeros(1, np.int32), ground_truth={1, 2})
    with pytest.raises(UserError, match=r"t9.*JSON"):
        pack_task(task)
