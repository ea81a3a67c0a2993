"""Notices that samples have ended, for a client that waits for all samples of a sampling session by one poll.

    ask ──▶ begin: the file names its number ──▶ sampling ──▶ ended: wakes the poll of its session
    poll ◀── numbers that ended after the client's cursor; after a restart all that a kill may have taken

A notice only makes the client fetch the answer: one too many costs a call, one too few would leave it waiting. The
file therefore names numbers before their samples begin, a block at a time, `["SESSION", CLONE, END, [OPEN, ...]]`:
those that may be waited for are the open ones and the block that ends with END, of the last line of a session.

consumes: ends of samples, polls. waits for: an end. unblocked by: an end, the time of the poll. produces: notices.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import TypeAlias

from meshrl.common.line_file import LineFile
from meshrl.contract.errors import BusyError, UnavailableError

CLONE = 1_000_000_000
"""Numbers of one clone of a sampling session, which polls for itself."""
BLOCK = 256
"""Numbers that one line of the file names."""
MOST_OPEN = 65_536
"""Samples of one client that it has neither fetched nor got a notice of."""

Target: TypeAlias = tuple[str, int]
"""A sampling session, and which clone of it."""


@dataclass(slots=True)
class _Awaited:
    """The samples of one target that it may wait for."""

    end: int = 0
    """The last block of the file ends before it."""
    running: set[int] = field(default_factory=set)
    ended: dict[int, int] = field(default_factory=dict)
    """Number to its place in the order of all ends, the oldest first."""
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def is_noted(self, number: int) -> bool:
        return number in self.running or self.end - BLOCK <= number < self.end

    def after(self, cursor: int) -> list[int]:
        """Numbers of samples that ended after `cursor`, the newest first."""
        newest_first = reversed(self.ended.items())
        return [number for number, _ in takewhile(lambda each: each[1] > cursor, newest_first)]


class SampleNotices:
    """Ends of samples, by sampling session."""

    def __init__(self, path: Path) -> None:
        """`path` is a file for this alone. One process has it open at a time."""
        self._file = LineFile(path, durable=True, mode=0o600)
        self._began = self._cursor = time.time_ns() // 1000
        """Above all cursors of earlier processes, since none ends a sample each microsecond."""
        self._writing = asyncio.Lock()
        self._open = {
            target: _Awaited(ended=dict.fromkeys(numbers, self._began))
            for target, numbers in _named_in(path)
        }

    async def begin(self, session: str, number: int) -> None:
        """Return once a restart would know that the sample may be waited for.

        Raises:
            BusyError: the client has fetched too few of its samples.
            UnavailableError: the disk refuses.
        """
        target = (session, number // CLONE)
        async with self._writing:
            known = self._open.get(target, _Awaited())
            if len(known.running) + len(known.ended) >= MOST_OPEN:
                raise BusyError(
                    f"{MOST_OPEN} samples of this session were not fetched", retry_after_s=1
                )
            if not known.is_noted(number):
                end = max(known.end, number + BLOCK)
                waiting = [*known.running, *known.ended, number]
                line = json.dumps([session, target[1], end, waiting])
                try:
                    await asyncio.to_thread(self._file.write, line)
                except OSError as error:
                    raise UnavailableError(
                        f"the disk takes no note of a sample: {error}"
                    ) from error
                known.end = end
            self._open[target] = known
        known.running.add(number)

    def ended(self, session: str, number: int) -> None:
        """Note that a sample has its answer or error. One that did not `begin` is ignored."""
        found = self._open.get((session, number // CLONE))
        if found is None or number not in found.running:
            return
        found.running.remove(number)
        self._cursor += 1
        found.ended.pop(number, None)  # the newest one is the last one
        found.ended[number] = self._cursor
        found.news.set()

    def fetched(self, session: str, number: int) -> None:
        """Note that the client has the answer or error of a sample."""
        found = self._open.get((session, number // CLONE))
        if found is not None:
            found.ended.pop(number, None)

    async def poll(
        self, session: str, clone: int, cursor: int, *, wait_s: float
    ) -> tuple[list[int], int]:
        """Numbers of samples that ended after `cursor`, as soon as there are any, and the next cursor.

        Args:
            session: The sampling session.
            clone: Which clone of its client asks.
            cursor: The last poll's; 0 for the first one. The client has the answer to that poll.
            wait_s: Seconds after which there may be none.
        """
        found = self._open.get((session, clone))
        if found is None:
            await asyncio.sleep(wait_s)
            return [], cursor
        if cursor >= self._began:
            for number in list(takewhile(lambda each: found.ended[each] <= cursor, found.ended)):
                del found.ended[number]
        if not found.ended:
            found.news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await found.news.wait()
        return found.after(cursor), self._cursor


def _named_in(path: Path) -> Iterator[tuple[Target, list[int]]]:
    """Each target of the file with the numbers that it may wait for. A line that a kill has torn is ignored."""
    last: dict[Target, list[int]] = {}
    with suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            with suppress(ValueError):
                session, clone, end, open_ = json.loads(line)
                last[session, clone] = [*open_, *range(end - BLOCK, end)]
    yield from last.items()
