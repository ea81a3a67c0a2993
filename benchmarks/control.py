"""The cost of 1,000 rollout workers for one queue: leases, heartbeats, memory, a restart of the queue, 64 that join.

    python benchmarks/control.py [--workers 1000] [--processes 4] [--ttl 5] [--warm 60]

A queue process (disk, fsync on) and workers of the product, several in a process, each with connections of its own as
in a mesh: the stage worker leases, renews and writes; instead of sampling it sleeps. Loopback, no certificates. A
consumer takes batches as a trainer does. Timed are:

    steady    after the warm-up: rows, leases that bring a row, renewals, the queue's processor and memory
    storm     the queue is killed with -9 and started again: when each worker is served again, rows given out again
    join      replicas that join one weight coordinator at once, until each serves the version that is published
    simulated the same fleet in virtual time (`meshrl plan` builds on it): rows an hour, beside the measured ones

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import math
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/ of the checkout

from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import MeshError, WaitTimeoutError
from meshrl.contract.held_rows import RENEWALS
from meshrl.contract.rows import rollout_write
from meshrl.contract.stage_worker import Intake, StageWorker
from meshrl.contract.types import (
    ROLLOUT_STAGE,
    LeasedRow,
    Outcome,
    RowWrite,
    RunSpec,
    SamplingParams,
    Task,
    Trajectory,
    Version,
    VersionSpan,
)
from meshrl.planning.scale import run_setting
from meshrl.planning.setting import Lengths, Setting
from meshrl.rpc.clients.base import connect
from meshrl.rpc.clients.queue import LeaseRenewer
from meshrl.rpc.queue_connection import connect_queue
from meshrl.rpc.runtime import GrpcServer, ServerSettings
from meshrl.rpc.servicers import QueueServicer
from meshrl.transferqueue import stores
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.queue import TransferQueue
from meshrl.weights.carrier import RunPaths
from meshrl.weights.coordinator import WeightCoordinator
from meshrl.weights.replica_controller import ReplicaController, ServedEngine
from meshrl.weights.servicer import WeightsServicer
from meshrl.weights.transport import load_transport
from tests.doubles.weights import HashSink, StubSource

RUN, GROUP, GROUPS = "control", 8, 16
FIRST = Version(1, 0)
LENGTHS = Lengths(mean=1500, p99=4000, most=5000)
TOKENS_PER_S = 50.0
"""The rate of a worker: rows take 30 s on average, at most 100."""
STEP_S = 0.5
STORED_TOKENS = 16
WARM_S = 60.0
"""All begin at once; after a mean and a tail of rows they have drifted apart."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--warm", type=float, default=WARM_S, help="seconds before timing")
    parser.add_argument("--storm", type=float, default=40.0, help="seconds after the restart")
    parser.add_argument("--ttl", type=float, default=5.0, help="queue.lease_ttl_s")
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--serve", nargs=2, metavar=("PORT", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    logging.disable(logging.WARNING)  # at the end everybody leaves
    _allow_files()
    if options.serve:
        asyncio.run(serve(int(options.serve[0]), Path(options.serve[1]), options.ttl))
        return
    with tempfile.TemporaryDirectory(prefix="control-") as folder:
        found = asyncio.run(fleet(options, Path(folder)))
        found["join"] = asyncio.run(join(options.replicas, Path(folder)))
    found["simulated"] = simulated(options, found["steady"]["rows_per_h"])
    for name, figures in found.items():
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in figures.items()))
    asked = {key: getattr(options, key) for key in ("workers", "processes", "ttl")}
    print(json.dumps({**asked, **found}))


def _allow_files() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# --- the queue


async def serve(port: int, folder: Path, ttl_s: float) -> None:
    """A queue process, until it is killed."""
    config = QueueConfig.model_validate({"store": "disk"})
    queue = await TransferQueue.open(stores.build(config, folder / "queue"))
    spec = RunSpec(
        run=RUN,
        group_size=GROUP,
        batch_groups=GROUPS,
        max_staleness=math.inf,
        stages=(ROLLOUT_STAGE,),
        resident_batches=max(8, 3 * 1000 // (GROUP * GROUPS)),
        lease_ttl_s=ttl_s,
    )
    await queue.open_run(spec)
    settings = ServerSettings(port=port, metrics_port=None)
    async with GrpcServer(settings, [QueueServicer(queue)]) as server:
        await server.ready()
        print(server.port, flush=True)
        await asyncio.Event().wait()


class QueueProcess:
    """The queue, and how much of the machine it takes."""

    def __init__(self, folder: Path, ttl_s: float) -> None:
        self._folder, self._ttl_s = folder, ttl_s
        self.port = 0
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Returns when it is served."""
        words = [sys.executable, __file__, "--serve", str(self.port), str(self._folder)]
        words += ["--ttl", str(self._ttl_s)]
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    @property
    def processor_s(self) -> float:
        assert self._process is not None
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def memory_mb(self) -> float:
        assert self._process is not None
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024


# --- the workers


class Call(NamedTuple):
    """One that was answered."""

    kind: str
    worker: str
    at: float
    """The time of the answer, on the machine's monotonic clock."""
    seconds: float


class Timed:
    """A queue's client that notes how long leases take which are answered with rows."""

    def __init__(self, queue: Any, worker: str, seen: Seen) -> None:
        self._queue, self._worker, self._seen = queue, worker, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    async def lease(self, *words: Any, **named: Any) -> Any:
        """As the client's."""
        began = time.monotonic()
        lease = await self._queue.lease(*words, **named)
        self._seen.note("lease", self._worker, began)
        return lease

    async def write_rows(self, *words: Any, **named: Any) -> Any:
        """As the client's."""
        began = time.monotonic()
        await self._queue.write_rows(*words, **named)
        self._seen.note("write", self._worker, began)


class Seen:
    """The calls that were answered to the workers of one process."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def note(self, kind: str, worker: str, began: float) -> None:
        """A call that was answered just now."""
        self.calls.append(Call(kind, worker, time.monotonic(), time.monotonic() - began))


async def sample(rows: Sequence[LeasedRow]) -> list[RowWrite]:
    """Sleep for as long as the row's tokens take, and answer with few of them."""
    (row,) = rows
    number = int(row.task.task_id.removeprefix("t"))
    tokens = LENGTHS.draw(0, number, row.uid.index, row.uid.attempt)
    await asyncio.sleep(tokens / TOKENS_PER_S)
    trajectory = Trajectory(
        uid=row.uid,
        tokens=np.zeros(STORED_TOKENS, np.int32),
        loss_mask=np.ones(STORED_TOKENS, np.uint8),
        rollout_logprobs=np.zeros(STORED_TOKENS, np.float32),
        spans=(VersionSpan(version=FIRST, start=0, end=STORED_TOKENS),),
    )
    return [rollout_write(trajectory, Outcome.OK, "stop", FIRST)]


async def work(address: str, names: Sequence[str], seen: Seen, stop: asyncio.Event) -> None:
    """Workers of one process; they begin within a second of each other."""
    start = LeaseRenewer._start_renewal

    def renewal(self: Any, owner: Any, *words: Any) -> Any:
        began, worker = time.monotonic(), owner.held_leases.worker
        future = start(self, owner, *words)

        def answered(done: Any) -> None:
            if done.code() is grpc.StatusCode.OK:
                seen.note("renew", worker, began)

        future.add_done_callback(answered)
        return future

    LeaseRenewer._start_renewal = renewal  # type: ignore[method-assign, assignment]

    async def one(name: str, number: int) -> None:
        await asyncio.sleep(number / len(names))
        async with connect_queue(address) as queue:
            worker = StageWorker(
                Timed(queue, name, seen),
                [RUN],
                ROLLOUT_STAGE,
                sample,
                worker=name,
                intake=Intake(limit=1, version=lambda: FIRST),
            )
            running = asyncio.create_task(worker.run(grace_s=0))
            await stop.wait()
            worker.drain()
            with suppress(MeshError, TimeoutError):
                async with asyncio.timeout(30):
                    await running

    await asyncio.gather(*(one(name, number) for number, name in enumerate(names)))


def worker_process(address: str, names: Sequence[str], pipe: Connection) -> None:
    """Work until told to end; then send what was seen."""
    _allow_files()

    async def run() -> None:
        seen, stop = Seen(), asyncio.Event()
        working = asyncio.create_task(work(address, names, seen, stop))
        await asyncio.to_thread(pipe.recv)
        pipe.send(seen.calls)
        stop.set()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)

    asyncio.run(run())
    os._exit(0)


# --- the fleet


async def feed(queue: Any) -> None:
    """Admit tasks for ever."""
    for start in itertools.count(0, 16):
        tasks = [
            Task(
                run=RUN,
                task_id=f"t{number}",
                prompt_ids=np.zeros(8, np.int32),
                group_size=GROUP,
                sampling=SamplingParams(max_tokens=STORED_TOKENS),
            )
            for number in range(start, start + 16)
        ]
        while tasks:
            with suppress(WaitTimeoutError):
                tasks = tasks[await queue.admit(RUN, tasks, cursor=str(start), wait_s=5) :]


async def consume(queue: Any, trained: list[tuple[float, int]]) -> None:
    """Take batches, as a trainer does."""
    for step in itertools.count():
        batch_id = f"b{step}"
        while True:
            with suppress(WaitTimeoutError):
                batch = await queue.take(
                    RUN, epoch=1, step=step, groups=GROUPS, batch_id=batch_id, wait_s=20
                )
                break
        await asyncio.sleep(STEP_S)
        await queue.settle(RUN, epoch=1, step=step, batch_id=batch_id)
        trained.append((time.monotonic(), len(batch.rows)))
        await queue.publish(RUN, Version(1, step + 1))
        await queue.commit(RUN, epoch=1, step=step + 1)


async def fleet(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The steady fleet, and the storm."""
    queue_process = QueueProcess(folder, options.ttl)
    await asyncio.to_thread(queue_process.start)
    empty_mb = queue_process.memory_mb
    address = f"127.0.0.1:{queue_process.port}"
    names = [f"rollout-{number}" for number in range(options.workers)]
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for number in range(options.processes):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=worker_process, args=(address, names[number :: options.processes], theirs)
        )
        process.start()
        pipes.append(ours)
        processes.append(process)
    trained: list[tuple[float, int]] = []
    async with connect_queue(address) as queue:
        await queue.acquire(RUN, "trainer")
        await queue.publish(RUN, FIRST)
        beside = [
            asyncio.create_task(feed(queue)),
            asyncio.create_task(consume(queue, trained)),
        ]
        await asyncio.sleep(options.warm)
        began, processor_s = time.monotonic(), queue_process.processor_s
        await asyncio.sleep(options.seconds)
        ended, processor_s = time.monotonic(), queue_process.processor_s - processor_s
        memory_mb = queue_process.memory_mb

        killed = time.monotonic()
        queue_process.kill()
        await asyncio.to_thread(queue_process.start)
        served = time.monotonic()
        await asyncio.sleep(options.storm)
        memory_after_mb = queue_process.memory_mb
        ledger = await queue.ledger(RUN)
        calls: list[Call] = []
        for pipe in pipes:
            pipe.send("end")
            calls += await asyncio.to_thread(pipe.recv)
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
    for process in processes:
        process.kill()
    queue_process.kill()
    span_s = ended - began
    written = sum(1 for call in calls if call.kind == "write" and began <= call.at < ended)
    steady: dict[str, float] = {
        "rows_per_h": round(3600 * written / span_s),
        "trained_per_h": round(3600 * sum(n for at, n in trained if began <= at < ended) / span_s),
    }
    for kind in ("lease", "renew", "write"):
        found = [c.seconds for c in calls if c.kind == kind and began <= c.at < ended]
        steady |= {f"{kind}_{key}": value for key, value in _times(found, span_s).items()}
    first: dict[str, float] = {}
    for call in sorted(calls, key=lambda call: call.at):
        if call.at > served:
            first.setdefault(call.worker, call.at - served)
    busiest = Counter(int(10 * (c.at - served)) for c in calls if c.at > served).most_common(1)
    return {
        "steady": {
            **steady,
            "queue_processor": round(processor_s / span_s, 3),
            "queue_mb": round(memory_mb),
            "queue_kb_a_worker": round(1024 * (memory_mb - empty_mb) / options.workers),
        },
        "storm": {
            "away_s": round(served - killed, 1),
            "workers_served": len(first),
            **{
                f"served_{name}_s": round(float(np.percentile([*first.values()], share)), 1)
                for name, share in (("half", 50), ("99_percent", 99), ("all", 100))
            },
            "most_answers_in_100_ms": busiest[0][1],
            "queue_mb_after": round(memory_after_mb),
            "rows_given_again": _given_again(calls),
            "ledger": "balanced" if ledger.balanced else str(ledger),
        },
    }


def _given_again(calls: Sequence[Call]) -> int:
    """Leases that were answered beyond the rows that were written and those that are still held."""
    count = Counter(call.kind for call in calls)
    return max(0, count["lease"] - count["write"] - len({call.worker for call in calls}))


def _times(seconds: Sequence[float], span_s: float) -> Mapping[str, float]:
    if not seconds:
        return {"per_s": 0.0}
    p50, p99 = np.percentile(seconds, [50, 99])
    return {
        "per_s": round(len(seconds) / span_s, 1),
        "p50_ms": round(1e3 * float(p50), 1),
        "p99_ms": round(1e3 * float(p99), 1),
        "max_ms": round(1e3 * max(seconds)),
    }


# --- replicas that join at once


async def join(replicas: int, folder: Path) -> dict[str, float]:
    """A coordinator behind gRPC, and so many replicas of 1 MB that join it at the same moment."""
    config = WeightsConfig(carrier="disk")
    paths = RunPaths(directory=folder)

    async def committed(version: Version) -> None:
        del version

    coordinator = WeightCoordinator(
        config,
        run=RUN,
        epoch=1,
        transport=load_transport(config, paths),
        on_committed=committed,
    )
    await coordinator.start()
    settings = ServerSettings(port=0, metrics_port=None)
    async with GrpcServer(settings, [WeightsServicer(coordinator)]) as server:
        await coordinator.publish(StubSource(RUN, FIRST, bucket_bytes=1 << 18))
        sinks = [HashSink() for _ in range(replicas)]
        controllers = [
            ReplicaController(
                config,
                run=RUN,
                replica=f"rollout-{number}",
                engine=ServedEngine(sink, config),
                transport=load_transport(config, paths),
                connect=lambda: connect(f"127.0.0.1:{server.port}"),
            )
            for number, sink in enumerate(sinks)
        ]
        began = time.monotonic()
        running = [asyncio.create_task(controller.run()) for controller in controllers]
        times: dict[int, float] = {}
        while len(times) < replicas:
            for number, sink in enumerate(sinks):
                if number not in times and sink.version == FIRST:
                    times[number] = time.monotonic() - began
            await asyncio.sleep(0.01)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    await coordinator.close()
    ordered = sorted(times.values())
    return {
        "replicas": replicas,
        "first_s": round(ordered[0], 2),
        "half_s": round(ordered[len(ordered) // 2], 2),
        "all_s": round(ordered[-1], 2),
    }


# --- the same in virtual time


def simulated(options: argparse.Namespace, measured: float) -> dict[str, float]:
    """Rows an hour of the same setting, and how far the measured ones are from them."""
    outlook = run_setting(
        Setting(
            workers=options.workers,
            slots=1,
            tokens_per_s=TOKENS_PER_S,
            lengths=LENGTHS,
            group=GROUP,
            batch_groups=GROUPS,
            step_s=STEP_S,
            max_staleness=math.inf,
            resident_batches=max(8, 3 * 1000 // (GROUP * GROUPS)),
            stages=0,
            renewals_per_s=RENEWALS / options.ttl,
            most_rows=40 * GROUP * GROUPS,
        )
    )
    return {
        "rows_per_h": round(outlook.samples_per_h),
        "off": round(measured / outlook.samples_per_h - 1, 3),
        "queue_processor": round(outlook.queue_load, 3),
    }


if __name__ == "__main__":
    main()
