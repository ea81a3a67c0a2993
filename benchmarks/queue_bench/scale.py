"""Fill a disk queue, ask how long a finished group takes to reach a waiting consumer, kill the queue, restart it."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ours_calls as calls
from compare import quantile
from system import HERE, Child, ChildFailed, memory, run
from systems import ROOT
from work import GROUP, Group, group

from meshrl.contract.ports import Queue
from meshrl.contract.types import Version
from meshrl.rpc.clients.queue import QueueClient

RUN = "scale"
WAIT_S = 300.0
PARALLEL = 4
"""Calls in flight while the queue is filled."""
WARM_UP = 20
"""Latencies at each size that are not counted."""
SETTLE_S = 0.005
"""From asking for a group to finishing it, so that the question waits at the queue."""


def main(description: str) -> None:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1000,100000,1000000", help="resident (%(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="of each row (%(default)s)")
    parser.add_argument("--probes", type=int, default=300, help="latencies at each size")
    parser.add_argument("--groups", type=int, default=64, help="of one call while filling")
    parser.add_argument("--store", default="disk")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs", help="(%(default)s)")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        run(measure(arguments, Path(folder)))


async def measure(arguments: argparse.Namespace, folder: Path) -> None:
    section = {"store": arguments.store, "resident_bytes": 1 << 50}
    server, address = await start(section, folder)
    figures: dict[str, Any] = {}
    try:
        async with QueueClient(address) as producers, QueueClient(address) as consumers:
            bench = Bench(producers, consumers, arguments)
            await bench.open()
            for rows in map(int, arguments.rows.split(",")):
                figures[str(rows)] = await at(bench, rows, server)
            before = await producers.ledger(RUN)
        server.kill()
        await server.close()
        began = time.perf_counter()
        server, address = await start(section, folder)
        async with QueueClient(address) as producers:
            after = await producers.ledger(RUN)
        recovery = time.perf_counter() - began
        if (after.admitted, after.resident) != (before.admitted, before.resident):
            raise ChildFailed(f"the queue came back with {after}, it had {before}")
        print(f"recovered in {recovery:.1f} s", flush=True)
        slowest = [figures[size]["ready_to_taken_ms"]["p99"] for size in figures]
        print(
            json.dumps(
                {
                    "benchmark": "queue_scale",
                    "store": arguments.store,
                    "over": "gRPC on loopback",
                    "tokens_per_row": arguments.tokens,
                    "by_resident_rows": figures,
                    "p99_ratio": round(max(slowest) / min(slowest), 2),
                    "recovered_rows": sum(after.resident.values()),
                    "recovery_s": round(recovery, 2),
                }
            )
        )
    finally:
        server.kill()
        await server.close()


async def start(section: dict[str, Any], folder: Path) -> tuple[Child, str]:
    """A queue service and its address, once it serves."""
    server = await Child.start(
        "queue", [sys.executable, str(HERE / "ours_server.py"), str(folder), json.dumps(section)]
    )
    return server, (await server.hear())["address"]


async def at(bench: Bench, rows: int, server: Child) -> dict[str, Any]:
    """The figures with so many resident rows."""
    began, had = time.perf_counter(), bench.admitted
    await bench.fill(rows // GROUP)
    filled = (bench.admitted - had) * GROUP / (time.perf_counter() - began)
    resident = sum((await bench.producers.ledger(RUN)).resident.values())
    taken, written = [], []
    for number in range(WARM_UP + bench.probes):
        after_write, after_start = await bench.probe()
        if number >= WARM_UP:
            taken.append(after_write)
            written.append(after_start)
    figures = {
        "resident_rows": resident,
        "filled_rows_per_s": round(filled),
        "ready_to_taken_ms": {"p50": quantile(taken, 0.5), "p99": quantile(taken, 0.99)},
        "write_begun_to_taken_ms": {
            "p50": quantile(written, 0.5),
            "p99": quantile(written, 0.99),
        },
        "rss_mb": round(memory(server.pid) / 1e6),
        "of_it_heap_mb": round(memory(server.pid, "RssAnon") / 1e6),
    }
    print(f"{resident} rows: {figures}", flush=True)
    return figures


class Bench:
    """A feeder, a producer, an annotator and a consumer of one run, in this process."""

    def __init__(self, producers: Queue, consumers: Queue, arguments: argparse.Namespace) -> None:
        self.producers, self.consumers = producers, consumers
        self.probes, self.chunk = arguments.probes, arguments.groups
        self.groups = [cut(group(0, number), arguments.tokens) for number in range(32)]
        self.admitted, self.step = 0, 0
        self.epoch = 0

    async def open(self) -> None:
        await self.producers.open_run(
            dataclasses.replace(
                calls.run_spec(RUN, group_size=GROUP, batch_groups=1, batches=1 << 30),
                resident_bytes=1 << 50,
                lease_ttl_s=600.0,
            )
        )
        self.epoch = (await self.producers.acquire(RUN, "scale")).epoch
        await self.producers.publish(RUN, Version(self.epoch, 0))

    @property
    def version(self) -> Version:
        return Version(self.epoch, self.step)

    async def fill(self, groups: int) -> None:
        """Rows that were sampled and wait for their annotation, until so many groups are resident."""
        missing = groups - (self.admitted - self.step)
        parts = iter([self.chunk] * (missing // self.chunk) + [missing % self.chunk])

        async def worker_loop() -> None:
            for part in parts:
                await self.sample(part)

        await asyncio.gather(*(worker_loop() for _ in range(PARALLEL)))

    async def sample(self, count: int) -> None:
        """Admit and roll out so many groups."""
        numbers = range(self.admitted, self.admitted + count)
        self.admitted += count
        tasks = [calls.task(RUN, n, self.groups[n % len(self.groups)]) for n in numbers]
        while tasks:
            tasks = tasks[await self.producers.admit(RUN, tasks, cursor="", wait_s=WAIT_S) :]
        left = count * GROUP
        while left:
            lease = await self.producers.lease(
                [RUN],
                calls.ROLLOUT.name,
                worker="producer",
                limit=left,
                version=self.version,
                wait_s=WAIT_S,
            )
            left -= lease.num_rows
            await calls.write_rollouts(self.producers, RUN, lease, self.groups, self.version)

    async def probe(self) -> tuple[float, float]:
        """Milliseconds from a group's last write, its end and its beginning, to the consumer's holding the group."""
        await self.sample(1)
        lease = await self.producers.lease(
            [RUN], calls.ANNOTATE.name, worker="annotator", limit=GROUP, wait_s=WAIT_S
        )
        taking = asyncio.create_task(self.take())
        await asyncio.sleep(SETTLE_S)
        begun = time.perf_counter()
        await calls.write_annotations(self.producers, RUN, lease)
        written = time.perf_counter()
        taken = await taking
        await self.producers.settle(RUN, epoch=self.epoch, step=self.step, batch_id=str(self.step))
        self.step += 1
        await self.producers.publish(RUN, self.version)
        await self.producers.commit(RUN, epoch=self.epoch, step=self.step)
        return 1e3 * max(0.0, taken - written), 1e3 * (taken - begun)

    async def take(self) -> float:
        await self.consumers.take(
            RUN,
            epoch=self.epoch,
            step=self.step,
            groups=1,
            batch_id=str(self.step),
            wait_s=WAIT_S,
        )
        return time.perf_counter()


def cut(given: Group, tokens: int) -> Group:
    """The group with rows of so many tokens, half of them the prompt's."""

    def shorter(rows: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(row[:tokens] for row in rows)

    return Group(
        given.number,
        given.prompt[: tokens // 2],
        shorter(given.tokens),
        shorter(given.loss_mask),
        shorter(given.rollout_logprobs),
    )
