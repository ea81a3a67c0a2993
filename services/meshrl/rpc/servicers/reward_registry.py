"""The gRPC servicer of the reward registry. meshrl/v1/reward_registry.proto describes each method."""
# ruff: noqa: D102

from __future__ import annotations

from typing import Final

import grpc

from meshrl.contract import codec
from meshrl.rewardd.registry.registry import Registry
from meshrl.rpc import reward_registry_codec as registry_codec
from meshrl.rpc.audit_log import AuditedChanges
from meshrl.rpc.interceptors import Context, full_name
from meshrl.v1 import reward_pb2
from meshrl.v1 import reward_registry_pb2 as pb
from meshrl.v1 import reward_registry_pb2_grpc as rpc


class RewardRegistryServicer(rpc.RewardRegistryServicer):
    """Translates messages, and calls the registry."""

    service: Final = full_name(pb.DESCRIPTOR, "RewardRegistry")
    waits: Final[frozenset[str]] = frozenset()

    def __init__(self, registry: Registry, changes: AuditedChanges) -> None:
        self._registry = registry
        self._changes = changes
        self.http_address = ""
        """Of the HTTP server; empty while there is none."""

    def attach(self, server: grpc.aio.Server) -> None:
        rpc.add_RewardRegistryServicer_to_server(self, server)

    async def SubmitReward(
        self, request: pb.SubmitRewardRequest, context: Context
    ) -> pb.SubmitRewardResponse:
        submission = registry_codec.SUBMISSION.decode(request)
        accepted = await self._changes.submit(submission)
        return pb.SubmitRewardResponse(
            hash=accepted.manifest.hash,
            created=accepted.created,
            cases=accepted.cases,
            name=registry_codec.NAME.encode(accepted.name),
        )

    async def ListRewards(self, request: pb.ListRewardsRequest, context: Context) -> pb.RewardNames:
        listing = self._registry.listing()
        return pb.RewardNames(
            names=map(registry_codec.NAME.encode, listing.names),
            followed=listing.followed,
            scoring=listing.scoring,
            base=listing.base,
            http_address=self.http_address,
        )

    async def GetReward(self, request: pb.RewardRef, context: Context) -> pb.RewardVersion:
        manifest, content, cases = self._registry.version(request.name, request.version)
        return pb.RewardVersion(
            name=request.name,
            hash=manifest.hash,
            entry_point=manifest.entry_point,
            kind=registry_codec.KINDS.number_of[manifest.kind],
            deps=manifest.deps,
            content=content,
            is_wheel=manifest.is_wheel,
            limits=manifest.limits,
            cases=map(registry_codec.CASE.encode, cases),
        )

    async def DiffRewards(self, request: pb.RewardPair, context: Context) -> pb.RewardDiff:
        text = self._registry.diff(request.name, request.old, request.new)
        return pb.RewardDiff(text=text)

    async def RollBackReward(self, request: pb.RewardRef, context: Context) -> pb.RewardName:
        name = await self._changes.roll_back(request.name, request.version)
        return registry_codec.NAME.encode(name)

    async def RetireReward(self, request: pb.RewardRef, context: Context) -> pb.RewardName:
        name = await self._changes.retire(request.name, request.version)
        return registry_codec.NAME.encode(name)

    async def TryReward(
        self, request: pb.TryRewardRequest, context: Context
    ) -> reward_pb2.ScoreResponse:
        samples = [codec.SAMPLE.decode(sample) for sample in request.samples]
        scores = await self._registry.score(request.name, request.version, samples)
        return reward_pb2.ScoreResponse(scores=map(codec.SCORE.encode, scores))

    async def CompareRewards(
        self, request: pb.CompareRewardsRequest, context: Context
    ) -> pb.RewardDifferences:
        samples = [codec.SAMPLE.decode(sample) for sample in request.samples]
        differences = await self._registry.compare(request.name, request.a, request.b, samples)
        return registry_codec.encode_differences(differences)
