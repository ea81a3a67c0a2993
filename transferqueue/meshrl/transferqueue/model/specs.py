"""A run's spec: checked and stored once, and compared when the run is opened again."""

from __future__ import annotations

import dataclasses

from meshrl.contract.errors import CapacityError, ConflictError, UserError
from meshrl.contract.row_values import ANY_TOKEN
from meshrl.contract.types import GroupPolicy, Json, RunSpec, StageSpec, StalePolicy, name_fault

RUN_BYTES = 200
"""The most bytes of a run's name."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Limits of one queue: on its runs, and on the bounds that a client may set for a run that it opens."""

    runs: int = 1000
    """Runs of the queue; a client may open three quarters of them, the operator all."""
    resident_rows: int = 4_000_000
    """Rows that admission may let into a run."""
    resident_bytes: int = 1 << 40
    """The largest bound on a run's payload."""
    dead_letters: int = 100_000
    """Dead letters that are kept of a run."""
    dead_letter_bytes: int = 1 << 30
    """The same in bytes: reasons, and the tasks that are kept for them."""
    stages: int = 64
    """Stages of a run, and columns that one of them reads or writes."""
    group_rows: int = 16_384
    """Rows of one group."""
    lease_rows: int = 65_536
    """Rows of one lease; a worker that asks for more gets these, and may ask again."""


CALLERS_SHARE = 3 / 4
CALLERS_LEAST = 2
"""A training run and its evaluation."""


def check_opener(caller: str, opened: int, quota: Quota) -> None:
    """Refuse a caller whose `opened` runs leave no room for others; "": one that may open all.

    Raises:
        CapacityError.
    """
    most = max(CALLERS_LEAST, int(CALLERS_SHARE * quota.runs))
    if caller and opened >= most:
        raise CapacityError(
            f"the role {caller} has opened {opened} runs of this queue and may open {most}:"
            " remove some that are over with `meshrl runs remove`"
        )


def check_spec(spec: RunSpec, quota: Quota) -> None:
    """Refuse a spec that cannot work or asks for too much. Stages and sampler are checked where they are built.

    Raises:
        UserError: it cannot work.
        CapacityError: it is beyond the queue's `quota`.
    """
    problem = ""
    if not 1 <= len(spec.run.encode(errors="replace")) <= RUN_BYTES or "/" in spec.run:
        problem = f"a run's name has 1 to {RUN_BYTES} bytes and no '/'"
    elif fault := name_fault(spec.run):
        problem = f"that is not a name: {fault}"
    elif spec.group_size < 1 or spec.batch_groups < 1 or spec.resident_batches < 1:
        problem = "group_size, batch_groups and resident_batches are at least 1"
    elif not spec.max_staleness >= 0:
        problem = f"max_staleness is {spec.max_staleness}, want 0 or more"
    elif spec.max_attempts < 1 or not spec.lease_ttl_s > 0:
        problem = "max_attempts is at least 1, lease_ttl_s more than 0"
    elif spec.group_policy is GroupPolicy.K_OF_N and not 1 <= spec.group_k <= spec.group_size:
        problem = f"group_k is {spec.group_k}, k_of_n wants 1 to {spec.group_size}"
    if problem:
        raise UserError(f"run {spec.run[:RUN_BYTES]!r}: {problem}")
    _check_vocabulary(spec)
    _check_quota(spec, quota)
    for stage in spec.stages:
        for name in (stage.name, *stage.reads, *stage.writes):
            if fault := name_fault(name):
                raise UserError(f"run {spec.run!r}: stage or column {name[:80]!r}: {fault}")


def _check_vocabulary(spec: RunSpec) -> None:
    if not 0 <= spec.vocabulary <= ANY_TOKEN:
        raise UserError(f"run {spec.run!r}: vocabulary is {spec.vocabulary}, want 0 to {ANY_TOKEN}")


def _check_quota(spec: RunSpec, quota: Quota) -> None:
    columns = max((max(len(stage.reads), len(stage.writes)) for stage in spec.stages), default=0)
    rows = spec.group_size * spec.batch_groups
    asked = {
        "stages": max(len(spec.stages), columns),
        "group_rows": spec.group_size,
        "resident_rows": max(rows, spec.group_size * spec.admission_groups),
        "resident_bytes": spec.resident_bytes,
    }
    for name, value in asked.items():
        if value > (most := getattr(quota, name)):
            raise CapacityError(
                f"run {spec.run!r} asks for {value:.0f} {name.replace('_', ' ')}, and this queue allows {most}"
            )


def joined_specs(old: RunSpec, new: RunSpec) -> RunSpec:
    """The spec of a run that is opened again: the old one, with the vocabulary if only the new one knows it.

    Raises:
        ConflictError: names the first field that differs.
        UserError: no vocabulary is so large.
    """
    _check_vocabulary(new)
    known = old.vocabulary or new.vocabulary
    old = dataclasses.replace(old, vocabulary=known)
    new = dataclasses.replace(new, vocabulary=new.vocabulary or known)
    for field in dataclasses.fields(RunSpec):
        had, wants = getattr(old, field.name), getattr(new, field.name)
        if had != wants:
            raise ConflictError(
                f"run {old.run} is open with {field.name} = {had}, not {wants}", field=field.name
            )
    return old


def encode_spec(spec: RunSpec) -> Json:
    """The spec as JSON; an infinite staleness is null."""
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(RunSpec)}
    fields["stages"] = [[stage.name, stage.reads, stage.writes] for stage in spec.stages]
    fields["max_staleness"] = None if spec.max_staleness == float("inf") else spec.max_staleness
    if not spec.vocabulary:  # as it was stored before runs had one
        del fields["vocabulary"]
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
