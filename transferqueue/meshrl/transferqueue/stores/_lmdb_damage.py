"""Damage to LMDB's file that LMDB would not notice, or not survive: an emptied file, pages that end their reader."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from pathlib import Path

from meshrl.contract.errors import CorruptError
from meshrl.transferqueue.stores import _lmdb_walk

log = logging.getLogger(__name__)

MARK = "kept"
"""A file beside the data that says: a queue was kept here."""


def mark(path: Path) -> None:
    """The store at `path` has its stamp, so from now on an empty file is a lost one."""
    (path / MARK).touch()


def marked(path: Path) -> bool:
    """A queue was kept at `path`."""
    return (path / MARK).exists()


def refuse_emptied(path: Path) -> None:
    """LMDB would start afresh on a file of no bytes. Raises CorruptError where a queue was kept."""
    data = path / "data.mdb"
    if marked(path) and not (data.exists() and data.stat().st_size):
        raise CorruptError(
            f"{data} is empty or gone, and a queue was kept there: put it back, or remove"
            f" {path} to start afresh"
        )


def walk(path: Path) -> _lmdb_walk.Walked | None:
    """Have another process walk the file first; None where there is nothing that it could walk to the end.

    Raises:
        CorruptError: that process did not survive it.
    """
    data = path / "data.mdb"
    if not data.exists():
        return None
    walk = subprocess.run(
        [sys.executable, "-I", _lmdb_walk.__file__, str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if walk.returncode < 0:
        cause = signal.Signals(-walk.returncode).name
        raise CorruptError(
            f"{data}: pages are damaged, reading them ends a process with {cause}: restore a backup"
        )
    if walk.returncode:
        # What LMDB names, or what is no store yet, the owner finds out by itself; else the tally is missed.
        log.info("%s cannot be walked: %s", data, walk.stderr.strip().rpartition("\n")[2])
        return None
    count, total = walk.stdout.split()
    return int(count), int(total)
