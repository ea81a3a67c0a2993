"""The calls of our clients, and the only file that knows in which form rows travel: a frame for each group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from work import SAMPLED, Array, Group, annotate

from meshrl.contract.frames import FRAME_BYTES, Flat, Frame, pack, pack_flat
from meshrl.contract.ports import Queue
from meshrl.contract.types import (
    Lease,
    LeasedBlock,
    Outcome,
    RowBlock,
    RowFacts,
    RunSpec,
    StageSpec,
    Task,
    Version,
    gathered,
)

ROLLOUT = StageSpec(name="rollout", reads=(), writes=SAMPLED)
ANNOTATE = StageSpec(name="annotate", reads=("tokens",), writes=("reward", "ref_logprobs"))
COLUMNS = (*ROLLOUT.writes, *ANNOTATE.writes)


def run_spec(run: str, *, group_size: int, batch_groups: int, batches: int) -> RunSpec:
    """A training run that follows versions, with leases and ledger; at most `batches` of rows are not consumed."""
    return RunSpec(
        run=run,
        group_size=group_size,
        batch_groups=batch_groups,
        max_staleness=float("inf"),
        resident_batches=batches,
        stages=(ROLLOUT, ANNOTATE),
    )


def task(run: str, number: int, given: Group) -> Task:
    """The task of this number; its rows are those of `given`."""
    return Task(
        run=run,
        task_id=str(number),
        prompt_ids=given.prompt,
        group_size=len(given.tokens),
    )


async def write_rollouts(
    queue: Queue, run: str, lease: Lease, groups: Sequence[Group], version: Version
) -> None:
    """Task n is answered with group n, modulo the groups there are."""
    packed = []
    for leased in lease.blocks:
        given = groups[int(leased.task) % len(groups)]
        rows = [
            {name: getattr(given, name)[index] for name in ROLLOUT.writes}
            for index in leased.indices
        ]
        for start, end in frames(rows):
            facts = tuple(
                [
                    RowFacts(
                        outcome=Outcome.OK,
                        num_tokens=len(row["tokens"]),
                        oldest=version,
                        newest=version,
                    )
                    for row in rows[start:end]
                ]
            )
            frame = pack(rows[start:end])
            packed.append(packed_group(leased, frame, facts, start))
    await queue.write(run, ROLLOUT.name, packed)


def frames(rows: Sequence[Mapping[str, Array]]) -> list[tuple[int, int]]:
    """From which row to which each frame has, as `pack_rows` divides the rows of a group."""
    starts, size = [0], 0
    for at, row in enumerate(rows):
        nbytes = sum([array.nbytes for array in row.values()])
        size += nbytes
        if size > FRAME_BYTES and at > starts[-1]:
            starts.append(at)
            size = nbytes
    return list(zip(starts, [*starts[1:], len(rows)], strict=True))


def packed_group(
    leased: LeasedBlock, frame: bytes, facts: tuple[RowFacts, ...] = (), start: int = 0
) -> RowBlock:
    """An annotator's frame, or a producer's, which begins with row `start` and has facts of each row."""
    end = start + len(facts) if facts else len(leased)
    return RowBlock(
        task=leased.task,
        indices=leased.indices[start:end],
        attempts=leased.attempts[start:end],
        token=leased.token,
        frames=(Frame(frame),),
        facts=facts,
    )


async def write_annotations(queue: Queue, run: str, lease: Lease) -> None:
    """Reward and reference log-probs of every row, computed at once."""
    tokens = gathered(lease.blocks, ("tokens",))["tokens"]
    assert tokens.lengths is not None
    ends = np.cumsum(tokens.lengths, dtype=np.int64)
    rewards, reference = annotate(tokens.values, ends - tokens.lengths)
    packed, row, token = [], 0, 0
    for leased in lease.blocks:
        to_row = row + len(leased)
        to_token = int(ends[to_row - 1])
        columns = {
            "reward": Flat(rewards[row:to_row], np.ones(len(leased), np.uint32)),
            "ref_logprobs": Flat(reference[token:to_token], tokens.lengths[row:to_row]),
        }
        packed.append(packed_group(leased, pack_flat(len(leased), columns)))
        row, token = to_row, to_token
    await queue.write(run, ANNOTATE.name, packed)


async def fetch(queue: Queue, run: str, groups: Sequence[RowBlock]) -> dict[str, Flat]:
    """All columns of the rows, each as one new array with its lengths: what a trainer packs from."""
    fetched = await queue.fetch(run, groups, COLUMNS)
    return gathered(fetched, COLUMNS)


def rows_of(fetched: Mapping[str, Flat]) -> list[tuple[Any, ...]]:
    """Reward and columns of each row: what `work.digest` wants."""
    names = (*SAMPLED, "ref_logprobs")
    split = [np.split(fetched[name].values, ends(fetched[name])) for name in names]
    return list(zip(fetched["reward"].values.tolist(), *split, strict=True))


def ends(column: Flat) -> Array:
    """The end of each row but the last."""
    assert column.lengths is not None
    return np.cumsum(column.lengths, dtype=np.int64)[:-1]
