"""Refuses what a queue of several processes left: one of its stores alone would open, and rows of the others be lost.

No release had such queues. Their stores hold notes, each of which is the cursor of a run without tasks:

    RUN.shards   BEGAN COUNT                      on the first store: the run is on COUNT processes
    .shards      QUEUE NUMBER ID ADDRESS...       on each store once a process was added, addresses on the first
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from meshrl.contract.errors import CorruptError, UserError
from meshrl.transferqueue.store import decode_record

READ_BY: Final = "c6584707"
"""The commit that reads them."""
NOTE: Final = ".shards"
"""Ends the names of the notes."""


def refusal(what: str) -> UserError:
    """The error for `what`."""
    return UserError(
        f"{what}: a queue is one process now; a run on several continues with the meshrl of commit {READ_BY}"
    )


def processes_noted(records: Iterable[tuple[bytes, bytes]]) -> int:
    """How many processes the queue with these records of META is; 1 where no note says it. Skips damaged records."""
    found = dict(records)
    return max((_noted(key, found) for key in found if key[:1] == b"r"), default=1)


def _noted(key: bytes, records: dict[bytes, bytes]) -> int:
    try:
        name = decode_record(records[key], "a run")["run"]
        if not name.endswith(NOTE):
            return 1
        words = decode_record(records[b"s" + key[1:]], "its state")["cursor"].split()
        if name == NOTE:
            return max(int(words[1]) + 1, len(words) - 3)
        _, count = map(int, words)
    except (CorruptError, LookupError, TypeError, ValueError, AttributeError):
        return 1  # the store reports the fault when it is opened
    return count
