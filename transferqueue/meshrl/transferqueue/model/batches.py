"""The verbs of trainers: acquire, publish, take, filter, settle, commit, rewind.

ready ──take──▶ taken ──settle(step)──▶ settled ──commit──▶ trained
▲               │ acquire by another      │
└───────────────┴──────── rewind(step) ───┘  back in the order of their takes
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat

from meshrl.common.plain_text import counted
from meshrl.contract.errors import (
    ConflictError,
    EndOfDataError,
    FencedError,
    NotFoundError,
    UserError,
)
from meshrl.contract.rows import UNTRAINABLE
from meshrl.contract.types import (
    Batch,
    Json,
    Outcome,
    RowBlock,
    RowFacts,
    StalePolicy,
    Uid,
    Version,
)
from meshrl.transferqueue.model.columns import Damage, InBatch
from meshrl.transferqueue.model.failures import BATCHES_DEAD, FEWEST_DEAD
from meshrl.transferqueue.model.group import Group, bits, count_sampled
from meshrl.transferqueue.model.leases import WorkerVerbs
from meshrl.transferqueue.model.records import Exit, TakenBatch
from meshrl.transferqueue.model.rows import Stage
from meshrl.transferqueue.model.waiting import Sampled, due, first_version, most_lacking
from meshrl.transferqueue.store import Table, decode_record, encode_record

log = logging.getLogger(__name__)


SPARE = "k_of_n"
"""The reason with which unfinished rows leave when the k rows that were asked for are taken."""

REISSUED, DROPPED = "reissued", "dropped"
ALWAYS_STALE = "stale at each attempt"
"""The reason with which a group leaves that was issued again `max_attempts` times and was too old each time."""


DEATHS = 2
"""Trainers that die with a batch in hand before it is taken apart: one may have been killed for any reason."""
ALONE = 3
"""Trainers that die without a word with one group alone in hand before it is given up; steps of others are made in
between."""
ALONE_LAST = 6
"""The same where there is no other group of which a step could be made."""


class TrainerVerbs(WorkerVerbs):
    """The verbs of trainers."""

    def check_epoch(self, epoch: int) -> None:
        """Refuse a trainer that lost the run. Raises FencedError."""
        if epoch != self.record.epoch:
            raise FencedError(
                f"run {self.name}: epoch {epoch} is fenced, epoch {self.record.epoch} has the run"
                f" ({self.record.owner or 'nobody acquired it'})",
                epoch=epoch,
                newest=self.record.epoch,
            )

    def groups_of(self, batch: TakenBatch) -> list[Group]:
        """The groups of a batch of this run."""
        return [self._groups[number] for number in batch.groups]

    def stored_in(self, batch: TakenBatch) -> list[InBatch]:
        """Every frame of a batch."""
        return [
            InBatch(
                group.frame_key(frame.number),
                frame,
                group.number,
                group.task_id,
                self.stages.ordered[frame.stage],
            )
            for group in self.groups_of(batch)
            for frame in group.frames
        ]

    # --- trainers and versions

    def acquire(self, owner: str) -> None:
        """Give the run to `owner`; the trainer before it held the received batches that are not settled.

        Their groups are complete again, and are suspected of its death. A death without an error (a crash in native
        code, too little memory) looks like a kill that has nothing to do with rows. So a group that the trainer held
        alone is held back until a step of others is made, and is given up when trainers that worked in between have
        died with it ALONE times.
        """
        in_hand = [
            batch for batch in self._batches.values() if batch.answered and not batch.settled
        ]
        groups = [group for batch in in_hand for group in self.groups_of(batch)]
        for group in groups:
            group.deaths += 1
        alone = groups[0] if len(groups) == 1 else None
        if alone is not None and alone.failed_in != self.record.epoch:
            alone.died_alone += self._is_evidence(alone)
            alone.settled_before = self._settled
        self.record.epoch, self.record.owner = self.record.epoch + 1, owner
        self.lasting_faults.forget()
        self.give_back([batch for batch in self._batches.values() if not batch.settled])
        if groups and groups[0].deaths >= DEATHS:
            log.warning(
                "run %s: %d trainers died with the groups of task %s and %d others in hand",
                self.name,
                groups[0].deaths,
                groups[0].task_id,
                len(groups) - 1,
            )
        if alone is not None and alone.died_alone >= ALONE:
            reason = f"{UNTRAINABLE}: trainers die with its group alone in hand"
            log.error("run %s: task %s: %s", self.name, alone.task_id, reason)
            self.complete.discard(alone)
            self._bury_all(alone, alone.present, self.stages.ordered[0], reason)
        self.save()
        self.notify_all()

    def _is_evidence(self, alone: Group) -> bool:
        """Whether the death of a trainer with this group alone in hand says something of the group.

        The first one does; a further one after a step of others, or where it is one of many and no group is left that
        nobody died with alone.
        """
        if not alone.died_alone or alone.settled_before not in (-1, self._settled):
            return True
        others = any(group.finished and not group.died_alone for group in self.groups.values())
        return not others and alone.deaths >= ALONE_LAST

    def publish(self, version: Version) -> None:
        """`version` is the newest one; batches of earlier steps may become consumed. An older one changes nothing."""
        if version < self.record.published:
            return
        # A rewind publishes the resumed version before the fleet has it. Publishing it again must end the leases
        # that wait under an older version, too.
        self.record.published = version
        self.publishes += 1
        self.recount()
        self.save()
        self.notify_all()

    # --- take

    def take(self, *, epoch: int, step: int, count: int, batch_id: str) -> Batch | None:
        """Take a batch of `count` complete groups; None if there are not enough yet, or groups are due that are not.

        A closed feed ends with one smaller batch. Groups that trainers died with come in smaller ones, see
        `suspects`.

        Raises:
            EndOfDataError: the feed is closed and nothing is left to take.
            ConflictError: the step is committed. A request that arrives after its repetition was answered would take
            rows
                that nobody trains.
        """
        if step < self.record.committed_step:
            raise ConflictError(
                f"run {self.name}: step {step} is committed, so batch {batch_id} was trained and has left",
                committed_step=self.record.committed_step,
            )
        groups = self.fresh_enough(step, count)
        if held := [group for group in groups if group.settled_before == self._settled]:
            others = self.fresh_enough(step, count + len(held))
            others = [group for group in others if group.settled_before != self._settled][:count]
            if others:
                return self._take_groups(suspects(others, count) or others, step, epoch, batch_id)
        if part := suspects(groups, count):
            return self._take_groups(part, step, epoch, batch_id)
        if len(groups) < count:
            open_groups = len(self.groups) - self.in_batches
            if not self.record.feed_closed or len(self.complete) < open_groups:
                return None
            if not groups:
                raise EndOfDataError(
                    f"run {self.name}: the feed is closed and every group is taken or has left"
                )
        if known := self.sampled(step):
            if len(groups) == count and self.due_groups(known, count)[1] > 0:
                return None
            wanted_by = [(first, wanted) for first, wanted, _ in due(known, len(groups))]
            groups = self._with_due(groups, step, wanted_by)
        return self._take_groups(groups, step, epoch, batch_id)

    def wait_for_batch(self, batch_id: str) -> None:
        """Note that a trainer waits for a batch; from its second call on, rows that die count against the wait."""
        if self._waited_for != batch_id:
            self._waited_for, self._dead_before = batch_id, None
        elif self._dead_before is None:
            self._dead_before = self.record.next_dead

    def refuse_hopeless(self) -> None:
        """End a wait for a batch that will not come (`failures.py`). Raises UserError, with the last reason."""
        faults, rows = self.lasting_faults, self.spec.batch_groups * self.spec.group_size
        dead, none = faults.in_a_row(), ", and none was finished in between"
        if dead < FEWEST_DEAD:
            before, none = self._dead_before, ""
            lost = 0 if before is None else self.record.next_dead - before
            if not self.spec.gated or (
                lost < max(FEWEST_DEAD, rows)
                and faults.dead < max(FEWEST_DEAD, BATCHES_DEAD * rows)
            ):
                return
            dead = max(lost, faults.dead)
        last = list(self.dead_letters.values())[-1].letter
        raise UserError(
            f"run {self.name}: {counted(dead, 'row was', 'rows were')} dead-lettered while the trainer waited for one"
            f" batch of {rows}{none}; the last one died of {f'{last.stage}: {last.reason}'!r} (all: meshrl"
            " dead-letters; try them again: meshrl dead-letters replay)"
        )

    def lacks_groups(self, count: int) -> bool:
        """Whether a taker from a run that is not gated, and has no feeder, waits for groups that left."""
        return not self.spec.gated and len(self.groups) - self.in_batches < count

    def _take_groups(self, groups: Sequence[Group], step: int, epoch: int, batch_id: str) -> Batch:
        """The batch of these complete groups."""
        self.lasting_faults.dead = 0
        for group in groups:
            self.complete.discard(group)
            if unfinished := group.unfinished:
                self.remove_rows(group, unfinished, Exit.FILTERED, SPARE)
        blocks, records = zip(*map(_manifest, groups), strict=True)
        batch = TakenBatch(self.number, self.record.next_batch, batch_id, step, epoch)
        self.record.next_batch += 1
        self._batches[batch_id] = batch
        now = self.clock()
        first_taken = [group for group in groups if group.position < 0]
        for group in groups:
            self._put_in(group, batch)
            if group.position < 0:
                group.position = self.record.next_position
                self.record.next_position += 1
            self._refresh(group)
        self.save(groups)
        self._commit_log.touch(batch)
        self._commit_log.put(Table.PAYLOAD, batch.manifest_key, encode_record(records))
        for group in first_taken:
            self.ready_to_taken.add(now - group.since, group.present.bit_count())
        return Batch(batch_id=batch_id, run=self.name, step=step, groups=blocks)

    def _put_in(self, group: Group, batch: TakenBatch) -> None:
        count_sampled(self.sampled_from, group, -1)
        group.batch = batch
        batch.groups.append(group.number)
        self.in_batches += 1

    def fresh_enough(self, step: int, count: int) -> list[Group]:
        """The next complete groups in order, at most `count`; groups that are too old leave first."""
        while True:
            groups = [self.groups[number] for number in self.complete.first(count)]
            stale = [group for group in groups if self.too_old(group, step)]
            if not stale:
                return groups
            for group in stale:
                self.retire(group)

    def too_old(self, group: Group, step: int) -> bool:
        """True when a row of the group was sampled more than `max_staleness` steps before `step`."""
        oldest = min([facts.oldest.step for facts in group.facts_of(group.present)], default=step)
        return step - oldest > self.spec.max_staleness

    def retire(self, group: Group) -> None:
        """Retire a group that is too old: its rows leave as stale; `reissue` samples the task again in its old place.

        At most `max_attempts` times: a prompt whose responses take longer than `max_staleness` steps would be sampled
        for as long as training continues.
        """
        reason = DROPPED
        if (
            self.spec.stale_policy is StalePolicy.REISSUE
            and min(group.attempts) >= self.spec.max_attempts
        ):
            reason = ALWAYS_STALE
        elif self.spec.stale_policy is StalePolicy.REISSUE:
            self.complete.discard(group)
            self.remove_rows(group, group.present, Exit.STALE, REISSUED)
            self._sample_from(group, None)
            group.position = -1
            # What trainers die of may be in the task: with each step that is made meanwhile it would begin anew.
            died = group.deaths, group.died_alone, group.settled_before
            self.start_attempts(group, range(group.size))
            group.deaths, group.died_alone, group.settled_before = died
            self.save([group])
            return
        self.remove_group(group, Exit.STALE, reason)
        self.save()

    def sampled(self, step: int) -> tuple[Sampled, ...]:
        """The groups in no batch by the version from which they are sampled, without what is too old for `step`."""
        spec = self.spec
        if math.isinf(spec.max_staleness) or not spec.gated:
            return ()
        last = math.floor(spec.max_staleness) - step
        complete = self.complete.sampled_from
        return tuple(
            Sampled(
                first, (first + last) * spec.batch_groups, self.sampled_from[first], complete[first]
            )
            for first in sorted(self.sampled_from)
            if first + last >= 0
        )

    def due_groups(self, known: Sequence[Sampled], count: int) -> tuple[int, int]:
        """Groups that `take` waits for although enough others are complete: a later step is too late for them.

        `known` is what `sampled` returns. Returns the step from which on they are sampled at the latest (negative:
        there are none), and their number. Without this, tasks that sample for longer than the staleness window were
        overtaken each time, and only short ones were trained. A run that drops what is too old waits for none: it is
        as fast as its short responses. A repeated batch is as it was.
        """
        if self.spec.stale_policy is StalePolicy.DROP or self.complete.taken_before >= count:
            return -1, 0
        return most_lacking(known, count)

    def _with_due(
        self, groups: list[Group], step: int, wanted_by: Iterable[tuple[int, int]]
    ) -> list[Group]:
        """`groups`, as the sampler has chosen, with those that must be in the batch in place of the last ones."""
        for first, wanted in wanted_by:
            missing = wanted - sum(first_version(group) <= first for group in groups)
            if missing <= 0:
                continue
            chosen = {group.number for group in groups}
            swaps = [
                group
                for group in self.groups.values()
                if group.complete
                and first_version(group) <= first
                and group.number not in chosen
                and not self.too_old(group, step)
            ]
            later = [
                group for group in groups if first_version(group) > first and group.position < 0
            ]
            swapped = min(missing, len(swaps), len(later))
            leaving = {group.number for group in later[len(later) - swapped :]}
            groups = [group for group in groups if group.number not in leaving] + swaps[:swapped]
        return groups

    # --- what is taken

    def shrink(self, batch: TakenBatch) -> None:
        """Answer the batch without the groups that have left it.

        A batch without groups is closed, so that it can be taken again.
        """
        if batch.groups:
            self._rewrite_manifest(batch)
        else:
            self.give_back([batch])

    def _rewrite_manifest(self, batch: TakenBatch) -> None:
        """Store the batch's manifest, with the groups that it has now."""
        records = [_manifest(group)[1] for group in self.groups_of(batch)]
        self._commit_log.put(Table.PAYLOAD, batch.manifest_key, encode_record(records))

    def show(self, batch: TakenBatch) -> None:
        """Note that a trainer received the batch."""
        batch.answered = True

    def filter(self, uids: Sequence[Uid], reason: str) -> None:
        """Taken rows leave as filtered. Rows that left before are skipped, so filtering twice is filtering once.

        Raises NotFoundError, ConflictError; see `taken`.
        """
        groups = self.taken(uids)
        for group, mask in groups:
            self.remove_rows(group, mask, Exit.FILTERED, reason)
            if not group.present:
                self.remove_group(group, Exit.FILTERED, reason)
        self.save([group for group, _ in groups])

    def taken(self, uids: Sequence[Uid]) -> list[tuple[Group, int]]:
        """Rows of batches that are not settled, by group; those that have left are skipped.

        Raises:
            NotFoundError: with `uid`; the task was never admitted.
            ConflictError: with `uid`; the row is resident and not taken.
        """
        rows: dict[int, tuple[Group, int]] = {}
        for uid in uids:
            group = self.find(uid)
            if group is None and uid.task not in self.known_tasks:
                raise NotFoundError(f"no row {uid} in run {self.name}", uid=uid)
            if group is None:
                continue
            if group.batch is None or group.batch.settled:
                state = self.state_of(group, uid.index)
                raise ConflictError(f"row {uid} is {state}, only taken rows are filtered", uid=uid)
            _, mask = rows.get(group.number, (group, 0))
            rows[group.number] = (group, mask | 1 << uid.index)
        return list(rows.values())

    def fail_batch(self, uids: Sequence[Uid], reason: str) -> None:
        """Report that the step of one taken group alone failed; at the second trainer it leaves as dead letters.

        Saying it twice in one epoch is saying it once. Raises NotFoundError, ConflictError; see `taken`.
        """
        for group, mask in self.taken(uids):
            if group.has_failed_before(self.record.epoch):
                rows = [group.uid(index) for index in bits(mask)]
                self.quarantine_unread(rows, f"{UNTRAINABLE}: twice {reason}")
            else:
                self.save([group])

    def quarantine_taken(self, batch: TakenBatch, damaged: Mapping[int, Damage]) -> None:
        """Damaged rows of a batch that nobody has seen leave as dead letters; `damaged` has them by group number.

        Their groups leave the batch, and do what the policy says.
        """
        groups = [group for group in self.groups_of(batch) if group.number in damaged]
        self._take_out(batch, groups)
        for group in groups:
            damage = damaged[group.number]
            self._bury_all(group, damage.rows & group.present, damage.stage, damage.reason)

    def _bury_all(self, group: Group, mask: int, stage: Stage, reason: str) -> None:
        """Dead-letter rows of a group that cannot be taken now; the others do what the policy says."""
        for index in bits(mask):
            # A dead letter may take its siblings with it.
            if self.groups.get(group.number) is group:
                self.dead_letter(group, index, stage, Outcome.INFRA_FAULT, reason)
        if self.groups.get(group.number) is group:
            self.offer_if_complete(group)

    def quarantine_unread(self, uids: Sequence[Uid], reason: str) -> None:
        """Taken rows that their trainer could not read or compute with leave as in `quarantine_taken`.

        Their batches are answered without them from now on. Raises NotFoundError, ConflictError; see `taken`.
        """
        damaged: defaultdict[str, dict[int, Damage]] = defaultdict(dict)
        for group, mask in self.taken(uids):
            assert group.batch is not None
            stage = self.stages.ordered[0]
            damaged[group.batch.batch_id][group.number] = Damage(mask, stage, reason)
        for batch_id, groups in damaged.items():
            self.quarantine_taken(self.batches[batch_id], groups)
            self._rewrite_manifest(self.batches[batch_id])

    # --- settle, commit, rewind

    def settle(self, *, step: int, batch_id: str) -> None:
        """Settle the batch in optimizer step `step`; settling twice is settling once.

        Raises:
            NotFoundError: no such batch. ConflictError: it was taken for another step.
        """
        batch = self.batches.get(batch_id)
        if batch is None:
            if step < self.record.committed_step:
                return  # settled and committed: the call is a repetition
            raise NotFoundError(f"run {self.name} has no batch {batch_id!r}", batch_id=batch_id)
        if batch.step != step:
            raise ConflictError(f"batch {batch_id} was taken for step {batch.step}, not {step}")
        if batch.settled:
            return
        batch.settled = True
        self._settled += 1
        for group in self.groups_of(batch):
            if group.deaths or group.failed_in:
                group.forget_deaths()
                self._commit_log.touch(group)
            self._refresh(group)
        self._commit_log.touch(batch)
        self.recount()
        self.save()

    def commit(self, step: int) -> None:
        """Let rows settled before `step` leave as trained; committing twice is committing once."""
        if step < self.record.committed_step:
            return
        for batch in [b for b in self._batches.values() if b.settled and b.step < step]:
            for group in self.groups_of(batch):
                self.remove_group(group, Exit.TRAINED, "")
            self._close_batch(batch)
        self.record.committed_step = step
        self.save()

    def rewind(self, step: int) -> int:
        """Rows that older epochs settled at `step` or later are ready again; returns how many.

        `step` is published, unless this epoch has published already: a request that was delayed in the network and
        arrives once more must not give back what this trainer has learned from, nor the version of its fleet.

        Raises:
            ConflictError: rows of that step were committed and have left.
        """
        if step < self.record.committed_step:
            raise ConflictError(
                f"run {self.name} cannot go back to step {step}: rows before step"
                f" {self.record.committed_step} were committed and have left",
                committed_step=self.record.committed_step,
            )
        batches = [
            batch
            for batch in self._batches.values()
            if batch.settled and batch.step >= step and batch.epoch < self.record.epoch
        ]
        rows = sum(g.present.bit_count() for batch in batches for g in self.groups_of(batch))
        self.give_back(batches)
        if self.record.published.epoch < self.record.epoch:
            self.record.published = Version(self.record.epoch, step)
        self.gate_signal.notify()
        self.recount()
        self.complete_signal.notify()
        self.save()
        return rows

    def give_back(self, batches: Sequence[TakenBatch]) -> None:
        """Return the groups of `batches` as complete groups, in the order in which they were taken."""
        for batch in batches:
            batch.settled = False
            groups = self.groups_of(batch)
            for group in groups:
                self.in_batches -= 1
                if batch.consumed:
                    self._consumed -= 1
                    self._count_open(group, 1)
                group.batch = None
                count_sampled(self.sampled_from, group, 1)
                self._refresh(group)
                self.offer(group)
            self.save(groups)
            batch.groups.clear()
            self._close_batch(batch)

    def _take_out(self, batch: TakenBatch, groups: Sequence[Group]) -> None:
        """`groups` leave a batch that nobody has seen, and are open again."""
        for group in groups:
            batch.groups.remove(group.number)
            self.in_batches -= 1
            group.batch = None
            count_sampled(self.sampled_from, group, 1)
            self._refresh(group)
        self.save(groups)

    def recount(self) -> None:
        """Find the batches that hold no credit any more, after a publish or a change of batches. O(batches)."""
        for batch in self._batches.values():
            consumed = batch.settled and (
                not self.spec.gated or batch.step < self.record.published.step
            )
            if consumed is not batch.consumed:
                batch.consumed = consumed
                self._consumed += len(batch.groups) if consumed else -len(batch.groups)
                for group in self.groups_of(batch):
                    self._count_open(group, -1 if consumed else 1)
        self.admission_signal.notify()
        self.notify_stages()

    def _close_batch(self, batch: TakenBatch) -> None:
        del self._batches[batch.batch_id]
        self._commit_log.delete(Table.META, batch.key)
        self._commit_log.delete(Table.PAYLOAD, batch.manifest_key)


def suspects(groups: Sequence[Group], count: int) -> list[Group]:
    """A part of those of `groups` that trainers died with, for a take of `count`; empty where there are none.

    One of them may be what trainers die of. With each death the parts have half as many groups, and those that were
    in fewer come first: they are trained, or they are known to be what is looked for.
    """
    known = [group for group in groups if group.deaths >= DEATHS]
    fewest = min((group.deaths for group in known), default=DEATHS)
    most = max(1, count >> fewest - DEATHS + 1)
    return [group for group in known if group.deaths == fewest][:most]


def _manifest(group: Group) -> tuple[RowBlock, Json]:
    """The group's block in a batch, and its stored form."""
    indices = bits(group.present)
    attempts = tuple([group.attempts[index] for index in indices])
    facts = group.facts_of(group.present)
    outcomes, num_tokens, oldest, newest, _, prompt_tokens = zip(*facts, strict=True)
    columns = zip(outcomes, num_tokens, oldest, newest, repeat(""), prompt_tokens)
    block = RowBlock(
        task=group.task_id,
        indices=indices,
        attempts=attempts,
        group_size=group.size,
        facts=tuple(map(_facts, repeat(RowFacts), columns)),
    )
    # Plain tuples: orjson takes no others.
    versions = list(map(tuple, oldest)), list(map(tuple, newest))
    sizes = group.size, num_tokens, *versions, prompt_tokens
    return block, (group.task_id, indices, attempts, *sizes, outcomes)


_facts = tuple.__new__
"""`RowFacts._make` in C, for every row that is taken."""


def read_manifest(run: str, batch: TakenBatch, value: bytes) -> Batch:
    """The batch as `take` answered it. Raises CorruptError."""
    groups = tuple(
        RowBlock(
            task=task,
            indices=tuple(indices),
            attempts=tuple(attempts),
            group_size=size,
            facts=tuple(
                RowFacts(Outcome(outcome), tokens, Version(*oldest), Version(*newest), "", *prompt)
                for outcome, tokens, oldest, newest, *prompt in zip(outcomes, *columns, strict=True)
            ),
        )
        # A store of before has no column of prompts.
        for task, indices, attempts, size, *columns, outcomes in decode_record(
            value, f"manifest of batch {batch.batch_id}"
        )
    )
    return Batch(batch_id=batch.batch_id, run=run, step=batch.step, groups=groups)
