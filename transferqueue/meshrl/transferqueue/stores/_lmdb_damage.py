"""Finds damage to LMDB's file that LMDB would not notice or not survive: an empty file, pages that crash readers."""

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
"""A file beside the data that says that a queue is stored here."""


def mark(path: Path) -> None:
    """Note that the store at `path` exists, so that from now on an empty data file counts as lost."""
    (path / MARK).touch()


def marked(path: Path) -> bool:
    """Whether a queue is stored at `path`."""
    return (path / MARK).exists()


def refuse_emptied(path: Path) -> None:
    """Raises CorruptError where a queue is stored and its file is empty, which LMDB would take for a new one."""
    data = path / "data.mdb"
    if marked(path) and not (data.exists() and data.stat().st_size):
        raise CorruptError(
            f"{data} is empty or gone, and a queue was stored there: put it back, or remove"
            f" {path} to start afresh"
        )


def walk(path: Path) -> _lmdb_walk.Walked | None:
    """Have another process walk the file first; None where it found no file, or could not walk it to the end.

    Raises:
        CorruptError: that process crashed.
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
        # The owner itself reports LMDB's own errors and files that are no store; for the rest the checksum is
        # missing.
        log.info("%s cannot be walked: %s", data, walk.stderr.strip().rpartition("\n")[2])
        return None
    count, total = walk.stdout.split()
    return int(count), int(total)
