"""LMDB without an fsync per commit, and still whole after a power cut: back to the last moment that was synced.

LMDB alone promises nothing here: pages that the last synced commit needs are written over by later ones, and both of
its meta pages soon point to what never reached the disk. So, at each sync, in this order:

    pin (a read transaction: its pages are not reused) ─▶ fdatasync ─▶ meta pages of that moment to `unsynced`
    ─▶ let the pin before go

The file `unsynced` stands for as long as commits may be in the page cache only, and holds this boot's id. Whoever
opens the store finds either the same boot (a process died; the page cache is whole; nothing is lost), or another (the
machine went down): then the meta pages are put back and the store is what it was at the last sync.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import lmdb
import xxhash

from meshrl.contract.errors import CorruptError
from meshrl.contract.files import sync
from meshrl.transferqueue.stores import _lmdb_checksums

log = logging.getLogger(__name__)

MARK = "unsynced"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ID_BYTES = 36


def boot_id() -> bytes:
    """Of this start of the machine; nothing else has it."""
    return BOOT_ID.read_bytes().strip().ljust(_ID_BYTES)[:_ID_BYTES]


def recover(path: Path) -> None:
    """Before the environment at `path` is opened: undo what a power cut may have torn.

    Raises:
        CorruptError: it was written with durability `none`, and the machine went down.
    """
    mark = path / MARK
    if not mark.exists():
        return
    found = mark.read_bytes()
    head, digest, pages = (
        found[:_ID_BYTES],
        found[_ID_BYTES : _ID_BYTES + 8],
        found[_ID_BYTES + 8 :],
    )
    if head == boot_id():
        return
    if not pages or xxhash.xxh3_64_digest(pages) != digest:
        raise CorruptError(
            f"the queue at {path} was written with durability none when the machine went down and may be"
            " torn: restore a backup (meshrl queue restore), or choose another path"
        )
    _lmdb_checksums.forget(path)
    with (path / "data.mdb").open("r+b") as data:
        data.write(pages)
        data.flush()
        os.fsync(data.fileno())
    log.warning("the queue at %s goes back to its last sync: the machine went down since", path)


class Synced:
    """The last synced moment of an open environment. Used by the commit thread alone."""

    def __init__(self, path: Path, environment: lmdb.Environment, *, points: bool) -> None:
        """`points`: keep a moment to go back to; else only mark that there is none."""
        self._path = path
        self._environment = environment
        self._points = points
        self._pin: lmdb.Transaction | None = None
        self.sync()

    def sync(self) -> None:
        """Everything committed until now survives a power cut. Raises lmdb.Error, OSError."""
        if not self._points:
            self._mark(b"")
            return
        pin = self._environment.begin()
        pages = self._meta_pages()
        self._environment.sync(True)
        self._mark(pages)
        self.unpin()
        self._pin = pin

    def close(self, *, clean: bool) -> None:
        """Let go; with `clean`, sync and take the mark away: whoever opens next finds nothing special."""
        self.unpin()
        if clean:
            self._environment.sync(True)
            (self._path / MARK).unlink(missing_ok=True)
            sync(self._path)

    def unpin(self) -> None:
        """Nothing may be committed before the next `sync`."""
        if self._pin is not None:
            self._pin.abort()
            self._pin = None

    def _meta_pages(self) -> bytes:
        with (self._path / "data.mdb").open("rb") as data:
            return data.read(2 * self._environment.stat()["psize"])

    def _mark(self, pages: bytes) -> None:
        fresh = self._path / f"{MARK}.tmp"
        with fresh.open("wb") as file:
            file.write(boot_id() + xxhash.xxh3_64_digest(pages) + pages)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._path / MARK)
        sync(self._path)


def settle(path: Path, environment: lmdb.Environment) -> None:
    """What an earlier owner left in the page cache becomes durable: for a store with an fsync per commit."""
    if (path / MARK).exists():
        environment.sync(True)
        (path / MARK).unlink()
        sync(path)
