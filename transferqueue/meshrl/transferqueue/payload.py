"""Reads the payload of rows back from the store: columns and tasks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeAlias

from meshrl.contract import codec
from meshrl.contract.errors import CorruptError, NotFoundError
from meshrl.contract.frames import Frame, checksum_of, pack, strip_checksum
from meshrl.contract.rows import DAMAGED
from meshrl.contract.types import (
    MEDIA,
    LeasedBlock,
    PackedTask,
    RowBlock,
)
from meshrl.transferqueue.model.columns import Damage, InBatch, NeededFrame, Unread
from meshrl.transferqueue.store import RecentFrames, Store

CHECKED_BYTES = 16 << 20
"""Bytes of payload that are read at once when a batch is checked, about."""


PROMPT_SHOWN = 200
"""Characters of a prompt that a list of rows shows."""
TASKS_CACHED, TASK_BYTES_CACHED = 4096, 256 << 20
"""Packed tasks kept in RAM, and how large they may be together: siblings and later stages read the same one."""


Stored: TypeAlias = Mapping[bytes, tuple[bytes | None, bool]]
"""Values by key, each with True if it has been in RAM since it was compared with its checksum."""


class PayloadReader:
    """Reads durable payload, and caches packed tasks."""

    def __init__(self, store: Store, frames: RecentFrames) -> None:
        self._store = store
        self._frames = frames
        self._tasks: OrderedDict[bytes, PackedTask] = OrderedDict()
        self._task_bytes = 0

    def forget(self) -> None:
        """Empty the caches: after a failed commit they may hold what was never stored."""
        self._frames.forget()
        self._tasks.clear()
        self._task_bytes = 0

    def remember(self, task_key: bytes, task: PackedTask) -> None:
        """Cache a task that is being stored, so that a lease need not read it back."""
        replaced = self._tasks.pop(task_key, None)
        self._tasks[task_key] = task
        self._task_bytes += len(task.data) - (0 if replaced is None else len(replaced.data))
        while len(self._tasks) > TASKS_CACHED or self._task_bytes > TASK_BYTES_CACHED:
            _, oldest = self._tasks.popitem(last=False)
            self._task_bytes -= len(oldest.data)

    async def read(
        self, unread: Sequence[Unread], names: Sequence[str], writes: Sequence[Sequence[str]]
    ) -> list[RowBlock]:
        """The blocks with the columns `names`; `writes` has the columns of every stage.

        Raises:
            NotFoundError: rows left while they were read.
        """
        stored = await self._read([frame.key for each in unread for frame in each.frames])
        some = frozenset(names)
        blocks: list[RowBlock] = []
        for each in unread:
            block = each.block
            frames = _frames(each.frames, stored, some, writes)
            if frames is None:
                raise NotFoundError(
                    f"rows of task {block.task} left while they were read", task=block.task
                )
            blocks.append(
                RowBlock(
                    task=block.task,
                    indices=block.indices,
                    attempts=block.attempts,
                    frames=frames,
                )
            )
        return blocks

    async def with_media(
        self, unread: Sequence[Unread], blocks: Sequence[RowBlock]
    ) -> list[RowBlock]:
        """`blocks`, which `read` has answered `unread` with: the first row of each has its task's pictures, too.

        Raises:
            NotFoundError: rows left while they were read.
        """
        missing = [each.task_key for each in unread if each.task_key not in self._tasks]
        stored = await self._read(missing)
        found: list[RowBlock] = []
        for each, block in zip(unread, blocks, strict=True):
            task = self._task(each, stored)
            if task is None:
                raise NotFoundError(f"task {block.task} left while it was read", task=block.task)
            if media := task.task.media:
                frame = Frame(pack([{MEDIA: codec.pack_media(media)}]), (0,))
                block = replace(block, frames=(*block.frames, frame))
            found.append(block)
        return found

    async def leased(
        self, unread: Sequence[Unread], names: Sequence[str], writes: Sequence[Sequence[str]]
    ) -> tuple[list[LeasedBlock], dict[str, str]]:
        """Like `read`, with tasks and progress; blocks whose groups left in the meantime are left out.

        A damaged group keeps no other from its worker: the second result says by task what is wrong with it.
        """
        missing = [each.task_key for each in unread if each.task_key not in self._tasks]
        keys = [f.key for each in unread for f in (*each.frames, *each.progress)]
        stored = await self._read([*missing, *keys])
        some = frozenset(names)
        blocks: list[LeasedBlock] = []
        damaged: dict[str, str] = {}
        for each in unread:
            block = each.block
            try:
                task = self._task(each, stored)
                frames = _frames(each.frames, stored, some, writes)
                progress = _frames(each.progress, stored, None, writes)
            except CorruptError as error:
                damaged[block.task] = error.message
                continue
            if task is None or frames is None or progress is None:
                continue
            blocks.append(
                LeasedBlock(
                    task=block.task,
                    indices=block.indices,
                    attempts=block.attempts,
                    token=block.token,
                    frames=frames,
                    deliveries=each.deliveries,
                    packed=task,
                    progress=progress,
                )
            )
        return blocks, damaged

    async def damaged(self, frames: Sequence[InBatch]) -> dict[int, Damage]:
        """The damage in the frames of a batch, by group number; all frames are read.

        The first damage in a group counts.
        """
        found: dict[int, Damage] = {}
        left = list(frames)
        while left:
            nbytes = count = 0
            while count < len(left) and nbytes < CHECKED_BYTES:
                nbytes += left[count].frame.nbytes
                count += 1
            part, left = left[:count], left[count:]
            stored = await self._read([each.key for each in part])
            for each in part:
                if fault := _fault(each.key, stored, each.frame.checksum):
                    reason = f"{DAMAGED}: task {each.task}, {fault}"
                    found.setdefault(each.group, Damage(each.frame.live, each.stage, reason))
        return found

    async def prompts(self, task_keys: Sequence[bytes]) -> dict[bytes, str]:
        """The beginnings of what tasks ask; none of a task that left, is damaged or has tokens only."""
        found: dict[bytes, str] = {}
        for key, (value, _) in (await self._read(task_keys)).items():
            with suppress(CorruptError):
                if value is not None:
                    task = codec.unpack_task(bytes(strip_checksum(value, "a task")))
                    found[key] = "".join(m.content for m in task.conversation[-1:])[:PROMPT_SHOWN]
        return found

    async def _read(self, keys: Sequence[bytes]) -> Stored:
        found = {key: (value, True) for key, value in self._frames.recall(keys).items()}
        missing = [key for key in keys if key not in found]
        if not missing:
            return found
        values = await self._store.read(missing)
        return {
            **found,
            **{key: (value, False) for key, value in zip(missing, values, strict=True)},
        }

    def _task(self, each: Unread, stored: Stored) -> PackedTask | None:
        task = self._tasks.get(each.task_key)
        value, _ = stored.get(each.task_key, (None, False))
        if task is None and value is not None:
            what = f"task {each.block.task}"
            task = PackedTask(bytes(strip_checksum(value, what)), codec.unpack_task)
            if task.task.task_id != each.block.task:
                raise CorruptError(f"{what}: the store returns {task.task.task_id}")
            self.remember(each.task_key, task)
        return task


def _fault(key: bytes, stored: Stored, checksum: int) -> str:
    """The fault in a frame that the store returns; empty if there is none."""
    value, checked = stored[key]
    if value is None:
        return f"frame {key.hex()}: the store has lost it"
    try:
        if checksum_of(value) != checksum:
            return f"frame {key.hex()}: the store returns another one"
        if not checked:
            strip_checksum(value, f"frame {key.hex()}")
    except CorruptError as error:
        return error.message
    return ""


def _frames(
    needed: Sequence[NeededFrame],
    stored: Stored,
    names: frozenset[str] | None,
    writes: Sequence[Sequence[str]],
) -> tuple[Frame, ...] | None:
    """The needed rows and columns of stored frames; None if one of the frames was deleted while they were read.

    A frame that has no others is passed on as it is. `names` None: all columns.

    Raises:
        CorruptError: the store returns another frame than the one that was written under its key.
    """
    frames: list[Frame] = []
    for each in needed:
        value, _ = stored[each.key]
        if value is None:
            return None
        if fault := _fault(each.key, stored, each.checksum):
            raise CorruptError(fault)
        whole = names is None or names.issuperset(writes[each.stage])
        if each.positions is not None or not whole:
            read = Frame(value, what=f"frame {each.key.hex()}", checked=True)
            some = [name for name in read.columns if names is None or name in names]
            value = read.select(some, each.positions)
        frames.append(Frame(value, each.places))
    return tuple(frames)
