"""The calls of our clients, and the only file that knows in which form rows travel: one row at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from work import Array, Group, annotate, starts_of

from meshrl.contract.nouns import (
    Columns,
    Lease,
    Outcome,
    RowFacts,
    RowWrite,
    RunSpec,
    StageSpec,
    Task,
    Uid,
    Version,
)
from meshrl.contract.ports import Queue
from meshrl.services.wires import QueueWire
from meshrl.services.wires.shard import ShardWire
from meshrl.transferqueue.sharding.router import ShardedQueue

ROLLOUT = StageSpec(name="rollout", reads=(), writes=("tokens", "loss_mask", "rollout_logprobs"))
ANNOTATE = StageSpec(name="annotate", reads=("tokens",), writes=("reward", "ref_logprobs"))
COLUMNS = (*ROLLOUT.writes, *ANNOTATE.writes)


def connect(addresses: str) -> Queue:
    """A queue service, or the router over several, their addresses separated by commas."""
    if "," not in addresses:
        return QueueWire(addresses)
    return ShardedQueue([ShardWire(address) for address in addresses.split(",")])


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
    rows = []
    for row in lease.rows:
        given, index = groups[int(row.uid.task) % len(groups)], row.uid.index
        columns = {name: getattr(given, name)[index] for name in ROLLOUT.writes}
        facts = RowFacts(
            outcome=Outcome.OK,
            num_tokens=len(columns["tokens"]),
            oldest=version,
            newest=version,
        )
        rows.append(RowWrite(uid=row.uid, columns=columns, facts=facts))
    await queue.write(run, ROLLOUT.name, tokens_of(lease), rows)


def annotated(lease: Lease) -> list[RowWrite]:
    """Reward and reference log-probs of every row."""
    tokens = [row.columns["tokens"] for row in lease.rows]
    starts = starts_of(tokens)
    rewards, reference = annotate(np.concatenate(tokens), starts)
    parts = np.split(reference, starts[1:])
    return [
        RowWrite(uid=row.uid, columns={"reward": rewards[at : at + 1], "ref_logprobs": parts[at]})
        for at, row in enumerate(lease.rows)
    ]


async def write_annotations(queue: Queue, run: str, lease: Lease) -> None:
    await queue.write(run, ANNOTATE.name, tokens_of(lease), annotated(lease))


async def fetch(queue: Queue, run: str, uids: Sequence[Uid]) -> Sequence[Columns]:
    """All columns of the rows, as arrays."""
    return await queue.fetch(run, uids, COLUMNS)


def rows_of(fetched: Sequence[Columns]) -> list[tuple[Array, Array, Array, Array, float]]:
    """tokens, mask, log-probs, reference, reward of each row: what `work.digest` wants."""
    return [
        (
            row["tokens"],
            row["loss_mask"],
            row["rollout_logprobs"],
            row["ref_logprobs"],
            row["reward"].item(),
        )
        for row in fetched
    ]


def tokens_of(lease: Lease) -> dict[Uid, int]:
    """Fencing tokens."""
    return {row.uid: row.token for row in lease.rows}
