"""The codec: whatever goes in comes out."""

from __future__ import annotations

import json
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshrl.contract import codec
from meshrl.contract.types import (
    Batch,
    DeadLetter,
    EngineStats,
    Ledger,
    Message,
    Outcome,
    RunState,
    Sample,
    Score,
    Task,
    TrainerPhase,
    TrainerStatus,
    Uid,
    Version,
    Waiting,
)

from .codec_values import (
    arrays,
    batch_groups,
    counts,
    json_objects,
    json_values,
    large,
    measures,
    numbers,
    over_the_network,
    round_trip,
    same,
    small,
    specs,
    tasks,
    texts,
    uids,
    versions,
)


@given(arrays)
def test_any_array_comes_back_bit_for_bit(array: np.ndarray) -> None:
    assert same(array, codec.decode_array(over_the_network(codec.encode_array(array))))


@given(versions, uids, tasks)
def test_shared_nouns_come_back(version: Version, uid: Uid, task: Task) -> None:
    round_trip("version", version)
    round_trip("uid", uid)
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
    assert same(batch, codec.decode_batch(over_the_network(codec.encode_batch(batch))))
    round_trip("ledger", ledger)
    round_trip("dead_letter", letter)
    round_trip("waiting", waiting)


@given(versions)
def test_what_the_engine_says_comes_back(version: Version) -> None:
    stats = EngineStats(
        version=version,
        running=1,
        capacity=2,
        tokens_generated=3,
        tokens_per_s=4.5,
        updates=6,
        update_pause_s=7.5,
        staging="host",
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


def test_a_big_endian_or_strided_array_travels_as_little_endian_and_contiguous() -> None:
    array = np.arange(12, dtype=">i4").reshape(3, 4)[:, ::2]
    decoded = codec.decode_array(codec.encode_array(array))
    assert decoded.tolist() == array.tolist()
    assert decoded.dtype == np.dtype("<i4")


def test_free_text_travels_even_where_it_is_no_unicode() -> None:
    score = Score(uid=Uid("r", "t", 0), outcome=Outcome.INFRA_FAULT, reason="bad \ud83d text")
    assert codec.SCORE.decode(codec.SCORE.encode(score)).reason == "bad ? text"
    said = Score(uid=score.uid, outcome=Outcome.OK, texts={"why": "half \ud83d", "how": "42"})
    assert codec.SCORE.decode(codec.SCORE.encode(said)).texts == {"why": "half ?", "how": "42"}


def test_json_travels_as_python_writes_it() -> None:
    task = Task(run="r", task_id="t", prompt_ids=np.zeros(1, np.int32), ground_truth=math.inf)
    assert codec.TASK.decode(codec.TASK.encode(task)).ground_truth == math.inf
    assert json.loads(codec.TASK.encode(task).ground_truth_json) == math.inf
