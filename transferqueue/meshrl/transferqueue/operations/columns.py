"""Checks of the columns that a stage writes: names, types (contract/rows.py), lengths, finite numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from meshrl.contract.errors import UserError
from meshrl.contract.frames import Column, Frame
from meshrl.contract.types import PackedGroup, Uid
from meshrl.transferqueue.model.group import Group
from meshrl.transferqueue.model.run import Run
from meshrl.transferqueue.model.stages import Stage

_I4, _I8, _U1, _F4 = map(np.dtype, ("<i4", "<i8", "u1", "<f4"))
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
}
"""Name to (dtype, rank); any other column may have any storable type."""
PER_TOKEN = frozenset({"tokens", "loss_mask", "rollout_logprobs", "ref_logprobs", "token_rewards"})


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
            lengths = _lengths_in(group, write)
        for name, column in frame.columns.items():
            _check_column(name, column, lengths)
    except _Refused as refused:
        at = refused.position
        uid = Uid(run.name, write.task, write.indices[at], write.attempts[at])
        raise UserError(f"row {uid}: {refused}", uid=uid) from None


def _check_names(frame: Frame, stage: Stage) -> None:
    if tuple(frame.columns) == stage.writes:
        return
    unknown = [name for name in frame.columns if name not in stage.writes]
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


def _lengths_in(group: Group | None, write: PackedGroup) -> tuple[int, ...]:
    """Tokens (T) of each row; 0 for a row without facts."""
    if group is None:
        return (0,) * len(write.indices)
    known = map(group.facts.__getitem__, write.indices)
    return tuple([facts.num_tokens if facts else 0 for facts in known])


def _check_column(name: str, column: Column, num_tokens: tuple[int, ...]) -> None:
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
    if name == "token_rewards":
        _check_finite(name, column)
    if name == "spans" and entry.tail != (4,):
        raise _Refused(f"column spans is {_shape(column)}, want int64[n, 4]")
    if name == "reward":
        _check_reward(column)


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


def _check_finite(name: str, column: Column) -> None:
    assert column.lengths is not None
    values = column.values
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        position = int(np.searchsorted(np.cumsum(column.lengths), bad[0], side="right"))
        raise _Refused(f"column {name} holds {values[bad[0]]}, want finite numbers", position)


def _shape(column: Column) -> str:
    first = [] if column.lengths is None else [column.lengths[0]]
    return f"{column.entry.dtype.name}{[*first, *column.entry.tail]}"
