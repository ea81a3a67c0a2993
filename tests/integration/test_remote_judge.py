"""A judge behind another reward service, as a part of the reward."""

from __future__ import annotations

from typing import Any

import pytest

from meshrl.contract.errors import UnavailableError
from meshrl.contract.types import Outcome, Sample, Uid
from meshrl.rewardd.config import RewardConfig
from meshrl.rewardd.judge import build_judge
from meshrl.rpc.servicers import RewardServicer

from .test_servicers import LengthJudge, serving

GUARD = {"retries": 1, "pause_s": 0.001, "deadline_s": 20}


def config(address: str) -> RewardConfig:
    judge = {"kind": "grpc", "weight": 2, "options": {"address": address, "guard": GUARD}}
    return RewardConfig.model_validate({"judges": [judge]})


def sample(solution: str) -> Sample:
    fields: dict[str, Any] = {"data_source": "", "ground_truth": {"answer": 42}, "extra_info": {}}
    return Sample(uid=Uid("r", "t", 0), solution=solution, **fields)


async def test_its_scores_are_a_component_and_its_end_is_a_fault() -> None:
    async with serving(RewardServicer(LengthJudge())) as server:
        judge = build_judge(config(server.address))
        await judge.start()
        (score,) = await judge.score([sample("four")])
        assert (score.outcome, score.score) == (Outcome.OK, 8.0)
        assert score.components["grpc"] == 4.0
    (score,) = await judge.score([sample("four")])
    assert score.outcome is Outcome.INFRA_FAULT
    assert "(2 tries)" in score.reason
    await judge.close()


async def test_one_that_is_down_at_start_is_named() -> None:
    judge = build_judge(config("127.0.0.1:9"))
    with pytest.raises(UnavailableError, match=r"the judge at 127\.0\.0\.1:9"):
        await judge.start()
    await judge.close()
