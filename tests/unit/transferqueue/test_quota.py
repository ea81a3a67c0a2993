"""Bounds on a client's requests: on names, and on sizes, which the queue's own recipe limits."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from meshrl.contract.errors import CapacityError, UserError
from meshrl.contract.types import ROLLOUT_STAGE, StageSpec
from meshrl.testing.contract.queue_actors import spec, task
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
    with pytest.raises(UserError, match=r"is no name|wants an id"):
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
