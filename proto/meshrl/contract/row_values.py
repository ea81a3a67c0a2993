"""Values that columns of a row may have: what a stage writes is checked by the queue, what is trained by the trainer.

One wrong number could end the step of everybody's rows: a token beyond the vocabulary is an index beyond the
embedding, a mask of 7 shifts the counts of a whole batch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import orjson

from meshrl.contract.errors import CorruptError
from meshrl.contract.routed_experts import RoutedExperts
from meshrl.contract.types import (
    CONVERSATION,
    DATA_SOURCE,
    PARTS,
    POSTED_REWARD,
    REWARD_INPUTS,
    REWARD_TIMES,
    ROLLOUT_TIMES,
    ROUTED_EXPERTS,
    TOKEN_REWARDS,
    Columns,
    Json,
)

Array: TypeAlias = npt.NDArray[Any]

ANY_TOKEN: Final = 1 << 31
"""Tokens that an int32 can name: the vocabulary of unknown size."""


class ValueFault(NamedTuple):
    """A value that a column must not have."""

    row: int
    """Its place among the checked rows."""
    problem: str
    """Names the column and the value, and says what is right."""


class _Rows(NamedTuple):
    """One column of several rows, on end."""

    name: str
    values: Array
    lengths: Sequence[int]
    """Entries of each row."""
    tokens: Sequence[int]
    """T of each row."""
    vocabulary: int

    def fault(self, bad: Array, wanted: str) -> ValueFault | None:
        """The first entry where `bad`, bool[entries, values of one], is true; None: there is none."""
        found = np.flatnonzero(bad.any(axis=1))
        if not len(found):
            return None
        at = int(found[0])
        row, start = self._row_of(at)
        held = self.values[at].tolist()
        return ValueFault(row, f"column {self.name} holds {held} at {at - start}, want {wanted}")

    def of_row(self, row: int, problem: object) -> ValueFault:
        """The fault of a whole row."""
        return ValueFault(row, f"column {self.name} {problem}")

    def _row_of(self, at: int) -> tuple[int, int]:
        ends = np.cumsum(self.lengths)
        row = int(np.searchsorted(ends, at, side="right"))
        return row, int(ends[row]) - self.lengths[row]

    def split(self) -> list[Array]:
        """The values of each row."""
        ends = list(accumulate(self.lengths))
        return [
            self.values[end - length : end] for end, length in zip(ends, self.lengths, strict=True)
        ]


def _tokens(rows: _Rows) -> ValueFault | None:
    limit = rows.vocabulary or ANY_TOKEN
    # As an unsigned number a negative one is larger than any token.
    unsigned = rows.values.view(np.uint32)
    if not unsigned.size or int(unsigned.max()) < limit:
        return None
    bad = (unsigned >= limit).reshape(len(unsigned), -1)
    return rows.fault(bad, f"0 to {limit - 1}, the vocabulary" if rows.vocabulary else "0 or more")


def _mask(rows: _Rows) -> ValueFault | None:
    if not rows.values.size or int(rows.values.max()) <= 1:
        return None
    return rows.fault((rows.values > 1)[:, None], "0 or 1")


def _finite(rows: _Rows) -> ValueFault | None:
    finite = np.isfinite(rows.values)
    if finite.all():
        return None
    return rows.fault(~finite.reshape(len(finite), -1), "finite numbers")


def _spans(rows: _Rows) -> ValueFault | None:
    starts, ends = rows.values[:, 2], rows.values[:, 3]
    lengths = np.asarray(rows.lengths)
    before = np.zeros_like(starts)
    before[1:] = ends[:-1]
    firsts = np.cumsum(lengths) - lengths
    before[firsts[lengths > 0]] = 0
    bad = (starts < before) | (ends < starts) | (ends > np.repeat(rows.tokens, lengths))
    if not bad.any():
        return None
    return rows.fault(
        bad[:, None], "spans [epoch, step, start, end) in order and within the row's tokens"
    )


def _text(rows: _Rows) -> ValueFault | None:
    if rows.values.tobytes().isascii():
        return None
    for row, column in enumerate(rows.split()):
        try:
            column.tobytes().decode()
        except UnicodeDecodeError as error:
            return rows.of_row(row, f"is no UTF-8 text: {error.reason} at {error.start}")
    return None


def _json(rows: _Rows, *, fits: Callable[[Json], bool], wanted: str) -> ValueFault | None:
    for row, column in enumerate(rows.split()):
        text = column.tobytes() or b"null"
        try:
            try:
                said = orjson.loads(text)
            except (
                orjson.JSONDecodeError
            ):  # NaN and halves of surrogates are not JSON to the letter
                said = json.loads(text.decode())  # of bytes it reads more than UTF-8
            if not fits(said):
                return rows.of_row(row, f"holds {_shown(column)}, want {wanted}")
        except (ValueError, RecursionError):
            return rows.of_row(row, f"holds {_shown(column)}, which is no JSON; want {wanted}")
    return None


def _shown(column: Array) -> str:
    return repr(column[:80].tobytes().decode(errors="replace"))


def _is_component(value: Json) -> bool:
    try:
        return isinstance(value, str) or math.isfinite(value)
    except (TypeError, OverflowError):  # no number, or an integer that no float holds
        return False


def _is_posted(said: Json) -> bool:
    if said is None:  # an empty column: nothing was posted
        return True
    if not isinstance(said, dict) or not isinstance(said.get("components"), dict):
        return False
    numbers = [said.get("score"), *said["components"].values()]
    return not any(isinstance(number, str) or not _is_component(number) for number in numbers)


def _experts(rows: _Rows) -> ValueFault | None:
    for row, column in enumerate(rows.split()):
        try:
            RoutedExperts.of(column, rows.tokens[row])
        except CorruptError as error:
            return rows.of_row(row, f"is wrong: {error}")
    return None


_CHECKS: Final[Mapping[str, Callable[[_Rows], ValueFault | None]]] = {
    "tokens": _tokens,
    "ref_top_ids": _tokens,
    "loss_mask": _mask,
    "spans": _spans,
    **dict.fromkeys(
        (
            "rollout_logprobs",
            "ref_logprobs",
            "ref_top_logprobs",
            "reward",
            TOKEN_REWARDS,
            ROLLOUT_TIMES,
            REWARD_TIMES,
        ),
        _finite,
    ),
    **dict.fromkeys(("response_text", "replica", "reward_hash", DATA_SOURCE), _text),
    "reward_components": partial(
        _json,
        fits=lambda said: isinstance(said, dict) and all(map(_is_component, said.values())),
        wanted="an object of finite numbers and texts",
    ),
    POSTED_REWARD: partial(
        _json,
        fits=_is_posted,
        wanted="nothing, or an object with a score and components, finite numbers",
    ),
    CONVERSATION: partial(
        _json,
        fits=lambda said: (
            isinstance(said, list) and all(isinstance(message, dict) for message in said)
        ),
        wanted="a list of messages",
    ),
    **dict.fromkeys(
        (REWARD_INPUTS, PARTS),
        partial(_json, fits=lambda said: isinstance(said, list), wanted="a list"),
    ),
    ROUTED_EXPERTS: _experts,
}


def value_fault(
    name: str,
    values: Array,
    lengths: Sequence[int],
    *,
    tokens: Sequence[int],
    vocabulary: int = 0,
) -> ValueFault | None:
    """The first value of a column that it must not have; None where there is none, or the column is not known.

    Args:
        name: The column, which has the dtype and rank that the queue stores it in.
        values: [sum(lengths), *axes after the first]: the rows' arrays on end.
        lengths: Entries of each row.
        tokens: T of each row.
        vocabulary: Tokens are less than this; 0 where it is not known.
    """
    check = _CHECKS.get(name)
    return check and check(_Rows(name, values, lengths, tokens, vocabulary))


def row_fault(columns: Columns, *, vocabulary: int = 0) -> str:
    """The fault in the values of one row; empty where there is none."""
    tokens = (len(columns["tokens"]),)
    for name, values in columns.items():
        if values.ndim:
            fault = value_fault(name, values, (len(values),), tokens=tokens, vocabulary=vocabulary)
            if fault:
                return fault.problem
    return ""
