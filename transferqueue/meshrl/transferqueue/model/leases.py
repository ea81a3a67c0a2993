"""The verbs of workers: lease, renew, write, append, fail, release, redo; and what happens when a lease expires."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias, TypeVar

from meshrl.contract.errors import ConflictError, EndOfDataError, FencedError, UserError
from meshrl.contract.rows import DAMAGED
from meshrl.contract.types import Outcome, RowBlock, Uid, Version
from meshrl.transferqueue.model import columns
from meshrl.transferqueue.model.columns import Unread, stored_frames
from meshrl.transferqueue.model.fair_share import Holder
from meshrl.transferqueue.model.group import Grant, Group, bits
from meshrl.transferqueue.model.groups import FeederVerbs
from meshrl.transferqueue.model.rows import Stage
from meshrl.transferqueue.signals import Signal

EXPIRED = "lease expired"


CheckedBlock: TypeAlias = tuple[Group, int, RowBlock]
"""A group, the set of those of its rows that are to be written, and the block of these."""


class WorkerVerbs(FeederVerbs):
    """The verbs of workers."""

    # --- lease

    def open_to(self, stage: Stage, version: Version | None) -> bool:
        """True if an engine at `version` may get rows; only stages that sample for a gated run depend on it."""
        if not (self.spec.gated and stage.first):
            return True
        if version is None:
            raise UserError(
                f"run {self.name} is gated: a lease of stage {stage.name} must name its engine's version"
            )
        behind = self.record.published.step - version.step
        return version.epoch == self.record.epoch and behind <= self.spec.max_staleness

    def enough(self, stage: Stage, at_least: int) -> bool:
        """True when the lease can be answered: `at_least` rows are ready, or some are and no more can come.

        `at_least` applies to gated runs only. The feed of an evaluation stays open between evaluations, so there a
        lease would wait for the next evaluation.
        """
        available = self.num_ready(stage)
        if available == 0 or available >= at_least or not self.spec.gated:
            return available > 0
        upstream = 0 if stage.first else self.ledger.unstarted
        return not upstream and not self.can_grow()

    def share(self, stage: Stage, worker: str, limit: int, at_least: int) -> int:
        """Rows that `worker` is granted now: its fair share, or `limit` if the caller asked for a fixed number."""
        if not stage.first or at_least > 1:
            return limit
        return self.fair_share.share(
            worker,
            self.num_ready(stage),
            limit,
            now=self.clock(),
            silence_s=self.spec.lease_ttl_s,
        )

    def grant(self, stage: Stage, worker: str, limit: int) -> list[Unread]:
        """Deliver at most `limit` ready rows to `worker`, under a new token."""
        self.record.last_token += 1
        number, token, now = stage.number, self.record.last_token, self.clock()
        deadline = self.lease_deadline()
        holder = self.fair_share.holder(worker, now) if stage.first else None
        granted: list[Unread] = []
        groups: list[Group] = []
        for group, mask in self._ready[number].pop(limit, worker, now):
            grant = Grant(group, number, token, worker, mask, now, deadline, holder)
            group.add_grant(grant)
            if group.sampled_from is None:
                self._sample_from(group, self.record.published.step)
            self._expiry.watch(grant)
            self._refresh(group)
            groups.append(group)
            indices, deliveries = bits(mask), group.deliveries[number]
            frames, progress = stored_frames(group, indices, mask, stage.after, progress_of=number)
            block = RowBlock(
                task=group.task_id,
                indices=indices,
                attempts=tuple([group.attempts[index] for index in indices]),
                token=token,
            )
            delivered = tuple([deliveries[index] for index in indices])
            granted.append(
                Unread(block, group.task_key, frames, progress, delivered, group.task_bytes)
            )
        self.save(groups)
        return granted

    def renew(self, stage: Stage, worker: str, uids: Iterable[Uid]) -> list[Uid]:
        """Extend leases; returns the rows that `worker` does not hold any more. Deadlines are not stored."""
        lost: list[Uid] = []
        named: dict[int, int] = {}
        for uid in uids:
            group = self.find(uid)
            if group is None or not _held_by(group, stage, worker) >> uid.index & 1:
                lost.append(uid)
            else:
                named[group.number] = named.get(group.number, 0) | 1 << uid.index
        deadline = self.lease_deadline()
        if stage.first:
            self.fair_share.holder(worker, self.clock())
        for number, mask in named.items():
            group = self.groups[number]
            for grant in list(group.grants):
                if grant.stage == stage.number and grant.worker == worker and grant.mask & mask:
                    self._extend(grant, mask, deadline)
        return lost

    def _extend(self, grant: Grant, mask: int, deadline: float) -> None:
        """Move the deadline of the rows in `mask`; the other rows of the grant keep theirs. Nothing is stored."""
        rest = grant.group.split_grant(grant, mask)
        if rest is not None:
            self._expiry.watch(rest)
        grant.deadline = deadline
        grant.renewed = True

    # --- write

    def check_write(self, stage: Stage, blocks: Sequence[RowBlock]) -> list[CheckedBlock]:
        """The checked writes; rows that were written before under the same token are skipped.

        Raises:
            FencedError: with `uid`; another worker holds the row, or the lease ended.
            UserError: with `uid`; a column is wrong, or a row is named twice.
        """
        found: list[CheckedBlock] = []
        named: dict[int, int] = {}
        for block in blocks:
            group, mask = self._rows_to_write(stage, block)
            columns.check_frame(self, block)
            columns.check(self, block, stage, group)
            if group is None or not mask:
                continue
            if named.get(group.number, 0) & mask:
                uid = group.uid(bits(named[group.number] & mask)[0])
                raise UserError(f"row {uid} is written twice in one call", uid=uid)
            named[group.number] = named.get(group.number, 0) | mask
            if mask.bit_count() < len(block):
                block = block.part(
                    [at for at, index in enumerate(block.indices) if mask >> index & 1]
                )
            found.append((group, mask, block))
        return found

    def write(self, stage: Stage, blocks: Sequence[CheckedBlock]) -> None:
        """Add the columns of checked writes."""
        number, now = stage.number, self.clock()
        holders: dict[Holder, None] = {}
        for group, mask, block in blocks:
            self._store_frame(group, number, mask, block)
            tokens = [row.num_tokens for row in block.facts]
            for grant in group.grants:
                if grant.holder and grant.stage == number and grant.token == block.token:
                    grant.holder.finished(tokens, now - grant.since)
                    holders[grant.holder] = None
            group.mark_written(number, block.indices, mask, block.token)
            self.lasting_faults.finished[stage.name] += len(block)
            self._drop_frames(group, group.drop_progress(number, mask))
            if block.facts:
                group.set_facts(block.indices, block.facts)
                self.open_tokens += sum(tokens)
            group.since = now
            self._refresh(group)
            self.offer_if_complete(group)
        self.save([group for group, _, _ in blocks])
        self.notify_shares(stage, holders)

    def _rows_to_write(self, stage: Stage, block: RowBlock) -> tuple[Group | None, int]:
        """The group, and the mask of the rows to write: held under the block's token and not written yet."""
        group = self.by_task.get(block.task)
        held = group.held_under(stage.number, block.token) if group else 0
        if group is not None and (all_of := group.mask_of(block)) and all_of & held == all_of:
            return group, all_of
        mask = 0
        for index, attempt in zip(block.indices, block.attempts, strict=True):
            if group is not None and group.has(index, attempt):
                if held >> index & 1:
                    mask |= 1 << index
                    continue
                written = group.done[stage.number] >> index & 1
                if written and group.writers[stage.number][index] == block.token:
                    continue
            raise self._fenced(stage, Uid(self.name, block.task, index, attempt), block.token)
        return group, mask

    # --- append

    def check_append(self, stage: Stage, blocks: Sequence[RowBlock]) -> list[CheckedBlock]:
        """The checked appends; entries that were appended before are skipped.

        Raises:
            FencedError: with `uid`; another worker holds the row, or the lease ended.
            ConflictError: with `uid`; the entries before these are missing.
            UserError: a column is wrong or a row is named twice (with `uid`), or the stage reads columns.
        """
        if not stage.first:
            raise UserError(
                f"stage {stage.name} reads columns: only a stage that samples can append"
            )
        appends: list[CheckedBlock] = []
        named: set[tuple[int, int]] = set()
        for block in blocks:
            if len(block.starts) != len(block):
                raise UserError(
                    f"append: {len(block)} rows of task {block.task} without their starts"
                )
            columns.check_frame(self, block)
            lengths = columns.entries(self, block)
            columns.check_progress(self, block, lengths)
            group = self.by_task.get(block.task)
            held = group.held_under(stage.number, block.token) if group else 0
            new: list[int] = []
            for at, (index, attempt) in enumerate(zip(block.indices, block.attempts, strict=True)):
                if group is None or not (group.has(index, attempt) and held >> index & 1):
                    uid = Uid(self.name, block.task, index, attempt)
                    raise self._fenced(stage, uid, block.token)
                known = group.recorded_progress[index] if group.recorded_progress else 0
                if block.starts[at] > known:
                    raise ConflictError(
                        f"row {group.uid(index)}: entries {known} to {block.starts[at]} were never"
                        f" appended",
                        uid=group.uid(index),
                    )
                if (group.number, index) in named:
                    uid = group.uid(index)
                    raise UserError(f"row {uid} is appended to twice in one call", uid=uid)
                named.add((group.number, index))
                if block.starts[at] == known and lengths[at]:
                    new.append(at)
            if group is not None and new:
                part = block if len(new) == len(block) else block.part(new)
                appends.append((group, sum(1 << index for index in part.indices), part))
        return appends

    def append(self, stage: Stage, appends: Sequence[CheckedBlock]) -> None:
        """Store checked appends."""
        for group, mask, block in appends:
            self._store_frame(group, stage.number, mask, block, partial=True)
            lengths = columns.entries(self, block)
            ends = [start + length for start, length in zip(block.starts, lengths, strict=True)]
            group.set_progress(block.indices, ends)
        self.save([group for group, _, _ in appends])

    # --- rows come back

    def fail(
        self,
        stage: Stage,
        uid: Uid,
        token: int,
        outcome: Outcome,
        reason: str,
        *,
        lasting: bool = False,
    ) -> None:
        """Report that a worker cannot finish a row. Raises FencedError, with `uid`.

        Where the fault is `lasting`, a stage that reads columns tries the row once more at most; one that samples may
        draw something else each time.
        """
        group = self.find(uid)
        if group is None or not group.held_under(stage.number, token) >> uid.index & 1:
            raise self._fenced(stage, uid, token)
        self.note_failure(stage, uid, reason)
        if not lasting:
            self._redeliver(stage, group, 1 << uid.index, outcome, reason)
            return
        place = stage.number, uid.index
        fault = self.lasting_faults.met(stage.name, group.lasting.get(place), reason)
        group.lasting[place] = fault
        last = fault.again and not stage.first
        self._redeliver(stage, group, 1 << uid.index, outcome, reason, last=last)
        if self.find(uid) is None:
            self.lasting_faults.died(stage.name, fault)
            self.complete_signal.notify()

    def release(self, stage: Stage, token_of: Mapping[Uid, int]) -> None:
        """Return rows untouched; rows that the caller no longer holds are skipped."""
        masks: dict[int, int] = {}
        for uid, token in token_of.items():
            group = self.find(uid)
            if group is not None and group.held_under(stage.number, token) >> uid.index & 1:
                masks[group.number] = masks.get(group.number, 0) | 1 << uid.index
        for number, mask in masks.items():
            self.return_rows(stage, self.groups[number], mask, undelivered=True)
        if masks:
            self.save([self.groups[number] for number in masks])

    def expire(self, grant: Grant, *, attended: bool) -> None:
        """Give the rows of a worker that was silent for `lease_ttl_s` to another one.

        If the worker is `attended` and never renewed the rows, they never reached it: that does not count as an
        attempt.
        """
        stage = self.stages.ordered[grant.stage]
        self._lease_expiries[stage.name] += grant.mask.bit_count()
        grant.group.lost_by.update(dict.fromkeys(bits(grant.mask), grant.worker))
        if attended and not grant.renewed:
            grant.group.undo_delivery(grant.stage, grant.mask)
        self._redeliver(stage, grant.group, grant.mask, Outcome.INFRA_FAULT, EXPIRED)

    def _redeliver(
        self,
        stage: Stage,
        group: Group,
        mask: int,
        outcome: Outcome,
        reason: str,
        *,
        last: bool = False,
    ) -> None:
        """Return rows; those that had their last delivery are dead-lettered, or all if this was the `last` one."""
        self.return_rows(stage, group, mask)
        self.save([group])
        deliveries = group.deliveries[stage.number]
        for index in bits(mask):
            # A dead letter may take its siblings with it.
            given_up = last or deliveries[index] >= self.spec.max_attempts
            if given_up and group.present >> index & 1:
                self.dead_letter(group, index, stage, outcome, reason)

    def redo(self, stage: Stage, uids: Sequence[Uid]) -> int:
        """Rows in no batch go back to before `stage`; no uids means all rows. Returns how many did.

        Raises:
            UserError: `stage` samples; its columns cannot be made again.
        """
        if stage.first:
            raise UserError(f"stage {stage.name} samples: its columns cannot be made again")
        masks: dict[int, int] = {}
        for uid in uids:
            if (group := self.find(uid)) is not None:
                masks[group.number] = masks.get(group.number, 0) | 1 << uid.index
        if not uids:
            masks = {number: group.present for number, group in self.groups.items()}
        again = self.stages.depending_on(stage)
        touched: list[Group] = []
        rows = 0
        for number, mask in masks.items():
            group = self.groups[number]
            mask &= group.done[stage.number]
            if group.batch is not None or not mask:
                continue
            rows += mask.bit_count()
            self.complete.discard(group)
            self._drop_frames(group, group.undo_stages(again, mask))
            group.since = self.clock()
            self._refresh(group)
            touched.append(group)
        self.save(touched)
        return rows

    def quarantine_leased(self, stage: Stage, rows: RowBlock, fault: str) -> None:
        """Leased rows whose payload is damaged leave as dead letters."""
        for uid in rows.uids(self.name):
            group = self.find(uid)  # a dead letter may take its siblings with it
            if group is None or not group.held_under(stage.number, rows.token) >> uid.index & 1:
                continue
            self.return_rows(stage, group, 1 << uid.index)
            reason = f"{DAMAGED}: {fault}"
            self.dead_letter(group, uid.index, stage, Outcome.INFRA_FAULT, reason)

    def _fenced(self, stage: Stage, uid: Uid, token: int) -> FencedError:
        """The error for a write under `token`: it names the worker that holds the row now."""
        group = self.find(uid)
        holders = [
            f"{grant.worker} holds it under token {grant.token}"
            for grant in (group.grants if group else ())
            if grant.stage == stage.number and grant.mask >> uid.index & 1
        ]
        holder = holders[0] if holders else "the lease ended"
        return FencedError(
            f"row {uid}, stage {stage.name}: token {token} is fenced, {holder}", uid=uid
        )


L = TypeVar("L", bound=WorkerVerbs)


def leasable(runs: Mapping[str, L], names: Sequence[str], stage: str) -> list[tuple[L, Stage]]:
    """The runs of `names` that are open and have the stage, highest priority first.

    Raises:
        EndOfDataError: no run has rows left, and no run will get any.
        UserError: all runs are open and none has the stage.
    """
    opened = [run for name in names if (run := runs.get(name)) is not None]
    candidates = [(run, spec) for run in opened if (spec := run.stages.get(stage)) is not None]
    if len(opened) == len(names):
        if not candidates:
            raise UserError(
                f"no stage named {stage!r} in {', '.join(names)} (run {names[0]} has"
                f" {', '.join(spec.name for spec in opened[0].stages.ordered)})"
            )
        if all(run.record.feed_closed and not run.groups for run in opened):
            raise EndOfDataError(f"nothing is left to lease in {', '.join(names)}")
    return sorted(candidates, key=lambda pair: -pair[0].spec.priority)


def signals(
    candidates: Sequence[tuple[WorkerVerbs, Stage]], worker: str, at_least: int
) -> list[Signal]:
    """The signals that wake a lease of `worker` waiting for `at_least` rows of one of `candidates`."""
    if at_least > 1:
        return [
            s
            for run, stage in candidates
            for s in (run.rows_signals[stage.number], run.gate_signal)
        ]
    found: list[Signal] = []
    for run, stage in candidates:
        turns = run.turns[stage.number]
        line = turns.line
        if stage.first:
            holder = run.fair_share.holder(worker, run.clock())
            found.append(holder.wrote)
            # Its share allows a worker without rows one at least; many others would find nothing.
            line = line if holder.rows else turns.ahead
        found += (line, run.gate_signal)
    return found


@contextmanager
def waiting(candidates: Sequence[tuple[WorkerVerbs, Stage]], worker: str) -> Iterator[None]:
    """`worker` waits for rows that it would sample, for as long as the block runs."""
    runs = [run for run, stage in candidates if stage.first]
    for run in runs:
        run.fair_share.holder(worker, run.clock()).waiting += 1
    try:
        yield
    finally:
        for run in runs:
            run.fair_share.holder(worker, run.clock()).waiting -= 1


def _held_by(group: Group, stage: Stage, worker: str) -> int:
    mask = 0
    for grant in group.grants:
        if grant.stage == stage.number and grant.worker == worker:
            mask |= grant.mask
    return mask
