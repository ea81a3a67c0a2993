"""Reads payload back from the store: the frames of rows as they were written, and the tasks of leased rows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from meshrl.contract import codec
from meshrl.contract.errors import CorruptError, NotFoundError
from meshrl.contract.frames import Frame, checksum_of, strip_checksum
from meshrl.contract.types import GroupRows, LeasedGroup, PackedTask, Part, PayloadGroup
from meshrl.transferqueue.model.group import Group, StoredFrame, bits
from meshrl.transferqueue.model.stages import Stage
from meshrl.transferqueue.store import Store

TASKS_CACHED = 4096
"""Packed tasks kept in RAM: siblings and later stages read the same one."""


class NeededFrame(NamedTuple):
    """A stored frame, and which of its rows are needed."""

    key: bytes
    stage: int
    rows: tuple[int, ...]
    """For each needed row, its position among the rows of the request."""
    positions: tuple[int, ...] | None
    """For each needed row, its position in the frame; None: every row of the frame, in order."""
    checksum: int
    """The checksum that the frame must have: it detects a store that returns the frame of another row."""


class Extract(NamedTuple):
    """What to read for some rows of one group; it stays valid whatever happens to the group meanwhile."""

    task: str
    indices: tuple[int, ...]
    attempts: tuple[int, ...]
    task_key: bytes
    frames: tuple[NeededFrame, ...]
    progress: tuple[NeededFrame, ...] = ()
    """The progress that was appended for the rows, in order."""

    @property
    def rows(self) -> GroupRows:
        """The names of the rows."""
        return GroupRows(task=self.task, indices=self.indices, attempts=self.attempts)


def extract(
    group: Group, rows: GroupRows, mask: int, stages: Sequence[Stage], names: Sequence[str]
) -> Extract:
    """Where the columns `names`, which `stages` write, lie for resident `rows`, whose set is `mask`.

    Raises:
        NotFoundError: with `uid`; a stage has not written a row yet.
    """
    for stage in stages:
        if absent := mask & ~group.done[stage.number]:
            uid, missing = (
                group.uid(bits(absent)[0]),
                next(n for n in names if n in stage.writes),
            )
            raise NotFoundError(f"row {uid} has no column {missing} yet", uid=uid)
    numbers = [stage.number for stage in stages]
    return located(group, rows.indices, rows.attempts, mask, numbers)


def located(
    group: Group,
    indices: tuple[int, ...],
    attempts: tuple[int, ...],
    mask: int,
    stages: Sequence[int],
    *,
    progress_of: int = -1,
) -> Extract:
    """Where the columns of `stages` (numbers) and the progress of stage `progress_of` lie for the rows."""
    frames: list[NeededFrame] = []
    progress: list[NeededFrame] = []
    for frame in group.frames:
        wanted = frame.stage == progress_of if frame.partial else frame.stage in stages
        if wanted and frame.live & mask:
            rows_, positions = _overlap(indices, frame, mask)
            (progress if frame.partial else frames).append(
                NeededFrame(
                    group.frame_key(frame.number), frame.stage, rows_, positions, frame.checksum
                )
            )
    return Extract(group.task_id, indices, attempts, group.task_key, tuple(frames), tuple(progress))


def _overlap(
    indices: tuple[int, ...], frame: StoredFrame, mask: int
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """`rows` and `positions` of NeededFrame for those rows of a frame that are in `indices`, whose set is `mask`."""
    if frame.rows == indices and frame.live & mask == mask:
        return bits((1 << len(indices)) - 1), None
    place = {index: at for at, index in enumerate(indices)}
    pairs = [
        (place[index], position)
        for position, index in enumerate(frame.rows)
        if index in place and frame.live >> index & 1
    ]
    all_rows = len(pairs) == len(frame.rows)
    return tuple([at for at, _ in pairs]), None if all_rows else tuple([at for _, at in pairs])


class PayloadReader:
    """Reads durable payload, and caches packed tasks."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tasks: OrderedDict[bytes, PackedTask] = OrderedDict()

    def forget(self) -> None:
        """Empty the cache: after a failed commit it may hold tasks that were never stored."""
        self._tasks.clear()

    def remember(self, task_key: bytes, task: PackedTask) -> None:
        """Cache a task that is being stored, so that a lease need not read it back."""
        self._tasks[task_key] = task
        if len(self._tasks) > TASKS_CACHED:
            self._tasks.popitem(last=False)

    async def read(
        self, extracts: Sequence[Extract], names: Sequence[str], writes: Sequence[Sequence[str]]
    ) -> list[PayloadGroup]:
        """The columns `names` of each extract; `writes` has the columns of every stage.

        Raises:
            NotFoundError: rows left while they were read.
        """
        stored = await self._stored([frame.key for each in extracts for frame in each.frames])
        wanted = frozenset(names)
        groups: list[PayloadGroup] = []
        for each in extracts:
            parts = _parts(each.frames, stored, wanted, writes)
            if parts is None:
                task = each.task
                raise NotFoundError(f"rows of task {task} left while they were read", task=task)
            groups.append(
                PayloadGroup(
                    task=each.task,
                    indices=each.indices,
                    attempts=each.attempts,
                    parts=parts,
                )
            )
        return groups

    async def leased(
        self,
        extracts: Sequence[Extract],
        names: Sequence[str],
        writes: Sequence[Sequence[str]],
        held: Sequence[tuple[int, tuple[int, ...]]],
    ) -> list[LeasedGroup]:
        """Like `read`, with tasks, progress, tokens and deliveries; groups that left in the meantime are left out."""
        missing = [each.task_key for each in extracts if each.task_key not in self._tasks]
        keys = [*missing, *[f.key for each in extracts for f in (*each.frames, *each.progress)]]
        stored = await self._stored(keys)
        wanted = frozenset(names)
        groups: list[LeasedGroup] = []
        for each, (token, deliveries) in zip(extracts, held, strict=True):
            task = self._task(each, stored.get(each.task_key))
            parts = _parts(each.frames, stored, wanted, writes)
            progress = _parts(each.progress, stored, None, writes)
            if task is None or parts is None or progress is None:
                continue
            groups.append(
                LeasedGroup(
                    task=each.task,
                    indices=each.indices,
                    attempts=each.attempts,
                    parts=parts,
                    token=token,
                    deliveries=deliveries,
                    packed=task,
                    progress=progress,
                )
            )
        return groups

    async def _stored(self, keys: Sequence[bytes]) -> dict[bytes, bytes | None]:
        return dict(zip(keys, await self._store.read(keys), strict=True)) if keys else {}

    def _task(self, each: Extract, value: bytes | None) -> PackedTask | None:
        task = self._tasks.get(each.task_key)
        if task is None and value is not None:
            what = f"task {each.task}"
            task = PackedTask(bytes(strip_checksum(value, what)), codec.unpack_task)
            if task.task.task_id != each.task:
                raise CorruptError(f"{what}: the store returns {task.task.task_id}")
            self.remember(each.task_key, task)
        return task


def _parts(
    frames: Sequence[NeededFrame],
    stored: Mapping[bytes, bytes | None],
    names: frozenset[str] | None,
    writes: Sequence[Sequence[str]],
) -> tuple[Part, ...] | None:
    """The parts of a row group; None if one of the frames was deleted while they were read."""
    parts: list[Part] = []
    for frame in frames:
        value = stored[frame.key]
        if value is None:
            return None
        parts.append(_part(frame, value, names, writes[frame.stage]))
    return tuple(parts)


def _part(
    frame: NeededFrame, value: bytes, names: frozenset[str] | None, written: Sequence[str]
) -> Part:
    """The needed rows and columns of a stored frame; the frame itself if it has no others. `names` None: all columns.

    Raises:
        CorruptError: it is not the frame that was written under this key.
    """
    if checksum_of(value) != frame.checksum:
        raise CorruptError(f"frame {frame.key.hex()}: the store returns another one")
    if frame.positions is None and (names is None or names.issuperset(written)):
        return Part(rows=frame.rows, frame=value)
    read = Frame(value, f"frame {frame.key.hex()}")
    columns = [name for name in read.columns if names is None or name in names]
    return Part(rows=frame.rows, frame=read.select(columns, frame.positions))
