"""Calls as their bytes on the wire: read from a recording, and made to a server without its client."""

from __future__ import annotations

import base64
import json
import lzma
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc

from meshrl.rpc.runtime import GrpcServer, ServerSettings
from meshrl.rpc.servicers import QueueServicer
from meshrl.transferqueue import stores
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.queue import TransferQueue

ERROR = "meshrl-error-bin"


@dataclass
class Call:
    """One call: a unary one has one request, or one reply."""

    method: str
    requests: list[bytes]
    replies: list[bytes] = field(default_factory=list)
    status: str = "OK"
    error: bytes = b""
    """The ErrorDetail in the trailing metadata."""


def read(path: Path) -> list[Call]:
    """A recording, in the order in which the calls began."""

    def decoded(call: dict[str, Any]) -> Call:
        call["requests"] = [base64.b64decode(one) for one in call["requests"]]
        call["replies"] = [base64.b64decode(one) for one in call["replies"]]
        return Call(**{**call, "error": base64.b64decode(call["error"])})

    return [decoded(call) for call in json.loads(lzma.decompress(path.read_bytes()))]


def write(path: Path, calls: Iterable[Call]) -> None:
    """Keep a recording for `read`."""
    found = [asdict(call) for call in calls]
    text = json.dumps(found, default=lambda value: base64.b64encode(value).decode())
    path.write_bytes(lzma.compress(text.encode(), preset=9))


async def make_call(
    channel: grpc.aio.Channel,
    method: str,
    requests: Sequence[bytes],
    metadata: Sequence[tuple[str, str]] = (),
) -> Call:
    """Send the bytes; returns the call with its answer."""
    done = Call(method, list(requests))
    # A unary call has the bytes of a stream of one message.
    answers = channel.stream_stream(method)(iter(requests), metadata=metadata, timeout=60)
    try:
        async for reply in answers:
            done.replies.append(reply)
    except grpc.aio.AioRpcError as error:
        done.status = error.code().name
        done.error = dict(error.trailing_metadata() or ()).get(ERROR, b"")
    return done


@asynccontextmanager
async def queue_server(**settings: Any) -> AsyncIterator[str]:
    """The address of a queue in memory that serves."""
    queue = await TransferQueue.open(stores.build(QueueConfig(store="memory"), Path("unused")))
    server = GrpcServer(
        ServerSettings(metrics_port=None, drain_grace_s=0, **settings), [QueueServicer(queue)]
    )
    async with server:
        await server.ready()
        yield server.address
    await queue.close()
