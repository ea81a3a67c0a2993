"""What may be written into a row: the columns of the stage, in the types of contract/rows.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from meshrl.contract.errors import UserError
from meshrl.contract.nouns import RowFacts, RowWrite
from meshrl.transferqueue.frames import storable
from meshrl.transferqueue.stages import Stage

_I4, _I8, _U1, _F4 = map(np.dtype, ("<i4", "<i8", "u1", "<f4"))
TYPES: Mapping[str, tuple[np.dtype[Any], int]] = {
    "tokens": (_I4, 1),
    "loss_mask": (_U1, 1),
    "rollout_logprobs": (_F4, 1),
    "spans": (_I8, 2),
    "response_text": (_U1, 1),
    "reward": (_F4, 1),
    "reward_components": (_U1, 1),
    "reward_hash": (_U1, 1),
    "ref_logprobs": (_F4, 1),
}
"""Name to (dtype, rank); a column that is not named here may have any storable type."""
PER_TOKEN = frozenset({"tokens", "loss_mask", "rollout_logprobs", "ref_logprobs"})


def check(write: RowWrite, stage: Stage, num_tokens: int) -> None:
    """Refuse a write that does not fit `stage`; `num_tokens` is the row's T, 0 when it has no tokens yet.

    Raises:
        UserError: with `uid`; names the column, what it is and what would be right.
    """
    unknown = [name for name in write.columns if name not in stage.writes]
    missing = [name for name in stage.writes if name not in write.columns]
    if unknown or missing:
        problem = f"column {unknown[0]} is not" if unknown else f"column {missing[0]} is missing"
        raise _refusal(write, f"{problem} in what stage {stage.name} writes: {stage.writes}")
    if stage.first:
        num_tokens = _checked_facts(write, stage).num_tokens
    elif write.facts is not None:
        raise _refusal(write, f"facts come with the first stage, not with {stage.name}")
    for name, array in write.columns.items():
        _check_array(write, name, array, num_tokens)


def _checked_facts(write: RowWrite, stage: Stage) -> RowFacts:
    facts = write.facts
    if facts is None:
        raise _refusal(write, f"stage {stage.name} must give the row's facts")
    if not facts.outcome.trainable:
        raise _refusal(write, f"outcome {facts.outcome} can never be trained on: use fail")
    if facts.newest < facts.oldest or facts.num_tokens < 0:
        raise _refusal(write, f"facts make no sense: {facts}")
    return facts


def _check_array(write: RowWrite, name: str, array: npt.NDArray[Any], num_tokens: int) -> None:
    if not isinstance(array, np.ndarray) or not storable(array):
        raise _refusal(write, f"column {name} is {_shape(array)}, which cannot be stored")
    dtype, rank = TYPES.get(name, (array.dtype, array.ndim))
    if array.dtype != dtype or array.ndim != rank:
        raise _refusal(write, f"column {name} is {_shape(array)}, want {dtype} of rank {rank}")
    if name in PER_TOKEN and len(array) != num_tokens:
        raise _refusal(
            write, f"column {name} has {len(array)} entries, the row {num_tokens} tokens"
        )
    if name == "spans" and array.shape[1] != 4:
        raise _refusal(write, f"column spans is {_shape(array)}, want int64[n, 4]")
    if name == "reward" and (len(array) != 1 or not np.isfinite(array[0])):
        raise _refusal(write, f"column reward is {array}, want one finite number")


def _shape(array: object) -> str:
    if isinstance(array, np.ndarray):
        return f"{array.dtype.name}{list(array.shape)}"
    return type(array).__name__


def _refusal(write: RowWrite, problem: str) -> UserError:
    return UserError(f"row {write.uid}: {problem}", uid=write.uid)
