"""A line of the log that comes again and again is told once, and then with its count; numbers of things."""

from __future__ import annotations

import logging

import pytest

from meshrl.common.plain_text import MOST_ALIKE, TELL_AGAIN_S, RepeatedLines, counted


class Told(logging.Handler):
    """Keeps what passes the filter."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.lines: list[str] = []
        self.addFilter(RepeatedLines(lambda: self.now))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def log(told: Told) -> logging.Logger:
    log = logging.Logger("rows")
    log.addHandler(told)
    return log


def test_a_line_for_each_row_is_one_line_and_its_count(log: logging.Logger, told: Told) -> None:
    for number in range(36_815):
        log.warning("rollout of r/t%d failed: token %s is none of 640", number, f"'w{number}'")
    assert told.lines == [
        "rollout of r/t0 failed: token 'w0' is none of 640",
        "rollout of r/t9 failed: token 'w9' is none of 640 (8 more lines like this before)",
        "rollout of r/t99 failed: token 'w99' is none of 640 (89 more lines like this before)",
        "rollout of r/t999 failed: token 'w999' is none of 640 (899 more lines like this before)",
        "rollout of r/t9999 failed: token 'w9999' is none of 640 (8,999 more lines like this before)",
    ]


def test_a_line_comes_again_after_a_while_with_those_before(
    log: logging.Logger, told: Told
) -> None:
    for _ in range(4):
        log.error("no room")
    told.now += TELL_AGAIN_S
    log.error("no room")
    assert told.lines == ["no room", "no room (3 more lines like this before)"]


def test_lines_that_differ_more_are_bounded_by_their_place_in_the_code(
    log: logging.Logger, told: Told
) -> None:
    words = [f"{chr(97 + number % 26) * (number // 26 + 1)}" for number in range(500)]
    for word in words:
        log.warning("no number in %s", word)
    assert told.lines[:MOST_ALIKE] == [f"no number in {word}" for word in words[:MOST_ALIKE]]
    assert len(told.lines) < MOST_ALIKE + 5
    log.warning("another place")
    assert told.lines[-1] == "another place"


def test_what_is_no_warning_is_told_each_time(log: logging.Logger, told: Told) -> None:
    for _ in range(5):
        log.info("step 1")
    assert len(told.lines) == 5


@pytest.mark.parametrize(
    ("count", "words", "said"),
    [
        (0, ("row",), "0 rows"),
        (1, ("row",), "1 row"),
        (1024, ("row",), "1,024 rows"),
        (1, ("key is", "keys are"), "1 key is"),
        (2, ("key is", "keys are"), "2 keys are"),
    ],
)
def test_one_is_singular(count: int, words: tuple[str, ...], said: str) -> None:
    assert counted(count, *words) == said
