"""The sets that make leasing and taking cheap give what a scan and a sort would give."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshrl.contract.nouns import Version
from meshrl.transferqueue import sampling
from meshrl.transferqueue.ready import ReadyRows
from meshrl.transferqueue.rows import Group, Row
from meshrl.transferqueue.sampling import CompleteGroup


def make_rows(groups: int = 6, size: int = 3) -> list[Row]:
    rows: list[Row] = []
    for number in range(groups):
        group = Group("r", 0, number, f"t{number}", size, number % 2, 0, [0] * size)
        rows += [group.fresh_row(index, 1, 0.0) for index in range(size)]
    return rows


@given(st.lists(st.tuples(st.sampled_from(["add", "discard", "pop"]), st.integers(0, 17))))
def test_rows_pop_in_the_order_of_a_sort(steps: list[tuple[str, int]]) -> None:
    rows, ready = make_rows(), ReadyRows()
    model: set[int] = set()
    for verb, number in steps:
        if verb == "add":
            ready.add(rows[number])
            model.add(number)
        elif verb == "discard":
            ready.discard(rows[number])
            model.discard(number)
        else:
            limit = number % 5
            expected = sorted(model, key=lambda at: (-rows[at].group.priority, at))[:limit]
            assert ready.pop(limit) == [rows[at] for at in expected]
            model -= set(expected)
        assert len(ready) == len(model)


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
