"""Our clients: producers, annotator and consumer of a queue service, over gRPC.

    python ours_client.py ROLE NUMBER ADDRESS[,ADDRESS] SEED '{"groups": 16, "in_flight": 2, ...}'

Every row is leased with a fencing token, written under it, taken, fetched, settled, committed; the run follows
published versions; each acknowledgement is as durable as the store is.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import ours_calls as calls
import uvloop
from child import Timer, in_order, serve
from work import BATCH, GROUP, digest, digests, group

from meshrl.contract.types import Version
from meshrl.rpc.clients.queue import QueueClient
from meshrl.rpc.process_memory import freeze_startup_objects, reuse_freed_memory

WAIT_S = 300.0


class Client:
    """The part that all roles share."""

    def __init__(self, number: int, address: str, seed: int, tuning: dict[str, Any]) -> None:
        self.number, self.seed, self.tuning = number, seed, tuning
        self.queue = QueueClient(address)
        self.time = Timer()
        self.name, self.count, self.tasks = "", 0, 0

    async def prepare(self, order: dict[str, Any]) -> None:
        self.name, self.count = order["name"], order["groups"]
        self.tasks = order.get("tasks", self.count)
        self.time.ms.clear()

    def report(self) -> dict[str, Any]:
        return {"ms": self.time.ms}

    def verify(self) -> dict[str, Any]:
        return {}

    async def in_parallel(self, worker_loop: Any) -> None:
        await asyncio.gather(*(worker_loop(number) for number in range(self.tuning["in_flight"])))


class Producer(Client):
    """Admits every second group, and samples whatever rows it is given."""

    async def prepare(self, order: dict[str, Any]) -> None:
        await super().prepare(order)
        # Leases are not bound to who admitted: any producer may get any group.
        self.groups = [group(self.seed, number) for number in range(self.count)]
        self.began = 0.0
        self.version = (await self.queue.run_state(self.name)).published

    async def work(self) -> None:
        self.began = time.monotonic()
        await asyncio.gather(self.admit(), self.in_parallel(self.sample))

    async def admit(self) -> None:
        mine = range(self.number, self.tasks, 2)
        chunk, at = self.tuning["admit"], 0
        while at < len(mine):
            given = [
                calls.task(self.name, number, self.groups[number % self.count])
                for number in mine[at : at + chunk]
            ]
            at += await self.queue.admit(self.name, given, cursor=str(at), wait_s=WAIT_S)

    async def sample(self, index: int) -> None:
        limit = self.tuning["groups"] * GROUP
        worker = f"producer-{self.number}-{index}"
        while True:
            lease = await self.queue.lease(
                [self.name],
                calls.ROLLOUT.name,
                worker=worker,
                limit=limit,
                version=self.version,
                wait_s=WAIT_S,
            )
            with self.time():
                await calls.write_rollouts(self.queue, self.name, lease, self.groups, self.version)

    def report(self) -> dict[str, Any]:
        return {"began": self.began, **super().report()}


class Annotator(Client):
    """Reads the tokens, writes reward and reference log-probs."""

    async def work(self) -> None:
        await self.in_parallel(self.annotate)

    async def annotate(self, index: int) -> None:
        while True:
            lease = await self.queue.lease(
                [self.name],
                calls.ANNOTATE.name,
                worker=f"annotator-{index}",
                limit=self.tuning["groups"] * GROUP,
                wait_s=WAIT_S,
            )
            with self.time():
                await calls.write_annotations(self.queue, self.name, lease)


class Consumer(Client):
    """Takes batches; two are on their way at a time. Keeps what arrived, to verify it after the clock has stopped."""

    async def prepare(self, order: dict[str, Any]) -> None:
        await super().prepare(order)
        batches = self.tuning["resident_batches"]
        spec = calls.run_spec(
            self.name, group_size=GROUP, batch_groups=BATCH // GROUP, batches=batches
        )
        await self.queue.open_run(spec)
        self.epoch = (await self.queue.acquire(self.name, "consumer")).epoch
        await self.queue.publish(self.name, Version(self.epoch, 0))
        self.batches: list[Any] = []
        self.known: set[int] = set()
        if self.tasks > self.count:
            self.known = {d for n in range(self.count) for d in digests(group(self.seed, n))}

    async def work(self) -> None:
        steps = self.tasks * GROUP // BATCH
        batches = in_order(map(self.receive, range(steps)), at_a_time=2)
        for step in range(steps):
            self.keep(await anext(batches))
            await self.finish(step)

    def keep(self, fetched: Any) -> None:
        """Keep the batch; where rows repeat, look at the first group of each batch."""
        if not self.known:
            self.batches.append(fetched)
            return
        for row in calls.rows_of(fetched)[:GROUP]:
            if digest(*row) not in self.known:
                raise ValueError("a row arrived that nobody wrote")

    async def receive(self, step: int) -> Any:
        with self.time():
            batch = await self.queue.take(
                self.name,
                epoch=self.epoch,
                step=step,
                groups=BATCH // GROUP,
                batch_id=str(step),
                wait_s=WAIT_S,
            )
            return await calls.fetch(self.queue, self.name, batch.groups)

    async def finish(self, step: int) -> None:
        """Trained, published, checkpointed."""
        run, epoch = self.name, self.epoch
        await self.queue.settle(run, epoch=epoch, step=step, batch_id=str(step))
        await self.queue.publish(run, Version(epoch, step + 1))
        await self.queue.commit(run, epoch=epoch, step=step + 1)

    def verify(self) -> dict[str, Any]:
        rows = [row for batch in self.batches for row in calls.rows_of(batch)]
        lengths = [batch["tokens"].lengths.tolist() for batch in self.batches]
        return {"arrived": [digest(*row) for row in rows], "lengths": lengths}


ROLES = {"producer": Producer, "annotator": Annotator, "consumer": Consumer}


async def main(role: str, number: str, address: str, seed: str, tuning: str) -> None:
    client = ROLES[role](int(number), address, int(seed), json.loads(tuning))
    freeze_startup_objects()
    await serve(client)


if __name__ == "__main__":
    reuse_freed_memory()  # this and what `main` sets aside: as every service does
    uvloop.run(main(*sys.argv[1:]))
