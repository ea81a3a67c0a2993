"""The payload of rows: checks the columns that a stage writes, and reads columns and tasks back from the store."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

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
    LeasedBlock,
    PackedTask,
    RowBlock,
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


def check(run: Run, write: RowBlock, stage: Stage, group: Group | None) -> None:
    """Check a write to `stage`, for all its rows at once.

    Raises:
        UserError: with `uid`; names the column, what it is and what it must be.
    """
    frame = write.frame
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


def check_progress(run: Run, write: RowBlock, lengths: Sequence[int]) -> None:
    """Check entries that are appended, `lengths` of them to each row. Raises UserError as `check` does."""
    try:
        for name, column in write.frame.columns.items():
            _check_column(name, column, tuple(lengths), run.spec.vocabulary)
    except _Refused as refused:
        raise _named(refused, run, write) from None


def _named(refused: _Refused, run: Run, rows: RowBlock) -> UserError:
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


def _lengths_by_facts(write: RowBlock, stage: Stage) -> tuple[int, ...]:
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


Stored: TypeAlias = Mapping[bytes, tuple[bytes | None, bool]]
"""What was read, by key; True: it has been in RAM since it was compared with its checksum."""


class NeededFrame(NamedTuple):
    """A stored frame, and which of its rows are needed."""

    key: bytes
    stage: int
    places: tuple[int, ...]
    """For each needed row, its place in the block."""
    positions: tuple[int, ...] | None
    """For each needed row, its position in the frame; None: every row of the frame, in order."""
    checksum: int
    """The checksum that the frame must have: it detects a store that returns the frame of another row."""


class Unread(NamedTuple):
    """A block whose frames are still to be read; it stays valid whatever happens to its group meanwhile."""

    block: RowBlock
    task_key: bytes
    frames: tuple[NeededFrame, ...]
    progress: tuple[NeededFrame, ...] = ()
    """The progress that was appended for the rows, in order."""
    deliveries: tuple[int, ...] = ()
    """Of leased rows."""


def wanted(
    group: Group, rows: RowBlock, mask: int, stages: Sequence[Stage], names: Sequence[str]
) -> Unread:
    """Where the columns `names`, which `stages` write, lie for resident `rows`, whose set is `mask`.

    Raises:
        NotFoundError: with `uid`; a stage has not written a row yet.
    """
    for stage in stages:
        if absent := mask & ~group.done[stage.number]:
            uid = group.uid(bits(absent)[0])
            missing = next(name for name in names if name in stage.writes)
            raise NotFoundError(f"row {uid} has no column {missing} yet", uid=uid)
    frames, _ = stored_frames(group, rows.indices, mask, [stage.number for stage in stages])
    return Unread(rows, group.task_key, frames)


def stored_frames(
    group: Group,
    indices: tuple[int, ...],
    mask: int,
    stages: Sequence[int],
    *,
    progress_of: int = -1,
) -> tuple[tuple[NeededFrame, ...], tuple[NeededFrame, ...]]:
    """Where the columns of `stages` (numbers), and the progress of stage `progress_of`, lie for the rows."""
    frames: list[NeededFrame] = []
    progress: list[NeededFrame] = []
    for frame in group.frames:
        needed = frame.stage == progress_of if frame.partial else frame.stage in stages
        if needed and frame.live & mask:
            places, positions = _overlap(indices, frame, mask)
            (progress if frame.partial else frames).append(
                NeededFrame(
                    group.frame_key(frame.number), frame.stage, places, positions, frame.checksum
                )
            )
    return tuple(frames), tuple(progress)


def _overlap(
    indices: tuple[int, ...], frame: StoredFrame, mask: int
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """`places` and `positions` of NeededFrame for a frame's rows that are in `indices`, whose set is `mask`."""
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
                if fault := _fault(key, stored, frame.checksum):
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
    """What is wrong with a frame that the store returns; empty if nothing is."""
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
