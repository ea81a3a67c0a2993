"""The cost of gRPC alone: the messages of our queue between the same processes, with no queue behind them.

    python floor_server.py

It keeps what producers and the annotator send until it is asked for it, and hands it out in order: no leases, no
ledger, no groups, no checks, nothing that would survive a mistake. Prints {"address": ..., "server": [pid]}, and ends
with stdin.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import grpc
import uvloop

from meshrl.rpc.process_memory import collect_garbage_rarely, reuse_freed_memory
from meshrl.rpc.transport import SERVER_OPTIONS

SERVICE = "Floor"


class Floor:
    """Messages by run and topic, in the order in which they came."""

    def __init__(self) -> None:
        self._rows: defaultdict[str, list[bytes]] = defaultdict(list)
        self._handed: defaultdict[str, int] = defaultdict(int)
        self._came = asyncio.Condition()

    def handlers(self) -> grpc.GenericRpcHandler:
        methods = {
            "Call": grpc.unary_unary_rpc_method_handler(self.call),
            "Send": grpc.stream_unary_rpc_method_handler(self.send),
            "Receive": grpc.unary_stream_rpc_method_handler(self.receive),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def call(self, request: bytes, context: Any) -> bytes:
        """Admit, take, settle, publish, commit, the lease of rows that have no columns yet."""
        return b""

    async def send(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        """The first message names the topic."""
        topic, *messages = [message async for message in requests]
        async with self._came:
            self._rows[topic.decode()] += messages
            self._came.notify_all()
        return b""

    async def receive(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        """{"topic", "count", "part"}: so many messages once they are there, and that part of each."""
        fields = json.loads(request)
        stored, topic = self._rows[fields["topic"]], fields["topic"] + fields["by"]
        start = self._handed[topic]
        self._handed[topic] += fields["count"]
        async with self._came:
            await self._came.wait_for(lambda: len(stored) >= start + fields["count"])
        for number in range(start, start + fields["count"]):
            message = stored[number]
            yield message[: int(len(message) * fields["part"])]
            if fields["last"]:
                stored[number] = b""


async def main() -> None:
    collect_garbage_rarely()
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((Floor().handlers(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"address": f"127.0.0.1:{port}", "server": [os.getpid()]}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


if __name__ == "__main__":
    reuse_freed_memory()
    uvloop.run(main())
