"""How much may come in: credits by staleness, and a byte budget.

At most `admission_groups = (max_staleness + 1) x batch_groups` groups are admitted and not consumed. A group is
consumed when it left, or when its batch was settled at a step before the published one. So at the moment a group is
admitted under published step p, at most `max_staleness` batches are ahead of it and it is trained at a step
<= p + max_staleness: staleness is bounded where rows come in, and the check in `take` only meets what redelivery and
reordering made late. With `max_staleness = 0` nothing of the next batch comes in before the next version is out.

A run that is not gated (evaluation) has no versions to follow: there a settled group is a consumed one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from meshrl.contract import codec
from meshrl.contract.errors import ConflictError, UserError
from meshrl.contract.frames import seal
from meshrl.contract.types import PackedTask, Task
from meshrl.transferqueue.model.group import Group, TaskMetadata
from meshrl.transferqueue.records import encode_record
from meshrl.transferqueue.store import Table

if TYPE_CHECKING:
    from meshrl.transferqueue.model.run import Run
    from meshrl.transferqueue.operations.batches import TakenBatch

REMEMBERED = 20_000
"""Tasks that left whose ids are still known. A feeder that repeats itself is at most one call behind its cursor, and
never further than what may be admitted and not consumed."""
TASK_ID_BYTES = 400
"""A task id is part of a key, and LMDB's keys have at most 511 bytes."""


def free_groups(run: Run) -> int:
    """Groups that may come in now."""
    spec = run.spec
    limit = spec.admission_groups
    if run.open_bytes >= spec.resident_bytes or 0 < spec.resident_tokens <= run.open_tokens:
        # The budget never holds up the batch that is being filled: that would wait for itself.
        limit = min(limit, spec.batch_groups)
    return max(0, math.floor(limit) - unconsumed(run))


def unconsumed(run: Run) -> int:
    """Groups admitted and not consumed."""
    return len(run.groups) - run.consumed


def explain(run: Run) -> str:
    """What admission waits for, with the numbers."""
    spec = run.spec
    return (
        f"room: {unconsumed(run)} of {spec.admission_groups:g} groups are admitted and not consumed"
        f" (published {run.published}), {run.open_bytes} of {spec.resident_bytes} bytes"
        + (f", {run.open_tokens} of {spec.resident_tokens} tokens" if spec.resident_tokens else "")
    )


def can_grow(run: Run) -> bool:
    """True when admission could add rows now."""
    return not run.feed_closed and free_groups(run) > 0


def packed(run: Run, tasks: Sequence[Task]) -> dict[str, PackedTask]:
    """The tasks that are not known yet, checked and packed, by id. Raises UserError, with `task`."""
    found: dict[str, PackedTask] = {}
    for task in tasks:
        problem = ""
        if task.run != run.name:
            problem = f"belongs to run {task.run}, not {run.name}"
        elif not task.task_id or len(task.task_id.encode()) > TASK_ID_BYTES:
            problem = f"wants an id of 1 to {TASK_ID_BYTES} bytes"
        elif task.group_size < 1:
            problem = f"wants a group of {task.group_size} rows, at least 1 makes sense"
        elif task.prompt_ids.ndim != 1 or task.prompt_ids.dtype != np.int32:
            problem = f"has prompt_ids {task.prompt_ids.dtype}{list(task.prompt_ids.shape)}, want int32[P]"
        elif run.spec.group_k > task.group_size:
            problem = f"has {task.group_size} rows, and the run wants {run.spec.group_k} finished"
        if problem:
            raise UserError(f"task {task.task_id!r} {problem}", task=task.task_id)
        if task.task_id not in run.seen and task.task_id not in found:
            try:
                found[task.task_id] = codec.pack_task(task)
            except UserError as error:
                raise UserError(
                    f"task {task.task_id!r}: {error.message}", task=task.task_id
                ) from error
    return found


def admit(run: Run, tasks: Sequence[Task], frames: Mapping[str, PackedTask], cursor: str) -> int:
    """Add the longest prefix that fits, maybe none; `cursor` moves when all of it did.

    `frames` is what `packed` made of them; a task that it lacks was known by then, and is packed here.

    Raises:
        ConflictError: the feed is closed and a task is unknown.
    """
    added: list[Group] = []
    count = 0
    for task in tasks:
        if task.task_id not in run.seen:
            if run.feed_closed:
                raise ConflictError(
                    f"run {run.name}: the feed is closed, {task.task_id} is too late"
                )
            if free_groups(run) == 0:
                break
            added.append(_add(run, task, frames.get(task.task_id) or codec.pack_task(task)))
        count += 1
    if count == len(tasks) and cursor != run.cursor:
        run.cursor = cursor
        run.save()
    if added:
        _forget(run)
        run.save(added)
        run.notify_stages()
    return count


def _add(run: Run, task: Task, frame: PackedTask) -> Group:
    number = run.next_group
    run.next_group += 1
    group = run.new_group(
        number,
        task.task_id,
        metadata=TaskMetadata(task.priority, task.data_source, _difficulty(task)),
        task_bytes=len(frame.data),
        attempts=[0] * task.group_size,
    )
    run.commit_log.put(Table.PAYLOAD, group.task_key, seal(frame.data))
    run.seen[task.task_id] = number
    run.commit_log.put(Table.META, seen_key(run.number, task.task_id), encode_record(number))
    run.add_group(group)
    return group


def _difficulty(task: Task) -> float:
    given = task.extra_info.get("difficulty", 0.0)
    return float(given) if isinstance(given, int | float) and math.isfinite(given) else 0.0


def _forget(run: Run) -> None:
    """The tasks that left longest ago, beyond REMEMBERED."""
    while len(run.departed) > REMEMBERED:
        task = run.departed.popleft()
        if task not in run.by_task and task in run.seen:
            del run.seen[task]
            run.commit_log.delete(Table.META, seen_key(run.number, task))


def seen_key(run_number: int, task_id: str) -> bytes:
    """Says that the task was admitted: a feeder that repeats itself changes nothing."""
    return b"n" + run_number.to_bytes(4, "big") + task_id.encode()


def recount(run: Run) -> None:
    """The published version or a batch changed: which batches give their credits back? O(batches)."""
    for batch in run.batches.values():
        consumed = batch.settled and (not run.spec.gated or batch.step < run.published.step)
        if consumed is not batch.consumed:
            _turn(run, batch, consumed)
    run.admission_signal.notify()
    run.notify_stages()


def _turn(run: Run, batch: TakenBatch, consumed: bool) -> None:
    sign = 1 if consumed else -1
    batch.consumed = consumed
    run.consumed += sign * len(batch.groups)
    run.open_load(batch.groups.values(), -sign)
