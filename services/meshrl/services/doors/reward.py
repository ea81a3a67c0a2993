"""The Judge port for callers elsewhere. Each method is described in meshrl/v1/reward.proto."""
# ruff: noqa: D102

from __future__ import annotations

from typing import Final

import grpc

from meshrl.contract import codec
from meshrl.contract.ports import Judge
from meshrl.services.doors.base import full_name
from meshrl.services.interceptor import Context
from meshrl.v1 import reward_pb2 as pb
from meshrl.v1 import reward_pb2_grpc as rpc


class RewardDoor(rpc.RewardServicer):
    """Translates and delegates."""

    service: Final = full_name(pb.DESCRIPTOR, "Reward")
    waits: Final[frozenset[str]] = frozenset()

    def __init__(self, judge: Judge) -> None:
        self._judge = judge

    def attach(self, server: grpc.aio.Server) -> None:
        rpc.add_RewardServicer_to_server(self, server)

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        samples = [codec.decode_sample(sample) for sample in request.samples]
        scores = await self._judge.score(samples)
        return pb.ScoreResponse(scores=map(codec.encode_score, scores))

    async def GetInfo(self, request: pb.GetRewardInfoRequest, context: Context) -> pb.RewardInfo:
        return pb.RewardInfo(reward_hash=self._judge.reward_hash)
