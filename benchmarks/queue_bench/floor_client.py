"""The clients of floor_server.py: as many calls as ours make and as many bytes, and the arrays at both ends.

    python floor_client.py ROLE NUMBER ADDRESS SEED '{"groups": 64, "in_flight": 2, ...}'

Nobody looks at what arrives: bytes are counted by the messages that are asked for.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np
import uvloop
from child import Timer, in_order, serve
from floor_server import SERVICE
from work import BATCH, GROUP, SAMPLED, SAMPLED_BYTES, annotate, group

from meshrl.rpc.process_memory import freeze_startup_objects, reuse_freed_memory
from meshrl.rpc.transport import CHANNEL_OPTIONS


class Client:
    """The part that all roles share."""

    def __init__(self, number: int, address: str, seed: int, tuning: dict[str, Any]) -> None:
        self.number, self.seed, self.tuning = number, seed, tuning
        self.channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self.call = self.channel.unary_unary(f"/{SERVICE}/Call")
        self.send = self.channel.stream_unary(f"/{SERVICE}/Send")
        self.receive = self.channel.unary_stream(f"/{SERVICE}/Receive")
        self.time = Timer()
        self.name, self.count = "", 0
        self.page = math.gcd(16, tuning["groups"], BATCH // GROUP)
        """Groups of one message: about a mebibyte where they are short, as ours."""

    async def prepare(self, order: dict[str, Any]) -> None:
        self.name, self.count = order["name"], order["groups"]
        self.time.ms.clear()

    def report(self) -> dict[str, Any]:
        return {"ms": self.time.ms}

    def verify(self) -> dict[str, Any]:
        return {"arrived": []}

    async def put(self, topic: str, pages: Sequence[bytes]) -> None:
        await self.send(iter((f"{self.name}-{topic}".encode(), *pages)))

    async def get(self, topic: str, pages: int, *, part: float = 1.0, last: bool = False) -> Any:
        fields = {
            "topic": f"{self.name}-{topic}",
            "by": type(self).__name__,
            "count": pages,
            "part": part,
            "last": last,
        }
        return [page async for page in self.receive(json.dumps(fields).encode())]


class Producer(Client):
    """Sends half of the groups."""

    async def prepare(self, order: dict[str, Any]) -> None:
        await super().prepare(order)
        self.groups = [group(self.seed, n) for n in range(self.number, self.count, 2)]

    async def work(self) -> None:
        self.began = time.monotonic()
        size = self.tuning["groups"]
        for _ in range(0, len(self.groups), self.tuning["admit"]):
            await self.call(b"admit")
        starts = range(0, len(self.groups), size)
        await asyncio.gather(*(self.sample(self.groups[at : at + size]) for at in starts))

    async def sample(self, groups: Sequence[Any]) -> None:
        await self.call(b"lease")
        with self.time():
            pages = [
                b"".join(
                    np.concatenate(getattr(given, name)).data
                    for given in groups[at : at + self.page]
                    for name in SAMPLED
                )
                for at in range(0, len(groups), self.page)
            ]
            await self.put("rollout", pages)

    def report(self) -> dict[str, Any]:
        return {"began": self.began, **super().report()}


class Annotator(Client):
    """Reads the tokens, writes reward and reference log-probs."""

    async def work(self) -> None:
        left = self.count // self.page
        size = self.tuning["groups"] // self.page
        calls = [min(size, left - at) for at in range(0, left, size)]
        await asyncio.gather(*map(self.annotate, calls))

    async def annotate(self, pages: int) -> None:
        found = await self.get("rollout", pages, part=4 / SAMPLED_BYTES)
        with self.time():
            made = []
            for page in found:
                tokens = np.frombuffer(page[: len(page) & ~3], np.int32)
                step = max(1, len(tokens) // (GROUP * self.page))
                rewards, reference = annotate(tokens, np.arange(0, len(tokens), step))
                made.append(rewards.tobytes() + reference.tobytes())
            await self.put("annotate", made)


class Consumer(Client):
    """Takes batches, two on their way at a time; every column of a batch on end in one array."""

    async def work(self) -> None:
        steps = self.count * GROUP // BATCH
        self.batches: list[Any] = []
        async for batch in in_order((self.batch() for _ in range(steps)), at_a_time=2):
            self.batches.append(batch)
            for name in (b"settle", b"publish", b"commit"):
                await self.call(name)

    async def batch(self) -> Any:
        with self.time():
            await self.call(b"take")
            pages = BATCH // GROUP // self.page
            found = [await self.get(t, pages, last=True) for t in ("annotate", "rollout")]
            return [np.concatenate([np.frombuffer(p, np.uint8) for p in each]) for each in found]


ROLES = {"producer": Producer, "annotator": Annotator, "consumer": Consumer}


async def main(role: str, number: str, address: str, seed: str, tuning: str) -> None:
    client = ROLES[role](int(number), address, int(seed), json.loads(tuning))
    freeze_startup_objects()
    await serve(client)


if __name__ == "__main__":
    reuse_freed_memory()
    uvloop.run(main(*sys.argv[1:]))
