"""The audit of pictures in a picture store: each that a task names is there, or in the backup that is checked."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING

from meshrl.contract import codec
from meshrl.contract.frames import Frame, strip_checksum
from meshrl.contract.types import ROW_MEDIA
from meshrl.transferqueue.model.group import task_key
from meshrl.transferqueue.model.run import Run
from meshrl.transferqueue.store import PICTURE

if TYPE_CHECKING:
    from meshrl.contract.picture_store import PictureFolders


class PictureAudit:
    """Told every value of PAYLOAD, then asked run by run."""

    def __init__(self, folders: PictureFolders | None) -> None:
        """Pictures are to be in `folders`; None: among the values."""
        self._folders = folders
        self._named: dict[bytes, Mapping[str, int]] = {}
        """Key of a value to the pictures that it names, and their bytes."""
        self._copies: dict[str, int] = {}
        """Path to bytes."""
        self.beside = self.beside_bytes = 0
        """Pictures that were found in `folders`."""

    @property
    def copies(self) -> int:
        """Values that are pictures of a backup."""
        return len(self._copies)

    def is_copy(self, key: bytes, value: bytes) -> bool:
        """Whether a value is a picture of a backup; else notes which pictures it names. Raises CorruptError."""
        if key.startswith(PICTURE):
            from meshrl.transferqueue.operations.pictures import read_back

            path, data = read_back(value)
            self._copies[path] = len(data)
            return True
        if found := _named_in(key, value):
            self._named[key] = found
        return False

    async def lost(self, run: Run) -> AsyncIterator[str]:
        """Problems: pictures that the run's tasks name and nobody has."""
        wanted: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for group in run.groups.values() if self._named else ():
            for key in (group.task_key, *(group.frame_key(frame.number) for frame in group.frames)):
                wanted[group.task_id] |= self._named.get(key, {})
        for dead in run.dead_letters.values():
            wanted[dead.letter.uid.task] |= self._named.get(task_key(run.number, dead.group), {})
        for task, sizes in wanted.items():
            if not sizes:
                continue
            found = await self._found(run.name, task, sizes)
            where = f"in {self._folders.url}" if self._folders else "here (data.media_store)"
            for name, size in sizes.items():
                if found.get(name) != size:
                    yield f"task {run.name}/{task}: picture {name[:12]} of {size} bytes is not {where}"

    async def _found(self, run: str, task: str, names: Mapping[str, int]) -> dict[str, int]:
        """The bytes of each of those pictures that is there."""
        if self._folders is None:
            from meshrl.contract.picture_store import path_of

            paths = {name: path_of(run, task, name) for name in names}
            return {n: self._copies[path] for n, path in paths.items() if path in self._copies}
        there = await asyncio.to_thread(self._folders.pictures, run, task)
        found = {name: there[name] for name in names if name in there}
        self.beside += len(found)
        self.beside_bytes += sum(found.values())
        return found


def _named_in(key: bytes, value: bytes) -> dict[str, int]:
    """Pictures of a picture store, and their bytes, that a value of PAYLOAD names. Raises CorruptError."""
    what = f"payload {key.hex()}"
    if key.startswith(b"t"):
        return codec.stored_in_task(bytes(strip_checksum(value, what)))
    if not key.startswith(b"c"):
        return {}
    frame = Frame(value, what)
    if ROW_MEDIA not in frame.columns:
        return {}
    found: dict[str, int] = {}
    for column in frame.split(ROW_MEDIA):
        found |= codec.stored_in_column(column)
    return found
