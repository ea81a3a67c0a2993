"""A connection to the queue that loses answers: what was asked has happened, and who asked is never told.

client ──▶ proxy ──▶ queue
       ◀── ✂ ────── some answer: swallowed, and the connection reset
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import Final

from .plan import Plan

CHUNK: Final = 1 << 16
SMALLEST: Final = 40
"""Bytes of the shortest chunk that is lost: a shorter one answers no call, it is HTTP/2's own."""


class Proxy:
    """Passes bytes on between clients and one queue process."""

    def __init__(self, plan: Plan, dice: random.Random) -> None:
        self._plan = plan
        self._dice = dice

    async def serve(self) -> None:
        """Run until cancelled, as every process of a campaign."""
        server = await asyncio.start_server(self._connected, self._plan.host, self._plan.proxy_port)
        async with server:
            await server.serve_forever()

    async def _connected(
        self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter
    ) -> None:
        try:
            queue, to_queue = await asyncio.open_connection(self._plan.host, self._plan.port)
        except OSError:
            to_client.transport.abort()
            return
        ways = [
            asyncio.create_task(self._pass_on(client, to_queue)),
            asyncio.create_task(self._pass_on(queue, to_client, loses=True)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            for end in (to_queue, to_client):
                end.transport.abort()

    async def _pass_on(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, loses: bool = False
    ) -> None:
        """Return when one end is closed, or an answer was lost."""
        with suppress(ConnectionError):
            while chunk := await source.read(CHUNK):
                if loses and self._is_lost(chunk):
                    return
                sink.write(chunk)
                await sink.drain()

    def _is_lost(self, chunk: bytes) -> bool:
        lost = len(chunk) >= SMALLEST and self._dice.random() < self._plan.lost_answers
        if lost:
            with self._plan.lost.open("ab") as file:
                file.write(b"x")
        return lost
