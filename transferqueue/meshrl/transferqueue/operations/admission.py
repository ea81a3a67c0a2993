"""How much may come in: credits that bound staleness, and a budget of bytes and tokens.

At most `admission_groups = (max_staleness + 1) x batch_groups` groups are admitted and not consumed. A group is
consumed when it left, or when its batch was settled at a step before the published one. So when a group is admitted
under published step p, at most `max_staleness` batches are ahead of it, and it is trained at a step
<= p + max_staleness: staleness is bounded where rows come in, and the check in `take` only finds rows that redelivery
or reordering made late. With `max_staleness = 0` nothing of the next batch comes in before the next version is out.

A run that is not gated (evaluation) follows no versions: there every settled group is consumed.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence

import numpy as np

from meshrl.contract import codec
from meshrl.contract.errors import ConflictError, UserError
from meshrl.contract.types import PackedTask, RunSpec, Task
from meshrl.transferqueue.model.group import Group
from meshrl.transferqueue.model.records import TaskMetadata
from meshrl.transferqueue.model.run import Run

TASK_ID_BYTES = 400
"""A task id is part of a key, and LMDB's keys have at most 511 bytes."""


def free_groups(run: Run) -> int:
    """Groups that may come in now."""
    spec = run.spec
    limit = spec.admission_groups
    if run.open_bytes >= spec.resident_bytes or 0 < spec.resident_tokens <= run.open_tokens:
        # The budget never holds up the batch that is being filled: the run would wait for itself.
        limit = min(limit, spec.batch_groups)
    return max(0, math.floor(limit) - run.unconsumed)


def waits_for(run: Run) -> str:
    """What admission waits for, with the numbers."""
    spec = run.spec
    return (
        f"room: {run.unconsumed} of {spec.admission_groups:g} groups are admitted and not consumed"
        f" (published {run.published}), {run.open_bytes} of {spec.resident_bytes} bytes"
        + (f", {run.open_tokens} of {spec.resident_tokens} tokens" if spec.resident_tokens else "")
    )


def can_grow(run: Run) -> bool:
    """True when admission could add rows now."""
    return not run.feed_closed and free_groups(run) > 0


def packed(spec: RunSpec, known: Container[str], tasks: Sequence[Task]) -> dict[str, PackedTask]:
    """The tasks that are not `known`, checked and packed, by id. Raises UserError, with `task`."""
    frames: dict[str, PackedTask] = {}
    for task in tasks:
        problem = ""
        if task.run != spec.run:
            problem = f"belongs to run {task.run}, not {spec.run}"
        elif not task.task_id or len(task.task_id.encode()) > TASK_ID_BYTES:
            problem = f"wants an id of 1 to {TASK_ID_BYTES} bytes"
        elif task.group_size < 1:
            problem = f"wants a group of {task.group_size} rows, at least 1 makes sense"
        elif task.prompt_ids.ndim != 1 or task.prompt_ids.dtype != np.int32:
            problem = f"has prompt_ids {task.prompt_ids.dtype}{list(task.prompt_ids.shape)}, want int32[P]"
        elif spec.group_k > task.group_size:
            problem = f"has {task.group_size} rows, and the run wants {spec.group_k} finished"
        if problem:
            raise UserError(f"task {task.task_id!r} {problem}", task=task.task_id)
        if task.task_id not in known and task.task_id not in frames:
            try:
                frames[task.task_id] = codec.pack_task(task)
            except UserError as error:
                raise UserError(
                    f"task {task.task_id!r}: {error.message}", task=task.task_id
                ) from error
    return frames


def admit(run: Run, tasks: Sequence[Task], frames: Mapping[str, PackedTask], cursor: str) -> int:
    """Admit the longest prefix of `tasks` that fits, and return its length; `cursor` moves when everything fits.

    `frames` is what `packed` returned; a task that it lacks was known then, and is packed here if it is not any more.

    Raises:
        ConflictError: the feed is closed and a task is not known.
    """
    added: list[Group] = []
    count = 0
    for task in tasks:
        if task.task_id not in run.known_tasks:
            if run.feed_closed:
                raise ConflictError(
                    f"run {run.name}: the feed is closed, {task.task_id} is too late"
                )
            if free_groups(run) == 0:
                break
            added.append(_add(run, task, frames.get(task.task_id) or codec.pack_task(task)))
        count += 1
    if count == len(tasks) and cursor != run.cursor:
        run.move_cursor(cursor)
        run.save()
    if added:
        run.forget_tasks()
        run.save(added)
        run.notify_stages()
    return count


def _add(run: Run, task: Task, frame: PackedTask) -> Group:
    metadata = TaskMetadata(task.priority, task.data_source, _difficulty(task))
    return run.admit(task.task_id, metadata, frame.data, task.group_size)


def _difficulty(task: Task) -> float:
    value = task.extra_info.get("difficulty", 0.0)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0
