"""Groups of a run: they are admitted, become complete, lose rows to dead letters, and leave.

Admission: credits bound staleness, and there is a budget of bytes and tokens. At most
`admission_groups = (max_staleness + 1) x batch_groups` groups are admitted and not consumed. A group is
consumed when it left, or when its batch was settled at a step before the published one. So when a group is admitted
under published step p, at most `max_staleness` batches are ahead of it, and it is trained at a step
<= p + max_staleness: staleness is bounded where rows come in, and the check in `take` only finds rows that redelivery
or reordering made late. With `max_staleness = 0` nothing of the next batch comes in before the next version is out.

A run that is not gated (evaluation) follows no versions: there every settled group is consumed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Container, Iterable, Mapping, Sequence

import numpy as np

from meshrl.contract import codec
from meshrl.contract.errors import ConflictError, UserError
from meshrl.contract.frames import with_checksum
from meshrl.contract.types import (
    DeadLetter,
    GroupPolicy,
    Outcome,
    PackedTask,
    RunSpec,
    Task,
    Uid,
    name_fault,
)
from meshrl.transferqueue.model.failures import LastFailure
from meshrl.transferqueue.model.group import Group, count_sampled, task_key
from meshrl.transferqueue.model.records import DeadRow, Exit, State, TaskMetadata
from meshrl.transferqueue.model.rows import ResidentRows, Stage
from meshrl.transferqueue.store import Table

log = logging.getLogger(__name__)

TASK_ID_BYTES = 400
"""A task id is part of a key, and LMDB's keys have at most 511 bytes."""


INCOMPLETE = "group_incomplete"
"""The reason with which siblings of a dead row leave."""


READY = list(State).index(State.READY)


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
            problem = f"is not a name: {fault}"
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


class FeederVerbs(ResidentRows):
    """The verbs of the feeder, and what becomes of a group by the run's policy."""

    # --- the feeder

    @property
    def unconsumed(self) -> int:
        """Groups that are admitted and not consumed: they hold admission credit (see above)."""
        return len(self._groups) - self._consumed

    def free_groups(self) -> int:
        """Groups that may come in now."""
        spec = self.spec
        limit = self.admission_groups
        if self.open_bytes >= spec.resident_bytes or 0 < spec.resident_tokens <= self.open_tokens:
            # The budget never holds up the batch that is being filled: the run would wait for itself.
            limit = min(limit, spec.batch_groups)
        return max(0, math.floor(limit) - self.unconsumed)

    def waits_for(self) -> str:
        """The reason why admission waits, with the numbers."""
        spec = self.spec
        return (
            f"room: {self.unconsumed} of {self.admission_groups:g} groups are admitted and not consumed"
            f" (published {self.record.published}), {self.open_bytes} of {spec.resident_bytes} bytes"
            + (
                f", {self.open_tokens} of {spec.resident_tokens} tokens"
                if spec.resident_tokens
                else ""
            )
        )

    def can_grow(self) -> bool:
        """True when admission could add rows now."""
        return not self.record.feed_closed and self.free_groups() > 0

    def admit(self, tasks: Sequence[Task], frames: Mapping[str, PackedTask], cursor: str) -> int:
        """Admit the longest prefix of `tasks` that fits, and return its length; `cursor` moves when everything fits.

        `frames` is what `packed` returned; a task that it lacks was known then, and is packed here if it is not any
        more.

        Raises:
            ConflictError: the feed is closed and a task is not known.
        """
        added: list[Group] = []
        count = 0
        for task in tasks:
            if task.task_id not in self.known_tasks:
                if self.record.feed_closed:
                    raise ConflictError(
                        f"run {self.name}: the feed is closed, {task.task_id} is too late"
                    )
                if self.free_groups() == 0:
                    break
                difficulty = task.extra_info.get("difficulty", 0.0)
                if not isinstance(difficulty, int | float) or not math.isfinite(difficulty):
                    difficulty = 0.0
                metadata = TaskMetadata(task.priority, task.data_source, float(difficulty))
                frame = frames.get(task.task_id) or codec.pack_task(task)
                number = self.record.next_group
                self.record.next_group += 1
                self.known_tasks.add(task.task_id, number)
                attempts = [0] * task.group_size
                group = self._add_group(number, task.task_id, metadata, len(frame.data), attempts)
                self._commit_log.put(Table.PAYLOAD, group.task_key, with_checksum(frame.data))
                added.append(group)
            count += 1
        if count == len(tasks) and cursor != self.record.cursor:
            self.record.cursor = cursor
            self.save()
        if added:
            self.known_tasks.forget(self.by_task)
            self.save(added)
            self.notify_stages()
        return count

    def close_feed(self) -> None:
        """Close the feed: no task will come any more."""
        if not self.record.feed_closed:
            self.record.feed_closed = True
            self.save()
            self.notify_all()

    # --- complete groups

    def is_complete(self, group: Group) -> bool:
        """True when a group that is in no batch may be taken.

        `all` and `replace_sibling` need every row. `k_of_n` needs k; the unfinished rows continue until the group is
        taken.
        """
        wanted = group.size
        if self.spec.group_policy is GroupPolicy.K_OF_N:
            wanted = self.spec.group_k
        return group.counts[READY] >= wanted

    def offer_if_complete(self, group: Group) -> None:
        """Offer the group if its rows, some of which got a column, are complete."""
        if not group.complete and group.batch is None and self.is_complete(group):
            self.offer(group)

    # --- groups leave

    def remove_group(self, group: Group, exit_: Exit, reason: str) -> None:
        """Remove the group; every remaining row leaves."""
        if group.present:
            self.remove_rows(group, group.present, exit_, reason)
        self.complete.discard(group)
        batch = group.batch
        if batch is not None:
            batch.groups.remove(group.number)
            self.in_batches -= 1
        else:
            count_sampled(self.sampled_from, group, -1)
        if batch is not None and batch.consumed:
            self._consumed -= 1
        else:
            self.open_bytes -= group.task_bytes
        del self._groups[group.number]
        del self._by_task[group.task_id]
        self._commit_log.delete(Table.META, group.key)
        dead = self._dead.by_group.get(group.number, [])
        for row in dead:
            row.attempts = list(group.attempts)
            self._commit_log.touch(row)
        if not dead:
            self._commit_log.delete(Table.PAYLOAD, group.task_key)
            self.known_tasks.mark_departed(group.task_id)
        self.notify_stages()
        self.complete_signal.notify()
        self.admission_signal.notify()
        if self.record.feed_closed and not self._groups:
            self.gate_signal.notify()

    # --- dead letters

    def note_failure(self, stage: Stage, uid: Uid, reason: str) -> None:
        """Note that a worker could not finish a row."""
        now, before = self.clock(), self._failures.get(stage.name)
        self._failures[stage.name] = LastFailure(
            count=before.count + 1 if before else 1,
            first=before.first if before else now,
            last=now,
            uid=uid,
            reason=reason,
        )

    def dead_letter(
        self, group: Group, index: int, stage: Stage, outcome: Outcome, reason: str
    ) -> None:
        """Dead-letter a row; its group does what the policy says."""
        self._bury(group, index, stage, outcome, reason)
        self._after_dead_letter(group, index)
        dropped, total = self._drop_dead_letters(), self.record.dropped_letters
        if dropped and (total == dropped or total // 1000 > (total - dropped) // 1000):
            log.warning(
                "run %s: the oldest dead letters are dropped, %d so far",
                self.name,
                total,
            )
        self.save([group])

    def _bury(self, group: Group, index: int, stage: Stage, outcome: Outcome, reason: str) -> None:
        """Dead-letter the row at `index` for `stage`."""
        row = DeadRow(
            run_number=self.number,
            number=self.record.next_dead,
            letter=DeadLetter(
                uid=group.uid(index),
                stage=stage.name,
                outcome=outcome,
                reason=reason,
                attempts=group.deliveries[stage.number][index],
            ),
            group=group.number,
            metadata=group.metadata,
            task_bytes=group.task_bytes,
            attempts=list(group.attempts),
        )
        self.record.next_dead += 1
        self._dead.add(row)
        self._commit_log.touch(row)
        self.remove_rows(group, 1 << index, Exit.DEAD, reason)

    def _after_dead_letter(self, group: Group, index: int) -> None:
        """Replace the dead-lettered row at `index` of an open group, continue without it, or drop the group."""
        policy = self.spec.group_policy
        replacements = group.replacements[index]
        if policy is GroupPolicy.REPLACE_SIBLING and replacements < self.spec.max_attempts:
            self.start_attempts(group, [index], replacements=replacements + 1)
            return
        group.dead |= 1 << index
        if policy is not GroupPolicy.K_OF_N or group.present.bit_count() < self.spec.group_k:
            self.remove_group(group, Exit.FILTERED, INCOMPLETE)

    def _drop_dead_letters(self) -> int:
        """Drop the oldest letters beyond what a run may keep, with the tasks that nothing else needs; how many.

        The ledger continues counting their rows as dead-lettered.
        """
        before, quota = self.record.dropped_letters, self._quota
        while len(self.dead_letters) > 1 and (
            len(self.dead_letters) > quota.dead_letters
            or self._dead.nbytes > quota.dead_letter_bytes
        ):
            row = next(iter(self.dead_letters.values()))
            self._remove_dead_letter(row)
            self.record.dropped_letters += 1
            if row.group not in self._dead.by_group and row.group not in self._groups:
                self._commit_log.delete(Table.PAYLOAD, task_key(self.number, row.group))
                self.known_tasks.mark_departed(row.letter.uid.task)
        return self.record.dropped_letters - before

    def replay(self, uids: Iterable[Uid]) -> int:
        """Admit dead rows again as new attempts; returns how many letters were answered.

        If the group is still open, the row joins it again. If the group is in a batch, the letter stays. If the group
        has left, the whole task comes in again with a new attempt at each index: one sibling could never complete a
        group.
        """
        answered = 0
        for uid in uids:
            row = self.dead_letters.get(uid)
            if row is None:
                continue
            group = self.groups.get(row.group)
            if group is not None and group.batch is not None:
                continue
            self._remove_dead_letter(row)
            answered += 1
            if group is None:
                attempts = [attempt + 1 for attempt in row.attempts]
                group = self._add_group(row.group, uid.task, row.metadata, row.task_bytes, attempts)
            elif group.dead >> uid.index & 1:
                self.start_attempts(group, [uid.index])
            self.save([group])
        return answered

    def _remove_dead_letter(self, row: DeadRow) -> None:
        """Remove a dead letter that was answered or dropped."""
        self._dead.remove(row)
        self._commit_log.delete(Table.META, row.key)
