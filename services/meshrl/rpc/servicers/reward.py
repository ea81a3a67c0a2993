"""Serves a Judge port over gRPC. meshrl/v1/reward.proto describes each method."""
# ruff: noqa: D102

from __future__ import annotations

from collections.abc import Iterable

from meshrl.contract import codec, types
from meshrl.contract.errors import NotFoundError
from meshrl.contract.ports import Judge
from meshrl.rewardd.registry.active_reward import ActiveRewardJudge
from meshrl.rpc.interceptors import Context
from meshrl.rpc.servicers.base import TableServicer
from meshrl.rpc.tables.services import RewardTable
from meshrl.v1 import reward_pb2 as pb


class RewardServicer(TableServicer, table=RewardTable):
    """Translates and delegates."""

    def __init__(self, judge: Judge, versions: ActiveRewardJudge | None = None) -> None:
        super().__init__(judge)
        self._judge = judge
        self._versions = versions

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        samples = [codec.SAMPLE.decode(sample) for sample in request.samples]
        scores = await self._score(request.reward_hash, samples)
        return pb.ScoreResponse(scores=map(codec.SCORE.encode, scores))

    async def GetInfo(self, request: pb.GetRewardInfoRequest, context: Context) -> pb.RewardInfo:
        return pb.RewardInfo(reward_hash=self._judge.reward_hash)

    async def _score(self, version: str, samples: list[types.Sample]) -> Iterable[types.Score]:
        if not version or version == self._judge.reward_hash:
            return await self._judge.score(samples)
        if self._versions is None:
            raise NotFoundError(f"this judge is version {self._judge.reward_hash}, not {version}")
        return await self._versions.score_with(version, samples)
