"""Prometheus metrics of a service: calls by method and status, their latency, and the HTTP endpoint."""

from __future__ import annotations

import errno
import threading
import time
from functools import cache, partial
from types import TracebackType
from typing import Any, Final, Self
from wsgiref.simple_server import WSGIServer

import grpc
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    start_http_server,
)

from meshrl.contract.errors import UserError
from meshrl.rpc.errors import PortInUseError
from meshrl.rpc.interceptors import Behavior, Context

# From a write on loopback to a long poll.
LATENCY_BUCKETS_S: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_STATUS_NAMES: Final = {code.value[0]: code.name for code in grpc.StatusCode}


class CallMetrics:
    """Counts and times the calls of one server. Each has its own registry: a process may have several."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._calls = Counter(
            "meshrl_rpc_total", "Calls ended.", ["method", "status"], registry=registry
        )
        self._latency = Histogram(
            "meshrl_rpc_seconds",
            "Seconds from the start of a call to its end.",
            ["method"],
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._running = Gauge(
            "meshrl_rpc_running", "Calls running now.", ["method"], registry=registry
        )

    def interceptor(self, method: str, behavior: Behavior) -> Behavior:
        """The outermost interceptor, so that it sees the status that the others have set."""
        running, latency = self._running.labels(method), self._latency.labels(method)
        ended = cache(partial(self._calls.labels, method))

        async def run(request: Any, context: Context) -> Any:
            start = time.perf_counter()
            status = "CANCELLED"
            running.inc()
            try:
                answer = await behavior(request, context)
                status = "OK"
                return answer
            except grpc.aio.AbortError:
                status = _status_name(context)
                raise
            finally:
                running.dec()
                latency.observe(time.perf_counter() - start)
                ended(status).inc()

        return run


def _status_name(context: Context) -> str:
    # grpc.aio returns the number, although its type stubs promise the enum.
    code: object = context.code()
    return code.name if isinstance(code, grpc.StatusCode) else _STATUS_NAMES.get(code, "UNKNOWN")


class MetricsEndpoint:
    """Serves `/metrics` over HTTP while the context is open."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        self.port = port
        """The port in use, once the context is entered. 0 picks a free one."""
        self._registry = registry
        self._host = host
        self._http: tuple[WSGIServer, threading.Thread] | None = None
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)

    def __enter__(self) -> Self:
        try:
            self._http = start_http_server(self.port, self._host, self._registry)
        except OSError as error:
            kind = PortInUseError if error.errno == errno.EADDRINUSE else UserError
            raise kind(
                f"cannot serve metrics on {self._host}:{self.port}: {error.strerror or error}",
                port=self.port,
            ) from error
        self.port = self._http[0].server_port
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._http is not None:
            server, thread = self._http
            server.shutdown()
            thread.join()
            server.server_close()
            self._http = None
