"""Serves an engine over gRPC. meshrl/v1/rollout.proto describes each method."""
# ruff: noqa: D102

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Final, Protocol

import grpc
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from meshrl.contract import codec
from meshrl.contract.types import EngineStats, GenerateDelta, GenerateRequest
from meshrl.rpc.interceptors import Context, closing, full_name
from meshrl.v1 import rollout_pb2 as pb
from meshrl.v1 import rollout_pb2_grpc as rpc


class Sampler(Protocol):
    """The part of an Engine that callers may use. Its weights belong to the weight plane."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]: ...

    def stats(self) -> EngineStats: ...


class RolloutServicer(rpc.RolloutServicer):
    """Translates and delegates."""

    service: Final = full_name(pb.DESCRIPTOR, "Rollout")
    waits: Final[frozenset[str]] = frozenset()

    def __init__(self, engine: Sampler) -> None:
        self._engine = engine

    def attach(self, server: grpc.aio.Server) -> None:
        rpc.add_RolloutServicer_to_server(self, server)

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateDelta]:
        generation = codec.decode_generate_request(request)
        async with closing(self._engine.generate(generation)) as deltas:
            async for delta in deltas:
                yield codec.encode_generate_delta(delta)

    async def GetStats(self, request: pb.GetStatsRequest, context: Context) -> pb.EngineStats:
        return codec.encode_engine_stats(self._engine.stats())


class EngineCollector(Collector):
    """Prometheus metrics of how an engine takes new weights, read at each scrape."""

    def __init__(self, engine: Sampler) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Two gauges."""
        stats = self._engine.stats()
        yield GaugeMetricFamily(
            "meshrl_engine_update_pause_seconds",
            "How long the last update of the weights held generation up.",
            value=stats.update_pause_s,
        )
        staging = GaugeMetricFamily(
            "meshrl_engine_weights_staging",
            "1 for where the last version of the weights waited for its commit.",
            labels=["staging"],
        )
        for where in ("device", "host"):
            staging.add_metric([where], float(stats.staging == where))
        yield staging
