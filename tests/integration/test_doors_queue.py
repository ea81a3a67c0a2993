"""The transfer queue through its door and its wire: one life of a batch, its errors, and a queue that is killed."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from meshrl.contract import errors
from meshrl.contract.rows import rollout_write
from meshrl.contract.types import (
    ROLLOUT_STAGE,
    Lease,
    Outcome,
    RowFacts,
    RowWrite,
    RunSpec,
    Task,
    Uid,
    Version,
    VersionSpan,
)
from meshrl.contract.types import Trajectory as Row
from meshrl.rpc.clients import QueueClient
from meshrl.rpc.runtime import GrpcServer, ServerSettings
from meshrl.rpc.servicers import QueueServicer
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import build

SPEC = RunSpec(run="run", group_size=2, batch_groups=1, max_staleness=1, stages=(ROLLOUT_STAGE,))
NOW = Version(1, 0)


def task(name: str) -> Task:
    return Task(
        run="run",
        task_id=name,
        prompt_ids=np.arange(3, dtype=np.int32),
        ground_truth={"answer": 4},
        extra_info={"index": 1},
        group_size=2,
    )


def answered(lease: Lease, tokens: int = 8) -> list[RowWrite]:
    return [
        rollout_write(
            Row(
                uid=row.uid,
                tokens=np.arange(tokens, dtype=np.int32),
                loss_mask=np.ones(tokens, np.uint8),
                rollout_logprobs=np.linspace(-1, 0, tokens, dtype=np.float32),
                spans=(VersionSpan(version=NOW, start=0, end=tokens),),
                response_text="four",
            ),
            Outcome.OK,
            "stop",
            NOW,
        )
        for row in lease.rows
    ]


def tokens_of(lease: Lease) -> dict[Uid, int]:
    return {row.uid: row.token for row in lease.rows}


@asynccontextmanager
async def queue_elsewhere() -> AsyncIterator[QueueClient]:
    queue = await TransferQueue.open(build(QueueConfig(store="memory"), Path()))
    settings = ServerSettings(metrics_port=None, drain_grace_s=1)
    try:
        async with (
            GrpcServer(settings, [QueueServicer(queue)]) as server,
            QueueClient(server.address, retry_s=1) as wire,
        ):
            yield wire
    finally:
        await queue.close()


async def leased(wire: QueueClient, worker: str = "worker", wait_s: float = 5) -> Lease:
    return await wire.lease(["run"], "rollout", worker=worker, limit=8, version=NOW, wait_s=wait_s)


async def begun(wire: QueueClient) -> int:
    """Open the run and take it over; the epoch, whose version 0 every engine has."""
    await wire.open_run(SPEC)
    state = await wire.acquire("run", "trainer")
    await wire.publish("run", NOW)
    return state.epoch


async def settled(wire: QueueClient, tokens: int) -> Sequence[np.ndarray]:
    """One batch from prompt to trained; the tokens that the trainer saw."""
    epoch = await begun(wire)
    assert await wire.admit("run", [task("a")], cursor="1", wait_s=5) == 1
    lease = await leased(wire)
    assert [row.task.ground_truth for row in lease.rows] == [{"answer": 4}] * 2
    await wire.write("run", "rollout", tokens_of(lease), answered(lease, tokens))
    batch = await wire.take("run", epoch=epoch, step=0, groups=1, batch_id="b0", wait_s=5)
    uids = [row.uid for row in batch.rows]
    rows = await wire.fetch("run", uids, ["tokens", "rollout_logprobs"])
    await wire.settle("run", epoch=epoch, step=0, batch_id="b0")
    await wire.publish("run", Version(epoch, 1))
    await wire.commit("run", epoch=epoch, step=1)
    return [row["tokens"] for row in rows]


@pytest.mark.parametrize("tokens", [8, 700_000])
async def test_a_batch_goes_from_prompt_to_trained_through_the_wire(tokens: int) -> None:
    async with queue_elsewhere() as wire:
        assert (await wire.open_run(SPEC)).spec == SPEC
        seen = await settled(wire, tokens)
        ledger = await wire.ledger("run")
        state = await wire.run_state("run")
    assert [row.tolist() == list(range(tokens)) for row in seen] == [True, True]
    assert (ledger.admitted, ledger.trained, ledger.balanced) == (2, 2, True)
    assert (state.cursor, state.committed_step) == ("1", 1)


async def test_the_rest_of_the_port_answers_too() -> None:
    async with queue_elsewhere() as wire:
        epoch = await begun(wire)
        await wire.admit("run", [task("a")], cursor="1", wait_s=5)
        lease = await leased(wire)
        uids = [row.uid for row in lease.rows]
        assert await wire.renew("run", "rollout", "worker", uids) == []
        assert await wire.renew("run", "rollout", "somebody else", uids) == uids
        await wire.release("run", "rollout", tokens_of(lease))
        for delivery in (1, 2, 3):
            lease = await leased(wire)
            assert {row.delivery for row in lease.rows} == {delivery}
            # The third failure gives the group up, the sibling included.
            for row in lease.rows[: 1 if delivery == 3 else 2]:
                await wire.fail(
                    "run", "rollout", row.uid, row.token, Outcome.INFRA_FAULT, "bad \ud83d disk"
                )
        letters = await wire.dead_letters("run")
        assert {letter.reason for letter in letters} == {"bad ? disk"}
        assert await wire.replay("run", [letter.uid for letter in letters]) == len(letters)
        lease = await leased(wire)
        await wire.write("run", "rollout", tokens_of(lease), answered(lease))
        batch = await wire.take("run", epoch=epoch, step=0, groups=1, batch_id="b", wait_s=5)
        again = await wire.take("run", epoch=epoch, step=0, groups=1, batch_id="b", wait_s=5)
        assert batch == again
        await wire.settle("run", epoch=epoch, step=0, batch_id="b")
        assert await wire.rewind("run", epoch=epoch, step=0) == 2
        batch = await wire.take("run", epoch=epoch, step=0, groups=1, batch_id="c", wait_s=5)
        await wire.filter(
            "run", epoch=epoch, uids=[row.uid for row in batch.rows], reason="no spread"
        )
        await wire.close_feed("run")
        waits = await wire.why_waiting("run")
        assert all(wait.since_s >= 0 for wait in waits)
        ledger = await wire.ledger("run")
    assert ledger.filtered["no spread"] == 2
    assert ledger.balanced


async def test_the_queues_errors_arrive_with_their_values() -> None:
    async with queue_elsewhere() as wire:
        with pytest.raises(errors.NotFoundError):
            await wire.run_state("nowhere")
        await begun(wire)
        with pytest.raises(errors.ConflictError, match="group_size"):
            await wire.open_run(
                RunSpec(
                    run="run", group_size=4, batch_groups=1, max_staleness=1, stages=SPEC.stages
                )
            )
        with pytest.raises(errors.WaitTimeoutError):
            await leased(wire, wait_s=0.05)
        await wire.admit("run", [task("a")], cursor="1", wait_s=5)
        lease = await leased(wire)
        stale = {uid: token - 1 for uid, token in tokens_of(lease).items()}
        with pytest.raises(errors.FencedError) as raised:
            await wire.write("run", "rollout", stale, answered(lease))
        assert Uid.parse(raised.value.details["uid"]) in stale
        wrong = RowWrite(
            uid=lease.rows[0].uid,
            columns={"reward": np.zeros(1, np.float32)},
            facts=RowFacts(outcome=Outcome.OK, num_tokens=1, oldest=NOW, newest=NOW),
        )
        with pytest.raises(errors.UserError):
            await wire.write("run", "rollout", tokens_of(lease), [wrong])


async def test_a_lease_waits_for_a_task_that_comes_later() -> None:
    async with queue_elsewhere() as wire:
        await begun(wire)
        waiting = asyncio.create_task(leased(wire, wait_s=60))
        await asyncio.sleep(0)
        await wire.admit("run", [task("late")], cursor="1", wait_s=5)
        lease = await waiting
    assert {row.uid.task for row in lease.rows} == {"late"}


SERVICE = """
import asyncio, sys
from pathlib import Path
from meshrl.rpc.servicers import QueueServicer
from meshrl.rpc.runtime import GrpcServer, ServerSettings, run_service
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.disk import build

async def main():
    path, port = Path(sys.argv[1]), int(sys.argv[2])
    queue = await TransferQueue.open(build(QueueConfig(), path))
    settings = ServerSettings(port=port, metrics_port=None)
    async with GrpcServer(settings, [QueueServicer(queue)]) as server:
        await server.ready()
        print("ready", flush=True)
        await server.until_stopped()
    await queue.close()

sys.exit(run_service(main))
"""


async def start(path: Path, port: int) -> Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVICE, str(path), str(port), stdout=PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    return process


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_queue_that_is_ended_during_a_long_poll_and_comes_back_is_never_missed(
    tmp_path: Path, number: signal.Signals
) -> None:
    port = free_port()
    process = await start(tmp_path, port)
    async with QueueClient(f"127.0.0.1:{port}", retry_s=100) as wire:
        await begun(wire)
        waiting = asyncio.create_task(leased(wire, wait_s=100))
        async with asyncio.timeout(120):
            while not await wire.why_waiting("run"):  # noqa: ASYNC110 - another process' state
                await asyncio.sleep(0.01)
        process.send_signal(number)
        await process.wait()
        admitting = asyncio.create_task(wire.admit("run", [task("a")], cursor="1", wait_s=100))
        process = await start(tmp_path, port)
        try:
            assert await admitting == 1
            lease = await waiting
            await wire.write("run", "rollout", tokens_of(lease), answered(lease))
            process.kill()
            await process.wait()
            writing = asyncio.create_task(
                wire.write("run", "rollout", tokens_of(lease), answered(lease))
            )
            process = await start(tmp_path, port)
            await writing
            ledger = await wire.ledger("run")
        finally:
            process.terminate()
            await process.wait()
    assert process.returncode == 0
    assert (ledger.admitted, ledger.balanced, dict(ledger.resident)["ready"]) == (2, True, 2)
