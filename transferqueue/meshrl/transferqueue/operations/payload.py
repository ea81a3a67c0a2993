"""The payload of rows: checks the columns that a stage writes, and reads columns and tasks back from the store."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from meshrl.contract import codec
from meshrl.contract.errors import CorruptError, NotFoundError, UserError
from meshrl.contract.frames import Column, Frame, checksum_of, pack, strip_checksum
from meshrl.contract.row_values import value_fault
from meshrl.contract.rows import DAMAGED
from meshrl.contract.types import (
    CONVERSATION,
    DATA_SOURCE,
    MEDIA,
    NOTES,
    REWARD_TIMES,
    ROLLOUT_TIMES,
    ROUTED_EXPERTS,
    ROW_MEDIA,
    GroupRows,
    LeasedGroup,
    PackedGroup,
    PackedTask,
    Part,
    PayloadGroup,
    ProgressGroup,
    Uid,
)
from meshrl.transferqueue.model.group import Group, StoredFrame, bits
from meshrl.transferqueue.model.run import Run
from meshrl.transferqueue.model.stages import Stage
from meshrl.transferqueue.store import RecentFrames, Store

_I4, _I8, _U1, _F4, _F8 = map(np.dtype, ("<i4", "<i8", "u1", "<f4", "<f8"))
TYPES: Mapping[str, tuple[np.dtype[Any], int]] = {
    "tokens": (_I4, 1),
    "loss_mask": (_U1, 1),
    "rollout_logprobs": (_F4, 1),
    "spans": (_I8, 2),
    "response_text": (_U1, 1),
    "replica": (_U1, 1),
    "posted_reward": (_U1, 1),
    "reward": (_F4, 1),
    "reward_components": (_U1, 1),
    "reward_hash": (_U1, 1),
    "token_rewards": (_F4, 1),
    "ref_logprobs": (_F4, 1),
    "ref_top_ids": (_I4, 2),
    "ref_top_logprobs": (_F4, 2),
    ROUTED_EXPERTS: (_U1, 1),
    ROLLOUT_TIMES: (_F8, 1),
    CONVERSATION: (_U1, 1),
    ROW_MEDIA: (_U1, 1),
    REWARD_TIMES: (_F8, 1),
    DATA_SOURCE: (_U1, 1),
}
"""Name to (dtype, rank); any other column may have any storable type."""
PER_TOKEN = frozenset(
    {
        "tokens",
        "loss_mask",
        "rollout_logprobs",
        "token_rewards",
        "ref_logprobs",
        "ref_top_ids",
        "ref_top_logprobs",
    }
)


class _Refused(Exception):
    """Why a write is refused, and for which position of the frame."""

    def __init__(self, problem: str, position: int = 0) -> None:
        super().__init__(problem)
        self.position = position


def check(run: Run, write: PackedGroup, frame: Frame, stage: Stage, group: Group | None) -> None:
    """Check a write to `stage`, for all rows of the frame at once.

    Raises:
        UserError: with `uid`; names the column, what it is and what it must be.
    """
    try:
        _check_names(frame, stage)
        if stage.first:
            lengths = _lengths_by_facts(write, stage)
        elif write.facts:
            raise _Refused(f"facts come with the first stage, not with {stage.name}")
        else:
            known = [group.facts[index] if group else None for index in write.indices]
            lengths = tuple([facts.num_tokens if facts else 0 for facts in known])
        for name, column in frame.columns.items():
            _check_column(name, column, lengths, run.spec.vocabulary)
    except _Refused as refused:
        raise _named(refused, run, write) from None


def check_progress(run: Run, write: ProgressGroup, frame: Frame, lengths: Sequence[int]) -> None:
    """Check entries that are appended, `lengths` of them to each row. Raises UserError as `check` does."""
    try:
        for name, column in frame.columns.items():
            _check_column(name, column, tuple(lengths), run.spec.vocabulary)
    except _Refused as refused:
        raise _named(refused, run, write) from None


def _named(refused: _Refused, run: Run, rows: GroupRows) -> UserError:
    at = refused.position
    uid = Uid(run.name, rows.task, rows.indices[at], rows.attempts[at])
    return UserError(f"row {uid}: {refused}", uid=uid)


def _check_names(frame: Frame, stage: Stage) -> None:
    if tuple(frame.columns) == stage.writes:
        return
    known = (*stage.writes, *NOTES.get(stage.name, ()))
    unknown = [name for name in frame.columns if name not in known]
    missing = [name for name in stage.writes if name not in frame.columns]
    if unknown or missing:
        problem = f"column {unknown[0]} is not" if unknown else f"column {missing[0]} is missing"
        raise _Refused(f"{problem} in what stage {stage.name} writes: {stage.writes}")


def _lengths_by_facts(write: PackedGroup, stage: Stage) -> tuple[int, ...]:
    if len(write.facts) != len(write.indices):
        raise _Refused(f"stage {stage.name} must give the row's facts")
    for position, facts in enumerate(write.facts):
        if not facts.outcome.trainable:
            raise _Refused(f"outcome {facts.outcome} can never be trained on: use fail", position)
        if facts.newest < facts.oldest or facts.num_tokens < 0:
            raise _Refused(f"facts make no sense: {facts}", position)
    return tuple([facts.num_tokens for facts in write.facts])


def _check_column(name: str, column: Column, num_tokens: tuple[int, ...], vocabulary: int) -> None:
    entry = column.entry
    dtype, rank = TYPES.get(name, (entry.dtype, entry.rank))
    if entry.dtype != dtype or entry.rank != rank:
        raise _Refused(f"column {name} is {_shape(column)}, want {dtype} of rank {rank}")
    if column.lengths is None:
        return
    if name in PER_TOKEN and column.lengths != num_tokens:
        pairs = enumerate(zip(column.lengths, num_tokens, strict=True))
        position, (length, wanted) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
        raise _Refused(f"column {name} has {length} entries, the row {wanted} tokens", position)
    if name == "spans" and entry.tail != (4,):
        raise _Refused(f"column spans is {_shape(column)}, want int64[n, 4]")
    if name == "reward":
        _check_reward(column)
    elif fault := value_fault(
        name, column.values, column.lengths, tokens=num_tokens, vocabulary=vocabulary
    ):
        raise _Refused(fault.problem, fault.row)


def _check_reward(column: Column) -> None:
    lengths, values = column.lengths or (), column.values
    # For a few numbers, this takes less time than one call of numpy.
    if lengths.count(1) == len(lengths) and all(map(math.isfinite, values.tolist())):
        return
    at = 0
    for position, length in enumerate(lengths):
        array = values[at : at + length]
        if length != 1 or not np.isfinite(array[0]):
            raise _Refused(f"column reward is {array}, want one finite number", position)
        at += length


def _shape(column: Column) -> str:
    first = [] if column.lengths is None else [column.lengths[0]]
    return f"{column.entry.dtype.name}{[*first, *column.entry.tail]}"


CHECKED_BYTES = 16 << 20
"""About so much payload is read at once when a batch is checked."""


class Damage(NamedTuple):
    """Rows of one group whose payload is not what was written."""

    rows: int
    """Their set."""
    stage: Stage
    """The one that wrote what is damaged."""
    reason: str
    """The reason in their dead letters."""


PROMPT_SHOWN = 200
"""Characters of a prompt that a list of rows shows."""
TASKS_CACHED, TASK_BYTES_CACHED = 4096, 256 << 20
"""Packed tasks kept in RAM, and how large they may be together: siblings and later stages read the same one."""


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


class Stored(NamedTuple):
    """What was read under a key."""

    value: bytes | None
    checked: bool
    """It has been in RAM since it was compared with its checksum."""


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
    return located(group, rows.indices, mask, numbers)


def located(
    group: Group,
    indices: tuple[int, ...],
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
    attempts = tuple([group.attempts[index] for index in indices])
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
        self, extracts: Sequence[Extract], names: Sequence[str], writes: Sequence[Sequence[str]]
    ) -> list[PayloadGroup]:
        """The columns `names` of each extract; `writes` has the columns of every stage.

        Raises:
            NotFoundError: rows left while they were read.
        """
        stored = await self._read([frame.key for each in extracts for frame in each.frames])
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

    async def with_media(
        self, extracts: Sequence[Extract], groups: Sequence[PayloadGroup]
    ) -> list[PayloadGroup]:
        """`groups`, which `read` has answered `extracts` with: the first row of each has its task's pictures, too.

        Raises:
            NotFoundError: rows left while they were read.
        """
        missing = [each.task_key for each in extracts if each.task_key not in self._tasks]
        stored = await self._read(missing)
        found: list[PayloadGroup] = []
        for each, group in zip(extracts, groups, strict=True):
            task = self._task(each, stored)
            if task is None:
                raise NotFoundError(f"task {each.task} left while it was read", task=each.task)
            if media := task.task.media:
                part = Part(rows=(0,), frame=pack([{MEDIA: codec.pack_media(media)}]))
                group = replace(group, parts=(*group.parts, part))
            found.append(group)
        return found

    async def leased(
        self,
        extracts: Sequence[Extract],
        names: Sequence[str],
        writes: Sequence[Sequence[str]],
        held: Sequence[tuple[int, tuple[int, ...]]],
    ) -> tuple[list[LeasedGroup], dict[str, str]]:
        """Like `read`, with tasks, progress, tokens and deliveries; groups that left in the meantime are left out.

        A damaged group keeps no other from its worker: the second result says by task what is wrong with it.
        """
        missing = [each.task_key for each in extracts if each.task_key not in self._tasks]
        frames = [f.key for each in extracts for f in (*each.frames, *each.progress)]
        stored = await self._read([*missing, *frames])
        wanted = frozenset(names)
        groups: list[LeasedGroup] = []
        damaged: dict[str, str] = {}
        for each, (token, deliveries) in zip(extracts, held, strict=True):
            try:
                task = self._task(each, stored)
                parts = _parts(each.frames, stored, wanted, writes)
                progress = _parts(each.progress, stored, None, writes)
            except CorruptError as error:
                damaged[each.task] = error.message
                continue
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
        return groups, damaged

    async def damaged(self, run: Run, groups: Sequence[Group]) -> dict[int, Damage]:
        """What is damaged in the columns of complete `groups`, by their numbers; all of them are read.

        What is found first in a group counts.
        """
        found: dict[int, Damage] = {}
        frames = [
            (group, frame, group.frame_key(frame.number))
            for group in groups
            for frame in group.frames
        ]
        while frames:
            nbytes = count = 0
            while count < len(frames) and nbytes < CHECKED_BYTES:
                nbytes += frames[count][1].nbytes
                count += 1
            part, frames = frames[:count], frames[count:]
            stored = await self._read([key for _, _, key in part])
            for group, frame, key in part:
                if fault := _fault(key, stored[key], frame.checksum):
                    fault = f"{DAMAGED}: task {group.task_id}, {fault}"
                    found.setdefault(
                        group.number, Damage(frame.live, run.stages.ordered[frame.stage], fault)
                    )
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

    async def _read(self, keys: Sequence[bytes]) -> dict[bytes, Stored]:
        found = {key: Stored(value, True) for key, value in self._frames.recall(keys).items()}
        missing = [key for key in keys if key not in found]
        if missing:
            values = await self._store.read(missing)
            found |= {key: Stored(value, False) for key, value in zip(missing, values, strict=True)}
        return found

    def _task(self, each: Extract, stored: Mapping[bytes, Stored]) -> PackedTask | None:
        task = self._tasks.get(each.task_key)
        read = stored.get(each.task_key)
        if task is None and read is not None and read.value is not None:
            what = f"task {each.task}"
            task = PackedTask(bytes(strip_checksum(read.value, what)), codec.unpack_task)
            if task.task.task_id != each.task:
                raise CorruptError(f"{what}: the store returns {task.task.task_id}")
            self.remember(each.task_key, task)
        return task


def _fault(key: bytes, stored: Stored, checksum: int) -> str:
    """What is wrong with a frame that the store returns; empty if nothing is."""
    value = stored.value
    if value is None:
        return f"frame {key.hex()}: the store has lost it"
    try:
        if checksum_of(value) != checksum:
            return f"frame {key.hex()}: the store returns another one"
        if not stored.checked:
            strip_checksum(value, f"frame {key.hex()}")
    except CorruptError as error:
        return error.message
    return ""


def _parts(
    frames: Sequence[NeededFrame],
    stored: Mapping[bytes, Stored],
    names: frozenset[str] | None,
    writes: Sequence[Sequence[str]],
) -> tuple[Part, ...] | None:
    """The needed rows and columns of stored frames; None if one of the frames was deleted while they were read.

    A frame that has no others is passed on as it is. `names` None: all columns.

    Raises:
        CorruptError: the store returns another frame than the one that was written under its key.
    """
    parts: list[Part] = []
    for frame in frames:
        found = stored[frame.key]
        value = found.value
        if value is None:
            return None
        if fault := _fault(frame.key, found, frame.checksum):
            raise CorruptError(fault)
        whole = names is None or names.issuperset(writes[frame.stage])
        if frame.positions is not None or not whole:
            read = Frame(value, f"frame {frame.key.hex()}", checked=True)
            wanted = [name for name in read.columns if names is None or name in names]
            value = read.select(wanted, frame.positions)
        parts.append(Part(rows=frame.rows, frame=value))
    return tuple(parts)
