"""Every method of the port that changes a queue: durable before it answers, fenced, and the same if repeated.

A method that is added to the port and stands in no table here fails `test_every_method_is_in_a_table`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pytest

from meshrl.contract.errors import FencedError
from meshrl.contract.frames import Frame
from meshrl.contract.ports import Queue
from meshrl.contract.types import (
    GenerateDelta,
    Lease,
    LeasedRow,
    Outcome,
    RowBlock,
    Version,
    pack_rows,
)
from meshrl.rollout.generation_checkpoint import progress_frame
from meshrl.testing.contract.queue_actors import Actors, rollout_of, spec, tasks, tokens_of
from meshrl.transferqueue.queue import TransferQueue
from tests.doubles.gated_store import GatedStore

READING: Final = {
    "run_state": "changes nothing",
    "ledger": "changes nothing",
    "dead_letters": "changes nothing",
    "why_waiting": "changes nothing",
    "fetch": "changes nothing",
    "fetch_rows": "`fetch` by the row",
    "write_rows": "`write` by the row",
    "renew_held": "`renew`, again and again",
}
"""Methods of the port that write nothing themselves."""

State = dict[str, Any]
Call = Callable[[Actors, State], Awaitable[object]]


@dataclass(frozen=True)
class Writing:
    """One method that writes."""

    prepare: Callable[[Actors, State], Awaitable[None]]
    call: Call
    fenced_by: str
    """`lease`, `epoch`, or why nobody fences it."""
    again: str = ""
    """Why a repeated call may do more; empty where it may not."""
    ignores: str = ""
    """Why it passes over what the caller holds no more; empty where it refuses it."""
    in_ram: str = ""
    """Why it may answer before a commit; empty where it may not."""


async def nothing(actors: Actors, state: State) -> None: ...


async def admitted(actors: Actors, state: State) -> None:
    await actors.feed(tasks(2))


async def leased(actors: Actors, state: State) -> None:
    await admitted(actors, state)
    state["lease"] = await actors.lease()


async def sampled(actors: Actors, state: State) -> None:
    await leased(actors, state)
    await actors.write(state["lease"])


async def scored(actors: Actors, state: State) -> None:
    await sampled(actors, state)
    await actors.write(await actors.lease("reward"))


async def taken(actors: Actors, state: State) -> None:
    await scored(actors, state)
    state["batch"] = await actors.take(0)


async def settled(actors: Actors, state: State) -> None:
    await taken(actors, state)
    await actors.settle(0)


async def rewound(actors: Actors, state: State) -> None:
    """A step that was settled in an epoch before, which a checkpoint does not have."""
    await settled(actors, state)
    actors.epoch = (await actors.queue.acquire(actors.run, "trainer")).epoch


async def dead(actors: Actors, state: State) -> None:
    await leased(actors, state)
    row = first(state)
    await actors.queue.fail(
        actors.run, "rollout", row.uid, row.token, Outcome.POLICY_FAULT, "no answer"
    )
    state["letters"] = [letter.uid for letter in await actors.queue.dead_letters(actors.run)]
    assert state["letters"]


def first(state: State) -> LeasedRow:
    lease: Lease = state["lease"]
    return lease.rows[0]


def block_of(actors: Actors, state: State) -> list[RowBlock]:
    rows = state["lease"].rows
    return pack_rows(tokens_of(state["lease"]), [rollout_of(row, actors.version) for row in rows])


def progress_of(actors: Actors, state: State) -> list[RowBlock]:
    delta = GenerateDelta(
        tokens=np.arange(2, dtype=np.int32),
        logprobs=np.zeros(2, dtype=np.float32),
        version=actors.version,
    )
    row = first(state)
    return [
        RowBlock(
            task=row.uid.task,
            indices=(row.uid.index,),
            attempts=(row.uid.attempt,),
            token=row.token,
            frames=(Frame(progress_frame([[delta]])),),
            starts=(0,),
        )
    ]


WRITING: Final[Mapping[str, Writing]] = {
    "open_run": Writing(
        nothing,
        lambda a, s: a.queue.open_run(spec("other")),
        "nobody: any feeder may declare the same run",
    ),
    "acquire": Writing(
        admitted,
        lambda a, s: a.queue.acquire(a.run, "trainer"),
        "nobody: it is what fences",
        again="each is a new epoch",
    ),
    "admit": Writing(
        nothing,
        lambda a, s: a.queue.admit(a.run, tasks(2), cursor="c", wait_s=0),
        "nobody: task ids are known",
    ),
    "close_feed": Writing(
        admitted, lambda a, s: a.queue.close_feed(a.run), "nobody: it can only be closed once"
    ),
    "lease": Writing(
        admitted,
        lambda a, s: a.lease(limit=1),
        "the version: an engine of an older epoch gets no rows",
        again="each gives other rows",
    ),
    "renew": Writing(
        leased,
        lambda a, s: a.queue.renew(a.run, "rollout", "w", [row.uid for row in s["lease"].rows]),
        "the worker's name: uids that it holds no longer are the answer",
        in_ram="leases of a queue that ended begin anew",
    ),
    "write": Writing(leased, lambda a, s: a.queue.write(a.run, "rollout", block_of(a, s)), "lease"),
    "append": Writing(
        leased, lambda a, s: a.queue.append(a.run, "rollout", progress_of(a, s)), "lease"
    ),
    "fail": Writing(
        leased,
        lambda a, s: a.queue.fail(
            a.run, "rollout", first(s).uid, first(s).token, Outcome.INFRA_FAULT, "broken"
        ),
        "lease",
    ),
    "release": Writing(
        leased,
        lambda a, s: a.queue.release(a.run, "rollout", tokens_of(s["lease"])),
        "lease",
        ignores="a drain gives back what it still holds",
    ),
    "redo": Writing(
        scored,
        lambda a, s: a.queue.redo(a.run, "reward", []),
        "nobody: it returns rows to a stage, which any trainer may ask",
    ),
    "take": Writing(scored, lambda a, s: a.take(0), "epoch"),
    "filter": Writing(
        taken,
        lambda a, s: a.queue.filter(
            a.run, epoch=a.epoch, uids=[s["batch"].rows[0].uid], reason="all right"
        ),
        "epoch",
    ),
    "settle": Writing(taken, lambda a, s: a.settle(0), "epoch"),
    "publish": Writing(settled, lambda a, s: a.queue.publish(a.run, Version(a.epoch, 1)), "epoch"),
    "commit": Writing(settled, lambda a, s: a.commit(1), "epoch"),
    "rewind": Writing(rewound, lambda a, s: a.queue.rewind(a.run, epoch=a.epoch, step=0), "epoch"),
    "replay": Writing(
        dead,
        lambda a, s: a.queue.replay(a.run, s["letters"]),
        "nobody: an operator's command",
        again="a letter that was replayed is there no more",
    ),
}


async def snapshot(queue: Queue) -> object:
    """All that callers can see of the runs of a queue."""
    seen: dict[str, object] = {}
    assert isinstance(queue, TransferQueue)
    for run in queue.runs:
        ledger = await queue.ledger(run)
        assert ledger.balanced, ledger
        letters = [(str(each.uid), each.reason) for each in await queue.dead_letters(run)]
        seen[run] = ledger, await queue.run_state(run), letters
    return seen


async def opened(store: GatedStore) -> Actors:
    return Actors(await TransferQueue.open(store, recovery_pause_s=0.01))


async def prepared(name: str) -> tuple[Actors, GatedStore, State]:
    store = GatedStore()
    actors = await opened(store)
    await actors.start(spec(max_staleness=99.0, max_attempts=1 if name == "replay" else 3))
    state: State = {}
    await WRITING[name].prepare(actors, state)
    return actors, store, state


def test_every_method_is_in_a_table() -> None:
    methods = {
        name
        for name, _ in inspect.getmembers(Queue, inspect.iscoroutinefunction)
        if not name.startswith("_")
    }
    assert methods == {*READING, *WRITING}


@pytest.mark.parametrize("name", [name for name in WRITING if not WRITING[name].in_ram])
async def test_it_answers_when_what_it_did_is_durable(name: str) -> None:
    actors, store, state = await prepared(name)
    store.gate.clear()
    call = asyncio.ensure_future(WRITING[name].call(actors, state))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not call.done(), f"{name} answered before its commit"
    store.gate.set()
    await call
    after = GatedStore()
    after._tables = {table: dict(found) for table, found in store._tables.items()}
    told = await snapshot(actors.queue)
    again = await opened(after)
    assert await snapshot(again.queue) == told, f"{name}: a kill after its answer loses something"
    await again.queue.close()
    await actors.queue.close()


READS: Final[Mapping[str, Call]] = {
    "run_state": lambda a, s: a.queue.run_state(a.run),
    "ledger": lambda a, s: a.queue.ledger(a.run),
    "dead_letters": lambda a, s: a.queue.dead_letters(a.run),
    "fetch": lambda a, s: a.queue.fetch_rows(
        a.run, [row.uid for row in s["batch"].rows], ["tokens"]
    ),
}


@pytest.mark.parametrize("name", READS)
async def test_a_reader_is_told_what_is_durable_alone(name: str) -> None:
    actors, store, state = await prepared("settle")
    store.gate.clear()
    write = asyncio.ensure_future(actors.settle(0))
    await asyncio.sleep(0)
    read = asyncio.ensure_future(READS[name](actors, state))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not read.done(), f"{name} answered with what a kill undoes"
    store.gate.set()
    await asyncio.gather(write, read)
    await actors.queue.close()


@pytest.mark.parametrize(
    "name", [name for name in WRITING if WRITING[name].fenced_by in ("lease", "epoch")]
)
async def test_it_is_refused_to_whoever_was_replaced(name: str) -> None:
    actors, _, state = await prepared(name)
    queue = actors.queue
    if WRITING[name].fenced_by == "epoch":
        await queue.acquire(actors.run, "another trainer")
    else:
        await queue.release(actors.run, "rollout", tokens_of(state["lease"]))
        await actors.lease(worker="another")
    before = await snapshot(queue)
    refused = nullcontext() if WRITING[name].ignores else pytest.raises(FencedError)
    with refused:
        await WRITING[name].call(actors, state)
    assert await snapshot(queue) == before
    await queue.close()


@pytest.mark.parametrize("name", [name for name in WRITING if not WRITING[name].again])
async def test_a_repeated_call_does_nothing_more(name: str) -> None:
    actors, _, state = await prepared(name)
    call = WRITING[name].call
    await call(actors, state)
    once = await snapshot(actors.queue)
    try:
        await call(actors, state)
    except FencedError:
        assert WRITING[name].fenced_by == "lease"  # what it gave back is not the caller's any more
    assert await snapshot(actors.queue) == once
    await actors.queue.close()
