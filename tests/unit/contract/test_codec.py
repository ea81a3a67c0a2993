"""The codec: whatever goes in comes out."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import TypeAliasType

from meshrl.contract import codec
from meshrl.contract.codec import Codec, Field, control
from meshrl.contract.errors import UserError
from meshrl.contract.types import (
    Batch,
    DeadLetter,
    EngineStats,
    Json,
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
from meshrl.v1 import queue_pb2, reward_pb2, reward_registry_pb2, trajectory_pb2

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


@dataclass(frozen=True, kw_only=True)
class Test:
    """As RewardCase, with a field under another name."""

    __test__ = False
    response: str
    score: float
    ground_truth: Json = None
    data_source: str = ""
    extra_info: Mapping[str, Json] = field(default_factory=dict)
    tolerance: float = 0.5

    @property
    def shout(self) -> str:
        return self.data_source.upper()


CASE = Codec(
    Test,
    reward_registry_pb2.RewardCase,
    given={"response": Field(name="solution")},
)


def test_what_is_absent_is_the_default_and_json_travels_under_its_own_name() -> None:
    sent = CASE.encode(Test(response="42", score=1.0, ground_truth=[1], tolerance=0.25))
    assert (sent.solution, sent.ground_truth_json, sent.extra_info_json) == ("42", "[1]", "")
    assert CASE.decode(sent).tolerance == 0.25
    sent.ClearField("tolerance")
    assert CASE.decode(sent) == Test(response="42", score=1.0, ground_truth=[1])


def test_a_part_without_which_there_is_no_value_is_missed_by_name() -> None:
    with pytest.raises(UserError, match="malformed run state: spec is missing"):
        codec.RUN_STATE.decode(queue_pb2.RunState())


@dataclass(frozen=True)
class Held:
    uid: Uid
    more: int


@dataclass(frozen=True)
class Outer:
    held: Held


def test_a_value_may_lie_in_several_fields_of_the_message_that_it_is_part_of() -> None:
    pair = Codec(
        Outer,
        queue_pb2.HeldRow,
        given={
            "held": Field(
                lambda held: {"uid": codec.UID.encode(held.uid), "token": held.more},
                lambda message: Held(codec.UID.decode(message.uid), message.token),
                spread=True,
            )
        },
    )
    value = Outer(Held(Uid("r", "t", 0), 7))
    assert pair.decode(pair.encode(value)) == value
    assert pair.encode(value).token == 7


def test_what_is_told_is_sent_and_follows_for_the_receiver() -> None:
    @dataclass(frozen=True)
    class Version:
        epoch: int

        @property
        def step(self) -> int:
            return self.epoch + 1

    pair = Codec(Version, trajectory_pb2.Version, told=("step",))
    assert pair.encode(Version(4)) == trajectory_pb2.Version(epoch=4, step=5)
    assert pair.decode(trajectory_pb2.Version(epoch=4, step=9)) == Version(4)


@dataclass(frozen=True)
class Short:
    epoch: int


@dataclass(frozen=True)
class Long:
    epoch: int
    step: int
    more: int


@dataclass(frozen=True)
class Other:
    epoch: int
    step: str


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Short, "nothing fills step of Version"),
        (Long, "has no field for more"),
        (Other, "step holds int, not <class 'str'>"),
    ],
)
def test_a_type_that_does_not_fit_its_message_is_a_mistake_of_the_program(
    kind: type[Any], said: str
) -> None:
    pair = Codec(kind, trajectory_pb2.Version)
    with pytest.raises(TypeError, match=said):
        pair.decode(trajectory_pb2.Version())
    with pytest.raises(TypeError, match=said):
        pair.encode(None)


def test_what_may_be_none_needs_a_field_that_may_be_absent() -> None:
    @dataclass(frozen=True)
    class Maybe:
        epoch: int | None
        step: int

    with pytest.raises(TypeError, match="epoch is never absent, epoch may be None"):
        Codec(Maybe, trajectory_pb2.Version).encode(Maybe(None, 1))


Scalar = TypeVar("Scalar", bound=np.generic)
Alias = TypeAliasType("Alias", np.ndarray[Any, np.dtype[Scalar]], type_params=(Scalar,))
"""The form of `NDArray` from numpy 2.5 on."""


@dataclass(frozen=True, kw_only=True)
class Rewarded:
    uid: Uid
    outcome: Outcome = Outcome.OK
    score: float = 0.0
    components: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    reward_hash: str = ""
    token_rewards: Alias[np.float64] | None = None
    texts: Mapping[str, str] = field(default_factory=dict)
    lasting: bool = False


def test_an_array_is_one_whatever_numpy_makes_of_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control.npt, "NDArray", Alias)
    rewarded = Codec(Rewarded, reward_pb2.Score)
    sent = rewarded.encode(Rewarded(uid=Uid("run", "t", 0), token_rewards=np.array([0.5, 1.0])))
    found = rewarded.decode(sent).token_rewards
    assert found is not None and found.dtype == np.float64 and found.tolist() == [0.5, 1.0]
