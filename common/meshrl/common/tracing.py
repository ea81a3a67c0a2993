"""Spans from prompt to gradient: what each process did with a sampled row, and what the trainer did in a step.

    feeder      admit ─┐ root of the row's trace
    rollout            ├─ rollout ─┬─ generate, tool, generate ...
    reward, reference  ├─ reward, reference      (and calls that they make: `traceparent` in gRPC metadata)
    trainer            └─ learn                  step trace: waiting, training, publishing; a publish per replica

The trace of a row follows from its uid, which every row of the queue has: no call carries it. Spans have the form of
OpenTelemetry's (W3C trace context, OTLP). A process that was not told to trace only looks at one variable.

consumes: ended spans. waits for: nothing. produces: lines of <run.dir>/spans/<service>.jsonl, and OTLP over HTTP.
A thread of its own writes them: a full disk or a collector that is away drops spans, with one warning.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Final, TypeVar

import orjson

from meshrl.contract.types import Json, Uid

log = logging.getLogger(__name__)

FOLDER: Final = "spans"
MAX_BYTES: Final = 16 << 20
"""Limit of one file; one older file stays beside it."""
MOST_WAITING: Final = 10_000
FLUSH_S: Final = 1.0
EXPORT_S: Final = 2.0
DIRECT: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Through no proxy of the environment: a collector is one of the mesh's own services."""
HEADER: Final = "traceparent"
Attributes = Mapping[str, Json]
Waiting = TypeVar("Waiting")


@dataclass(slots=True)
class Span:
    """One piece of work; times in ns since 1970."""

    name: str
    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16."""
    parent_id: str
    """ID of the enclosing span; empty for a root."""
    start_ns: int
    end_ns: int = 0
    attributes: dict[str, Json] = field(default_factory=dict)

    @property
    def header(self) -> str:
        """The header `traceparent` of W3C trace context."""
        return f"00-{self.trace_id}-{self.span_id}-01"


def row_trace(uid: Uid) -> tuple[str, str]:
    """Trace and root span of a row, all its attempts together."""
    return _row_ids(uid.run, uid.task, uid.index)


@lru_cache(4096)
def _row_ids(run: str, task: str, index: int) -> tuple[str, str]:
    return _ids(f"{run}/{task}/{index}")


def step_trace(run: str, epoch: int, step: int) -> tuple[str, str]:
    """Trace and root span of an optimizer step."""
    return _ids(f"{run} step {epoch}.{step}")


@lru_cache(4096)
def _place(run: str, task: str) -> float:
    """Position of a group among all groups, in [0, 1)."""
    digest = hashlib.blake2b(f"{run}/{task}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def _ids(name: str) -> tuple[str, str]:
    digest = hashlib.blake2b(name.encode(), digest_size=24).hexdigest()
    return digest[:32], digest[32:]


class Tracer:
    """Writes the spans of this process."""

    def __init__(
        self,
        path: Path,
        service: str,
        share: float,
        *,
        otlp: str | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """Start.

        Args:
            path: The file; appended to.
            service: The name of this service.
            share: Share of the groups whose rows are traced. Which, depends on run and task alone.
            otlp: URL of an OTLP/HTTP endpoint that gets the spans too, such as `http://localhost:4318/v1/traces`.
            max_bytes: At this size the file is moved aside.
        """
        self._path = path
        self._service = service
        self._share = share
        self._otlp = otlp
        self._max_bytes = max_bytes
        self._ids = count(int.from_bytes(os.urandom(7)))
        self._lines: deque[bytes] = deque()
        self._exported: deque[Span] = deque()
        self._some, self._closing = threading.Event(), threading.Event()
        self._warned: set[str] = set()
        self._thread = threading.Thread(target=self._write_all, name="spans", daemon=True)
        self._thread.start()

    def samples(self, uid: Uid) -> bool:
        """The same for the rows of a group, in every process."""
        return self._share >= 1.0 or _place(uid.run, uid.task) < self._share

    def new_id(self) -> str:
        """ID of a new span."""
        return f"{next(self._ids):016x}"

    def end(self, span: Span) -> None:
        """Hand a span over, as ended now if it has no end."""
        span.end_ns = span.end_ns or time.time_ns()
        if len(self._lines) >= MOST_WAITING:
            self._warn("spans come faster than they can be written, and some are left out")
            return
        # A line at once, while all of it is in the cache; bytes also give Python's collector nothing to look at.
        self._lines.append(self._line(span))
        if self._otlp is not None:
            self._exported.append(span)
        if not self._some.is_set():
            self._some.set()

    def close(self) -> None:
        """Write what was handed over."""
        self._closing.set()
        self._some.set()
        self._thread.join(timeout=2 * EXPORT_S)

    def _write_all(self) -> None:
        """Write all spans; the writer thread."""
        closing = False
        while not closing:
            self._some.wait()
            closing = self._closing.wait(FLUSH_S)
            self._some.clear()
            try:
                self._save(_emptied(self._lines))
            except OSError as error:
                self._warn(f"{self._path}: spans are left out: {error}")
            if self._otlp is not None and (spans := _emptied(self._exported)):
                self._export(self._otlp, spans)

    def _save(self, lines: Sequence[bytes]) -> None:
        if not lines:
            return
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(b"".join(lines))
            size = file.tell()
        if size > self._max_bytes:
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))

    def _line(self, span: Span) -> bytes:
        line = {
            "trace": span.trace_id,
            "span": span.span_id,
            "parent": span.parent_id,
            "name": span.name,
            "service": self._service,
            "start_ns": span.start_ns,
            "end_ns": span.end_ns,
            "attributes": span.attributes,
        }
        try:
            return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
        except TypeError:  # half a character, of a tool's name from a model
            return json.dumps(line).encode() + b"\n"

    def _export(self, url: str, spans: Sequence[Span]) -> None:
        body = json.dumps(otlp_message(self._service, spans)).encode()
        asked = urllib.request.Request(
            url, data=body, headers={"content-type": "application/json"}, method="POST"
        )
        try:
            with DIRECT.open(asked, timeout=EXPORT_S):
                pass
        except (OSError, ValueError) as error:
            self._warn(f"{url} takes no spans: {error}")

    def _warn(self, what: str) -> None:
        if what not in self._warned and len(self._warned) < 8:
            self._warned.add(what)
            log.warning("%s", what)


def _emptied(waiting: deque[Waiting]) -> list[Waiting]:
    return [waiting.popleft() for _ in range(len(waiting))]


def otlp_message(service: str, spans: Iterable[Span]) -> dict[str, Json]:
    """An ExportTraceServiceRequest as OTLP's JSON (https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding)."""
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": _otlp_attributes({"service.name": service})},
                "scopeSpans": [
                    {
                        "scope": {"name": "meshrl"},
                        "spans": [
                            {
                                "traceId": span.trace_id,
                                "spanId": span.span_id,
                                "parentSpanId": span.parent_id,
                                "name": span.name,
                                "kind": 1,
                                "startTimeUnixNano": str(span.start_ns),
                                "endTimeUnixNano": str(span.end_ns),
                                "attributes": _otlp_attributes(span.attributes),
                            }
                            for span in spans
                        ],
                    }
                ],
            }
        ]
    }


def _otlp_attributes(attributes: Attributes) -> list[Json]:
    def value(given: Json) -> Json:
        if isinstance(given, bool):
            return {"boolValue": given}
        if isinstance(given, int):
            return {"intValue": str(given)}
        return {"doubleValue": given} if isinstance(given, float) else {"stringValue": str(given)}

    return [
        {"key": f"meshrl.{k}" if "." not in k else k, "value": value(v)}
        for k, v in attributes.items()
    ]


_tracer: Tracer | None = None
_current: ContextVar[Span | None] = ContextVar("span", default=None)


def start(folder: Path, service: str, share: float, *, otlp: str | None = None) -> None:
    """Trace in this process from now on, to `folder/<service>.jsonl`; with a share of 0 nothing is done."""
    global _tracer
    if share > 0:
        _tracer = Tracer(folder / f"{service}.jsonl", service, share, otlp=otlp)
        atexit.register(stop)


def stop() -> None:
    """Write what is left, and trace no more; idempotent."""
    global _tracer
    tracer, _tracer = _tracer, None
    if tracer is not None:
        tracer.close()


def is_on() -> bool:
    """Whether this process traces."""
    return _tracer is not None


class _Open(AbstractContextManager[Span]):
    """Around a piece of work: its span is the current one. A class, for a generator takes three times as long."""

    __slots__ = ("_before", "_span", "_tracer")
    _before: Token[Span | None]

    def __init__(
        self, tracer: Tracer, name: str, trace: str, parent: str, attributes: dict[str, Json]
    ) -> None:
        self._tracer = tracer
        self._span = Span(name, trace, tracer.new_id(), parent, 0, 0, attributes)

    def __enter__(self) -> Span:
        self._span.start_ns = time.time_ns()
        self._before = _current.set(self._span)
        return self._span

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._span.attributes["error"] = f"{type(error).__name__}: {error}"[:200]
        _current.reset(self._before)
        self._tracer.end(self._span)


_UNTRACED: Final = nullcontext[None]()


def row_span(name: str, uid: Uid, **attributes: Json) -> AbstractContextManager[Span | None]:
    """Around work on one row; None where the row is not traced."""
    tracer = _tracer
    if tracer is None or not tracer.samples(uid):
        return _UNTRACED
    trace, root = row_trace(uid)
    return _Open(tracer, name, trace, root, {"uid": str(uid), **attributes})


def span(name: str, **attributes: Json) -> AbstractContextManager[Span | None]:
    """Around a part of the current span; None where there is none."""
    tracer, parent = _tracer, _current.get()
    if tracer is None or parent is None:
        return _UNTRACED
    return _Open(tracer, name, parent.trace_id, parent.span_id, attributes)


def record_rows(
    name: str, uids: Iterable[Uid], start_ns: int, *, root: bool = False, **attributes: Json
) -> None:
    """Work on several rows at once that ends now: a span in the trace of each sampled one; `root`: its first."""
    tracer = _tracer
    if tracer is None:
        return
    end_ns = time.time_ns()
    for uid in uids:
        if tracer.samples(uid):
            trace, first = row_trace(uid)
            own, parent = (first, "") if root else (tracer.new_id(), first)
            tracer.end(
                Span(name, trace, own, parent, start_ns, end_ns, {"uid": str(uid), **attributes})
            )


def record_step(
    name: str,
    run: str,
    epoch: int,
    step: int,
    start_ns: int,
    *,
    root: bool = False,
    **attributes: Json,
) -> None:
    """Record a part of an optimizer step that ends now."""
    tracer = _tracer
    if tracer is not None:
        trace, first = step_trace(run, epoch, step)
        own, parent = (first, "") if root else (tracer.new_id(), first)
        tracer.end(
            Span(name, trace, own, parent, start_ns, attributes={"step": step, **attributes})
        )


def metadata() -> tuple[tuple[str, str], ...]:
    """Metadata that carries the current span to the called service; empty outside of a span."""
    if _tracer is None:
        return ()
    current = _current.get()
    return () if current is None else ((HEADER, current.header),)


def called(name: str, header: str | None) -> AbstractContextManager[object]:
    """Around the work on a call that came with `header`."""
    tracer = _tracer
    parts = (header or "").split("-")
    if tracer is None or [len(part) for part in parts] != [2, 32, 16, 2]:
        return _UNTRACED
    return _Open(tracer, name, parts[1], parts[2], {})
