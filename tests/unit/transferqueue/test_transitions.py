"""The table of states and verbs in the room's README is what the queue does, and `model/` alone changes state."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import meshrl.transferqueue.model
from meshrl.contract.errors import WaitTimeoutError
from meshrl.contract.types import ROLLOUT_STAGE, GroupPolicy, LeasedRow, Outcome, StalePolicy, Uid
from meshrl.testing.contract.queue_actors import Actors, spec, tasks, tokens_of
from meshrl.transferqueue.model.fair_share import Holder
from meshrl.transferqueue.model.group import Grant, Group
from meshrl.transferqueue.model.records import DeadRow, Exit, RunRecord, State, TakenBatch
from meshrl.transferqueue.model.run import Run
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore

README = Path(__file__).parents[3] / "transferqueue/README.md"
Move = tuple[str, str, str]
OUTSIDE = "-"


def drawn() -> set[Move]:
    """The rows `| verb | from | to |` of the README; a cell may name several states."""
    found: set[Move] = set()
    table = README.read_text().partition("| verb | from | to |")[2].partition("\n\n")[0]
    for line in table.splitlines()[2:]:
        verbs, olds, news = (re.findall(r"[a-z_]+|-", cell) for cell in line.split("|")[1:4])
        found |= {(verb, old, new) for verb in verbs for old in olds for new in news}
    return found


class Watched:
    """A queue that notes between which states each verb moves rows."""

    def __init__(self, queue: TransferQueue, moves: set[Move]) -> None:
        self._queue, self._moves = queue, moves
        self._exits = 0

    def __getattr__(self, verb: str) -> Any:
        method = getattr(self._queue, verb)

        async def call(*args: Any, **named: Any) -> Any:
            before = self.states()
            try:
                return await method(*args, **named)
            finally:
                self.note(verb.removesuffix("_rows"), before)

        return call

    def states(self) -> dict[Uid, str]:
        [run] = self._queue.open_runs or [None]
        if run is None:
            return {}
        return {
            group.uid(index): run.state_of(group, index).value
            for group in run.groups.values()
            for index in range(group.size)
            if group.present >> index & 1
        }

    def note(self, verb: str, before: dict[Uid, str]) -> None:
        after = self.states()
        if not before and not after:
            return
        [run] = self._queue.open_runs
        entries = [entry for _, noted in run.audit_log._records for entry in noted]
        exits = {task: exit_ for task, _, exit_, _ in entries[self._exits :] if exit_ in set(Exit)}
        self._exits = len(entries)
        for uid in before.keys() | after.keys():
            left = Exit.DEAD.value if uid in run.dead_letters else exits.get(uid.task, OUTSIDE)
            old, new = before.get(uid, OUTSIDE), after.get(uid, str(left))
            if old != new:
                self._moves.add((verb, old, new))


async def watched(moves: set[Move], **changes: Any) -> tuple[Actors, TransferQueue]:
    queue = await TransferQueue.open(MemoryStore())
    actors = Actors(Watched(queue, moves))  # type: ignore[arg-type]
    await actors.start(spec(**{"max_staleness": 4.0, "batch_groups": 4, **changes}))
    return actors, queue


async def test_the_table_in_the_readme_is_what_the_verbs_do() -> None:
    moves: set[Move] = set()
    await train_and_go_back(moves)
    await give_back(moves)
    await grow_old(moves, StalePolicy.REISSUE)
    await grow_old(moves, StalePolicy.DROP)
    await lose_a_row(moves, "fail")
    await lose_a_row(moves, "expire")
    await go_on_without_some(moves)
    await sample_only(moves)
    assert sorted(moves) == sorted(drawn())


async def train_and_go_back(moves: set[Move]) -> None:
    actors, queue = await watched(moves)
    await actors.feed(tasks(4))
    await actors.work()
    batch = await actors.take(0, 1)
    await actors.queue.acquire("run", "next")
    actors.epoch = 2
    await actors.queue.rewind("run", epoch=2, step=0)
    await actors.take(0, 1, name="again")
    await actors.settle(0, name="again")
    await actors.queue.acquire("run", "last")
    actors.epoch = 3
    await actors.queue.rewind("run", epoch=3, step=0)
    await actors.take(0, 1, name="once more")
    await actors.settle(0, name="once more")
    await actors.commit(1)
    batch = await actors.take(1, 2)
    uids = [row.uid for row in batch.rows]
    await actors.queue.filter("run", epoch=3, uids=uids[:1], reason="too easy")
    await actors.queue.filter("run", epoch=3, uids=uids[-1:], reason="cannot be trained on: NaN")
    await actors.queue.redo("run", "reward", [])
    await actors.queue.replay("run", uids[-1:])
    await queue.close()


async def give_back(moves: set[Move]) -> None:
    actors, queue = await watched(moves, max_attempts=2)
    await actors.feed(tasks(1))
    await actors.queue.release("run", "rollout", tokens_of(await actors.lease()))
    row = (await actors.lease(limit=1)).rows[0]
    await lost("fail", actors, queue, "rollout", row)
    leases = [await actors.lease(limit=1) for _ in range(2)]
    row = next(lease.rows[0] for lease in leases if lease.rows[0].delivery == 1)
    await lost("expire", actors, queue, "rollout", row)
    await queue.close()


async def lost(verb: str, actors: Actors, queue: TransferQueue, stage: str, row: LeasedRow) -> None:
    """Its worker says that it cannot work on the row, or is silent."""
    if verb == "fail":
        await actors.queue.fail("run", stage, row.uid, row.token, Outcome.INFRA_FAULT, "died")
        return
    [run] = queue.open_runs
    before = actors.queue.states()  # type: ignore[attr-defined]
    for grant in list(run.by_task[row.uid.task].grants):
        if grant.mask >> row.uid.index & 1:
            run.expire(grant, attended=False)
    actors.queue.note(verb, before)  # type: ignore[attr-defined]


async def in_every_state(actors: Actors) -> LeasedRow:
    """A group of five: a row is ready, one pending, one queued, and two are leased, one of which is returned."""
    await actors.feed(tasks(1, group_size=5))
    lease = await actors.lease(limit=3)
    await actors.write(lease, rows=lease.rows[:2])
    await actors.write(await actors.lease("reward", limit=1))
    await actors.lease(limit=1, worker="another")
    return lease.rows[2]


async def lose_a_row(moves: set[Move], verb: str) -> None:
    """Dead letters: sampled or scored once too often, among siblings in every state, or alone, or replaced."""
    for policy in GroupPolicy:
        actors, queue = await watched(moves, max_attempts=1, group_policy=policy, group_k=1)
        row = await in_every_state(actors)
        await lost(verb, actors, queue, "rollout", row)
        if policy is GroupPolicy.REPLACE_SIBLING:
            row = (await actors.lease("reward", limit=1)).rows[0]
            await lost(verb, actors, queue, "reward", row)
        await queue.close()


async def go_on_without_some(moves: set[Move]) -> None:
    actors, queue = await watched(moves, group_policy=GroupPolicy.K_OF_N, group_k=1)
    await in_every_state(actors)
    await actors.take(0, 1)
    await actors.feed(tasks(1, start=1))
    await actors.work()
    (row, _) = (await actors.take(1, 1)).rows
    await actors.queue.filter("run", epoch=1, uids=[row.uid], reason="cannot be trained on: NaN")
    await queue.close()


async def sample_only(moves: set[Move]) -> None:
    actors, queue = await watched(moves, stages=(ROLLOUT_STAGE,))
    await actors.feed(tasks(1))
    await actors.write(await actors.lease())
    await queue.close()


async def grow_old(moves: set[Move], policy: StalePolicy) -> None:
    actors, queue = await watched(moves, max_staleness=1.0, stale_policy=policy)
    await actors.feed(tasks(1))
    await actors.work()
    await actors.publish(3)
    with pytest.raises(WaitTimeoutError):
        await actors.take(3, 1)
    await queue.close()


def test_every_state_and_exit_is_in_the_table() -> None:
    named = {state for _, old, new in drawn() for state in (old, new)} - {OUTSIDE}
    assert named == {*map(str, State), *map(str, Exit)}


MODEL = Path(meshrl.transferqueue.model.__path__[0])
MODULES = sorted(MODEL.parent.rglob("*.py"))


def set_on_self(path: Path) -> Iterator[str]:
    """Attributes that the methods of a module's classes set on `self`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


STATE = {*dir(Run), *set_on_self(MODEL / "rows.py"), *set_on_self(MODEL / "run.py")}.union(
    *(each.__slots__ for each in (Group, Grant, TakenBatch, DeadRow, Holder, RunRecord))
)


def changes(path: Path) -> Iterator[str]:
    """Attributes of the model's classes, or items of them, that a module sets or deletes on others than `self`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            owner: ast.expr = node
            names: set[str] = set()
            while isinstance(owner, ast.Attribute | ast.Subscript):
                if isinstance(owner, ast.Attribute):
                    names.add(owner.attr)
                owner = owner.value
            of_self = isinstance(owner, ast.Name) and owner.id == "self"
            if names & STATE and not of_self:
                yield f"{path.name}:{node.lineno}: {ast.unparse(node)}"


def test_no_module_outside_model_sets_state_of_a_run_or_group() -> None:
    paths = [path for path in MODULES if path.parent == MODEL.parent]
    assert paths
    assert [change for path in paths for change in changes(path)] == []


def test_the_check_finds_an_assignment() -> None:
    assert any(list(changes(path)) for path in MODULES if path.parent == MODEL)
