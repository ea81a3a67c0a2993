"""Tasks and records at rest come back as they were."""

from __future__ import annotations

import numpy as np
import pytest

from meshrl.contract.errors import CorruptError, UserError
from meshrl.contract.nouns import Message, SamplingParams, Task
from meshrl.transferqueue.sealed import Encoded, pack_task, seal_json, unpack_task, unseal_json


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


@pytest.mark.parametrize("value", [[1, "x", None, {"a": [0.5]}], "lone \ud83d surrogate", 2**70])
def test_a_record_comes_back_and_a_broken_one_is_named(value: object) -> None:
    stored = seal_json(value)
    assert unseal_json(stored, "record") == value
    with pytest.raises(CorruptError, match="record 5"):
        unseal_json(stored[:-1], "record 5")


@pytest.mark.parametrize("beside", ["plain", "lone \ud83d surrogate", 2**70])
def test_what_is_json_already_is_written_as_it_is(beside: object) -> None:
    stored = seal_json([Encoded(b'[1,{"a":null}]'), beside])
    assert unseal_json(stored, "record") == [[1, {"a": None}], beside]
