"""Prometheus metrics of a gateway's sessions."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from meshrl.http.gateway.sessions import SessionTable


class GatewayMetrics(Collector):
    """Collected on each scrape."""

    def __init__(self, sessions: SessionTable) -> None:
        self._sessions = sessions

    def collect(self) -> Iterator[Metric]:
        """Two gauges, two counters."""
        sessions = self._sessions
        yield GaugeMetricFamily(
            "meshrl_gateway_sessions", "Open sessions.", value=sessions.open_sessions
        )
        yield GaugeMetricFamily(
            "meshrl_gateway_claims_waiting",
            "External agents that wait for a row.",
            value=sessions.demand,
        )
        yield CounterMetricFamily(
            "meshrl_gateway_sessions_opened",
            "Sessions opened since the start.",
            value=sessions.opened_ever,
        )
        yield CounterMetricFamily(
            "meshrl_gateway_tokens_left_out",
            "Sampled tokens of ended sessions that lie on branches which are not trained.",
            value=sessions.tokens_left_out,
        )
