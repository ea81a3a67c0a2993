"""The engine of a rollout service, seen over gRPC."""

from __future__ import annotations

from meshrl.rpc.clients.base import SERVICE_RETRY_S, GrpcClient
from meshrl.rpc.tables.services import RolloutTable


class RolloutClient(GrpcClient, RolloutTable):
    """Client of a rollout process: the state of its engine."""

    def __init__(self, address: str, *, retry_s: float = SERVICE_RETRY_S) -> None:
        super().__init__("rollout", address, retry_s)
