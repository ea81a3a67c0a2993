"""From a batch's manifest to tensors: who fetches what, and the ragged columns that every rank holds in full.

    manifest ──schedule──▶ mini-batches, micro-batches ──fetch own──▶ Trajectory ──assemble──▶ Experience

Payload is fetched once, each rank its own rows; then ranks exchange the response-only columns (a few floats a
token), so that advantages are computed on the whole batch and are the same for every number of ranks.
B = rows, N = response tokens of the batch: from a row's first sampled token to its end.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from meshrl.common.device_lease import ROWS_PER_LAID
from meshrl.contract.errors import CorruptError
from meshrl.contract.types import Batch, BatchRow, Outcome, Trajectory, Uid, Version
from meshrl.trainer.algorithms.advantages._types import Steps
from meshrl.trainer.algorithms.advantages.gigpo import anchors_of, steps_of
from meshrl.trainer.algorithms.ragged import Ragged
from meshrl.trainer.model.packing import PackSize, cut, plan
from meshrl.trainer.ranks.world import World

GROUP_PARTS = 4
"""Rows of a group stay together in parts of at most 1/4 of a micro-batch: larger parts would leave it half empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """Rows of one optimizer update."""

    rows: tuple[int, ...]
    """Indices into the schedule's rows."""
    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    """rank -> micro-batch -> rows; some micro-batches may be empty, every rank has equally many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Partition of a batch into updates and ranks; computed from the manifest alone, equal on every rank."""

    batch: Batch
    rows: tuple[BatchRow, ...]
    """Sorted by group and index: the order in which rows arrived must not change a bit of the weights. Their prompts
    have no tokens where siblings do not share them."""
    mini_batches: tuple[MiniBatch, ...]
    baselines: tuple[BatchRow, ...] = ()
    """Rows that are not trained: their reward is the baseline of their group (ReMax)."""
    extra_rows: int = 0
    """Such rows of each group."""

    def own(self, rank: int) -> tuple[int, ...]:
        """Indices of the rows that `rank` fetches, in the order of its micro-batches."""
        micros = itertools.chain.from_iterable(m.ranks[rank] for m in self.mini_batches)
        return tuple(itertools.chain.from_iterable(micros))

    def uids(self, rank: int) -> tuple[Uid, ...]:
        """The same rows by name."""
        return tuple(self.rows[i].uid for i in self.own(rank))


def schedule(
    batch: Batch,
    *,
    ranks: int,
    max_tokens: int,
    mini_batch_groups: int | None,
    whole_groups: bool = False,
    extra_rows: int = 0,
    share_prompts: bool = True,
    rows_per_laid: int = ROWS_PER_LAID,
) -> Schedule:
    """Sort rows, cut the groups into mini-batches, deal each to the ranks.

    With `whole_groups` the rows of a group stay in one micro-batch. Otherwise siblings stay together as far as the
    token budget is not wasted by it: with `share_prompts` their prompt is computed, and counted, once for each
    micro-batch that has some of them. The last `extra_rows` of a group are baselines.
    """
    ordered = sorted(batch.rows, key=lambda row: (row.group, row.uid.index, row.uid.attempt))
    rows = tuple(row for row in ordered if not is_baseline(row, extra_rows))
    if not share_prompts:
        rows = tuple(replace(row, prompt_tokens=0) for row in rows)
    baselines = tuple(row for row in ordered if is_baseline(row, extra_rows))
    groups = [
        [index for index, _ in part]
        for _, part in itertools.groupby(enumerate(rows), key=lambda pair: pair[1].group)
    ]
    size = mini_batch_groups or max(1, len(groups))
    minis = []
    for start in range(0, len(groups), size):
        units = groups[start : start + size]
        if not whole_groups:
            laid = sum(pack_size(rows, group).laid for group in units)
            most = min(max_tokens, laid // ranks)
            units = [part for group in units for part in _parts_of_group(rows, group, most)]
        sizes = [pack_size(rows, unit) for unit in units]
        minis.append(_mini_batch(units, sizes, ranks, max_tokens, rows_per_laid))
    return Schedule(
        batch=batch,
        rows=rows,
        mini_batches=_evened(rows, minis),
        baselines=baselines,
        extra_rows=extra_rows,
    )


def redrawn(
    schedule: Schedule,
    sample: Sequence[int],
    *,
    max_tokens: int,
    rows_per_laid: int = ROWS_PER_LAID,
) -> tuple[MiniBatch, ...]:
    """The mini-batches of `schedule`, each row as often as `sample` (sorted, with repetitions) has it.

    A row stays on the rank that fetched it. A mini-batch of which nothing was drawn is left out.
    """
    counts = Counter(sample)
    minis = []
    for mini in schedule.mini_batches:
        shares = []
        for rank in mini.ranks:
            rows = [row for micro in rank for row in micro for _ in range(counts[row])]
            sizes = [pack_size(schedule.rows, [row]) for row in rows]
            micros = cut(sizes, max_tokens, rows_per_laid)
            shares.append([tuple(rows[i] for i in micro) for micro in micros])
        most = max(len(share) for share in shares)
        if most:
            ranks = tuple(tuple(share) + ((),) * (most - len(share)) for share in shares)
            chosen = tuple(row for share in shares for micro in share for row in micro)
            minis.append(MiniBatch(rows=chosen, ranks=ranks))
    return tuple(minis)


def is_baseline(row: BatchRow, extra_rows: int) -> bool:
    """Whether `row` is one of the last `extra_rows` of its group."""
    return row.uid.index >= row.group_size - extra_rows


def pack_size(rows: Sequence[BatchRow], members: Sequence[int]) -> PackSize:
    """The size of these rows of one group in a micro-batch."""
    tokens = sum(rows[row].num_tokens for row in members)
    prompts = [rows[row].prompt_tokens for row in members]
    return PackSize(tokens, tokens - sum(prompts), rows[members[0]].group, max(prompts))


def _parts_of_group(rows: Sequence[BatchRow], group: Sequence[int], most: int) -> list[list[int]]:
    """A group in parts that lay at most 1/GROUP_PARTS of `most` tokens; a row that has more is a part of its own.

    Where the prompt alone is longer, parts lay up to `most`: otherwise it would be laid again for each row.
    """
    if pack_size(rows, group).shared <= most // GROUP_PARTS:
        most //= GROUP_PARTS
    parts: list[list[int]] = []
    for row in group:
        if not parts or pack_size(rows, [*parts[-1], row]).laid > most:
            parts.append([])
        parts[-1].append(row)
    return parts


def _mini_batch(
    units: Sequence[Sequence[int]],
    sizes: Sequence[PackSize],
    ranks: int,
    max_tokens: int,
    rows_per_laid: int,
) -> MiniBatch:
    """Deal units of rows that must stay together."""
    packing = plan(sizes, ranks=ranks, max_tokens=max_tokens, rows_per_laid=rows_per_laid)
    micros = tuple(
        tuple(tuple(row for index in micro for row in units[index]) for micro in rank)
        for rank in packing.ranks
    )
    return MiniBatch(rows=tuple(itertools.chain.from_iterable(units)), ranks=micros)


def _evened(rows: Sequence[BatchRow], minis: Sequence[MiniBatch]) -> tuple[MiniBatch, ...]:
    """The same shares, the largest of each mini-batch to the rank with the fewest tokens so far.

    So that over the whole batch, too, each rank fetches about as much; within a mini-batch nothing changes.
    """
    loads: list[int] = []
    evened: list[MiniBatch] = []
    for mini in minis:
        sizes = [sum(rows[i].num_tokens for micro in rank for i in micro) for rank in mini.ranks]
        loads = loads or [0] * len(sizes)
        takers = sorted(range(len(sizes)), key=lambda rank: (loads[rank], -sizes[rank]))
        shares = sorted(range(len(sizes)), key=lambda rank: -sizes[rank])
        share_of = dict(zip(takers, shares, strict=True))
        loads = [load + sizes[share_of[rank]] for rank, load in enumerate(loads)]
        ranks = tuple(mini.ranks[share_of[rank]] for rank in range(len(sizes)))
        evened.append(replace(mini, ranks=ranks))
    return tuple(evened)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Experience:
    """The whole batch, response-only and ragged, on the CPU of every rank."""

    ragged: Ragged
    """The layout: B rows over N tokens; its mask says what the policy sampled."""
    group_sizes: torch.Tensor
    """int64[B]: the true size of each row's group."""
    rewards: torch.Tensor
    """float32[B]"""
    token_rewards: torch.Tensor | None
    """float32[N]: the reward of each token, where the run has them; `rewards` is what reports show then."""
    components: tuple[Mapping[str, float], ...]
    """B reward components."""
    rollout_logprobs: torch.Tensor
    """float32[N]"""
    ref_logprobs: torch.Tensor | None
    """float32[N]"""
    versions: torch.Tensor
    """int64[N]: the policy step that sampled each token; -1 where none did."""
    data_sources: tuple[str, ...]
    """B names of the data sets that the rows come from; "" is none."""
    replicas: tuple[str, ...]
    """B names of the engine replicas that sampled the rows."""
    data_answers: torch.Tensor | None
    """bool[B]: rows that are the data's own answers, beside what the policy said."""
    reward_baselines: torch.Tensor | None
    """float32[B]: the reward of the greedy response to each row's prompt."""
    steps: Steps | None
    """Steps of the rows; None where the estimator does not read them."""
    staleness: torch.Tensor
    """int64[B]: optimizer steps between the oldest sampled token and this step (0 for a row that was sampled ahead of
    it, by a history that a crash undid)."""

    def tokens_of(self, rows: Iterable[int]) -> torch.Tensor:
        """int64[n]: places of the tokens of `rows`, row after row."""
        bounds = self.ragged.offsets
        parts = [torch.arange(int(bounds[i]), int(bounds[i + 1])) for i in rows]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)

    def layout_of(self, rows: Sequence[int], mask: torch.Tensor) -> Ragged:
        """The layout of `rows` alone, on the device of `mask` bool[n], the mask of their tokens."""
        chosen = list(rows)
        return Ragged.from_lengths(self.ragged.lengths[chosen], mask, self.ragged.groups[chosen])


def assemble(
    schedule: Schedule,
    own: Sequence[Trajectory],
    world: World,
    *,
    baselines: Mapping[str, float] | None = None,
    with_steps: bool = False,
) -> Experience:
    """Exchange response-only columns with the other ranks.

    Args:
        schedule: Plan of the batch.
        own: The rows of `schedule.own(world.data_rank)`, in that order.
        world: The ranks.
        baselines: Group to the reward of its greedy response; None: the algorithm has none.
        with_steps: Find the steps of rows and what they start from.

    Raises:
        CorruptError: a row lacks its reward or its baseline, or only some have reference log-probs or token rewards.
    """
    for row in own:
        if row.reward is None:
            raise CorruptError(f"row {row.uid} reached training without a reward")
    order = _Order(schedule, world, [len(row.tokens) - row.prompt_length for row in own])
    numbers = {group: n for n, group in enumerate(dict.fromkeys(r.group for r in schedule.rows))}
    step = schedule.batch.step
    ragged = Ragged(
        offsets=torch.from_numpy(order.offsets),
        mask=order.tokens([_response(row, row.loss_mask) for row in own], np.uint8).bool(),
        groups=torch.tensor([numbers[row.group] for row in schedule.rows]),
    )
    anchors = order.objects([anchors_of(row) for row in own]) if with_steps else None
    return Experience(
        ragged=ragged,
        group_sizes=torch.tensor([row.group_size - schedule.extra_rows for row in schedule.rows]),
        rewards=torch.from_numpy(order.rows(np.array([r.reward for r in own], dtype=np.float32))),
        components=tuple(order.objects([dict(row.reward_components) for row in own])),
        rollout_logprobs=order.tokens([_response(r, r.rollout_logprobs) for r in own], np.float32),
        ref_logprobs=_optional(schedule, own, order, "ref_logprobs"),
        token_rewards=_optional(schedule, own, order, "token_rewards"),
        versions=order.tokens([_versions(row) for row in own], np.int64),
        data_sources=tuple(order.objects([row.data_source for row in own])),
        replicas=tuple(order.objects([row.replica for row in own])),
        data_answers=None,
        reward_baselines=None if baselines is None else _baselines(schedule.rows, baselines),
        steps=None if anchors is None else steps_of(ragged, anchors),
        staleness=torch.tensor([max(0, step - row.oldest.step) for row in schedule.rows]),
    )


def gather_tokens(schedule: Schedule, own: Sequence[torch.Tensor], world: World) -> torch.Tensor:
    """float32[N] of the whole batch from this rank's rows: `own[i]` belongs to `schedule.own(rank)[i]`."""
    lengths = [len(part) for part in own]
    order = _Order(schedule, world, lengths)
    return order.tokens([part.numpy() for part in own], np.float32)


def row_objects(schedule: Schedule, world: World, own: Sequence[Any]) -> list[Any]:
    """One JSON value per row of the batch, from those of this rank's rows."""
    return _Order(schedule, world, [0] * len(own)).objects(own)


def _versions(row: Trajectory) -> npt.NDArray[np.int64]:
    """int64[R]: the policy step of each response token."""
    steps = np.full(len(row.tokens), -1, dtype=np.int64)
    for span in row.spans:
        steps[span.start : span.end] = span.version.step
    return steps[row.prompt_length :]


def _baselines(rows: Sequence[BatchRow], rewards: Mapping[str, float]) -> torch.Tensor:
    for row in rows:
        if row.group not in rewards:
            raise CorruptError(
                f"group {row.group} reached training without its greedy row: queue.group_policy must be all"
            )
    return torch.tensor([rewards[row.group] for row in rows], dtype=torch.float32)


def _optional(
    schedule: Schedule, own: Sequence[Trajectory], order: _Order, column: str
) -> torch.Tensor | None:
    """float32[N] of a column that all rows have, or none. Raises CorruptError."""
    parts = [getattr(row, column) for row in own]
    present = order.rows(np.array([part is not None for part in parts], dtype=np.int64))
    if not present.all():
        if present.any():
            bad = schedule.rows[int(np.flatnonzero(present == 0)[0])].uid
            raise CorruptError(f"row {bad} has no {column}, others of its batch have")
        return None
    return order.tokens([_response(*pair) for pair in zip(own, parts, strict=True)], np.float32)


def _response(row: Trajectory, column: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
    if column is None:
        raise CorruptError(f"row {row.uid} lacks a column")
    return column[row.prompt_length :]


class _Order:
    """Puts what ranks hold in their own order into the schedule's."""

    def __init__(self, schedule: Schedule, world: World, own_lengths: Sequence[int]) -> None:
        self._world = world
        self._owners = [schedule.own(rank) for rank in range(world.data_size)]
        lengths = self.rows(np.array(own_lengths, dtype=np.int64))
        self.offsets: npt.NDArray[np.int64] = np.concatenate([[0], np.cumsum(lengths)])

    def rows(self, own: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """One value per row, of the whole batch."""
        values = np.zeros(sum(map(len, self._owners)), dtype=own.dtype)
        for owner, part in zip(self._owners, self._world.gather_shares(own), strict=True):
            values[list(owner)] = part
        return values

    def tokens(self, own: Sequence[npt.NDArray[Any]], dtype: type[np.generic]) -> torch.Tensor:
        """One value per response token, of the whole batch."""
        flat = np.concatenate([*own, np.zeros(0, dtype)]).astype(dtype)
        values = np.zeros(int(self.offsets[-1]), dtype=dtype)
        for owner, part in zip(self._owners, self._world.gather_shares(flat), strict=True):
            start = 0
            for row in owner:
                size = int(self.offsets[row + 1] - self.offsets[row])
                values[self.offsets[row] : self.offsets[row + 1]] = part[start : start + size]
                start += size
        return torch.from_numpy(values)

    def objects(self, own: Sequence[Any]) -> list[Any]:
        """One JSON value per row, of the whole batch."""
        data = np.frombuffer(json.dumps(list(own)).encode(), dtype=np.uint8)
        values: list[Any] = [None] * sum(map(len, self._owners))
        for owner, part in zip(self._owners, self._world.gather_shares(data), strict=True):
            for row, value in zip(owner, json.loads(part.tobytes()), strict=True):
                values[row] = value
        return values


def batch_to_json(batch: Batch) -> dict[str, Any]:
    """The manifest as JSON, for the other ranks."""
    return {
        "batch_id": batch.batch_id,
        "run": batch.run,
        "step": batch.step,
        "rows": [
            {
                **{f.name: getattr(row, f.name) for f in dataclasses.fields(row)},
                "uid": str(row.uid),
                "oldest": str(row.oldest),
                "newest": str(row.newest),
            }
            for row in batch.rows
        ],
    }


def batch_from_json(data: Mapping[str, Any]) -> Batch:
    """The inverse of `batch_to_json`."""
    rows = tuple(
        BatchRow(
            **{
                **row,
                "uid": Uid.parse(row["uid"]),
                "oldest": Version.parse(row["oldest"]),
                "newest": Version.parse(row["newest"]),
                "outcome": Outcome(row["outcome"]),
            }
        )
        for row in data["rows"]
    )
    return Batch.of_rows(rows, batch_id=data["batch_id"], run=data["run"], step=data["step"])
