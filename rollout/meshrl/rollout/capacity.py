"""How many requests an engine's cache holds, by the tokens that those that run have and will have.

    capacity = running + (cache - what is reserved for them) / what one more is reckoned to need

A request is reckoned to become as long as the longest of the last that ended, and never longer than it was asked to;
before any has ended, as long as the longest asked for. What has grown beyond that is reckoned as it is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Running:
    """One running request; all in tokens, the prompt's included."""

    now: int
    longest: int
    """As long as it was asked to become at most."""


class Room:
    """The books of one engine with up to `slots` requests of at most `longest` tokens each."""

    def __init__(self, *, slots: int, longest: int) -> None:
        self._slots = slots
        self._longest = longest
        self._asked: deque[int] = deque(maxlen=slots)
        self._ended: deque[int] = deque(maxlen=slots)
        self._running: set[Running] = set()

    def begin(self, *, prompt: int, longest: int) -> Running:
        """A request begins; add to `now` what it grows."""
        sequence = Running(now=prompt, longest=longest)
        self._asked.append(longest)
        self._running.add(sequence)
        return sequence

    def end(self, sequence: Running, *, whole: bool) -> None:
        """It ended; a `whole` one tells how long responses are."""
        self._running.discard(sequence)
        if whole:
            self._ended.append(sequence.now)

    @property
    def expected(self) -> int:
        """Tokens that one more request is reckoned to need."""
        return max(self._ended, default=max(self._asked, default=self._longest))

    def capacity(self, cache_tokens: int) -> int:
        """Requests that a cache of so many tokens holds at once, those that run included; at least 1.

        Args:
            cache_tokens: 0 where nothing is known: the slots are the only bound.
        """
        if not cache_tokens:
            return self._slots
        expected = self.expected
        reserved = sum(max(s.now, min(s.longest, expected)) for s in self._running)
        more = max(0, cache_tokens - reserved) // max(1, expected)
        return max(1, min(self._slots, len(self._running) + more))
