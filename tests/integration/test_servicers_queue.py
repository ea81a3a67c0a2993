"""The transfer queue through its servicer and client: the life of a batch, errors, a killed queue."""

from __future__ import annotations

import asyncio
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
from meshrl.launcher.address_book import free_port
from meshrl.rpc.clients.queue import QueueClient
from meshrl.rpc.runtime import GrpcServer, ServerSettings
from meshrl.rpc.servicers import QueueServicer
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import build

from ..listening import sockets, unix_sockets
from ..waiting import answered

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


def answers(lease: Lease, tokens: int = 8) -> list[RowWrite]:
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


async def test_payload_goes_by_the_one_socket_of_grpc() -> None:
    before = unix_sockets(), sockets()
    async with remote_queue() as queue:
        await queue.open_run(SPEC)
        await queue.acquire("run", "trainer")
        await queue.publish("run", NOW)
        await queue.admit("run", [task("a")], cursor="1", wait_s=5)
        lease = await queue.lease(["run"], "rollout", worker="w", limit=2, version=NOW, wait_s=5)
        await queue.write_rows("run", "rollout", tokens_of(lease), answers(lease, tokens=1 << 16))
        found = await queue.fetch_rows("run", list(tokens_of(lease)), ["tokens"])
        assert [len(columns["tokens"]) for columns in found] == [1 << 16] * 2
        assert unix_sockets() == before[0]
        assert len(sockets() - before[1]) == 1


@asynccontextmanager
async def remote_queue() -> AsyncIterator[QueueClient]:
    queue = await TransferQueue.open(build(QueueConfig(store="memory"), Path()))
    settings = ServerSettings(metrics_port=None, drain_grace_s=1)
    try:
        async with (
            GrpcServer(settings, [QueueServicer(queue)]) as server,
            QueueClient(server.address, retry_s=1) as client,
        ):
            yield client
    finally:
        await queue.close()


async def leased(client: QueueClient, worker: str = "worker", wait_s: float = 5) -> Lease:
    return await client.lease(
        ["run"], "rollout", worker=worker, limit=8, version=NOW, wait_s=wait_s
    )


async def start_run(client: QueueClient) -> int:
    """Open the run and take it over. Returns the epoch, whose version 0 every engine has."""
    await client.open_run(SPEC)
    state = await client.acquire("run", "trainer")
    await client.publish("run", NOW)
    return state.epoch


async def train_one_batch(client: QueueClient, tokens: int) -> Sequence[np.ndarray]:
    """Train one batch. Returns the tokens that the trainer saw."""
    epoch = await start_run(client)
    assert await client.admit("run", [task("a")], cursor="1", wait_s=5) == 1
    lease = await leased(client)
    assert [row.task.ground_truth for row in lease.rows] == [{"answer": 4}] * 2
    await client.write_rows("run", "rollout", tokens_of(lease), answers(lease, tokens))
    batch = await client.take("run", epoch=epoch, step=0, groups=1, batch_id="b0", wait_s=5)
    uids = [row.uid for row in batch.rows]
    rows = await client.fetch_rows("run", uids, ["tokens", "rollout_logprobs"])
    await client.settle("run", epoch=epoch, step=0, batch_id="b0")
    await client.publish("run", Version(epoch, 1))
    await client.commit("run", epoch=epoch, step=1)
    return [row["tokens"] for row in rows]


@pytest.mark.parametrize("tokens", [8, 700_000])
async def test_a_batch_goes_from_prompt_to_trained_over_grpc(tokens: int) -> None:
    async with remote_queue() as client:
        assert (await client.open_run(SPEC)).spec == SPEC
        seen = await train_one_batch(client, tokens)
        ledger = await client.ledger("run")
        state = await client.run_state("run")
    assert [row.tolist() == list(range(tokens)) for row in seen] == [True, True]
    assert (ledger.admitted, ledger.trained, ledger.balanced) == (2, 2, True)
    assert (state.cursor, state.committed_step) == ("1", 1)


async def test_the_other_methods_of_the_port_work_too() -> None:
    async with remote_queue() as client:
        epoch = await start_run(client)
        await client.admit("run", [task("a")], cursor="1", wait_s=5)
        lease = await leased(client)
        uids = [row.uid for row in lease.rows]
        assert await client.renew("run", "rollout", "worker", uids) == []
        assert await client.renew("run", "rollout", "somebody else", uids) == uids
        await client.release("run", "rollout", tokens_of(lease))
        for delivery in (1, 2, 3):
            lease = await leased(client)
            assert {row.delivery for row in lease.rows} == {delivery}
            # The third failure ends the group, the other row included.
            for row in lease.rows[: 1 if delivery == 3 else 2]:
                await client.fail(
                    "run", "rollout", row.uid, row.token, Outcome.INFRA_FAULT, "bad \ud83d disk"
                )
        letters = await client.dead_letters("run")
        assert {letter.reason for letter in letters} == {"bad ? disk"}
        assert await client.replay("run", [letter.uid for letter in letters]) == len(letters)
        lease = await leased(client)
        await client.write_rows("run", "rollout", tokens_of(lease), answers(lease))
        batch = await client.take("run", epoch=epoch, step=0, groups=1, batch_id="b", wait_s=5)
        again = await client.take("run", epoch=epoch, step=0, groups=1, batch_id="b", wait_s=5)
        assert batch == again
        await client.settle("run", epoch=epoch, step=0, batch_id="b")
        epoch = (await client.acquire("run", "its successor")).epoch
        assert await client.rewind("run", epoch=epoch, step=0) == 2
        batch = await client.take("run", epoch=epoch, step=0, groups=1, batch_id="c", wait_s=5)
        await client.filter(
            "run", epoch=epoch, uids=[row.uid for row in batch.rows], reason="no spread"
        )
        await client.close_feed("run")
        waits = await client.why_waiting("run")
        assert all(wait.since_s >= 0 for wait in waits)
        ledger = await client.ledger("run")
    assert ledger.filtered["no spread"] == 2
    assert ledger.balanced


async def test_the_queues_errors_arrive_with_their_values() -> None:
    async with remote_queue() as client:
        with pytest.raises(errors.NotFoundError):
            await client.run_state("nowhere")
        await start_run(client)
        with pytest.raises(errors.ConflictError, match="group_size"):
            await client.open_run(
                RunSpec(
                    run="run", group_size=4, batch_groups=1, max_staleness=1, stages=SPEC.stages
                )
            )
        with pytest.raises(errors.WaitTimeoutError):
            await leased(client, wait_s=0.05)
        await client.admit("run", [task("a")], cursor="1", wait_s=5)
        lease = await leased(client)
        stale = {uid: token - 1 for uid, token in tokens_of(lease).items()}
        with pytest.raises(errors.FencedError) as raised:
            await client.write_rows("run", "rollout", stale, answers(lease))
        assert Uid.parse(raised.value.details["uid"]) in stale
        wrong = RowWrite(
            uid=lease.rows[0].uid,
            columns={"reward": np.zeros(1, np.float32)},
            facts=RowFacts(outcome=Outcome.OK, num_tokens=1, oldest=NOW, newest=NOW),
        )
        with pytest.raises(errors.UserError):
            await client.write_rows("run", "rollout", tokens_of(lease), [wrong])


async def test_a_lease_waits_for_a_task_that_comes_later() -> None:
    async with remote_queue() as client:
        await start_run(client)
        waiting = asyncio.create_task(leased(client, wait_s=60))
        await asyncio.sleep(0)
        await client.admit("run", [task("late")], cursor="1", wait_s=5)
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


async def test_calls_survive_a_queue_that_is_killed_during_a_long_poll_and_restarts(
    tmp_path: Path,
) -> None:
    port = free_port("127.0.0.1")
    process = await start(tmp_path, port)
    async with QueueClient(f"127.0.0.1:{port}", retry_s=100) as client:
        await start_run(client)
        waiting = asyncio.create_task(leased(client, wait_s=100))
        await answered(lambda: client.why_waiting("run"))
        process.kill()
        await process.wait()
        admitting = asyncio.create_task(client.admit("run", [task("a")], cursor="1", wait_s=100))
        process = await start(tmp_path, port)
        try:
            assert await admitting == 1
            lease = await waiting
            await client.write_rows("run", "rollout", tokens_of(lease), answers(lease))
            process.kill()
            await process.wait()
            writing = asyncio.create_task(
                client.write_rows("run", "rollout", tokens_of(lease), answers(lease))
            )
            process = await start(tmp_path, port)
            await writing
            ledger = await client.ledger("run")
        finally:
            process.terminate()
            await process.wait()
    assert process.returncode == 0
    assert (ledger.admitted, ledger.balanced, dict(ledger.resident)["ready"]) == (2, True, 2)
