"""The run's sampler, which may be a user's own, decides which complete groups a batch gets; the sets behind it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.contract.errors import ConfigError
from meshrl.contract.types import Version
from meshrl.testing.contract.queue_actors import Actors, batch_uids, spec, task, tasks
from meshrl.transferqueue import sampling
from meshrl.transferqueue.model.group import Group, bits, lowest
from meshrl.transferqueue.model.records import TaskMetadata
from meshrl.transferqueue.model.waiting import ReadyRows
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.sampling import CompleteGroup
from meshrl.transferqueue.stores.memory import MemoryStore

REVERSE = '''
class Sampler:
    """Last admitted, first taken."""

    def __init__(self):
        self._numbers = set()

    def add(self, group):
        self._numbers.add(group.number)

    def discard(self, number):
        self._numbers.discard(number)

    def first(self, count):
        return sorted(self._numbers, reverse=True)[:count]

    def __len__(self):
        return len(self._numbers)
'''


async def first_batch(sampler: str) -> list[str]:
    """The first batch of three complete groups: t0 and t1 were sampled by version 0, t2 by version 1."""
    actors = Actors(await TransferQueue.open(MemoryStore(), samplers=[sampler]))
    await actors.start(spec(max_staleness=5.0, sampler=sampler))
    await actors.feed(tasks(3))
    await actors.work(limit=4)
    await actors.publish(1)
    await actors.work()
    batch = batch_uids(await actors.take(1))
    await actors.queue.close()
    return [name.split(".")[0] for name in batch[::2]]


def complete(
    number: int, tokens: int = 1, source: str = "", difficulty: float = 0.0, step: int = 0
) -> CompleteGroup:
    return CompleteGroup(
        number=number,
        task_id=f"t{number}",
        priority=0,
        num_tokens=(tokens,),
        oldest=Version(0, step),
        newest=Version(0, step),
        data_source=source,
        difficulty=difficulty,
    )


def test_curriculum_takes_the_easiest_first() -> None:
    sampler = sampling.build("curriculum")
    for number, difficulty in enumerate([0.5, 0.1, 0.9, 0.1]):
        sampler.add(complete(number, difficulty=difficulty))
    assert list(sampler.first(3)) == [1, 3, 0]


async def test_the_difficulty_is_the_tasks_own() -> None:
    actors = Actors(await TransferQueue.open(MemoryStore()))
    await actors.start(spec(max_staleness=5.0, sampler="curriculum"))
    for number, difficulty in enumerate([3, 1, "hard", 2.5]):
        await actors.feed([task(f"t{number}", extra_info={"difficulty": difficulty})])
    await actors.work()
    batch = batch_uids(await actors.take(0, groups=4))
    await actors.queue.close()
    assert batch[::2] == ["t2.0.0", "t1.0.0", "t3.0.0", "t0.0.0"]


def test_grouped_keeps_one_data_source_together() -> None:
    sampler = sampling.build("grouped")
    for number, source in enumerate("abab" + "cc"):
        sampler.add(complete(number, source=source))
    assert list(sampler.first(3)) == [0, 2, 1]
    sampler.discard(0)
    assert list(sampler.first(9)) == [1, 3, 2, 4, 5]
    assert len(sampler) == 5


@given(st.lists(st.integers(1, 5000), min_size=40, max_size=40))
def test_length_balanced_takes_the_oldest_and_half_the_tokens_of_the_window(
    tokens: list[int],
) -> None:
    sampler = sampling.build("length_balanced")
    for number, count in enumerate(tokens):
        sampler.add(complete(number, count))
    taken = list(sampler.first(20))
    assert len(set(taken)) == 20
    assert 0 in taken
    # Of each pair of neighbours in length one is taken: the halves differ by at most the spread of the lengths.
    rest = sum(tokens) - sum(tokens[number] for number in taken)
    assert abs(sum(tokens[number] for number in taken) - rest) <= max(tokens) - min(tokens)


@given(st.integers(0, 30), st.integers(1, 20))
def test_length_balanced_gives_as_many_as_there_are(there: int, wanted: int) -> None:
    sampler = sampling.build("length_balanced")
    for number in range(there):
        sampler.add(complete(number, (7 * number) % 5 + 1))
    taken = sampler.first(wanted)
    assert len(set(taken)) == len(taken) == min(there, wanted)
    assert list(taken) == list(sampler.first(wanted))


async def test_a_sampler_of_the_users_own_is_named_by_its_dotted_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "my_samplers_for_a_test"
    package.mkdir()
    (package / "reverse.py").write_text(REVERSE)
    monkeypatch.syspath_prepend(tmp_path)
    assert await first_batch("my_samplers_for_a_test.reverse") == ["t2", "t1"]


async def test_opening_a_run_imports_no_module_that_the_recipe_of_the_queue_does_not_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "source.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\n" + REVERSE
    )
    monkeypatch.syspath_prepend(tmp_path)
    queue = await TransferQueue.open(MemoryStore(), samplers=["my_package.my_order"])
    for name in ("planted.source", "lib2to3.__main__", "..fifo"):
        with pytest.raises(ConfigError, match=r"only if the recipe .* names it: queue\.sampler"):
            await queue.open_run(spec(sampler=name))
    assert queue.runs == ()
    await queue.close()
    assert not (tmp_path / "ran").exists()


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


ADDS = st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 3)), max_size=40)


def check_order(name: str, steps: list[tuple[bool, int, int]]) -> None:
    sampler, model = sampling.build(name), dict[int, int]()
    for add, number, step in steps:
        if add and number not in model:
            sampler.add(complete(number, step=step))
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
