"""Streams of bulk messages come back whole; messages that do not fit together are refused."""

from __future__ import annotations

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
from meshrl.contract.types import Lease, LeasedBlock, RowBlock, RowFacts, Task
from meshrl.v1 import queue_pb2

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
