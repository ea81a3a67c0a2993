"""Marks a disk store whose commits may be in the page cache only, so that it is not trusted after a power cut.

Under durability `none` LMDB does not fsync, and a power cut may leave a torn file. The file `unsynced` stands beside
the data from the opening of such a store to its orderly end, and holds this boot's id. The process that opens the
store next finds either the same boot (only a process died: the page cache is complete, nothing is lost), or another
(the machine went down): then the store is refused.

meshrl 0.1 had a durability `everysec`, whose mark also holds LMDB's meta pages of the last sync. After a power cut
such a store goes back to that sync.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import lmdb
import xxhash

from meshrl.common.files import sync
from meshrl.contract.errors import CorruptError

log = logging.getLogger(__name__)

MARK = "unsynced"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ID_BYTES = 36


def boot_id() -> bytes:
    """Identifies this start of the machine."""
    return _BOOT_ID.read_bytes().strip().ljust(_ID_BYTES)[:_ID_BYTES]


def recover(path: Path) -> None:
    """Call before the environment at `path` is opened: checks whether a power cut may have torn it.

    Raises:
        CorruptError: it was written with durability `none`, and the machine went down.
    """
    mark = path / MARK
    if not mark.exists():
        return
    content = mark.read_bytes()
    boot, digest, pages = (
        content[:_ID_BYTES],
        content[_ID_BYTES : _ID_BYTES + 8],
        content[_ID_BYTES + 8 :],
    )
    if boot == boot_id():
        return
    if not pages or xxhash.xxh3_64_digest(pages) != digest:
        raise CorruptError(
            f"the queue at {path} was written with durability none when the machine went down and may be"
            " torn: restore a backup (meshrl queue restore), or choose another path"
        )
    with (path / "data.mdb").open("r+b") as data:
        data.write(pages)
        data.flush()
        os.fsync(data.fileno())
    log.warning("the queue at %s goes back to its last sync: the machine went down since", path)


def mark(path: Path) -> None:
    """From now on commits at `path` may be in the page cache only."""
    fresh = path / f"{MARK}.tmp"
    with fresh.open("wb") as file:
        file.write(boot_id() + xxhash.xxh3_64_digest(b""))
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path / MARK)
    sync(path)


def clear(path: Path, environment: lmdb.Environment) -> None:
    """Sync what may be in the page cache only, and remove the mark. Raises lmdb.Error, OSError."""
    if (path / MARK).exists():
        environment.sync(True)
        (path / MARK).unlink()
        sync(path)
