"""From a row of the queue to several that are trained: the queue counts one, whole, and the learner sees its parts.

    rows of a batch ──parts──▶ a schedule of parts ──learn──▶ columns of parts ──folded──▶ columns of the rows

What leases, settles, drops and counts knows nothing of parts: a row is settled once, whole, and is as old as its
oldest token. Parts stay on the rank that fetched their row. B = parts of the batch.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from meshrl.contract.types import Int32, Trajectory
from meshrl.trainer.learner.experience import Experience, MiniBatch, Schedule, row_objects
from meshrl.trainer.learner.policy_gradient import Targets
from meshrl.trainer.model.packing import alone, cut
from meshrl.trainer.ranks.world import World

Number = TypeVar("Number", bound=np.generic)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TrainedPart:
    """One row that is trained."""

    row: Trajectory
    start: int | None = 0
    """The place of its first token in the queue's row; None: its tokens are not the row's."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Unfolded:
    """The parts of a batch, in the order of its rows; the same on every rank but for `own`."""

    schedule: Schedule
    own: Sequence[Trajectory]
    """The parts of `schedule.own(world.data_rank)`, in that order."""
    origin: torch.Tensor
    """int64[B]: the row of each part."""
    number: torch.Tensor
    """int64[B]: which part of its row it is, from 0."""
    offsets: Sequence[int | None]
    """B places of a part's first response token among its row's; None: it has none there."""
    seats: Sequence[str]
    """B speakers; empty: a part has none."""

    def by_seat(self, parts: Experience) -> Experience:
        """Each part with its own seat's reward, in a group of that seat."""
        pairs = list(zip(parts.ragged.groups.tolist(), self.seats, strict=True))
        numbers = {pair: number for number, pair in enumerate(dict.fromkeys(pairs))}
        rewards = [
            own[seat] if seat else float(reward)
            for own, seat, reward in zip(parts.components, self.seats, parts.rewards, strict=True)
        ]
        groups = torch.tensor([numbers[pair] for pair in pairs])
        return dataclasses.replace(
            parts,
            ragged=dataclasses.replace(parts.ragged, groups=groups),
            rewards=torch.tensor(rewards, dtype=torch.float32),
        )

    def folded(
        self, values: torch.Tensor, parts: Experience, whole: Experience, empty: float
    ) -> torch.Tensor:
        """[N of `parts`] to [N of `whole`]; `empty` where no part has the token."""
        to, of = whole.ragged.offsets, parts.ragged.offsets
        result = torch.full((whole.ragged.num_tokens,), empty, dtype=values.dtype)
        for part, offset in enumerate(self.offsets):
            if offset is not None:
                start, size = int(of[part]), int(of[part + 1] - of[part])
                at = int(to[self.origin[part]]) + offset
                result[at : at + size] = values[start : start + size]
        return result

    def spread(self, values: torch.Tensor, parts: Experience, whole: Experience) -> torch.Tensor:
        """[N of `whole`] to [N of `parts`]: the inverse of `folded` where parts have tokens."""
        number = torch.arange(parts.ragged.num_tokens)
        places = self.folded(number, parts, whole, -1)
        there = places >= 0
        result = torch.zeros(parts.ragged.num_tokens, dtype=values.dtype)
        result[places[there]] = values[there]
        return result


def unfolded(
    schedule: Schedule,
    parts: Sequence[Sequence[TrainedPart]],
    world: World,
    *,
    max_tokens: int,
    together: bool,
) -> Unfolded:
    """Cut the parts of rows into micro-batches anew. Every rank calls this.

    Args:
        schedule: Schedule of the queue's rows.
        parts: Parts of each row of `schedule.own(world.data_rank)`, in that order.
        world: The ranks.
        max_tokens: Most tokens of a micro-batch.
        together: The parts of a row stay in one micro-batch.
    """
    rows = [
        [(len(p.row.tokens), _offset(_begins(of), p), [q.seat for q in p.row.parts]) for p in of]
        for of in parts
    ]
    told = row_objects(schedule, world, rows)
    places = [(row, number) for row, of in enumerate(told) for number in range(len(of))]
    numbers: list[list[int]] = [[] for _ in told]
    for place, (row, _) in enumerate(places):
        numbers[row].append(place)
    lengths = [int(told[row][number][0]) for row, number in places]
    minis = []
    for mini in schedule.mini_batches:
        shares = []
        for rank in mini.ranks:
            of_rows = [numbers[row] for micro in rank for row in micro]
            units = of_rows if together else [[place] for unit in of_rows for place in unit]
            sizes = alone([sum(lengths[place] for place in unit) for unit in units])
            shares.append(
                [
                    tuple(place for unit in micro for place in units[unit])
                    for micro in cut(sizes, max_tokens)
                ]
            )
        most = max(len(share) for share in shares)
        ranks = tuple(tuple(share) + ((),) * (most - len(share)) for share in shares)
        chosen = tuple(place for share in shares for micro in share for place in micro)
        minis.append(MiniBatch(rows=chosen, ranks=ranks))
    made = dataclasses.replace(
        schedule,
        rows=tuple(
            dataclasses.replace(schedule.rows[row], num_tokens=lengths[place], prompt_tokens=0)
            for place, (row, _) in enumerate(places)
        ),
        mini_batches=tuple(minis),
    )
    mine = {
        place: part.row
        for row, of in zip(schedule.own(world.data_rank), parts, strict=True)
        for place, part in zip(numbers[row], of, strict=True)
    }
    return Unfolded(
        schedule=made,
        own=[mine[place] for place in made.own(world.data_rank)],
        origin=torch.tensor([row for row, _ in places]),
        number=torch.tensor([number for _, number in places]),
        offsets=[told[row][number][1] for row, number in places],
        seats=["".join(told[row][number][2]) for row, number in places],
    )


def mapped(targets: Targets, column: Callable[[torch.Tensor], torch.Tensor]) -> Targets:
    """Targets of other rows, whose columns follow from these."""
    return dataclasses.replace(
        targets,
        advantages=column(targets.advantages),
        returns=column(targets.returns),
        token_rewards=column(targets.token_rewards),
        mask=column(targets.mask),
        old_logprobs=None if targets.old_logprobs is None else column(targets.old_logprobs),
        weights=None if targets.weights is None else column(targets.weights),
    )


def branches(row: Trajectory) -> list[TrainedPart]:
    """The branches of a row, each a sequence of its own; a row without parts is one."""
    bounds = [*(part.start for part in row.parts), len(row.tokens)]
    if len(bounds) < 3:
        return [TrainedPart(row=row)]
    found = []
    for of, (start, end) in zip(row.parts, itertools.pairwise(bounds), strict=True):
        spans = [
            dataclasses.replace(span, start=span.start - start, end=span.end - start)
            for span in row.spans
            if start <= span.start < end
        ]
        part = dataclasses.replace(
            row,
            tokens=row.tokens[start:end],
            loss_mask=row.loss_mask[start:end],
            rollout_logprobs=row.rollout_logprobs[start:end],
            ref_logprobs=_cut(row.ref_logprobs, start, end),
            ref_top_ids=_cut(row.ref_top_ids, start, end),
            ref_top_logprobs=_cut(row.ref_top_logprobs, start, end),
            spans=tuple(spans),
            routed_experts=row.routed_experts and row.routed_experts.part(start, end),
            parts=(dataclasses.replace(of, start=0),),
        )
        found.append(TrainedPart(row=part, start=start))
    return found


def _cut(column: npt.NDArray[Number] | None, start: int, end: int) -> npt.NDArray[Number] | None:
    return None if column is None else column[start:end]


def _begins(parts: Sequence[TrainedPart]) -> int:
    """Start of the response in the queue's row: the first token that was sampled in a part of it."""
    places = [
        part.start + part.row.prompt_length
        for part in parts
        if part.start is not None and part.row.loss_mask.any()
    ]
    return min(places, default=0)


def _offset(begins: int, part: TrainedPart) -> int | None:
    """Offset of a part's response in its row's response."""
    return None if part.start is None else max(0, part.start + part.row.prompt_length - begins)


def with_answer(row: Trajectory, answers: Mapping[int, Int32]) -> tuple[TrainedPart, TrainedPart]:
    """Parts of the policy's response, and of the data's answer to the same prompt, which is to be preferred."""
    answer = answers[int(row.uid.task.rpartition("-")[2])]
    prompt = row.tokens[: row.prompt_length]
    none = np.zeros(len(prompt) + len(answer), dtype=np.float32)
    mask = none.astype(np.uint8)
    mask[len(prompt) :] = 1
    said = dataclasses.replace(
        row,
        tokens=np.concatenate([prompt, answer]).astype(np.int32),
        loss_mask=mask,
        rollout_logprobs=none,
        spans=(),
        routed_experts=None,
    )
    return TrainedPart(row=row), TrainedPart(row=said, start=None)
