"""Stored records are read back as they were: values, groups, the audit log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from orjson import Fragment

from meshrl.contract.errors import CorruptError
from meshrl.contract.types import Outcome, RowFacts, Version
from meshrl.testing.contract.queue_actors import Actors, spec, tasks
from meshrl.transferqueue.model import records
from meshrl.transferqueue.model.group import Grant, Group, StoredFrame
from meshrl.transferqueue.model.records import AuditLog, TaskMetadata
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.store import decode_record, encode_record, to_json
from meshrl.transferqueue.stores.memory import MemoryStore

from .test_quota import trained


@pytest.mark.parametrize("value", [[1, "x", None, {"a": [0.5]}], "lone \ud83d surrogate", 2**70])
def test_a_record_comes_back_and_a_broken_one_is_named(value: object) -> None:
    stored = encode_record(value)
    assert decode_record(stored, "record") == value
    with pytest.raises(CorruptError, match="record 5"):
        decode_record(stored[:-1], "record 5")


@pytest.mark.parametrize("beside", ["plain", "lone \ud83d surrogate", 2**70])
@pytest.mark.parametrize("part", [[1, {"a": None}], "lone \ud83d surrogate", 2**70])
def test_a_part_that_is_encoded_already_is_written_as_it_is(part: object, beside: object) -> None:
    encoded = Fragment(to_json(part))
    for _ in range(2):
        stored = encode_record([encoded, beside])
        assert decode_record(stored, "record") == [part, beside]


FACTS = RowFacts(Outcome.OK, 7, Version(1, 2), Version(1, 3), "length")


def a_group() -> Group:
    """Four rows, two stages; the first has written all rows in two frames, and appended to a third."""
    group = Group.fresh(
        "demo",
        1,
        5,
        "task \ud83d",
        metadata=TaskMetadata(2, "math", 0.5),
        task_bytes=100,
        attempts=[0, 1, 0, 0],
        stages=2,
        now=0.0,
    )
    group.frames.append(StoredFrame(0, 0, (0, 1), 10, 0b0011, 2**64 - 1))
    group.frames.append(StoredFrame(0, 1, (3, 2), 20, 0b1100, 12))
    group.frames.append(StoredFrame(1, 2, (0, 1), 30, 0b0011, 13, partial=True))
    group.next_frame = 3
    group.set_facts([0], [FACTS])
    return group


def lease(group: Group) -> None:
    group.grants.append(Grant(group, 1, 9, "judge", 0b0101, 0.0, 0.0))
    group.held[1] |= 0b0101


CHANGES: dict[str, Callable[[Group], object]] = {
    "nothing": lambda group: None,
    "a frame comes": lambda group: group.frames.append(StoredFrame(1, 3, (2,), 1, 0b0100, 1)),
    "a frame goes with its rows": lambda group: group.drop_rows(0b0011),
    "rows of a frame go": lambda group: group.drop_rows(0b0001),
    "columns go": lambda group: group.drop_columns({1}, 0b0011, partial=True),
    "columns of some rows go": lambda group: group.drop_columns({0}, 0b0100, partial=False),
    "a row comes again": lambda group: group.add_row(0, 0.0),
    "facts come": lambda group: group.set_facts([2], [FACTS]),
    "rows are leased": lease,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_the_record_is_of_the_group_as_it_is_now(change: Callable[[Group], object]) -> None:
    group = a_group()
    group.encode()
    change(group)
    stored = decode_record(group.encode(), "group")
    again, batch = Group.restored("demo", 1, stored, 0.0)
    assert batch == -1
    assert again.encode() == group.encode()
    for name in ("number", "task_id", "metadata", "task_bytes", "attempts", "done", "held"):
        assert getattr(again, name) == getattr(group, name)
    for name in ("deliveries", "writers", "facts", "replacements", "present", "next_frame"):
        assert getattr(again, name) == getattr(group, name)
    assert list(map(fields, again.frames)) == list(map(fields, group.frames))
    assert [grant.mask for grant in again.grants] == [grant.mask for grant in group.grants]


def fields(frame: StoredFrame) -> tuple[object, ...]:
    return tuple(getattr(frame, name) for name in StoredFrame.__slots__)


def test_a_record_of_plain_text_is_that_of_the_format() -> None:
    group = a_group()
    group.task_id = "task"
    group.drop_rows(0b1000)
    lease(group)
    assert bytes(group.encode()[8:]).decode() == (
        '[5,"task",[2,"math",0.5],100,[0,1,0,0],"7","0",-1,-1,["0","0"],'
        "[[0,0,0,0],[0,0,0,0]],[[0,0,0,0],[0,0,0,0]],[0,0,0,0],"
        '[[0,7,1,2,1,3,"length",0],null,null,null],'
        '[[0,0,[0,1],10,"3",18446744073709551615,false],[0,1,[3,2],20,"4",12,false],'
        '[1,2,[0,1],30,"3",13,true]],3,[],[[1,9,"judge","5"]]]'
    )


async def lived(store: MemoryStore) -> Actors:
    """Two batches trained, one row given up (and its sibling with it), one group resident."""
    actors = Actors(await TransferQueue.open(store))
    await actors.start(spec(max_attempts=1))
    await trained(actors, 0, 2)
    await actors.feed(tasks(2, start=4))
    row = (await actors.lease(limit=1)).rows[0]
    await actors.queue.fail("run", "rollout", row.uid, row.token, Outcome.TIMEOUT, "slow")
    return actors


def sums_of(queue: TransferQueue) -> Counter[str]:
    return queue._runs["run"].audit_log.sums()


async def test_it_adds_up_to_the_ledger_also_after_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = {"admitted": 12, "trained": 8, "dead_lettered": 1, "filtered": 1}
    for limit in (1024, 2):
        monkeypatch.setattr(records, "MAX_RECORDS", limit)
        store = MemoryStore()
        queue = (await lived(store)).queue
        assert isinstance(queue, TransferQueue)
        assert sums_of(queue) == wanted
        await queue.close()
        again = await TransferQueue.open(store)
        assert sums_of(again) == wanted
        here = again._runs["run"].audit_log.open_rows()
        assert here == ({"t5": 2} if limit == 1024 else None)
        await again.close()


def test_nothing_noted_is_nothing_stored() -> None:
    assert AuditLog(0).sums() == Counter()
    assert AuditLog(0).open_rows() == Counter()
