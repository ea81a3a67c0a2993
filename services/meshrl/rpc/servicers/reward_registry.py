"""The gRPC servicer of the reward registry. meshrl/v1/reward_registry.proto describes each method."""
# ruff: noqa: D102

from __future__ import annotations

from typing import Final

import grpc

from meshrl.contract import codec
from meshrl.rewardd.registry.registry import Registry
from meshrl.rpc import reward_registry_codec as registry_codec
from meshrl.rpc.guarded_registry import Caller, GuardedRegistry
from meshrl.rpc.identity import certificate_names
from meshrl.rpc.interceptors import Context, full_name
from meshrl.v1 import reward_pb2
from meshrl.v1 import reward_registry_pb2 as pb
from meshrl.v1 import reward_registry_pb2_grpc as rpc


def caller_of(context: Context) -> Caller:
    """The caller, from the call's metadata."""
    metadata = dict(context.invocation_metadata() or ())
    authorization = metadata.get("authorization", "")
    if isinstance(authorization, bytes):
        authorization = authorization.decode("ascii", "replace")
    peer = context.peer().rpartition(":")[
        0
    ]  # without the port, which changes with every connection
    return Caller(
        authorization=authorization, peer=peer, transport="grpc", names=certificate_names(context)
    )


class RewardRegistryServicer(rpc.RewardRegistryServicer):
    """Translates messages, and calls the registry through its middleware."""

    service: Final = full_name(pb.DESCRIPTOR, "RewardRegistry")
    waits: Final[frozenset[str]] = frozenset()

    def __init__(self, registry: GuardedRegistry) -> None:
        self._registry = registry

    def attach(self, server: grpc.aio.Server) -> None:
        rpc.add_RewardRegistryServicer_to_server(self, server)

    async def SubmitReward(
        self, request: pb.SubmitRewardRequest, context: Context
    ) -> pb.SubmitRewardResponse:
        submission = registry_codec.SUBMISSION.decode(request)
        caller = caller_of(context)
        accepted = await self._registry.change(caller, Registry.submit, submission)
        return pb.SubmitRewardResponse(
            hash=accepted.manifest.hash,
            created=accepted.created,
            cases=accepted.cases,
            name=registry_codec.NAME.encode(accepted.name),
        )

    async def ListRewards(self, request: pb.ListRewardsRequest, context: Context) -> pb.RewardNames:
        listing = self._registry.read(caller_of(context), Registry.listing)
        return pb.RewardNames(
            names=map(registry_codec.NAME.encode, listing.names),
            followed=listing.followed,
            scoring=listing.scoring,
            base=listing.base,
            http_address=self._registry.http_address,
        )

    async def GetReward(self, request: pb.RewardRef, context: Context) -> pb.RewardVersion:
        caller = caller_of(context)
        manifest, content, cases = self._registry.read(
            caller, Registry.version, request.name, request.version
        )
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
        text = self._registry.read(
            caller_of(context), Registry.diff, request.name, request.old, request.new
        )
        return pb.RewardDiff(text=text)

    async def RollBackReward(self, request: pb.RewardRef, context: Context) -> pb.RewardName:
        name = await self._registry.change(
            caller_of(context), Registry.roll_back, request.name, request.version
        )
        return registry_codec.NAME.encode(name)

    async def RetireReward(self, request: pb.RewardRef, context: Context) -> pb.RewardName:
        name = await self._registry.change(
            caller_of(context), Registry.retire, request.name, request.version
        )
        return registry_codec.NAME.encode(name)

    async def TryReward(
        self, request: pb.TryRewardRequest, context: Context
    ) -> reward_pb2.ScoreResponse:
        samples = [codec.SAMPLE.decode(sample) for sample in request.samples]
        caller = caller_of(context)
        scores = await self._registry.read(
            caller, Registry.score, request.name, request.version, samples
        )
        return reward_pb2.ScoreResponse(scores=map(codec.SCORE.encode, scores))

    async def CompareRewards(
        self, request: pb.CompareRewardsRequest, context: Context
    ) -> pb.RewardDifferences:
        samples = [codec.SAMPLE.decode(sample) for sample in request.samples]
        caller = caller_of(context)
        differences = await self._registry.read(
            caller, Registry.compare, request.name, request.a, request.b, samples
        )
        return registry_codec.encode_differences(differences)
