"""Notices of the ends of samples: a poll learns of each, also of those that a kill took."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from meshrl.contract.errors import BusyError, UnavailableError
from meshrl.http.tinker import notices as module
from meshrl.http.tinker.notices import BLOCK, CLONE, SampleNotices

SESSION = "a session\nof two lines"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "samples.log"


def num_lines(path: Path) -> int:
    return len(path.read_bytes().splitlines())


async def told(notices: SampleNotices, cursor: int = 0, clone: int = 0) -> tuple[set[int], int]:
    numbers, cursor = await notices.poll(SESSION, clone, cursor, wait_s=0.01)
    assert len(set(numbers)) == len(numbers)
    return set(numbers), cursor


async def test_a_poll_waits_for_the_next_end_and_repeats_what_was_not_acknowledged(
    path: Path,
) -> None:
    notices = SampleNotices(path)
    for number in (1, 2, 3, CLONE + 1):
        await notices.begin(SESSION, number)
    assert (await told(notices))[0] == set()
    poll = asyncio.create_task(notices.poll(SESSION, 0, 0, wait_s=60))
    await asyncio.sleep(0)
    notices.ended(SESSION, 2)
    numbers, cursor = await poll
    assert numbers == [2]
    assert await told(notices) == ({2}, cursor)  # the answer to the first poll was lost
    notices.ended(SESSION, 1)
    notices.ended(SESSION, CLONE + 1)
    numbers_of_next, later = await told(notices, cursor)
    assert numbers_of_next == {1}
    assert (await told(notices, later))[0] == set()
    assert (await told(notices, clone=1))[0] == {CLONE + 1}


async def test_numbers_that_follow_each_other_share_a_line(path: Path) -> None:
    notices = SampleNotices(path)
    for number in range(4 * BLOCK):
        await notices.begin(SESSION, number)
    assert num_lines(path) == 4


@pytest.mark.parametrize("order", [range(1, 1000), range(999, 0, -1), [5, 900, 3, 300, 301, 1]])
async def test_after_a_kill_all_that_may_be_waited_for_have_notices(
    path: Path, order: range | list[int]
) -> None:
    killed = SampleNotices(path)
    for number in order:
        await killed.begin(SESSION, number)
    for number in list(order)[::2]:
        killed.ended(SESSION, number)
        killed.fetched(SESSION, number)
    cursor = (await told(killed))[1]
    with path.open("ab") as file:
        file.write(b'["a session\\nof')  # a kill in the middle of a line
    again = SampleNotices(path)
    for client_at in (0, cursor):
        numbers, now = await told(again, client_at)
        assert numbers >= set(list(order)[1::2])
    assert (await told(again, now))[0] == set()


async def test_numbers_cost_no_more_memory_the_farther_they_lie_apart(path: Path) -> None:
    notices = SampleNotices(path)
    for number in (1, CLONE - 1, 2**62):
        await notices.begin(SESSION, number)
    numbers, _ = await told(SampleNotices(path))
    assert {1, CLONE - 1} <= numbers
    assert len(numbers) < 3 * BLOCK


async def test_a_client_that_fetches_nothing_is_refused_and_a_full_disk_is_said(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_OPEN", 2)
    notices = SampleNotices(path)
    await notices.begin(SESSION, 1)
    await notices.begin(SESSION, 2)
    notices.ended(SESSION, 2)
    with pytest.raises(BusyError, match="2 samples of this session were not fetched"):
        await notices.begin(SESSION, 3)
    notices.fetched(SESSION, 2)
    await notices.begin(SESSION, 3)

    def full(line: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(notices._file, "write", full)
    with pytest.raises(UnavailableError, match="No space left"):
        await notices.begin("another", 1)
    assert await told(notices, clone=7) == (set(), 0)
