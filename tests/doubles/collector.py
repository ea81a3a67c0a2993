"""A collector of spans as OpenTelemetry's own schema reads them: an unknown field or a wrong type is refused."""

from __future__ import annotations

import base64
import http.server
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from google.protobuf import json_format


def parsed(message: Mapping[str, Any]) -> Any:
    """An ExportTraceServiceRequest. Raises json_format.ParseError. Skips the test without opentelemetry-proto."""
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    message = json.loads(json.dumps(message))
    for resource in message["resourceSpans"]:
        for span in resource["scopeSpans"][0]["spans"]:
            for name in (
                "traceId",
                "spanId",
                "parentSpanId",
            ):  # OTLP's JSON has them in hexadecimal
                span[name] = base64.b64encode(bytes.fromhex(span[name])).decode()
    return json_format.Parse(json.dumps(message), service.ExportTraceServiceRequest())


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Its URL, and what it got so far. What cannot be parsed is answered with 400 and fails the test at the end."""
    got: list[Any] = []
    refused: list[str] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            try:
                got.append(parsed(json.loads(body)))
                self.send_response(200)
            except (ValueError, KeyError, json_format.ParseError) as error:
                refused.append(f"{error}: {body[:500]!r}")
                self.send_response(400)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/traces", got
        finally:
            server.shutdown()
            thread.join()
    assert not refused
