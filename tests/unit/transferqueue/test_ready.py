"""The ordered sets behind lease and take return what a scan and a sort would return."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshrl.contract.types import Version
from meshrl.transferqueue import sampling
from meshrl.transferqueue.model.group import Group, bits, lowest
from meshrl.transferqueue.model.records import TaskMetadata
from meshrl.transferqueue.model.waiting import ReadyRows
from meshrl.transferqueue.sampling import CompleteGroup


def make_groups(groups: int = 6, size: int = 3) -> list[Group]:
    return [
        Group.fresh(
            "r",
            0,
            number,
            f"t{number}",
            metadata=TaskMetadata(priority=number % 2),
            task_bytes=0,
            attempts=[0] * size,
            stages=1,
            now=0.0,
        )
        for number in range(groups)
    ]


@given(st.lists(st.tuples(st.sampled_from(["set", "pop"]), st.integers(0, 5), st.integers(0, 7))))
def test_rows_pop_in_the_order_of_a_sort(steps: list[tuple[str, int, int]]) -> None:
    groups, ready = make_groups(), ReadyRows()
    model: set[tuple[int, int]] = set()
    for operation, number, mask in steps:
        if operation == "set":
            rows = {(number, index) for index in bits(mask)}
            had = {row for row in model if row[0] == number}
            assert ready.set(groups[number], mask) == bool(rows - had)
            model = (model - had) | rows
        else:
            expected = sorted(model, key=lambda row: (-groups[row[0]].metadata.priority, row))[
                :mask
            ]
            popped = [(group.number, index) for group, m in ready.pop(mask) for index in bits(m)]
            assert popped == expected
            model -= set(expected)
        assert ready.count == len(model)


@given(st.integers(0, 2**70), st.integers(0, 80))
def test_masks_are_sets_of_indices(mask: int, count: int) -> None:
    indices = [at for at in range(mask.bit_length()) if mask >> at & 1]
    assert list(bits(mask)) == indices
    assert list(bits(lowest(mask, count))) == indices[:count]


def complete(number: int, step: int) -> CompleteGroup:
    return CompleteGroup(
        number=number,
        task_id=f"t{number}",
        priority=0,
        num_tokens=(1,),
        oldest=Version(0, step),
        newest=Version(0, step),
    )


ADDS = st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 3)), max_size=40)


def check_order(name: str, steps: list[tuple[bool, int, int]]) -> None:
    sampler, model = sampling.build(name), dict[int, int]()
    for add, number, step in steps:
        if add and number not in model:
            sampler.add(complete(number, step))
            model[number] = step
        elif not add:
            sampler.discard(number)
            model.pop(number, None)
        newest_first = name == "fresh_first"
        expected = sorted(model, key=lambda n: (-model[n] if newest_first else 0, n))
        assert list(sampler.first(3)) == expected[:3]
        assert list(sampler.first(100)) == expected
        assert len(sampler) == len(model)


@given(ADDS)
def test_fifo_gives_the_first_admitted(steps: list[tuple[bool, int, int]]) -> None:
    check_order("fifo", steps)


@given(ADDS)
def test_fresh_first_gives_the_newest_version(steps: list[tuple[bool, int, int]]) -> None:
    check_order("fresh_first", steps)
