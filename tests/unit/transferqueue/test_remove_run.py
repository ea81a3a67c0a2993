"""A run is removed from a queue: all of it or nothing, and nothing of another."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from meshrl.contract.errors import CapacityError, ConflictError, InfraError, NotFoundError
from meshrl.contract.types import Outcome
from meshrl.testing.contract.queue_actors import WAIT_S, Actors, rollout_of, spec, tasks, tokens_of
from meshrl.transferqueue import why_waiting
from meshrl.transferqueue.admin import QueueAdmin
from meshrl.transferqueue.model.specs import Quota
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.store import Operation, Store, Table
from meshrl.transferqueue.stores.disk import DiskStore
from meshrl.transferqueue.stores.memory import MemoryStore


async def used(queue: TransferQueue, run: str) -> Actors:
    """A run with rows in every state, long ones too, a settled and a taken batch, a checkpoint and dead letters."""
    actors = Actors(queue, run)
    await actors.start(spec(run, max_staleness=9.0, max_attempts=1))
    await actors.feed(tasks(12, run=run), cursor="here")
    await actors.work(limit=16)
    await actors.train(0)
    await actors.commit(1)
    await actors.train(1)
    await actors.take(2)
    long = await actors.lease(limit=2)  # a frame beside the records
    await queue.write_rows(
        run,
        "rollout",
        tokens_of(long),
        [rollout_of(row, actors.version, tokens=50_000) for row in long.rows],
    )
    lease = await actors.lease(limit=1)
    [(uid, token)] = tokens_of(lease).items()
    await queue.fail(run, "rollout", uid, token, Outcome.INFRA_FAULT, "broken")
    return actors


async def kept(store: Store) -> list[Operation]:
    return [operation async for piece in store.export() for operation in piece]


def keys_of(operations: Sequence[Operation], number: int) -> list[bytes]:
    return [each.key for each in operations if each.key[1:5] == number.to_bytes(4, "big")]


def forget_calls(queue: TransferQueue) -> None:
    """As if ATTACHED_S had passed."""
    queue._called.clear()


@pytest.mark.parametrize("kind", ["memory", "disk"])
async def test_nothing_is_left_of_it_and_everything_of_the_others(
    kind: str, tmp_path: Path
) -> None:
    store: Store = MemoryStore() if kind == "memory" else DiskStore(tmp_path)
    queue = await TransferQueue.open(store)
    for run in ("first", "second", "third"):
        await used(queue, run)
    before = {run: await queue.ledger(run) for run in queue.runs}
    stored = await kept(store)
    assert all(keys_of(stored, number) for number in range(3))
    assert kind == "memory" or store.size_bytes() > 1 << 20
    gone = await queue.remove_run("second", force=True)
    assert gone.ledger == before["second"] and gone.committed_step == 1
    assert gone.loss == "18 resident rows, 1 dead letter and the feeder's position"
    after = await kept(store)
    assert not keys_of(after, 1)
    assert keys_of(after, 0) and keys_of(after, 2)
    audit = await QueueAdmin(queue, store).verify()
    assert audit.problems == [] and set(audit.ledgers) == {"first", "third"}
    assert {run: await queue.ledger(run) for run in queue.runs} == {
        run: before[run] for run in ("first", "third")
    }
    with pytest.raises(NotFoundError):
        await queue.remove_run("second", force=True)
    # The name can be used again, and the number of the last run as well.
    await used(queue, "second")
    await queue.remove_run("second", force=True)
    await used(queue, "fourth")
    await queue.close()
    if kind == "disk":
        store = DiskStore(tmp_path)
        queue = await TransferQueue.open(store)
        assert set(queue.runs) == {"first", "third", "fourth"}
        assert (await QueueAdmin(queue, store).verify()).problems == []
        await queue.close()


async def test_a_run_that_services_work_on_is_kept_unless_by_force() -> None:
    queue = await TransferQueue.open(MemoryStore())
    actors = Actors(queue)
    await actors.start(spec(max_staleness=9.0))
    await actors.feed(tasks(1))
    with pytest.raises(ConflictError, match=r"is worked on: a service has worked on it 0 s ago"):
        await queue.remove_run("run")
    forget_calls(queue)
    lease = await actors.lease()
    with pytest.raises(ConflictError, match="w holds 2 rows of stage rollout"):
        await queue.remove_run("run")
    await actors.write(lease)
    forget_calls(queue)
    taking = asyncio.ensure_future(actors.take(0, wait_s=WAIT_S))
    await actors.write(await actors.lease("reward"))
    waiting = asyncio.ensure_future(actors.lease("reward", wait_s=WAIT_S))
    await asyncio.sleep(0)
    forget_calls(queue)
    (found,) = queue.stored_runs()
    assert len(found.attached) == 2 and "trainer of epoch 1" in found.attached[0]
    with pytest.raises(ConflictError, match="waits for"):
        await queue.remove_run("run")
    await queue.remove_run("run", force=True)
    with pytest.raises(NotFoundError):
        await taking
    # A stage waits for a run by its name, as it did before there was one.
    await actors.start(spec(max_staleness=9.0))
    await actors.feed(tasks(1))
    await actors.write(await actors.lease())
    assert len((await waiting).rows) == 2
    await queue.close()


async def test_a_run_that_is_over_needs_no_force(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = await TransferQueue.open(MemoryStore())
    await Actors(queue).start()
    monkeypatch.setattr(why_waiting, "ATTACHED_S", 0.0)
    assert queue.stored_runs()[0].attached == ()
    await queue.remove_run("run")
    assert queue.runs == ()
    await queue.close()


async def test_leases_of_a_removed_run_end_with_it_and_disturb_none_of_its_name() -> None:
    queue = await TransferQueue.open(MemoryStore())
    actors = Actors(queue)
    for _ in range(2):
        await actors.start(spec(lease_ttl_s=0.05))
        await actors.feed(tasks(1))
        lease = await actors.lease()
        await queue.remove_run("run", force=True)
    await actors.start(spec())
    await actors.feed(tasks(1))
    with queue.heartbeat("w"):
        pass
    await asyncio.sleep(0.3)  # the leases of the removed runs would have expired
    assert await actors.resident() == {"queued": 2}
    with pytest.raises(Exception, match="fenced"):
        await actors.write(lease)
    await queue.close()


class Refusing(MemoryStore):
    """Fails the commits that `fails` says."""

    fails = False

    async def apply(self, operations: Sequence[Operation]) -> None:
        if self.fails:
            self.fails = False
            raise InfraError("the disk is gone")
        await super().apply(operations)


async def test_a_removal_that_cannot_be_committed_has_not_happened() -> None:
    store = Refusing()
    queue = await TransferQueue.open(store)
    actors = await used(queue, "run")
    before, stored = await actors.ledger(), await kept(store)
    store.fails = True
    with pytest.raises(InfraError):
        await queue.remove_run("run", force=True)
    assert await actors.ledger() == before and await kept(store) == stored
    await queue.remove_run("run", force=True)
    assert [each for each in await kept(store) if each.table in Table] == []
    await queue.close()


async def test_one_commit_removes_it() -> None:
    commits: list[int] = []

    class Counting(MemoryStore):
        async def apply(self, operations: Sequence[Operation]) -> None:
            commits.append(len(operations))
            await super().apply(operations)

    queue = await TransferQueue.open(Counting())
    await used(queue, "run")
    commits.clear()
    await queue.remove_run("run", force=True)
    assert len(commits) == 1
    await queue.close()


REMOVER = """
import asyncio, sys
from pathlib import Path
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.disk import DiskStore

async def main():
    queue = await TransferQueue.open(DiskStore(Path(sys.argv[1])))
    print("open", flush=True)
    await queue.remove_run("second", force=True)
    print("removed", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("after_s", [0.0, 0.0005, 0.001, 0.002, 0.004, 0.2])
async def test_a_kill_9_leaves_it_there_or_gone(after_s: float, tmp_path: Path) -> None:
    queue = await TransferQueue.open(DiskStore(tmp_path))
    for run in ("first", "second"):
        await used(queue, run)
    before = {run: await queue.ledger(run) for run in queue.runs}
    await queue.close()
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", REMOVER, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None and await child.stdout.readline() == b"open\n"
    await asyncio.sleep(after_s)
    with contextlib.suppress(ProcessLookupError):
        child.kill()
    acknowledged = b"removed" in await child.stdout.read()
    await child.wait()
    store = DiskStore(tmp_path)
    queue = await TransferQueue.open(store)
    assert (await QueueAdmin(queue, store).verify()).problems == []
    assert set(queue.runs) in ({"first"}, {"first", "second"})
    assert not acknowledged or queue.runs == ("first",)
    assert {run: await queue.ledger(run) for run in queue.runs} == {
        run: before[run] for run in queue.runs
    }
    await queue.close()


async def test_one_caller_leaves_room_for_others_and_removal_makes_room() -> None:
    store = MemoryStore()
    queue = await TransferQueue.open(store, quota=Quota(runs=8))
    for number in range(6):
        await queue.open_run(spec(f"a{number}"), caller="feeder")
    for _ in range(2):
        with pytest.raises(
            CapacityError, match=r"feeder has opened 6 runs.*may open 6.*runs remove"
        ):
            await queue.open_run(spec("more"), caller="feeder")
        await queue.open_run(spec("a0"), caller="feeder")  # it is open already
        await queue.close()
        queue = await TransferQueue.open(store, quota=Quota(runs=8))
    await queue.open_run(spec("b"), caller="trainer")
    await queue.open_run(spec("c"))
    with pytest.raises(CapacityError, match="runs already"):
        await queue.open_run(spec("d"))
    await queue.remove_run("a3")
    await queue.open_run(spec("a9"), caller="feeder")
    assert [one.opened_by for one in queue.stored_runs()][-3:] == ["trainer", "", "feeder"]
    await queue.close()


async def test_a_small_quota_has_room_for_a_training_run_and_its_evaluation() -> None:
    queue = await TransferQueue.open(MemoryStore(), quota=Quota(runs=2))
    for name in ("run", "run-eval"):
        await queue.open_run(spec(name), caller="trainer")
    await queue.close()
