"""Damage to LMDB's file that LMDB would not survive, or not notice: a file cut short, and one that was emptied."""

from __future__ import annotations

import os
from pathlib import Path

import lmdb

from meshrl.contract.errors import CorruptError

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


def fill_up(path: Path, environment: lmdb.Environment) -> None:
    """Extend a file that ends before its last page, with zeros that take no space.

    Reading a page behind the end of a mapped file ends the process (SIGBUS). A page of zeros is a CorruptError for
    whoever needs it. The last pages may be missing in a sound file, too: LMDB does not write those it freed at once.
    """
    data = path / "data.mdb"
    wanted = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    if data.stat().st_size < wanted:
        os.truncate(data, wanted)
