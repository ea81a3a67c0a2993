"""Streams of bulk messages come back whole; messages that do not fit together are refused."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.contract import codec
from meshrl.contract.codec import bulk as compression
from meshrl.contract.errors import UserError
from meshrl.contract.frames import Frame
from meshrl.contract.types import Lease, LeasedBlock, RowBlock, RowFacts, Score, Task, Uid
from meshrl.v1 import queue_pb2, reward_pb2, trajectory_pb2

from .codec_values import (
    facts,
    large,
    names,
    numbers,
    over_the_network,
    runs,
    same,
    small,
    tasks,
    texts,
)

plain_frames = st.binary(max_size=300).filter(lambda data: data[:4] != compression.MAGIC)


@given(st.lists(tasks, max_size=3).map(tuple), runs, texts, numbers)
def test_admitted_tasks_come_back(
    several: tuple[Task, ...], run: str, cursor: str, wait_s: float
) -> None:
    sent = codec.encode_admit(run, several, cursor=cursor, wait_s=wait_s)
    header, came = codec.decode_admit(over_the_network(sent))
    assert same(several, came)
    assert (header.run, header.cursor, header.wait_s) == (run, cursor, wait_s)


def test_an_admitted_task_is_packed_as_it_came_and_one_made_from_it_is_not() -> None:
    sent = Task(run="r", task_id="t", prompt_ids=np.arange(3, dtype=np.int32))
    messages = over_the_network(codec.encode_admit("r", (sent,), cursor="", wait_s=0.0))
    messages[0].tasks[0].ground_truth_json = '{"a":1}'
    _, (task,) = codec.decode_admit(messages)
    packed = codec.pack_task(task)
    assert packed.data == messages[0].tasks[0].SerializeToString()
    assert packed.task.ground_truth == task.ground_truth == {"a": 1}
    assert codec.pack_task(replace(task, task_id="u")).task.task_id == "u"


@st.composite
def groups(draw: st.DrawFn) -> dict[str, Any]:
    rows = draw(st.integers(0, 4))
    small_tuples = st.lists(small, min_size=rows, max_size=rows).map(tuple)
    return {"task": draw(names), "indices": draw(small_tuples), "attempts": draw(small_tuples)}


@st.composite
def payloads(draw: st.DrawFn) -> dict[str, Any]:
    fields = draw(groups())
    rows = range(len(fields["indices"]))
    places = st.lists(st.sampled_from(rows)).map(tuple) if rows else st.just(())
    frame = st.builds(Frame, plain_frames, places)
    return {**fields, "frames": draw(st.lists(frame, max_size=2).map(tuple))}


@given(st.lists(st.tuples(payloads(), tasks), max_size=3))
def test_leases_come_back(several: list[Any]) -> None:
    lease = Lease(
        stage="rollout",
        worker="w",
        ttl_s=3.5,
        blocks=tuple(
            LeasedBlock(
                **{**fields, "task": task.task_id},
                token=number,
                deliveries=tuple(range(len(fields["indices"]))),
                packed=codec.pack_task(task),
            )
            for number, (fields, task) in enumerate(several)
        ),
    )
    assert same(lease, codec.decode_lease(over_the_network(codec.encode_lease(lease))))


@given(st.lists(st.tuples(groups(), large, plain_frames, st.booleans()), max_size=3), facts)
def test_writes_come_back(several: list[Any], fact: RowFacts) -> None:
    blocks = tuple(
        RowBlock(
            **fields,
            token=token,
            frames=(Frame(frame),),
            facts=(fact,) * len(fields["indices"]) if sampled else (),
        )
        for fields, token, frame, sampled in several
    )
    header, came = codec.decode_write(over_the_network(codec.encode_write("r", "rollout", blocks)))
    assert same(blocks, came)
    assert (header.run, header.stage) == ("r", "rollout")


def test_a_written_frame_keeps_no_message_in_memory() -> None:
    groups = (written("a", 400_000), written("b", 1_000), written("c", 0))
    messages = over_the_network(codec.encode_write("r", "reward", groups))
    assert len(messages) == 1
    _, arrived = codec.decode_write(messages)
    assert [type(block.frame.value) for block in arrived] == [bytes] * 3
    assert same(groups, arrived)


@given(st.lists(payloads().map(lambda fields: RowBlock(**fields)), max_size=3))
def test_fetched_payload_comes_back(fetched: list[RowBlock]) -> None:
    messages = over_the_network(list(codec.encode_fetched(fetched)))
    assert same(fetched, codec.decode_fetched(messages, fetched))


@given(st.lists(st.sampled_from([0, 1, 1000, 400_000, 1_048_570, 1_048_576, 2_500_001])))
@settings(max_examples=20)
def test_frames_share_messages_of_a_mebibyte(sizes: list[int]) -> None:
    fetched = [
        RowBlock(task=f"t{at}", indices=(0,), attempts=(0,), frames=(Frame(bytes(size), (0,)),))
        for at, size in enumerate(sizes)
    ]
    messages = list(codec.encode_fetched(fetched))
    assert all(len(m.frames) == 1 or m.ByteSize() <= 1.01 * codec.PAGE_BYTES for m in messages)
    assert len(messages) <= 1 + 2 * (sum(sizes) // codec.PAGE_BYTES + 1)
    assert same(fetched, codec.decode_fetched(over_the_network(messages), fetched))


def written(task: str, nbytes: int = 8) -> RowBlock:
    return RowBlock(task=task, indices=(0,), attempts=(0,), token=1, frames=(Frame(bytes(nbytes)),))


def test_a_stream_that_was_cut_short_is_refused() -> None:
    messages = codec.encode_write("r", "s", [written(f"t{n}", 400_000) for n in range(5)])
    assert len(messages) > 1
    with pytest.raises(UserError, match="malformed write: 5 groups were announced"):
        codec.decode_write(messages[:-1])
    with pytest.raises(UserError, match="no header"):
        codec.decode_write(messages[1:])
    with pytest.raises(UserError, match="no header"):
        codec.decode_admit([])


def test_a_stream_with_too_many_or_too_few_frames_is_refused() -> None:
    [bulk] = codec.encode_write("r", "s", [written("t")])
    with pytest.raises(UserError, match="1 groups with 1 tokens, 2 frames"):
        codec.decode_write([codec.Bulk(bulk.message, [b"", b""])])
    with pytest.raises(UserError, match="1 groups with 1 tokens, 0 frames"):
        codec.decode_write([codec.Bulk(bulk.message, [])])
    group = RowBlock(task="t", indices=(0,), attempts=(0,), frames=(Frame(b"", (0,)),))
    [fetched] = codec.encode_fetched([group])
    for frames in ([b"", b""], []):
        with pytest.raises(UserError, match=f"1 parts with {len(frames)} frames"):
            codec.decode_fetched([codec.Bulk(fetched.message, frames)], [group])


@given(st.lists(plain_frames, max_size=5), st.integers(0, 2**40))
def test_bulk_is_what_protobuf_writes_and_reads(frames: list[bytes], announced: int) -> None:
    message = queue_pb2.FetchRowsResponse(num_groups=announced)
    bulk: Any = codec.Bulk(message, frames)
    data = bulk.SerializeToString()
    assert bulk.ByteSize() == len(data)
    known = queue_pb2.FetchRowsResponse.FromString(data)
    assert (known.num_groups, list(known.frames)) == (announced, frames)
    # Another writer may put the fields in any order.
    other = (
        queue_pb2.FetchRowsResponse(frames=frames).SerializeToString() + message.SerializeToString()
    )
    for read in map(codec.parser(queue_pb2.FetchRowsResponse), (data, other)):
        assert (read.message, [bytes(frame) for frame in read.frames]) == (message, frames)


@given(st.binary(max_size=60))
@settings(max_examples=200)
def test_bulk_takes_what_protobuf_takes_and_nothing_else(data: bytes) -> None:
    kind = queue_pb2.FetchRowsResponse
    try:
        wanted = kind.FromString(data)
    except DecodeError:
        with pytest.raises(DecodeError):
            codec.parser(kind)(data)
        return
    try:
        found = codec.parser(kind)(data)
    except DecodeError:
        # Groups, which proto3 has not: protobuf passes over them, nobody sends them.
        assert any(byte & 7 in (3, 4) for byte in data)
        return
    assert [bytes(frame) for frame in found.frames] == list(wanted.frames)
    wanted.ClearField("frames")
    assert found.message == wanted


def test_lists_that_do_not_fit_each_other_are_refused() -> None:
    [message] = codec.encode_write("r", "s", [written("t")])
    message.message.rows.indices.append(1)
    with pytest.raises(UserError, match="1 rows with 2 indices"):
        codec.decode_write([message])


def test_a_frame_of_rows_that_nobody_asked_for_is_refused() -> None:
    group = RowBlock(task="t", indices=(0,), attempts=(0,), frames=(Frame(b"", (1,)),))
    with pytest.raises(UserError, match="for a group of 1 rows"):
        codec.decode_fetched(list(codec.encode_fetched([group])), [group])


def test_fetched_rows_must_be_the_rows_asked_for() -> None:
    group = RowBlock(task="t", indices=(0,), attempts=(0,))
    sent = RowBlock(task="t", indices=(1,), attempts=(0,))
    with pytest.raises(UserError, match="not the ones"):
        codec.decode_fetched(list(codec.encode_fetched([group])), [sent])


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
