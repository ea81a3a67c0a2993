"""Damage to LMDB's file that LMDB would not notice, or not survive: an emptied file, pages that end their reader."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from meshrl.contract.errors import CorruptError
from meshrl.transferqueue.stores import _lmdb_walk

MARK = "kept"
"""A file beside the data that says: a queue was kept here."""


def mark(path: Path) -> None:
    """The store at `path` has its stamp, so from now on an empty file is a lost one."""
    (path / MARK).touch()


def refuse_emptied(path: Path) -> None:
    """LMDB would start afresh on a file of no bytes. Raises CorruptError where a queue was kept."""
    data = path / "data.mdb"
    if (path / MARK).exists() and not (data.exists() and data.stat().st_size):
        raise CorruptError(
            f"{data} is empty or gone, and a queue was kept there: put it back, or remove"
            f" {path} to start afresh"
        )


def refuse_unwalkable(path: Path) -> None:
    """Have another process walk the file first. Raises CorruptError where that process did not survive it."""
    data = path / "data.mdb"
    if not data.exists():
        return
    walk = subprocess.run(
        [sys.executable, "-I", _lmdb_walk.__file__, str(path)], capture_output=True, check=False
    )
    if walk.returncode < 0:
        cause = signal.Signals(-walk.returncode).name
        raise CorruptError(
            f"{data}: pages are damaged, reading them ends a process with {cause}: restore a backup"
        )
