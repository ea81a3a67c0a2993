"""The life of a group: admission, completeness, take, filter, settle, commit, rewind.

    admitted ──every row complete──▶ ready ──take──▶ taken ──settle(step)──▶ settled ──commit──▶ trained
                                       ▲               │ acquire by another      │
                                       └───────────────┴──────── rewind(step) ───┘  back in the order of their takes

Admission: credits bound staleness, and there is a budget of bytes and tokens. At most
`admission_groups = (max_staleness + 1) x batch_groups` groups are admitted and not consumed. A group is
consumed when it left, or when its batch was settled at a step before the published one. So when a group is admitted
under published step p, at most `max_staleness` batches are ahead of it, and it is trained at a step
<= p + max_staleness: staleness is bounded where rows come in, and the check in `take` only finds rows that redelivery
or reordering made late. With `max_staleness = 0` nothing of the next batch comes in before the next version is out.

A run that is not gated (evaluation) follows no versions: there every settled group is consumed.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np

from meshrl.contract import codec
from meshrl.contract.errors import ConflictError, EndOfDataError, NotFoundError, UserError
from meshrl.contract.types import (
    Batch,
    GroupPolicy,
    Json,
    Outcome,
    PackedTask,
    RowBlock,
    RowFacts,
    RunSpec,
    StalePolicy,
    Task,
    Uid,
    Version,
    name_fault,
)
from meshrl.transferqueue.model.group import Group, bits
from meshrl.transferqueue.model.records import Exit, State, TakenBatch, TaskMetadata
from meshrl.transferqueue.model.run import Run
from meshrl.transferqueue.store import decode_record, encode_record

TASK_ID_BYTES = 400
"""A task id is part of a key, and LMDB's keys have at most 511 bytes."""


class Sampled(NamedTuple):
    """The groups that are in no batch and are sampled from one version on, while they are fresh enough for a step."""

    first: int
    """The version's step."""
    later: int
    """Groups that fit into the batches after that step's which still come in time for them."""
    groups: int
    complete: int
    """How many of `groups` a take could get."""


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
        f" (published {run.record.published}), {run.open_bytes} of {spec.resident_bytes} bytes"
        + (f", {run.open_tokens} of {spec.resident_tokens} tokens" if spec.resident_tokens else "")
    )


def can_grow(run: Run) -> bool:
    """True when admission could add rows now."""
    return not run.record.feed_closed and free_groups(run) > 0


def packed(
    spec: RunSpec, known: Container[str], tasks: Sequence[Task], *, most_rows: float = math.inf
) -> dict[str, PackedTask]:
    """The tasks that are not `known`, checked and packed, by id. Raises UserError, with `task`."""
    frames: dict[str, PackedTask] = {}
    for task in tasks:
        problem = ""
        if task.run != spec.run:
            problem = f"belongs to run {task.run}, not {spec.run}"
        elif not task.task_id or len(task.task_id.encode(errors="replace")) > TASK_ID_BYTES:
            problem = f"wants an id of 1 to {TASK_ID_BYTES} bytes"
        elif fault := name_fault(task.task_id, most=TASK_ID_BYTES):
            problem = f"is no name: {fault}"
        elif task.group_size > most_rows:
            problem = f"wants a group of {task.group_size} rows, at most {most_rows:.0f}"
        elif task.group_size < 1:
            problem = f"wants a group of {task.group_size} rows, at least 1 makes sense"
        elif task.prompt_ids.ndim != 1 or task.prompt_ids.dtype != np.int32:
            problem = f"has prompt_ids {task.prompt_ids.dtype}{list(task.prompt_ids.shape)}, want int32[P]"
        elif spec.group_k > task.group_size:
            problem = f"has {task.group_size} rows, and the run wants {spec.group_k} finished"
        if problem:
            raise UserError(f"task {task.task_id[:200]!r} {problem}", task=task.task_id)
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
            if run.record.feed_closed:
                raise ConflictError(
                    f"run {run.name}: the feed is closed, {task.task_id} is too late"
                )
            if free_groups(run) == 0:
                break
            difficulty = task.extra_info.get("difficulty", 0.0)
            if not isinstance(difficulty, int | float) or not math.isfinite(difficulty):
                difficulty = 0.0
            metadata = TaskMetadata(task.priority, task.data_source, float(difficulty))
            frame = frames.get(task.task_id) or codec.pack_task(task)
            added.append(run.admit(task.task_id, metadata, frame.data, task.group_size))
        count += 1
    if count == len(tasks) and cursor != run.record.cursor:
        run.move_cursor(cursor)
        run.save()
    if added:
        run.known_tasks.forget(run.by_task)
        run.save(added)
        run.notify_stages()
    return count


INCOMPLETE = "group_incomplete"
"""The reason with which siblings of a dead row leave."""
SPARE = "k_of_n"
"""The reason with which unfinished rows leave when the k rows that were asked for are taken."""
REISSUED, DROPPED = "reissued", "dropped"
ALWAYS_STALE = "stale at each attempt"
"""The reason with which a group leaves that was issued again `max_attempts` times and was too old each time."""

READY = list(State).index(State.READY)


def is_complete(run: Run, group: Group) -> bool:
    """True when a group that is in no batch may be taken.

    `all` and `replace_sibling` need every row. `k_of_n` needs k; the unfinished rows go on until the group is taken.
    """
    wanted = group.size
    if run.spec.group_policy is GroupPolicy.K_OF_N:
        wanted = run.spec.group_k
    return group.counts[READY] >= wanted


def offer_if_complete(run: Run, group: Group) -> None:
    """Rows of the group got a column, maybe their last."""
    if not group.complete and group.batch is None and is_complete(run, group):
        run.offer(group)


def after_dead_letter(run: Run, group: Group, index: int) -> None:
    """The row at `index` of an open group was dead-lettered: replace it, go on without it, or drop the group."""
    policy = run.spec.group_policy
    replacements = group.replacements[index]
    if policy is GroupPolicy.REPLACE_SIBLING and replacements < run.spec.max_attempts:
        run.start_attempts(group, [index], replacements=replacements + 1)
        return
    run.mark_dead(group, index)
    if policy is not GroupPolicy.K_OF_N or group.present.bit_count() < run.spec.group_k:
        run.remove_group(group, Exit.FILTERED, INCOMPLETE)


def too_old(run: Run, group: Group, step: int) -> bool:
    """True when a row of the group was sampled more than `max_staleness` steps before `step`."""
    oldest = min([facts.oldest.step for facts in group.facts_of(group.present)], default=step)
    return step - oldest > run.spec.max_staleness


def retire(run: Run, group: Group) -> None:
    """The group is too old: every row leaves as stale; `reissue` samples the task again in its old place.

    At most `max_attempts` times: a prompt whose responses take longer than `max_staleness` steps would be sampled for
    as long as training goes on.
    """
    reason = DROPPED
    if (
        run.spec.stale_policy is StalePolicy.REISSUE
        and min(group.attempts) >= run.spec.max_attempts
    ):
        reason = ALWAYS_STALE
    elif run.spec.stale_policy is StalePolicy.REISSUE:
        run.reissue(group, REISSUED)
        run.save([group])
        return
    run.remove_group(group, Exit.STALE, reason)
    run.save()


def sampled(run: Run, step: int) -> tuple[Sampled, ...]:
    """The groups in no batch by the version from which they are sampled, without what is too old for `step`."""
    spec = run.spec
    if math.isinf(spec.max_staleness) or not spec.gated:
        return ()
    last = math.floor(spec.max_staleness) - step
    complete = run.complete.sampled_from
    return tuple(
        Sampled(first, (first + last) * spec.batch_groups, run.sampled_from[first], complete[first])
        for first in sorted(run.sampled_from)
        if first + last >= 0
    )


def due_groups(run: Run, known: Sequence[Sampled], count: int) -> tuple[int, int]:
    """Groups that `take` waits for although enough others are complete: any later step would be too late for them.

    `known` is what `sampled` returns. Returns the step from which on they are sampled at the latest (negative: there
    are none), and their number. Without this, tasks that sample for longer than the staleness window were overtaken
    each time, and only short ones were trained. A run that drops what is too old waits for none: it is as fast as its
    short responses. A repeated batch is as it was.
    """
    if run.spec.stale_policy is StalePolicy.DROP or run.complete.taken_before >= count:
        return -1, 0
    return most_lacking(known, count)


def _with_due(
    run: Run, groups: list[Group], step: int, wanted_by: Iterable[tuple[int, int]]
) -> list[Group]:
    """`groups`, which the sampler has chosen, with those that must be in the batch in the place of its last ones."""
    for first, wanted in wanted_by:
        missing = wanted - sum(_from(group) <= first for group in groups)
        if missing <= 0:
            continue
        chosen = {group.number for group in groups}
        swaps = [
            group
            for group in run.groups.values()
            if group.complete
            and _from(group) <= first
            and group.number not in chosen
            and not too_old(run, group, step)
        ]
        later = [group for group in groups if _from(group) > first and group.position < 0]
        swapped = min(missing, len(swaps), len(later))
        leaving = {group.number for group in later[len(later) - swapped :]}
        groups = [group for group in groups if group.number not in leaving] + swaps[:swapped]
    return groups


def sampled_by(group: Group, step: int) -> bool:
    """True if the group is sampled from `step` or an earlier one on."""
    return _from(group) <= step


def _from(group: Group) -> float:
    return math.inf if group.sampled_from is None else group.sampled_from


def take(run: Run, *, epoch: int, step: int, count: int, batch_id: str) -> Batch | None:
    """Take a batch of `count` complete groups; None if there are not enough yet, or groups are due that are not.

    A closed feed ends with one smaller batch. Groups that trainers died with come in smaller ones, see `suspects`.

    Raises:
        EndOfDataError: the feed is closed and nothing is left to take.
        ConflictError: the step is committed. A request that arrives after its repetition was answered would take rows
            that nobody trains.
    """
    if step < run.record.committed_step:
        raise ConflictError(
            f"run {run.name}: step {step} is committed, so batch {batch_id} was trained and has left",
            committed_step=run.record.committed_step,
        )
    groups = fresh_enough(run, step, count)
    if part := suspects(groups, count):
        return _taken(run, part, step, epoch, batch_id)
    if len(groups) < count:
        open_groups = len(run.groups) - run.in_batches
        if not run.record.feed_closed or len(run.complete) < open_groups:
            return None
        if not groups:
            raise EndOfDataError(
                f"run {run.name}: the feed is closed and every group is taken or has left"
            )
    if known := sampled(run, step):
        if len(groups) == count and due_groups(run, known, count)[1] > 0:
            return None
        wanted_by = [(first, wanted) for first, wanted, _ in due(known, len(groups))]
        groups = _with_due(run, groups, step, wanted_by)
    return _taken(run, groups, step, epoch, batch_id)


def _taken(run: Run, groups: Sequence[Group], step: int, epoch: int, batch_id: str) -> Batch:
    """The batch of these complete groups."""
    for group in groups:
        run.withdraw(group)
        if unfinished := group.unfinished:
            run.remove_rows(group, unfinished, Exit.FILTERED, SPARE)
    blocks, records = zip(*map(_manifest, groups), strict=True)
    run.open_batch(batch_id, step, epoch, groups, encode_record(records))
    run.save(groups)
    return Batch(batch_id=batch_id, run=run.name, step=step, groups=blocks)


DEATHS = 2
"""Trainers that die with a batch in hand before it is taken apart: one may have been killed for any reason."""


def suspects(groups: Sequence[Group], count: int) -> list[Group]:
    """A part of those of `groups` that trainers died with, for a take of `count`; empty where there are none.

    One of them may be what trainers die of. With each death the parts have half as many groups, and those that were
    in fewer come first: they are trained, or they are known to be what is looked for.
    """
    known = [group for group in groups if group.deaths >= DEATHS]
    fewest = min((group.deaths for group in known), default=DEATHS)
    most = max(1, count >> fewest - DEATHS + 1)
    return [group for group in known if group.deaths == fewest][:most]


def fresh_enough(run: Run, step: int, count: int) -> list[Group]:
    """The next `count` complete groups in order (fewer if there are fewer); groups that are too old leave first."""
    while True:
        groups = [run.groups[number] for number in run.complete.first(count)]
        stale = [group for group in groups if too_old(run, group, step)]
        if not stale:
            return groups
        for group in stale:
            retire(run, group)


def _manifest(group: Group) -> tuple[RowBlock, Json]:
    """What a batch says of the group, and the same as it is stored."""
    indices = bits(group.present)
    attempts = tuple([group.attempts[index] for index in indices])
    outcomes, num_tokens, oldest, newest, _ = zip(*group.facts_of(group.present), strict=True)
    columns = zip(outcomes, num_tokens, oldest, newest, repeat(""))
    block = RowBlock(
        task=group.task_id,
        indices=indices,
        attempts=attempts,
        group_size=group.size,
        facts=tuple(map(_facts, repeat(RowFacts), columns)),
    )
    # Plain tuples: orjson takes no others.
    versions = list(map(tuple, oldest)), list(map(tuple, newest))
    return block, (group.task_id, indices, attempts, group.size, num_tokens, *versions, outcomes)


_facts = tuple.__new__
"""`RowFacts._make` in C, for every row that is taken."""


def shrink(run: Run, batch: TakenBatch) -> None:
    """Groups have left the batch before anybody has seen it: it is answered without them.

    A batch without groups is closed, so that it can be taken again.
    """
    if batch.groups:
        rewrite_manifest(run, batch)
    else:
        run.give_back([batch])


def rewrite_manifest(run: Run, batch: TakenBatch) -> None:
    """The batch is answered with the groups that it has now."""
    records = [_manifest(group)[1] for group in run.groups_of(batch)]
    run.rewrite_manifest(batch, encode_record(records))


def read_manifest(run: str, batch: TakenBatch, value: bytes) -> Batch:
    """The batch as `take` answered it. Raises CorruptError."""
    groups = tuple(
        RowBlock(
            task=task,
            indices=tuple(indices),
            attempts=tuple(attempts),
            group_size=size,
            facts=tuple(
                RowFacts(Outcome(outcome), tokens, Version(*oldest), Version(*newest), "")
                for outcome, tokens, oldest, newest in zip(outcomes, *columns, strict=True)
            ),
        )
        for task, indices, attempts, size, *columns, outcomes in decode_record(
            value, f"manifest of batch {batch.batch_id}"
        )
    )
    return Batch(batch_id=batch.batch_id, run=run, step=batch.step, groups=groups)


def filter_rows(run: Run, uids: Sequence[Uid], reason: str) -> None:
    """Taken rows leave as filtered. Rows that left before are skipped, so filtering twice is filtering once.

    Raises NotFoundError, ConflictError; see `taken`.
    """
    groups = taken(run, uids)
    for group, mask in groups:
        run.remove_rows(group, mask, Exit.FILTERED, reason)
        if not group.present:
            run.remove_group(group, Exit.FILTERED, reason)
    run.save([group for group, _ in groups])


def taken(run: Run, uids: Sequence[Uid]) -> list[tuple[Group, int]]:
    """Rows of batches that are not settled, by group; those that have left are skipped.

    Raises:
        NotFoundError: with `uid`; the task was never admitted.
        ConflictError: with `uid`; the row is resident and not taken.
    """
    rows: dict[int, tuple[Group, int]] = {}
    for uid in uids:
        group = run.find(uid)
        if group is None and uid.task not in run.known_tasks:
            raise NotFoundError(f"no row {uid} in run {run.name}", uid=uid)
        if group is None:
            continue
        if group.batch is None or group.batch.settled:
            state = run.state_of(group, uid.index)
            raise ConflictError(f"row {uid} is {state}, only taken rows are filtered", uid=uid)
        _, mask = rows.get(group.number, (group, 0))
        rows[group.number] = (group, mask | 1 << uid.index)
    return list(rows.values())


def settle(run: Run, *, step: int, batch_id: str) -> None:
    """The batch went into optimizer step `step`; settling twice is settling once.

    Raises:
        NotFoundError: no such batch. ConflictError: it was taken for another step.
    """
    batch = run.batches.get(batch_id)
    if batch is None:
        if step < run.record.committed_step:
            return  # settled and committed: the call is a repetition
        raise NotFoundError(f"run {run.name} has no batch {batch_id!r}", batch_id=batch_id)
    if batch.step != step:
        raise ConflictError(f"batch {batch_id} was taken for step {batch.step}, not {step}")
    if batch.settled:
        return
    run.settle(batch)
    run.save()


def commit(run: Run, step: int) -> None:
    """Rows settled before `step` are trained for good and leave; committing twice is committing once."""
    if step >= run.record.committed_step:
        run.commit(step)
        run.save()


def rewind(run: Run, step: int) -> int:
    """Rows settled at `step` or later are ready again, and `step` is the published version; returns the rows.

    Raises:
        ConflictError: rows of that step were committed and have left.
    """
    if step < run.record.committed_step:
        raise ConflictError(
            f"run {run.name} cannot go back to step {step}: rows before step"
            f" {run.record.committed_step} were committed and have left",
            committed_step=run.record.committed_step,
        )
    rows = run.rewind(step)
    run.save()
    return rows


def due(sampled: Sequence[Sampled], count: int) -> Iterator[tuple[int, int, int]]:
    """How many of the groups that are sampled from `first` or earlier on must be in a batch of `count` groups.

    `sampled` is in the order of `first`. Yields (first, groups, how many of those are not complete).
    """
    groups = complete = 0
    for one in sampled:
        groups += one.groups
        complete += one.complete
        if (wanted := min(groups - one.later, count)) > 0:
            yield one.first, wanted, max(0, wanted - complete)


def most_lacking(sampled: Sequence[Sampled], count: int) -> tuple[int, int]:
    """The `first` of `due` for which the most groups are not complete, and how many; (-1, 0): all are."""
    lacking = [(first, groups) for first, _, groups in due(sampled, count) if groups]
    return max(lacking, key=lambda each: each[1], default=(-1, 0))
