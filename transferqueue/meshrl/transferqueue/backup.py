"""Backup and restore: a backup is a disk store, from which any store can be filled.

    store ──export (one commit)──▶ FOLDER.partial ──synced, renamed──▶ FOLDER ──▶ an empty store

An interrupted backup leaves only a folder `.partial`, which no command takes for a backup. A restore writes the
payload first and all records in its last commit, so an interrupted one leaves an empty store.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from meshrl.common.files import sync
from meshrl.contract.errors import ConflictError, NotFoundError, UserError
from meshrl.transferqueue.several_processes import refusal
from meshrl.transferqueue.store import Operation, Store, Table
from meshrl.transferqueue.stores.disk import DiskStore

PARTIAL = ".partial"
PICTURE = b"p"
"""How keys of pictures began that were not in the queue they were backed up from."""


@dataclass(slots=True, kw_only=True)
class Copied:
    """How much a backup or a restore has copied."""

    records: int = 0
    values: int = 0
    """Entries of PAYLOAD."""
    nbytes: int = 0
    """Keys and values."""

    def add(self, piece: Sequence[Operation]) -> None:
        """Count `piece`."""
        for table, key, value in piece:
            self.records += table is Table.META
            self.values += table is Table.PAYLOAD
            self.nbytes += len(key) + len(value or b"")


async def back_up(pieces: AsyncIterator[Sequence[Operation]], folder: Path) -> Copied:
    """Write what a store exports to `folder`.

    Raises:
        ConflictError: `folder` exists. CapacityError: the disk is full. UserError: the folder cannot be created.
    """
    partial = _begin(folder)
    copied = Copied()
    store = DiskStore(partial, durability="none")
    try:
        await store.load()
        async for piece in pieces:
            await store.apply(piece)
            copied.add(piece)
    except BaseException:
        await store.close()
        shutil.rmtree(partial, ignore_errors=True)
        raise
    await store.close()
    partial.rename(folder)
    sync(folder.parent)
    return copied


def _begin(folder: Path) -> Path:
    if folder.exists():
        raise ConflictError(
            f"{folder} exists: a backup never overwrites anything; name another folder"
        )
    partial = folder.with_name(folder.name + PARTIAL)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700, parents=True)  # it holds rows
    except OSError as error:
        raise UserError(f"cannot write a backup to {folder}: {error.strerror}") from error
    return partial


def opened(folder: Path) -> DiskStore:
    """The store of a backup; the caller loads and closes it.

    Raises:
        NotFoundError: none is there. UserError: a backup of several queue processes is there.
    """
    if all((folder / part / "data.mdb").is_file() for part in ("queue-0", "queue-1")):
        raise refusal(f"{folder} is a backup of several queue processes")
    if not (folder / "data.mdb").is_file():
        raise NotFoundError(f"{folder} holds no backup of a queue (no data.mdb in it)")
    return DiskStore(folder)


async def restore_backup(folder: Path, store: Store) -> Copied:
    """Fill an empty `store`, which is opened here and stays open.

    Raises:
        NotFoundError: `folder` holds no backup. ConflictError: the store holds a queue.
        UserError: the backup has another format or pictures of a store, or the store is owned.
        CorruptError: it cannot be read. CapacityError: it does not fit.
    """
    source = opened(folder)
    try:
        await source.load()
        if await store.load():
            raise ConflictError(
                "the store holds a queue already, and a restore never overwrites one: choose another"
                " run.dir, queue.path or queue.redis_prefix"
            )
        copied = Copied()
        records: list[Operation] = []
        async with aclosing(source.export()) as pieces:
            async for piece in pieces:
                copied.add(piece)
                records += [operation for operation in piece if operation.table is Table.META]
                payload = [operation for operation in piece if operation.table is Table.PAYLOAD]
                if any(operation.key.startswith(PICTURE) for operation in payload):
                    raise UserError(
                        f"{folder} has pictures of data.media_store, which is no more: commit 9121209e"
                        " restores it"
                    )
                if payload:
                    store.check_room(sum(len(operation.value or b"") for operation in payload))
                    await store.apply(payload)
        await store.apply(records)
    finally:
        await source.close()
    return copied
