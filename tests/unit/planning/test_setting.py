"""Lengths of simulated responses."""

from __future__ import annotations

from meshrl.planning.setting import Lengths


def test_a_row_that_is_issued_again_has_another_length_of_the_same_prompt() -> None:
    lengths = Lengths(mean=150, p99=400, most=480)
    first, again = lengths.draw(0, 7, 1), lengths.draw(0, 7, 1, attempt=1)
    assert first == lengths.draw(0, 7, 1)
    assert first != again
    alike = Lengths(mean=150, p99=400, most=480, alike=1.0)
    assert alike.draw(0, 7, 1) == alike.draw(0, 7, 1, attempt=1)
