"""Every branch of a session in one row: its parts, end to end, each with the history that the policy really saw.

    branches  P a A b │ P' c │ P' d        P, P', A observed; a, b, c, d sampled
    row       P a A b   P' c   P' d        parts begin at 0, 4 and 6; d is trained behind P', not behind c

The queue sees one row: sampled, scored, settled and counted as ever. The trainer takes it apart
(`learner/unfolding.py`). A turn that several branches share is trained in the first of them, context in the others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from meshrl.contract.types import RowPart, Trajectory, Uint8, VersionSpan
from meshrl.rollout.sessions.history import Turn


def joined(
    turns: Sequence[Turn], row_of: Callable[[Turn], Trajectory]
) -> tuple[Trajectory, tuple[RowPart, ...]]:
    """All branches as one row, in the order in which their first new turns ended.

    Args:
        turns: The turns of a session, in that order; at least one.
        row_of: The row of the branch that ends with a turn.
    """
    number = {turn: index for index, turn in enumerate(turns)}
    parents = {turn.parent for turn in turns}
    trained: set[Turn] = set()
    rows: list[Trajectory] = []
    parts: list[RowPart] = []
    leaves = [turn for turn in turns if turn not in parents]
    while leaves:
        leaf = min(leaves, key=lambda end: min(number[t] for t in end.path() if t not in trained))
        leaves.remove(leaf)
        start = sum(len(row.tokens) for row in rows)
        row, anchors = _new_turns(row_of(leaf), leaf.path(), trained)
        rows.append(row)
        parts.append(RowPart(start=start, anchors=anchors))
        trained.update(leaf.path())
    spans = [
        replace(span, start=span.start + part.start, end=span.end + part.start)
        for row, part in zip(rows, parts, strict=True)
        for span in row.spans
    ]
    whole = replace(
        rows[0],
        tokens=np.concatenate([row.tokens for row in rows]),
        loss_mask=np.concatenate([row.loss_mask for row in rows]),
        rollout_logprobs=np.concatenate([row.rollout_logprobs for row in rows]),
        spans=tuple(spans),
        response_text="\n".join(row.response_text for row in rows),
    )
    return whole, tuple(parts)


def _new_turns(
    row: Trajectory, path: Sequence[Turn], trained: set[Turn]
) -> tuple[Trajectory, tuple[str, ...]]:
    """A branch whose known turns are context, and what each run of new tokens answers."""
    keep: Uint8 = np.zeros(len(row.tokens), dtype=np.uint8)
    anchors: list[str] = []
    at, runs_on = 0, False
    for turn in path:
        start = at + len(turn.observed)
        at = start + len(turn.response.tokens)
        new = turn not in trained and len(turn.response.tokens) > 0
        if new:
            keep[start:at] = 1
            if turn.observed or not runs_on:
                anchors.append(_observation(turn))
        runs_on = new or (runs_on and at == start and not turn.observed)
    mask = row.loss_mask * keep
    spans = [part for span in row.spans for part in _within(span, keep)]
    logprobs = np.where(mask, row.rollout_logprobs, 0).astype(np.float32)
    return (
        replace(row, loss_mask=mask, rollout_logprobs=logprobs, spans=tuple(spans)),
        tuple(anchors),
    )


def _within(span: VersionSpan, keep: Uint8) -> list[VersionSpan]:
    """The pieces of a span that are kept."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], keep[span.start : span.end], [0]])))
    return [
        replace(span, start=span.start + int(a), end=span.start + int(b))
        for a, b in zip(edges[::2], edges[1::2], strict=True)
    ]


def _observation(turn: Turn) -> str:
    """A hash of what the policy was shown last: the last message before its answer, else the tokens."""
    asked = turn.messages[:-1]
    shown = json.dumps(asked[-1], sort_keys=True) if asked else json.dumps(turn.observed)
    return hashlib.blake2b(shown.encode(), digest_size=8).hexdigest()
