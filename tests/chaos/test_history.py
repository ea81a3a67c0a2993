"""The history checker finds nothing in a right queue, and finds each planted bug: lives of a run in one process."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest

from meshrl.contract.errors import CapacityError, MeshError
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore

from .campaign.actors import actor, resume
from .campaign.bugs import BUGS, planted
from .campaign.events import EventLog, lines, read
from .campaign.history import History, Verdict
from .campaign.plan import ACTORS, CHECKPOINT_EVERY, RUN, Plan
from .campaign.recorded import RecordedQueue, ledger_facts

STEPS = 16


async def live(plan: Plan) -> Verdict:
    """A run of some steps in which the consumer dies once, between two checkpoints."""
    real = await TransferQueue.open(MemoryStore())
    queue = planted(plan.bug, real)

    async def act(name: str) -> None:
        recorded = RecordedQueue(queue, EventLog(plan.events, name))
        await actor(name, plan, random.Random(name))(recorded)

    async def lived() -> None:
        async with asyncio.TaskGroup() as tasks:
            running = {name: tasks.create_task(act(name)) for name in ACTORS}
            await steps(running["consumer"], STEPS // 2)
            running["consumer"].cancel()
            await asyncio.wait([running["consumer"]])
            again = tasks.create_task(act("consumer"))
            await steps(again, STEPS)
            plan.enough.touch()

    async def steps(consumer: asyncio.Task[None], count: int) -> None:
        """Returns behind so many steps, in the middle between two checkpoints."""
        while not consumer.done():
            done = len(list(lines(plan.lineage)))
            if done >= count and done % CHECKPOINT_EVERY == CHECKPOINT_EVERY - 1:
                return
            await asyncio.sleep(0.001)

    try:
        # A queue that is wrong may leave its actors with nothing to do.
        async with asyncio.timeout(15 if plan.bug else 120):
            await lived()
    except (TimeoutError, ExceptionGroup, MeshError):
        assert plan.bug
    ledger = ledger_facts(await queue.ledger(RUN))
    cursor = (await queue.run_state(RUN)).cursor
    plan.final.write_text(json.dumps({"ledger": ledger, "cursor": cursor}))
    await real.close()
    return History(plan).check()


def made(folder: Path, bug: str = "") -> Plan:
    return Plan(folder=folder, bug=bug, lease_ttl_s=0.3)


async def test_a_right_queue_has_a_legal_history(tmp_path: Path) -> None:
    verdict = await live(made(tmp_path))
    assert verdict.legal, verdict
    assert (verdict.lost, verdict.duplicated) == (0, 0)
    assert verdict.trained >= 50


@pytest.mark.parametrize("bug", BUGS)
async def test_each_planted_bug_is_found_by_the_rule_that_is_there_for_it(
    tmp_path: Path, bug: str
) -> None:
    verdict = await live(made(tmp_path, bug))
    assert not verdict.legal
    assert verdict.violations[BUGS[bug][1]], verdict


def test_a_torn_line_is_an_answer_that_nobody_heard(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "actor")
    log.end(log.begin("commit", step=1))
    log.end(log.begin("commit", step=2))
    path = tmp_path / "actor.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    log = EventLog(tmp_path, "actor")
    log.end(log.begin("commit", step=3))
    calls = read(tmp_path)
    assert [call.asked["step"] for call in calls] == [1, 2, 3]
    assert [call.ended is not None for call in calls] == [True, False, True]


def test_every_question_is_asked_again_while_the_disk_is_full(tmp_path: Path) -> None:
    refusals = [CapacityError("no space", free=0)] * 2

    class Full:
        async def release(self, run: str) -> str:
            if refusals:
                raise refusals.pop()
            return run

    queue = RecordedQueue(Full(), EventLog(tmp_path, "actor"))  # type: ignore[arg-type]
    assert asyncio.run(queue.release("run")) == "run"
    assert [call.error for call in read(tmp_path)] == ["capacity", "capacity", None]


def test_resuming_forgets_what_was_learned_after_the_checkpoint(tmp_path: Path) -> None:
    plan = made(tmp_path)
    assert resume(plan) == 0
    plan.lineage.write_text('{"step":0,"rows":[]}\n')
    plan.checkpoint.write_text(json.dumps({"step": 1, "bytes": plan.lineage.stat().st_size}))
    with plan.lineage.open("a") as lineage:
        lineage.write('{"step":1,"ro')
    assert resume(plan) == 1
    assert plan.lineage.read_text() == '{"step":0,"rows":[]}\n'
