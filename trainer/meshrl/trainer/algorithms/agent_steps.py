"""The steps of an agent's row: runs of sampled tokens, each behind what the environment said last.

    prompt │ ●●●● │ tool says A │ ●● │ tool says B │ ●●●      three steps; their anchors are prompt, A, B

Two steps of one prompt with the same anchor are two ways to go on from one observation: what GiGPO compares.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from meshrl.contract.types import Trajectory
from meshrl.trainer.algorithms.ragged import Ragged


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Steps:
    """The steps of B rows over N tokens, in order. S = steps."""

    of_token: torch.Tensor
    """int64[N]: the step of each sampled token; -1 where the policy sampled none."""
    rows: torch.Tensor
    """int64[S]: the row of each step."""
    anchors: torch.Tensor
    """int64[S]: equal numbers are equal observations."""


def anchors_of(row: Trajectory) -> list[str]:
    """A hash of the tokens between the last step (or the beginning) and each step of `row`; of parts, as they say."""
    if row.parts:
        return [anchor for part in row.parts for anchor in part.anchors]
    sampled = np.asarray(row.loss_mask, dtype=bool)
    edges = np.diff(np.concatenate([[False], sampled, [False]]).astype(np.int8))
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    before = np.concatenate([[0], ends[:-1]]) if len(starts) else ends
    return [
        hashlib.blake2b(np.ascontiguousarray(row.tokens[a:b]).tobytes(), digest_size=8).hexdigest()
        for a, b in zip(before, starts, strict=True)
    ]


def steps_of(ragged: Ragged, anchors: Sequence[Sequence[str]]) -> Steps:
    """The steps of rows with `anchors` (`anchors_of` each); the mask of `ragged` says what was sampled."""
    mask = ragged.mask
    follows = mask.roll(1) & (ragged.positions > 0)
    starts = mask & ~follows
    names = [name for row in anchors for name in row]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return Steps(
        of_token=torch.where(mask, starts.long().cumsum(0) - 1, -1),
        rows=ragged.rows[starts],
        anchors=torch.tensor([numbers[name] for name in names], dtype=torch.int64),
    )
