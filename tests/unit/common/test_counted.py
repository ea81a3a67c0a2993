"""Counts are said as a person says them."""

from __future__ import annotations

import pytest

from meshrl.common.plain_text import counted


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
