"""The codec: whatever goes in comes out, and whatever makes no sense is a UserError."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from meshrl.contract import codec
from meshrl.contract.codec import compression
from meshrl.contract.codec.arrays import DTYPES
from meshrl.contract.errors import UserError
from meshrl.contract.nouns import (
    Batch,
    BatchGroup,
    DeadLetter,
    EngineStats,
    GenerateDelta,
    GenerateRequest,
    GroupPolicy,
    Lease,
    LeasedGroup,
    Ledger,
    Message,
    Outcome,
    PackedGroup,
    Part,
    PayloadGroup,
    RowFacts,
    RunSpec,
    RunState,
    Sample,
    SamplingParams,
    Score,
    Siblings,
    StageSpec,
    StalePolicy,
    Task,
    TrainerPhase,
    TrainerStatus,
    Uid,
    Version,
    Waiting,
)
from meshrl.v1 import queue_pb2, rollout_pb2, trajectory_pb2

settings.register_profile("codec", max_examples=30, deadline=None)
settings.load_profile("codec")

small = st.integers(0, 2**31 - 1)
large = st.integers(0, 2**63 - 1)
texts = st.text(st.characters(codec="utf-8"), max_size=12)
names = texts.filter(bool)
runs = names.map(lambda text: text.replace("/", "_"))
numbers = st.floats(allow_nan=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
json_objects = st.dictionaries(st.text(max_size=8), json_values, max_size=3)
versions = st.builds(Version, large, large)
uids = st.builds(Uid, runs, names, small, small)
ids = hnp.arrays(np.int32, st.integers(0, 20))
arrays = st.sampled_from(sorted(DTYPES)).flatmap(
    lambda name: hnp.arrays(np.dtype(name), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0))
)
columns = st.dictionaries(names, arrays, max_size=4)
facts = st.builds(
    RowFacts,
    outcome=st.sampled_from(Outcome),
    num_tokens=large,
    oldest=versions,
    newest=versions,
    finish_reason=texts,
)
sampling = st.builds(
    SamplingParams,
    temperature=st.floats(0, 10),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(-1, 1000),
    max_tokens=st.integers(1, 2**31 - 1),
    stop=st.lists(texts, max_size=3).map(tuple),
    stop_token_ids=st.lists(small, max_size=3).map(tuple),
    seed=st.integers(-(2**63), 2**63 - 1),
)
tasks = st.builds(
    Task,
    run=runs,
    task_id=names,
    prompt_ids=ids,
    messages=st.lists(st.builds(Message, role=texts, content=texts), max_size=2).map(tuple),
    data_source=texts,
    ground_truth=json_values,
    extra_info=json_objects,
    program=texts,
    sampling=sampling,
    group_size=st.integers(1, 64),
    deadline_s=numbers,
    priority=st.integers(-5, 5),
)
stages = st.builds(
    StageSpec,
    name=texts,
    reads=st.lists(texts, max_size=3).map(tuple),
    writes=st.lists(texts, max_size=3).map(tuple),
)
specs = st.builds(
    RunSpec,
    run=texts,
    group_size=small,
    batch_groups=small,
    max_staleness=st.just(math.inf) | st.integers(0, 9).map(float),
    stages=st.lists(stages, max_size=3).map(tuple),
    group_policy=st.sampled_from(GroupPolicy),
    group_k=small,
    stale_policy=st.sampled_from(StalePolicy),
    max_attempts=small,
    lease_ttl_s=numbers,
    resident_batches=small,
    resident_bytes=large,
    sampler=texts,
    gated=st.booleans(),
    priority=st.integers(-5, 5),
)
plain_frames = st.binary(max_size=300).filter(lambda data: data[:4] != compression.MAGIC)
counts = st.dictionaries(texts, large, max_size=3)


@st.composite
def batch_groups(draw: st.DrawFn) -> BatchGroup:
    rows = draw(st.integers(0, 3))

    def of_rows(values: st.SearchStrategy[Any]) -> Any:
        return draw(st.lists(values, min_size=rows, max_size=rows).map(tuple))

    return BatchGroup(
        task=draw(names),
        indices=of_rows(small),
        attempts=of_rows(small),
        size=draw(small),
        num_tokens=of_rows(large),
        oldest=of_rows(versions),
        newest=of_rows(versions),
        outcomes=of_rows(st.sampled_from(Outcome)),
    )


measures = st.dictionaries(texts, numbers, max_size=3)


def same(left: Any, right: Any) -> bool:
    """Equality of nouns that contain arrays: dtype, shape and bits."""
    if isinstance(left, np.ndarray):
        return (
            isinstance(right, np.ndarray)
            and left.dtype == right.dtype
            and left.shape == right.shape
            and left.tobytes() == right.tobytes()
        )
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if hasattr(left, "__dataclass_fields__"):
        return type(left) is type(right) and all(
            same(getattr(left, name), getattr(right, name)) for name in left.__dataclass_fields__
        )
    return bool(left == right)


def over_the_wire(message: Any) -> Any:
    """The message as the other side parses it."""
    if isinstance(message, list):
        return [over_the_wire(one) for one in message]
    if isinstance(message, codec.Bulk):
        return codec.parser(type(message.message))(message.SerializeToString())
    return type(message).FromString(message.SerializeToString())


@given(arrays)
def test_any_array_comes_back_bit_for_bit(array: np.ndarray) -> None:
    assert same(array, codec.decode_array(over_the_wire(codec.encode_array(array))))


def round_trip(name: str, noun: Any) -> None:
    message = getattr(codec, f"encode_{name}")(noun)
    assert same(noun, getattr(codec, f"decode_{name}")(over_the_wire(message)))


@given(versions, uids, facts, sampling, tasks)
def test_shared_nouns_come_back(
    version: Version, uid: Uid, row: RowFacts, how: SamplingParams, task: Task
) -> None:
    round_trip("version", version)
    round_trip("uid", uid)
    round_trip("sampling", how)
    round_trip("task", task)


@given(
    st.builds(
        RunState,
        spec=specs,
        epoch=large,
        published=versions,
        cursor=texts,
        feed_closed=st.booleans(),
        committed_step=large,
    )
)
def test_run_states_come_back(state: RunState) -> None:
    round_trip("run_state", state)


@given(
    st.builds(
        Batch,
        batch_id=texts,
        run=texts,
        step=large,
        groups=st.lists(batch_groups(), max_size=3).map(tuple),
    ),
    st.builds(
        Ledger,
        run=texts,
        admitted=large,
        trained=large,
        filtered=counts,
        stale=counts,
        dead_lettered=counts,
        resident=counts,
    ),
    st.builds(
        DeadLetter,
        uid=uids,
        stage=texts,
        outcome=st.sampled_from(Outcome),
        reason=texts,
        attempts=small,
    ),
    st.builds(
        Waiting,
        who=texts,
        what=texts,
        since_s=numbers,
        owners=st.lists(texts, max_size=2).map(tuple),
        uids=st.lists(uids, max_size=2).map(tuple),
    ),
)
def test_what_the_queue_reports_comes_back(
    batch: Batch, ledger: Ledger, letter: DeadLetter, waiting: Waiting
) -> None:
    round_trip("batch", batch)
    round_trip("ledger", ledger)
    round_trip("dead_letter", letter)
    round_trip("waiting", waiting)


@given(
    st.builds(
        GenerateRequest,
        request_id=texts,
        prompt_ids=ids,
        sampling=sampling,
        continued=st.integers(0, 2**31 - 1),
    ),
    ids,
    versions,
)
def test_what_the_engine_says_comes_back(
    request: GenerateRequest, tokens: np.ndarray, version: Version
) -> None:
    round_trip("generate_request", request)
    logprobs = np.linspace(-9, 0, len(tokens), dtype=np.float32)
    delta = GenerateDelta(tokens=tokens, logprobs=logprobs, version=version, finish_reason="stop")
    round_trip("generate_delta", delta)
    stats = EngineStats(
        version=version,
        running=1,
        capacity=2,
        tokens_generated=3,
        tokens_per_s=4.5,
        updates=6,
        update_pause_s=7.5,
    )
    round_trip("engine_stats", stats)


@given(
    st.builds(
        Sample,
        uid=uids,
        data_source=texts,
        solution=texts,
        ground_truth=json_values,
        extra_info=json_objects,
        messages=st.lists(st.builds(Message, role=texts, content=texts), max_size=3).map(tuple),
    ),
    st.builds(
        Score,
        uid=uids,
        outcome=st.sampled_from(Outcome),
        score=numbers,
        components=measures,
        reason=texts,
        reward_hash=texts,
        token_rewards=st.none() | st.lists(numbers, max_size=4).map(tuple),
    ),
    st.builds(
        TrainerStatus,
        step=large,
        total_steps=large,
        version=versions,
        phase=st.sampled_from(TrainerPhase),
        reward_mean=st.none() | numbers,
        held_out_score=st.none() | numbers,
        tokens_per_s=numbers,
        samples=large,
        staleness=st.dictionaries(large, large, max_size=3),
        metrics=measures,
        eta_s=st.none() | numbers,
        waiting_for=texts,
    ),
)
def test_what_judges_and_trainers_say_comes_back(
    sample: Sample, score: Score, status: TrainerStatus
) -> None:
    round_trip("sample", sample)
    round_trip("score", score)
    round_trip("trainer_status", status)


@given(st.lists(tasks, max_size=3).map(tuple), runs, texts, numbers)
def test_admitted_tasks_come_back(
    several: tuple[Task, ...], run: str, cursor: str, wait_s: float
) -> None:
    call = codec.AdmitCall(run=run, tasks=several, cursor=cursor, wait_s=wait_s)
    assert same(call, codec.decode_admit(over_the_wire(codec.encode_admit(call))))


@st.composite
def groups(draw: st.DrawFn) -> dict[str, Any]:
    rows = draw(st.integers(0, 4))
    small_tuples = st.lists(small, min_size=rows, max_size=rows).map(tuple)
    return {"task": draw(names), "indices": draw(small_tuples), "attempts": draw(small_tuples)}


@st.composite
def payloads(draw: st.DrawFn) -> dict[str, Any]:
    fields = draw(groups())
    rows = range(len(fields["indices"]))
    part = st.builds(
        Part,
        rows=st.lists(st.sampled_from(rows)).map(tuple) if rows else st.just(()),
        frame=plain_frames,
    )
    return {**fields, "parts": draw(st.lists(part, max_size=2).map(tuple))}


@given(st.lists(st.tuples(payloads(), tasks), max_size=3))
def test_leases_come_back(several: list[Any]) -> None:
    lease = Lease(
        stage="rollout",
        worker="w",
        ttl_s=3.5,
        groups=tuple(
            LeasedGroup(
                **{**fields, "task": task.task_id},
                token=number,
                deliveries=tuple(range(len(fields["indices"]))),
                packed=codec.pack_task(task),
            )
            for number, (fields, task) in enumerate(several)
        ),
    )
    assert same(lease, codec.decode_lease(over_the_wire(codec.encode_lease(lease))))


@given(st.lists(st.tuples(groups(), large, plain_frames, st.booleans()), max_size=3), facts)
def test_writes_come_back(several: list[Any], fact: RowFacts) -> None:
    call = codec.WriteCall(
        run="r",
        stage="rollout",
        groups=tuple(
            PackedGroup(
                **fields,
                token=token,
                frame=frame,
                facts=(fact,) * len(fields["indices"]) if sampled else (),
            )
            for fields, token, frame, sampled in several
        ),
    )
    assert same(call, codec.decode_write(over_the_wire(codec.encode_write(call))))


@given(st.lists(payloads().map(lambda fields: PayloadGroup(**fields)), max_size=3))
def test_fetched_payload_comes_back(fetched: list[PayloadGroup]) -> None:
    messages = over_the_wire(list(codec.encode_fetched(fetched)))
    assert same(fetched, codec.decode_fetched(messages, fetched))


@given(st.lists(st.sampled_from([0, 1, 1000, 400_000, 1_048_570, 1_048_576, 2_500_001])))
@settings(max_examples=20)
def test_frames_share_messages_of_a_mebibyte(sizes: list[int]) -> None:
    fetched = [
        PayloadGroup(
            task=f"t{at}", indices=(0,), attempts=(0,), parts=(Part(rows=(0,), frame=bytes(size)),)
        )
        for at, size in enumerate(sizes)
    ]
    messages = list(codec.encode_fetched(fetched))
    assert all(len(m.frames) == 1 or m.ByteSize() <= 1.01 * codec.PAGE_BYTES for m in messages)
    assert len(messages) <= 1 + 2 * (sum(sizes) // codec.PAGE_BYTES + 1)
    assert same(fetched, codec.decode_fetched(over_the_wire(messages), fetched))


def test_a_big_endian_or_strided_array_travels_as_little_endian_and_contiguous() -> None:
    array = np.arange(12, dtype=">i4").reshape(3, 4)[:, ::2]
    decoded = codec.decode_array(codec.encode_array(array))
    assert decoded.tolist() == array.tolist()
    assert decoded.dtype == np.dtype("<i4")


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
        codec.decode_uid(uid)


def test_an_unknown_enum_number_and_a_missing_part_are_refused() -> None:
    with pytest.raises(UserError, match="0 is no Outcome"):
        codec.decode_outcome(0)
    with pytest.raises(UserError, match="99 is no Outcome"):
        codec.decode_outcome(99)
    rows = queue_pb2.GroupRows(tasks=["t"], counts=[1], indices=[0], attempts=[0])
    write = queue_pb2.WriteRequest(header={}, rows=rows, tokens=[1], facts={"given": [True]})
    with pytest.raises(UserError, match="oldest is missing"):
        codec.decode_write([codec.Bulk(write, [b""])])
    with pytest.raises(UserError, match="malformed task"):
        codec.decode_task(trajectory_pb2.Task(run="r", task_id="t", group_size=1))


def test_bad_json_is_refused() -> None:
    task = codec.encode_task(Task(run="r", task_id="t", prompt_ids=np.zeros(1, np.int32)))
    for text in ("{", "[1]", "[" * 100_000):
        task.extra_info_json = text
        with pytest.raises(UserError, match="malformed task"):
            codec.decode_task(task)


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
    with pytest.raises(UserError, match=r"this (task|array) cannot travel"):
        codec.encode_task(task)


def test_free_text_travels_even_where_it_is_no_unicode() -> None:
    score = Score(uid=Uid("r", "t", 0), outcome=Outcome.INFRA_FAULT, reason="bad \ud83d text")
    assert codec.decode_score(codec.encode_score(score)).reason == "bad ? text"


def written(task: str, nbytes: int = 8) -> PackedGroup:
    return PackedGroup(task=task, indices=(0,), attempts=(0,), token=1, frame=bytes(nbytes))


def test_a_stream_that_was_cut_short_is_refused() -> None:
    call = codec.WriteCall(
        run="r", stage="s", groups=tuple(written(f"t{n}", 400_000) for n in range(5))
    )
    messages = codec.encode_write(call)
    assert len(messages) > 1
    with pytest.raises(UserError, match="malformed write: 5 groups were announced"):
        codec.decode_write(messages[:-1])
    with pytest.raises(UserError, match="no header"):
        codec.decode_write(messages[1:])
    with pytest.raises(UserError, match="no header"):
        codec.decode_admit([])


def test_a_stream_with_too_many_or_too_few_frames_is_refused() -> None:
    [bulk] = codec.encode_write(codec.WriteCall(run="r", stage="s", groups=(written("t"),)))
    with pytest.raises(UserError, match="more frames than groups"):
        codec.decode_write([codec.Bulk(bulk.message, [b"", b""])])
    with pytest.raises(UserError, match="fewer frames than groups"):
        codec.decode_write([codec.Bulk(bulk.message, [])])


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
    [message] = codec.encode_write(codec.WriteCall(run="r", stage="s", groups=(written("t"),)))
    message.message.rows.indices.append(1)
    with pytest.raises(UserError, match="1 rows with 2 indices, 1 attempts"):
        codec.decode_write([message])


def test_a_frame_of_rows_that_nobody_asked_for_is_refused() -> None:
    group = PayloadGroup(task="t", indices=(0,), attempts=(0,), parts=(Part(rows=(1,), frame=b""),))
    with pytest.raises(UserError, match="for a group of 1 rows"):
        codec.decode_fetched(list(codec.encode_fetched([group])), [group])


def test_fetched_rows_must_be_the_rows_asked_for() -> None:
    group = PayloadGroup(task="t", indices=(0,), attempts=(0,))
    asked = Siblings(task="t", indices=(1,), attempts=(0,))
    with pytest.raises(UserError, match="not the ones"):
        codec.decode_fetched(list(codec.encode_fetched([group])), [asked])


def test_tokens_without_their_log_probabilities_are_refused() -> None:
    message = rollout_pb2.GenerateDelta(
        tokens=codec.encode_array(np.zeros(2, np.int32)),
        logprobs=codec.encode_array(np.zeros(1, np.float32)),
        version=codec.encode_version(Version(0, 0)),
    )
    with pytest.raises(UserError, match="2 tokens with 1 log-probabilities"):
        codec.decode_generate_delta(message)


@given(st.binary(max_size=200))
@settings(max_examples=200)
def test_no_bytes_raise_anything_but_a_user_error(data: bytes) -> None:
    for message, decode in (
        (trajectory_pb2.Task, codec.decode_task),
        (trajectory_pb2.Array, codec.decode_array),
        (queue_pb2.RunState, codec.decode_run_state),
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


def test_json_travels_as_python_writes_it() -> None:
    task = Task(run="r", task_id="t", prompt_ids=np.zeros(1, np.int32), ground_truth=math.inf)
    assert codec.decode_task(codec.encode_task(task)).ground_truth == math.inf
    assert json.loads(codec.encode_task(task).ground_truth_json) == math.inf
