"""The memory of a queue service while rows rush through it, and while nobody takes them."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import systems
from system import ChildFailed, System, memory, run

from meshrl.contract.ports import Queue
from meshrl.services.wires import QueueWire

RUN = "soak"
SEED = 0
GROUPS = 128
"""Distinct groups; they come round again and again under new task ids."""
TASKS = 1 << 30
READINGS = 60
"""Readings of the memory in each part."""
SETTLING = 0.2
"""The part of the time that counts as warm-up."""
FLAT = 0.05


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
        "shards": 1,
    }
    async with (
        systems.ours(arguments.store, folder, SEED, tuning) as system,
        QueueWire(system.address) as queue,
    ):
        await system.prepare(RUN, groups=GROUPS, tasks=TASKS)
        for child in system.clients.values():
            child.tell(do="pass")
        running = await watch("at full rate", queue, system, 60 * arguments.minutes)
        await system.stopped(system.clients["consumer 0"])
        seconds = 60 * arguments.stopped_minutes
        stopped = await watch("without a consumer", queue, system, seconds)
        waits = [wait.what for wait in await queue.why_waiting(RUN)]
        if not any("waits for room" in what for what in waits):
            raise ChildFailed(f"nobody waits for room, though nothing is taken: {waits}")
        ledger = await queue.ledger(RUN)
    print(
        json.dumps(
            {
                "benchmark": "queue_soak",
                "store": arguments.store,
                "minutes": arguments.minutes,
                "at_full_rate": running,
                "consumer_stopped": stopped,
                "flat": running["heap"]["flat"] and stopped["heap"]["flat"],
                "ledger_balanced": ledger.balanced,
            }
        )
    )


async def watch(what: str, queue: Queue, system: System, seconds: float) -> dict[str, Any]:
    """Read the memory `READINGS` times; samples per second and how far memory strays from its median."""
    readings: dict[str, list[int]] = {"VmRSS": [], "RssAnon": []}
    began, had = time.monotonic(), (await queue.ledger(RUN)).left
    for number in range(1, READINGS + 1):
        await healthy_for(began + seconds * number / READINGS - time.monotonic(), system)
        for name, values in readings.items():
            values.append(sum(memory(pid, name) for pid in system.parts["server"]))
        if number % 5 == 0:
            rate = ((await queue.ledger(RUN)).left - had) / (time.monotonic() - began)
            mb = readings["VmRSS"][-1] / 1e6
            at = seconds * number / READINGS
            print(f"{what}: {at:.0f} s, {rate:,.0f} samples/s, {mb:.0f} MB", flush=True)
    ledger = await queue.ledger(RUN)
    if not ledger.balanced:
        raise ChildFailed(f"the ledger does not balance: {ledger}")
    return {
        "samples_per_s": round((ledger.left - had) / (time.monotonic() - began)),
        "resident_rows": sum(ledger.resident.values()),
        "rss": flatness(readings["VmRSS"]),
        "heap": flatness(readings["RssAnon"]),
    }


async def healthy_for(seconds: float, system: System) -> None:
    """Let time pass. Raises ChildFailed as soon as a client fails."""
    with suppress(TimeoutError):
        await asyncio.wait_for(system.until_done(None), seconds)


def flatness(readings: list[int]) -> dict[str, Any]:
    """After the warm-up: median, the largest distance from it, and whether that is small."""
    settled = readings[int(SETTLING * len(readings)) :]
    median = statistics.median(settled)
    strays = max(abs(value - median) for value in settled) / median
    return {"median_mb": round(median / 1e6, 1), "strays": round(strays, 3), "flat": strays <= FLAT}
