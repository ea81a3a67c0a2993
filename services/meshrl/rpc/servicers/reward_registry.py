"""The gRPC servicer of the reward registry. meshrl/v1/reward_registry.proto describes each method."""
# ruff: noqa: D102

from __future__ import annotations

from meshrl.rewardd.registry.registry import Registry
from meshrl.rpc.audit_log import AuditedChanges
from meshrl.rpc.interceptors import Context
from meshrl.rpc.servicers.base import TableServicer
from meshrl.rpc.tables.operators import CASE, KINDS, NAME, SUBMISSION, RewardRegistryTable
from meshrl.v1 import reward_registry_pb2 as pb


class RewardRegistryServicer(TableServicer, table=RewardRegistryTable):
    """The answers that hold several things. What changes something is audited, so `changes` goes before."""

    def __init__(self, registry: Registry, changes: AuditedChanges) -> None:
        super().__init__(changes, registry)
        self._registry = registry
        self._changes = changes
        self.http_address = ""
        """Of the HTTP server; empty while there is none."""

    async def SubmitReward(
        self, request: pb.SubmitRewardRequest, context: Context
    ) -> pb.SubmitRewardResponse:
        submission = SUBMISSION.decode(request)
        accepted = await self._changes.submit(submission)
        return pb.SubmitRewardResponse(
            hash=accepted.manifest.hash,
            created=accepted.created,
            cases=accepted.cases,
            name=NAME.encode(accepted.name),
        )

    async def ListRewards(self, request: pb.ListRewardsRequest, context: Context) -> pb.RewardNames:
        listing = self._registry.listing()
        return pb.RewardNames(
            names=map(NAME.encode, listing.names),
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
            kind=KINDS.number_of[manifest.kind],
            deps=manifest.deps,
            content=content,
            is_wheel=manifest.is_wheel,
            limits=manifest.limits,
            cases=map(CASE.encode, cases),
        )
