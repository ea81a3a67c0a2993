"""The client library against a real servicer, over gRPC on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from meshrl.client import (
    EndOfDataError,
    FencedError,
    LeaseLostError,
    NotFoundError,
    Queue,
    Run,
    UserError,
    WaitTimeoutError,
)

from .client_scenes import GROUP, answer, spec, tasks


@pytest.fixture
async def run(queue_address: str) -> AsyncIterator[Run]:
    async with Queue.connect(queue_address, patience_s=1) as queue:
        yield await queue.open_run(spec())


async def work(run: Run, rows: int) -> None:
    while rows:
        async with run.lease("rollout", limit=rows) as lease:
            await lease.write([answer(row) for row in lease.rows])
            rows -= len(lease.rows)


async def resident(run: Run) -> dict[str, int]:
    ledger = await run.ledger()
    assert ledger.balanced
    return {state: count for state, count in ledger.resident.items() if count}


async def test_rows_go_from_put_to_trained(run: Run) -> None:
    await run.put(tasks(5), cursor="five")
    await run.close_feed()
    await work(run, 5 * GROUP)
    seen = []
    batches = run.batches(groups=2)
    async for batch in batches:
        assert [columns["reward"].tolist() for columns in batch.columns] == [
            [row.uid.index] for row in batch.rows
        ]
        seen.append([row.group for row in batch.rows])
    assert seen == [["t000"] * 2 + ["t001"] * 2, ["t002"] * 2 + ["t003"] * 2, ["t004"] * 2]
    async with batches.checkpoint() as step:
        assert step == 3
    assert (await run.ledger()).trained == 5 * GROUP
    assert (await run.state()).cursor == "five"


async def test_rows_that_a_block_did_not_write_are_released_and_count_no_attempt(run: Run) -> None:
    await run.put(tasks(1))
    async with run.lease("rollout", limit=GROUP) as lease:
        await lease.write([answer(lease.rows[0])])
        assert lease.held == (lease.rows[1].uid,)
    assert await resident(run) == {"queued": 1, "ready": 1}
    async with run.lease("rollout") as again:
        assert again.rows[0].delivery == 1


async def test_a_block_that_raises_fails_its_rows_with_the_reason(queue_address: str) -> None:
    async with Queue.connect(queue_address) as queue:
        run = await queue.open_run(spec(max_attempts=1))
        await run.put(tasks(1))
        with pytest.raises(ZeroDivisionError):
            async with run.lease("rollout", limit=GROUP):
                raise ZeroDivisionError("by zero")
        letters = await run.dead_letters()
        assert [letter.reason for letter in letters] == ["ZeroDivisionError: by zero"]
        assert (await run.ledger()).filtered == {"group_incomplete": GROUP - 1}
        assert await run.replay([letter.uid for letter in letters]) == 1


async def test_a_lease_is_renewed_for_as_long_as_its_block_runs(queue_address: str) -> None:
    async with Queue.connect(queue_address) as queue:
        run = await queue.open_run(spec(lease_ttl_s=0.6))
        await run.put(tasks(1))
        async with run.lease("rollout", limit=GROUP) as lease:
            # Several times to live pass, and another worker gets no row meanwhile.
            with pytest.raises(WaitTimeoutError):
                async with run.lease("rollout", wait_s=2.0):
                    raise AssertionError("another worker got the lease")
            assert await lease.write([answer(row) for row in lease.rows]) == ()


async def test_a_lost_lease_ends_the_block(queue_address: str) -> None:
    async with Queue.connect(queue_address) as queue:
        run = await queue.open_run(spec(lease_ttl_s=0.6))
        await run.put(tasks(1))
        with pytest.raises(LeaseLostError, match="lost"):
            async with run.lease("rollout", limit=GROUP, worker="w") as lease:
                # To the holder this looks as if another worker took its rows.
                tokens = {row.uid: row.token for row in lease.rows}
                await queue.port.release("run", "rollout", tokens)
                await asyncio.Event().wait()
        task = asyncio.current_task()
        assert task is not None and task.cancelling() == 0
        await work(run, GROUP)
        assert await resident(run) == {"ready": GROUP}


async def test_one_lost_row_does_not_spoil_the_others(run: Run) -> None:
    await run.put(tasks(1))
    async with run.lease("rollout", limit=GROUP) as lease:
        lost, written = lease.rows
        await run._port.release("run", "rollout", {lost.uid: lost.token})
        async with run.lease("rollout") as other:
            assert other.rows[0].uid == lost.uid
            assert await lease.write([answer(row) for row in lease.rows]) == (lost.uid,)
            assert await other.write([answer(other.rows[0])]) == ()
    assert await resident(run) == {"ready": GROUP}
    assert written.uid not in lease.held


async def test_a_cancellation_from_outside_stays_a_cancellation(run: Run) -> None:
    await run.put(tasks(1))
    inside = asyncio.Event()

    async def hold() -> None:
        async with run.lease("rollout", limit=GROUP):
            inside.set()
            await asyncio.Event().wait()

    holder = asyncio.create_task(hold())
    await inside.wait()
    holder.cancel()
    with pytest.raises(asyncio.CancelledError):
        await holder
    assert await resident(run) == {"queued": GROUP}


async def test_a_batch_whose_step_failed_comes_again(run: Run) -> None:
    await run.put(tasks(4))
    await work(run, 4 * GROUP)
    batches = run.batches(groups=2)
    with pytest.raises(ZeroDivisionError):
        async for batch in batches:
            first = batch
            raise ZeroDivisionError
    async for batch in batches:
        assert batch is first
        break
    rival = run.batches(groups=2)
    async for batch in rival:
        assert [row.uid for row in batch.rows] == [row.uid for row in first.rows]
        break
    with pytest.raises(FencedError):
        await batches.settle()


async def test_a_trainer_resumes_where_its_checkpoint_was(run: Run) -> None:
    await run.put(tasks(8))
    await run.close_feed()
    await work(run, 8 * GROUP)
    seen: list[list[str]] = []
    batches = run.batches(groups=2)
    async for batch in batches:
        seen.append([str(row.uid) for row in batch.rows])
        if batch.step == 1:
            async with batches.checkpoint() as step:
                assert step == 2
        if batch.step == 3:
            break
    resumed = [
        [str(row.uid) for row in batch.rows] async for batch in run.batches(groups=2, step=2)
    ]
    assert resumed == seen[2:]


async def test_a_save_that_fails_commits_nothing(run: Run) -> None:
    await run.put(tasks(2))
    await work(run, 2 * GROUP)
    batches = run.batches(groups=2, steps=1)
    async for _ in batches:
        pass
    with pytest.raises(OSError):
        async with batches.checkpoint():
            raise OSError("disk full")
    assert (await run.state()).committed_step == 0
    assert await resident(run) == {"settled": 2 * GROUP}


async def test_the_end_of_the_feed_ends_a_lease(run: Run) -> None:
    await run.close_feed()
    with pytest.raises(EndOfDataError):
        async with run.lease("rollout"):
            pass


async def test_a_run_that_nobody_opened_is_not_found(queue_address: str) -> None:
    async with Queue.connect(queue_address) as queue:
        with pytest.raises(NotFoundError):
            await queue.run("nowhere").ledger()


@pytest.mark.parametrize("address", ["", "nowhere", "host:", "host:http", ":7001", "host:70000"])
def test_a_wrong_address_is_refused_with_the_right_form(address: str) -> None:
    with pytest.raises(UserError, match="want host:port"):
        Queue.connect(address)


async def test_a_row_of_another_lease_is_refused(run: Run) -> None:
    await run.put(tasks(2))
    async with run.lease("rollout") as one, run.lease("rollout") as other:
        with pytest.raises(UserError, match="not in this lease"):
            await one.write([answer(other.rows[0])])
