"""The memory of a queue service at full rate, and while nobody takes rows."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import systems
from system import ChildFailed, System, memory, run, total_cpu_s
from work import GROUP

from meshrl.contract.ports import Queue
from meshrl.contract.types import Ledger
from meshrl.rpc.clients.queue import QueueClient
from meshrl.transferqueue.model.records import REMEMBERED

RUN = "soak"
SEED = 0
GROUPS = 128
"""Distinct groups; they come round again and again under new task ids."""
TASKS = 1 << 30
READINGS = 60
"""Readings of each part; a reading is the most memory that was seen in its time."""
LOOK_S = 0.1
FLAT = 0.05
STILL_S = 60.0
"""In which a queue without a consumer must be full."""


def main(description: str) -> None:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=2.0, help="at full rate (%(default)s)")
    parser.add_argument("--stopped-minutes", type=float, default=0.5, help="without a consumer")
    parser.add_argument("--store", default="disk")
    parser.add_argument("--folder", type=Path, default=systems.ROOT / "runs", help="(%(default)s)")
    parser.add_argument("--groups", type=int, default=16, help="groups of one call")
    parser.add_argument("--in-flight", type=int, default=2, help="calls of each client")
    parser.add_argument("--resident-batches", type=int, default=8, help="bound of admission")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        run(soak(arguments, Path(folder)))


async def soak(arguments: argparse.Namespace, folder: Path) -> None:
    tuning = {
        "groups": arguments.groups,
        "in_flight": arguments.in_flight,
        "admit": 64,
        "resident_batches": arguments.resident_batches,
    }
    async with (
        systems.ours(arguments.store, folder, SEED, tuning) as system,
        QueueClient(system.address) as queue,
    ):
        await system.prepare(RUN, groups=GROUPS, tasks=TASKS)
        for child in system.clients.values():
            child.tell(do="pass")
        await warm(queue, system)
        running = await watch("at full rate", queue, system, 60 * arguments.minutes)
        await system.stopped(system.clients["consumer 0"])
        await until_full(queue, system)
        seconds = 60 * arguments.stopped_minutes
        stopped = await watch("without a consumer", queue, system, seconds)
        ledger = await queue.ledger(RUN)
    parts = (running["heap"], running["rss"], stopped["heap"], stopped["rss"])
    print(
        json.dumps(
            {
                "benchmark": "queue_soak",
                "store": arguments.store,
                "minutes": arguments.minutes,
                "at_full_rate": running,
                "consumer_stopped": stopped,
                "flat": all(part["flat"] for part in parts),
                "ledger_balanced": ledger.balanced,
            }
        )
    )


async def warm(queue: Queue, system: System) -> None:
    """Wait until the queue has forgotten a task: what it remembers of those that left is as much as it ever is."""
    began = time.monotonic()
    while (ledger := await queue.ledger(RUN)).left <= REMEMBERED * GROUP:
        await healthy_for(1.0, system)
    print(f"warm: {time.monotonic() - began:.0f} s, {ledger.left:,} samples", flush=True)


async def until_full(queue: Queue, system: System) -> None:
    """Wait until nothing moves, since nobody takes anything. Raises ChildFailed unless admission is what waits."""
    deadline = time.monotonic() + STILL_S
    before: Ledger | None = None
    while (now := await queue.ledger(RUN)) != before:
        if time.monotonic() > deadline:
            raise ChildFailed(f"rows still move, though nothing is taken: {now}")
        before = now
        await healthy_for(1.0, system)
    waits = [wait.what for wait in await queue.why_waiting(RUN)]
    if not any("waits for room" in what for what in waits):
        raise ChildFailed(f"nobody waits for room, though nothing is taken: {waits}")


@dataclass(frozen=True, slots=True)
class Moment:
    """Work done so far, and its processor time."""

    at: float
    left: int
    server_s: float
    clients_s: float

    @classmethod
    async def now(cls, queue: Queue, system: System) -> Moment:
        left = (await queue.ledger(RUN)).left
        spent = (total_cpu_s(system.parts[part]) for part in ("server", "clients"))
        return cls(time.monotonic(), left, *spent)

    def until(self, end: Moment) -> dict[str, float]:
        """Samples per second from here to `end`, and microseconds of processor time per sample."""
        found = {"samples_per_s": round((end.left - self.left) / (end.at - self.at))}
        if samples := end.left - self.left:
            found["server_us"] = round(1e6 * (end.server_s - self.server_s) / samples)
            found["clients_us"] = round(1e6 * (end.clients_s - self.clients_s) / samples)
        return found


async def watch(what: str, queue: Queue, system: System, seconds: float) -> dict[str, Any]:
    """Read the memory `READINGS` times; how flat it is, and how fast it went in each third of the time."""
    looks = {"VmRSS": list[list[int]](), "RssAnon": list[list[int]]()}
    began = time.monotonic()
    moments = [await Moment.now(queue, system)]
    for number in range(1, READINGS + 1):
        until = began + seconds * number / READINGS
        for values in looks.values():
            values.append([])
        while not looks["VmRSS"][-1] or time.monotonic() < until:
            await healthy_for(min(LOOK_S, until - time.monotonic()), system)
            for name, values in looks.items():
                values[-1].append(sum(memory(pid, name) for pid in system.parts["server"]))
        if number % (READINGS // 12) == 0:
            moments.append(await Moment.now(queue, system))
            rate = moments[-2].until(moments[-1])["samples_per_s"]
            mb = [max(values[-1]) / 1e6 for values in looks.values()]
            at = seconds * number / READINGS
            print(
                f"{what}: {at:.0f} s, {rate:,} samples/s, {mb[0]:.0f} MB, heap {mb[1]:.1f} MB",
                flush=True,
            )
    ledger = await queue.ledger(RUN)
    if not ledger.balanced:
        raise ChildFailed(f"the ledger does not balance: {ledger}")
    thirds = moments[:: len(moments) // 3]
    return {
        **moments[0].until(moments[-1]),
        "thirds": [start.until(end) for start, end in pairwise(thirds)],
        "resident_rows": sum(ledger.resident.values()),
        "rss": flatness(looks["VmRSS"]),
        "heap": flatness(looks["RssAnon"]),
    }


async def healthy_for(seconds: float, system: System) -> None:
    """Let time pass. Raises ChildFailed as soon as a client fails."""
    with suppress(TimeoutError):
        await asyncio.wait_for(system.until_done(None), seconds)


def flatness(looks: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Deviation and growth of the most memory of each reading's time.

    `deviation` is the largest distance from the median; `grows` is how much a straight line through the readings
    rises from the first to the last; both are parts of the median. Between the peaks the memory says little: protobuf
    makes malloc give free memory back about once a second, and takes it again within the next tenth. `lowest_mb`
    shows it.
    """
    readings = [max(each) for each in looks]
    median = statistics.median(readings)
    deviation = max(abs(value - median) for value in readings) / median
    slope, _ = statistics.linear_regression(range(len(readings)), readings)
    grows = slope * (len(readings) - 1) / median
    return {
        "median_mb": round(median / 1e6, 1),
        "lowest_mb": round(min(min(each) for each in looks) / 1e6, 1),
        "highest_mb": round(max(readings) / 1e6, 1),
        "deviation": round(deviation, 3),
        "grows": round(grows, 3),
        "flat": deviation <= FLAT and grows <= FLAT,
    }
