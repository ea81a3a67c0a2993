"""Values that make no sense to the codec raise a UserError that says what is wrong."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.contract import codec
from meshrl.contract.errors import UserError
from meshrl.contract.types import Score, Task, Uid
from meshrl.v1 import queue_pb2, reward_pb2, trajectory_pb2


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"dtype": "int32", "shape": [4], "data": bytes(12)}, "takes 16 bytes, 12 were sent"),
        ({"dtype": "complex64", "shape": [1], "data": bytes(8)}, "unknown dtype 'complex64'"),
        ({"dtype": "object", "shape": [1], "data": bytes(8)}, "unknown dtype 'object'"),
        ({"dtype": "int32", "shape": [-1], "data": b""}, "no array has the shape"),
        ({"dtype": "int32", "shape": [0, 2**62], "data": b""}, "malformed array"),
        ({"dtype": "int32", "shape": [2**62, 2**62], "data": b""}, "0 were sent"),
        ({"dtype": "int64", "shape": [1], "data": bytes(8)}, "want int32, got int64"),
        ({"dtype": "int32", "shape": [1, 1], "data": bytes(4)}, "want 1 axes"),
    ],
)
def test_a_malformed_array_is_refused_in_words(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match="malformed array") as raised:
        codec.decode_array(trajectory_pb2.Array(**fields), "int32", axes=1)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    "uid",
    [
        trajectory_pb2.Uid(),
        trajectory_pb2.Uid(run="a/b", task="t"),
        trajectory_pb2.Uid(run="a", task="t", index=-1),
        trajectory_pb2.Uid(run="a", task="t", attempt=-1),
    ],
)
def test_a_bad_uid_is_refused(uid: trajectory_pb2.Uid) -> None:
    with pytest.raises(UserError, match="malformed uid"):
        codec.UID.decode(uid)


@pytest.mark.parametrize(
    ("counts", "sizes", "rows", "problem"),
    [
        ([1, 1], [1], [0], "1 groups, parts of 2"),
        ([1], [-1], [], "parts of -1 rows, 0 are named"),
        ([1], [2], [0], "parts of 2 rows, 1 are named"),
        ([-1], [], [], "groups with -1 parts, 0 are there"),
        ([2], [1], [0], "groups with 2 parts, 1 are there"),
        ([0], [1], [0], "groups with 0 parts, 1 are there"),
        ([1], [1], [1], "a frame with columns of rows (1,) for a group of 1 rows"),
    ],
)
def test_parts_that_do_not_fit_their_groups_are_refused(
    counts: list[int], sizes: list[int], rows: list[int], problem: str
) -> None:
    named = queue_pb2.GroupRows(tasks=["t"], counts=[1], indices=[0], attempts=[0])
    parts = queue_pb2.Parts(counts=counts, sizes=sizes, rows=rows)
    answer = queue_pb2.FetchRowsResponse(num_groups=1, rows=named, parts=parts)
    with pytest.raises(UserError, match=re.escape(problem)):
        codec.decode_fetched([codec.Bulk(answer, [b""])], [])


def test_what_is_no_member_of_an_enum_cannot_travel() -> None:
    score = Score(uid=Uid("r", "t", 0), outcome="lost")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="this score cannot be sent: 'lost' is no Outcome"):
        codec.SCORE.encode(score)


def test_an_unknown_enum_number_and_a_missing_part_are_refused() -> None:
    for number in (0, 99):
        score = reward_pb2.Score(uid={"run": "r", "task": "t"}, outcome=number)
        with pytest.raises(UserError, match=f"malformed score: {number} is no Outcome"):
            codec.SCORE.decode(score)
    rows = queue_pb2.GroupRows(tasks=["t"], counts=[1], indices=[0], attempts=[0])
    write = queue_pb2.WriteRequest(header={}, rows=rows, tokens=[1], facts={"given": [True]})
    with pytest.raises(UserError, match="oldest is missing"):
        codec.decode_write([codec.Bulk(write, [b""])])
    with pytest.raises(UserError, match="malformed task"):
        codec.TASK.decode(trajectory_pb2.Task(run="r", task_id="t", group_size=1))


def test_bad_json_is_refused() -> None:
    task = codec.TASK.encode(Task(run="r", task_id="t", prompt_ids=np.zeros(1, np.int32)))
    for text in ("{", "[1]", "[" * 100_000):
        task.extra_info_json = text
        with pytest.raises(UserError, match="malformed task"):
            codec.TASK.decode(task)


@pytest.mark.parametrize(
    "task",
    [
        Task(run="r", task_id="t", prompt_ids=np.zeros(1, np.int32), ground_truth=object()),
        Task(run="r", task_id="t\ud83d", prompt_ids=np.zeros(1, np.int32)),
        Task(run="r", task_id="t", prompt_ids=np.zeros(1, np.complex64)),
        Task(run="r", task_id="t", prompt_ids=np.zeros(1, np.int32), group_size=2**40),
        Task(run="r", task_id="t", prompt_ids=[1]),  # type: ignore[arg-type]
    ],
)
def test_a_task_that_cannot_travel_says_so(task: Task) -> None:
    with pytest.raises(UserError, match=r"this (task|array) cannot be sent"):
        codec.TASK.encode(task)


@given(st.binary(max_size=200))
@settings(max_examples=200)
def test_no_bytes_raise_anything_but_a_user_error(data: bytes) -> None:
    for message, decode in (
        (trajectory_pb2.Task, codec.TASK.decode),
        (trajectory_pb2.Array, codec.decode_array),
        (queue_pb2.RunState, codec.RUN_STATE.decode),
        (queue_pb2.Batch, codec.decode_batch),
    ):
        try:
            parsed = message.FromString(data)
        except Exception as error:
            assert "DecodeError" in type(error).__name__
            continue
        try:
            decode(parsed)
        except UserError as error:
            assert "malformed" in str(error)
