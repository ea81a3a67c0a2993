"""What is stored of a run beside its rows: its spec, its state, and the ids of the tasks that were admitted.

The spec is checked and stored once, and compared when the run is opened again. Every transition rewrites the state.
The ids are kept so that a feeder that repeats a task changes nothing.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Container, Iterable
from dataclasses import dataclass

from meshrl.contract.errors import ConflictError, UserError
from meshrl.contract.types import GroupPolicy, Json, RunSpec, StageSpec, StalePolicy, Version
from meshrl.transferqueue.store import CommitLog, Table, encode_record

RUN_BYTES = 200
"""A run's name has at most so many bytes."""
REMEMBERED = 20_000
"""Tasks that left whose ids are still known. A feeder that repeats tasks is at most one call behind its cursor, and
never further than what may be admitted and not consumed."""


def check_spec(spec: RunSpec) -> None:
    """Refuse a spec that cannot work. Stages and sampler are checked where they are built. Raises UserError."""
    problem = ""
    if not spec.run or "/" in spec.run or len(spec.run.encode()) > RUN_BYTES:
        problem = f"a run's name has 1 to {RUN_BYTES} bytes and no '/'"
    elif spec.group_size < 1 or spec.batch_groups < 1 or spec.resident_batches < 1:
        problem = "group_size, batch_groups and resident_batches are at least 1"
    elif not spec.max_staleness >= 0:
        problem = f"max_staleness is {spec.max_staleness}, want 0 or more"
    elif spec.max_attempts < 1 or not spec.lease_ttl_s > 0:
        problem = "max_attempts is at least 1, lease_ttl_s more than 0"
    elif spec.group_policy is GroupPolicy.K_OF_N and not 1 <= spec.group_k <= spec.group_size:
        problem = f"group_k is {spec.group_k}, k_of_n wants 1 to {spec.group_size}"
    if problem:
        raise UserError(f"run {spec.run!r}: {problem}")


def compare_specs(old: RunSpec, new: RunSpec) -> None:
    """Raises ConflictError naming the first field that differs."""
    for field in dataclasses.fields(RunSpec):
        had, wants = getattr(old, field.name), getattr(new, field.name)
        if had != wants:
            raise ConflictError(
                f"run {old.run} is open with {field.name} = {had}, not {wants}", field=field.name
            )


def encode_spec(spec: RunSpec) -> Json:
    """As JSON; an infinite staleness is null."""
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(RunSpec)}
    fields["stages"] = [[stage.name, stage.reads, stage.writes] for stage in spec.stages]
    fields["max_staleness"] = None if spec.max_staleness == float("inf") else spec.max_staleness
    return fields


def decode_spec(stored: Json) -> RunSpec:
    """The inverse of `encode_spec`."""
    fields = dict(stored)
    fields["stages"] = tuple(
        StageSpec(name=name, reads=tuple(reads), writes=tuple(writes))
        for name, reads, writes in fields["stages"]
    )
    staleness = fields["max_staleness"]
    fields["max_staleness"] = float("inf") if staleness is None else staleness
    fields["group_policy"] = GroupPolicy(fields["group_policy"])
    fields["stale_policy"] = StalePolicy(fields["stale_policy"])
    return RunSpec(**fields)


UNPUBLISHED = Version(0, 0)


@dataclass(slots=True, eq=False)
class RunRecord:
    """The state of a run itself: versions, the feeder's cursor, counters. The names are those of the stored JSON."""

    epoch: int = 0
    owner: str = ""
    """The trainer that acquired the run last."""
    published: Version = UNPUBLISHED
    cursor: str = ""
    """The feeder's position in its data."""
    feed_closed: bool = False
    committed_step: int = 0
    last_token: int = 0
    """The last fencing token."""
    next_group: int = 0
    next_position: int = 0
    """The position of the next group that is taken for the first time."""
    next_batch: int = 0
    next_dead: int = 0

    def encode(self) -> Json:
        """As JSON."""
        return {
            "epoch": self.epoch,
            "owner": self.owner,
            "published": str(self.published),
            "cursor": self.cursor,
            "feed_closed": self.feed_closed,
            "committed_step": self.committed_step,
            "last_token": self.last_token,
            "next_group": self.next_group,
            "next_position": self.next_position,
            "next_batch": self.next_batch,
            "next_dead": self.next_dead,
        }

    @classmethod
    def decode(cls, stored: Json) -> RunRecord:
        """The inverse of `encode`. Raises KeyError, TypeError or ValueError for other JSON."""
        return cls(**{**stored, "published": Version.parse(stored["published"])})


class KnownTasks:
    """The known tasks of one run, each with the number of its group."""

    def __init__(self, run_number: int, commit_log: CommitLog) -> None:
        self._prefix = b"n" + run_number.to_bytes(4, "big")
        self._commit_log = commit_log
        self._numbers: dict[str, int] = {}
        self._departed: deque[str] = deque()
        """Known tasks that left, in that order; the oldest are forgotten."""

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, task_id: str, number: int) -> None:
        """A task was admitted as group `number`."""
        self._numbers[task_id] = number
        self._commit_log.put(Table.META, self._key(task_id), encode_record(number))

    def mark_departed(self, task_id: str) -> None:
        """The task left for good."""
        self._departed.append(task_id)

    def forget(self, resident: Container[str]) -> None:
        """Forget the tasks that left longest ago beyond REMEMBERED, except those that are `resident` again."""
        while len(self._departed) > REMEMBERED:
            task_id = self._departed.popleft()
            if task_id not in resident and task_id in self._numbers:
                del self._numbers[task_id]
                self._commit_log.delete(Table.META, self._key(task_id))

    def restore(self, items: Iterable[tuple[bytes, int]]) -> None:
        """From the stored records: key and group number of each."""
        self._numbers = {key[len(self._prefix) :].decode(): number for key, number in items}

    def restore_departed(self, needed: Container[str]) -> None:
        """Every known task that is not `needed` has left, in the order of admission."""
        departed = [task_id for task_id in self._numbers if task_id not in needed]
        self._departed.extend(sorted(departed, key=self._numbers.__getitem__))

    def _key(self, task_id: str) -> bytes:
        return self._prefix + task_id.encode()
