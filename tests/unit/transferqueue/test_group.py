"""A group's record describes the group as it is now, however often parts of it were encoded before."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from meshrl.contract.types import Outcome, RowFacts, Version
from meshrl.transferqueue.model.group import Grant, Group, StoredFrame
from meshrl.transferqueue.model.records import TaskMetadata
from meshrl.transferqueue.store import decode_record

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
