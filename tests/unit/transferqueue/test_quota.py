"""Bounds: on names and sizes of a client's requests, on tasks that are remembered, on the tokens of rows."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from meshrl.contract.errors import CapacityError, UserError, WaitTimeoutError
from meshrl.contract.types import ROLLOUT_STAGE, StageSpec
from meshrl.testing.contract.queue_actors import Actors, spec, task, tasks
from meshrl.transferqueue.model import records
from meshrl.transferqueue.model.specs import Quota
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore

BAD = [".", "..", "a\0b", "a\nb", "\ud800", "\u202e", "x" * 201]


@pytest.fixture
async def queue() -> AsyncIterator[TransferQueue]:
    queue = await TransferQueue.open(
        MemoryStore(), quota=Quota(runs=1, stages=8, group_rows=8, lease_rows=4)
    )
    yield queue
    await queue.close()


@pytest.mark.parametrize("name", ["", "a/b", *BAD], ids=ascii)
async def test_a_run_has_a_name_that_a_file_and_a_log_line_can_have(
    queue: TransferQueue, name: str
) -> None:
    with pytest.raises(UserError):
        await queue.open_run(spec(run=name))
    assert queue.runs == ()


@pytest.mark.parametrize("name", ["", "w\n12:00:00 ERROR forged", *BAD[:-1]], ids=ascii)
async def test_so_has_whoever_leases_rows_or_takes_a_run_over(
    queue: TransferQueue, name: str
) -> None:
    await queue.open_run(spec())
    with pytest.raises(UserError, match="the name of the worker"):
        await queue.lease(["run"], "rollout", worker=name, limit=1, wait_s=0)
    with pytest.raises(UserError, match="the name of the owner"):
        await queue.acquire("run", name)


@pytest.mark.parametrize("name", ["", "a/../b", "/a", *BAD[:-1]], ids=ascii)
async def test_so_have_its_stages_columns_and_tasks(queue: TransferQueue, name: str) -> None:
    for stage in (
        StageSpec(name=name, reads=(), writes=("tokens",)),
        StageSpec(name="rollout", reads=(), writes=("tokens", name)),
    ):
        with pytest.raises(UserError, match="stage or column"):
            await queue.open_run(spec(stages=(stage,)))
    await queue.open_run(spec())
    with pytest.raises(UserError, match=r"is not a name|wants an id"):
        await queue.admit("run", [task(name)], cursor="", wait_s=0)


@pytest.mark.parametrize(
    ("asked", "key"),
    [
        ({"resident_bytes": 1 << 60}, "resident_bytes"),
        ({"batch_groups": 1 << 30}, "resident_rows"),
        ({"max_staleness": 1e12}, "resident_rows"),
        ({"max_staleness": float("inf"), "resident_batches": 1 << 30}, "resident_rows"),
        ({"group_size": 9}, "group_rows"),
        (
            {
                "stages": tuple(
                    StageSpec(name=f"s{n}", reads=(), writes=(f"c{n}",)) for n in range(9)
                )
            },
            "stages",
        ),
        (
            {"stages": (StageSpec(name="s", reads=(), writes=tuple(f"c{n}" for n in range(9))),)},
            "stages",
        ),
    ],
    ids=str,
)
async def test_a_run_asks_for_no_more_than_the_queue_allows(
    queue: TransferQueue, asked: dict[str, object], key: str
) -> None:
    asked_for = key.replace("_", " ")
    with pytest.raises(CapacityError, match=rf"{asked_for}, and this queue allows \d+"):
        await queue.open_run(spec(**({"stages": (ROLLOUT_STAGE,)} | asked)))
    assert queue.runs == ()


async def test_a_queue_keeps_so_many_runs_and_groups_have_so_many_rows(
    queue: TransferQueue,
) -> None:
    await queue.open_run(spec(stages=(StageSpec(name="s", reads=(), writes=("c",)),)))
    with pytest.raises(UserError, match=r"9 rows, at most 8$"):
        await queue.admit("run", [task("t", group_size=9)], cursor="", wait_s=0)
    with pytest.raises(CapacityError, match=r"1 runs already"):
        await queue.open_run(
            spec(run="another", stages=(StageSpec(name="s", reads=(), writes=("c",)),))
        )


async def test_one_lease_has_so_many_rows_and_the_next_has_the_others(queue: TransferQueue) -> None:
    await queue.open_run(spec(group_size=6, gated=False, stages=(ROLLOUT_STAGE,)))
    await queue.admit("run", [task("t", group_size=6)], cursor="", wait_s=0)
    leases = [
        await queue.lease(
            ["run"],
            "rollout",
            worker="w",
            limit=1 << 30,
            at_least=least,
            wait_s=0,
        )
        for least in (1 << 30, 1)
    ]
    assert [len(lease.rows) for lease in leases] == [4, 2]


async def trained(actors: Actors, start: int, steps: int) -> None:
    """Batches of two groups each, through to the commit."""
    for step in range(start, start + steps):
        await actors.feed(tasks(2, start=2 * step))
        await actors.work()
        await actors.take(step)
        await actors.settle(step)
        await actors.publish(step + 1)
        await actors.commit(step + 1)


async def test_tasks_that_left_long_ago_are_forgotten_also_after_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(records, "REMEMBERED", 4)
    store = MemoryStore()
    actors = Actors(await TransferQueue.open(store))
    await actors.start()
    await trained(actors, 0, 4)
    await actors.queue.close()

    actors.queue = queue = await TransferQueue.open(store)
    await trained(actors, 4, 1)
    # t2 .. t7 had left when t8 and t9 came: the last four are known, and change nothing.
    assert await queue.admit("run", tasks(4, start=4), cursor="", wait_s=0) == 4
    assert (await queue.ledger("run")).admitted == 20
    assert len(queue._runs["run"].known_tasks) == 6
    await actors.feed(tasks(1, start=0))
    assert (await queue.ledger("run")).admitted == 22
    await queue.close()


async def test_new_groups_wait_while_the_rows_hold_too_many_tokens() -> None:
    actors = Actors(await TransferQueue.open(MemoryStore()))
    await actors.start(spec(max_staleness=9.0, resident_tokens=24))
    await actors.feed(tasks(2))
    await actors.work()  # four rows of six tokens
    assert await actors.queue.admit("run", tasks(3, start=1), cursor="", wait_s=0) == 1
    with pytest.raises(WaitTimeoutError, match="24 of 24 tokens"):
        await actors.queue.admit("run", tasks(1, start=2), cursor="", wait_s=0)
    await actors.take(0)
    await actors.settle(0)
    await actors.publish(1)
    assert await actors.queue.admit("run", tasks(1, start=2), cursor="", wait_s=0) == 1
    await actors.queue.close()
