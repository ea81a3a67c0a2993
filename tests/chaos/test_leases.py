"""Leases of a few seconds: rows of a dead worker move at once, of a stopped one soon, of a busy one never."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from meshrl.contract.errors import WaitTimeoutError
from meshrl.contract.held_rows import HeldLeases
from meshrl.rpc.clients.queue import LeaseRenewer, QueueClient
from meshrl.testing.contract.queue_actors import WAIT_S, Actors, spec, tasks
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore

from ..processes import python
from ..waiting import until

GROUPS = 2
ROWS = 4
TTL_S = 2.0
HOST = Path(__file__).parents[1] / "integration" / "client" / "queue_host.py"


class Noticing(TransferQueue):
    """Tells when a worker's heartbeat stream is open: only from then on does the queue notice its death at once."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.attended = asyncio.Event()

    @contextmanager
    def heartbeat(self, worker: str, **options: Any) -> Iterator[None]:
        with super().heartbeat(worker, **options):
            self.attended.set()
            yield


class Process:
    """A process that answers a line with a line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())

    async def read(self) -> str:
        assert self._process.stdout is not None
        async with asyncio.timeout(60):
            return (await self._process.stdout.readline()).decode().strip()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    async def kill(self) -> None:
        """Returns when it has ended, and its locks with it."""
        self._process.kill()
        await self._process.wait()


@asynccontextmanager
async def running(*words: object) -> AsyncIterator[Process]:
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    async with python(*words, **pipes) as process:
        yield Process(process)


@asynccontextmanager
async def held_by_a_process(
    actors: Actors, address: str, *options: object, **changes: Any
) -> AsyncIterator[Process]:
    """Rows of two groups, all held by a worker process. A second attempt of a row would be its last."""
    await actors.start(spec(**{"lease_ttl_s": TTL_S, "max_attempts": 2, **changes}))
    await actors.feed(tasks(GROUPS))
    module = ("-m", "tests.chaos.lease_process")
    async with running(*module, "--queue", address, "--rows", ROWS, *options) as process:
        assert await process.read() == f"holds {ROWS}"
        if isinstance(actors.queue, Noticing):
            async with asyncio.timeout(WAIT_S):
                await actors.queue.attended.wait()
        yield process


async def no_other_worker_gets_a_row(actors: Actors, wait_s: float) -> None:
    with pytest.raises(WaitTimeoutError):
        await actors.lease(worker="other", wait_s=wait_s)


async def assert_writes_all(worker: Process) -> None:
    worker.send("write")
    assert await worker.read() == f"written {ROWS} lost 0"


@pytest.fixture
async def queue() -> AsyncIterator[Noticing]:
    opened = await Noticing.open(MemoryStore())
    yield opened
    await opened.close()


@pytest.fixture
def actors(queue: Noticing) -> Actors:
    return Actors(queue)


async def test_rows_of_a_killed_worker_move_long_before_their_time_to_live(
    actors: Actors, queue_address: str
) -> None:
    async with held_by_a_process(actors, queue_address, lease_ttl_s=3600) as worker:
        worker.signal(signal.SIGKILL)
        moved = await actors.lease(limit=ROWS, worker="other", wait_s=WAIT_S)
    assert [row.delivery for row in moved.rows] == [2] * ROWS
    await actors.write(moved)
    assert await actors.resident() == {"pending": ROWS}


async def test_rows_of_a_stopped_worker_move_and_what_it_writes_late_is_refused(
    actors: Actors, queue_address: str
) -> None:
    async with held_by_a_process(actors, queue_address) as worker:
        worker.signal(signal.SIGSTOP)
        moved = await actors.lease(limit=ROWS, worker="other", wait_s=WAIT_S)
        worker.send("write")
        worker.signal(signal.SIGCONT)
        assert await worker.read() == f"written 0 lost {ROWS}"
        assert await actors.resident() == {"leased": ROWS}
        await actors.write(moved)
    ledger = await actors.ledger()
    assert ledger.balanced and ledger.resident["pending"] == ROWS and not ledger.dead_lettered


async def test_a_busy_worker_keeps_its_rows(actors: Actors, queue_address: str) -> None:
    async with held_by_a_process(actors, queue_address, max_attempts=1) as worker:
        worker.send(f"busy {4 * TTL_S}")
        await no_other_worker_gets_a_row(actors, 3 * TTL_S)
        assert await worker.read() == "idle"
        await assert_writes_all(worker)
    ledger = await actors.ledger()
    assert ledger.balanced and not ledger.dead_lettered


async def test_a_worker_that_hangs_loses_its_rows(actors: Actors, queue_address: str) -> None:
    async with held_by_a_process(actors, queue_address, "--hung", TTL_S) as worker:
        worker.send("busy 600")
        moved = await actors.lease(limit=ROWS, worker="other", wait_s=WAIT_S)
    assert [row.delivery for row in moved.rows] == [2] * ROWS


async def test_a_stopped_queue_ends_no_lease(tmp_path: Path) -> None:
    async with running(HOST, tmp_path) as host:
        address = await host.read()
        async with QueueClient(address) as queue:
            actors = Actors(queue)
            async with held_by_a_process(actors, address, max_attempts=1) as worker:
                host.signal(signal.SIGSTOP)
                await asyncio.sleep(4 * TTL_S)  # the test needs real time
                host.signal(signal.SIGCONT)
                await no_other_worker_gets_a_row(actors, 2 * TTL_S)
                await assert_writes_all(worker)
            ledger = await actors.ledger()
    assert ledger.balanced and not ledger.dead_lettered


async def test_a_killed_queue_ends_no_lease_of_a_live_worker(tmp_path: Path) -> None:
    async with running(HOST, tmp_path) as host:
        address = await host.read()
        async with QueueClient(address) as queue:
            actors = Actors(queue)
            async with held_by_a_process(
                actors, address, lease_ttl_s=2 * TTL_S, max_attempts=1
            ) as worker:
                await host.kill()
                async with running(HOST, tmp_path, address.rpartition(":")[2]) as again:
                    assert await again.read() == address
                    await no_other_worker_gets_a_row(actors, 3 * TTL_S)
                    await assert_writes_all(worker)


async def test_a_worker_that_was_idle_for_long_does_not_count_as_hanging(
    actors: Actors, queue_address: str
) -> None:
    hung_s = 0.5
    await actors.start(spec(lease_ttl_s=2 * hung_s, max_attempts=1))
    await actors.feed(tasks(1))
    async with QueueClient(queue_address, renewer=partial(LeaseRenewer, hung_s=hung_s)) as queue:
        held_leases = HeldLeases("rollout", "w", lambda lost: None)
        renewing = asyncio.ensure_future(queue.renew_held(held_leases))
        await asyncio.sleep(2 * hung_s)  # the test needs real time without a row
        lease = await queue.lease(
            ["run"], "rollout", worker="w", limit=2, version=actors.version, wait_s=WAIT_S
        )
        held_leases.add(lease.rows, lease.ttl_s)
        await no_other_worker_gets_a_row(actors, 4 * hung_s)
        renewing.cancel()


async def test_a_queue_that_ends_says_nothing_of_a_worker_that_holds_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hung_s = 0.2
    async with running(HOST, tmp_path) as host:
        address = await host.read()
        async with QueueClient(address, renewer=partial(LeaseRenewer, hung_s=hung_s)) as queue:
            renewing = asyncio.ensure_future(
                queue.renew_held(HeldLeases("rollout", "w", lambda lost: None))
            )
            renewer: Any = queue._renewer
            await until(lambda: renewer._streams)
            await asyncio.sleep(2 * hung_s)  # the test needs real time without a row
            await host.kill()
            await until(lambda: not renewer._streams)
            await until(lambda: renewer._streams)  # opened again: what was due then is done
            renewing.cancel()
    assert not [line for line in caplog.messages if "hangs" in line]
