"""Control messages by reflection: what follows from types and fields, and what is refused when a pair is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pytest
from typing_extensions import TypeAliasType

from meshrl.contract import codec
from meshrl.contract.codec import Codec, Field, control
from meshrl.contract.errors import UserError
from meshrl.contract.types import Json, Outcome, Uid
from meshrl.v1 import queue_pb2, reward_pb2, reward_registry_pb2, trajectory_pb2


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
