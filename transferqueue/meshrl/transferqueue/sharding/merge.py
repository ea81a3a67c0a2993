"""Merges the ledgers and the waits of several shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshrl.contract.types import Ledger, Waiting

CALLS = ("admit waits", "lease waits", "take waits")


def total_ledger(ledgers: Sequence[Ledger]) -> Ledger:
    """The sum. Each shard's ledger balances at every instant and no row is on two shards, so the sum balances too."""
    first = ledgers[0]
    return Ledger(
        run=first.run,
        admitted=sum(one.admitted for one in ledgers),
        trained=sum(one.trained for one in ledgers),
        filtered=_counts([one.filtered for one in ledgers]),
        stale=_counts([one.stale for one in ledgers]),
        dead_lettered=_counts([one.dead_lettered for one in ledgers]),
        resident=_counts([one.resident for one in ledgers]),
    )


def _counts(parts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)


def merged_waits(waits_by_shard: Sequence[Sequence[Waiting]]) -> list[Waiting]:
    """Everything that blocks, the longest wait first. A call that waits on several shards is listed once."""
    calls: dict[tuple[str, str], list[Waiting]] = {}
    found: list[Waiting] = []
    for number, waits in enumerate(waits_by_shard):
        for one in waits:
            if one.what.startswith(CALLS):
                calls.setdefault((one.who, one.what), []).append(one)
            else:
                found.append(replace(one, what=f"{one.what} (shard {number})"))
    found += [_merged_call(parts) for parts in calls.values()]
    return sorted(found, key=lambda one: -one.since_s)


def _merged_call(parts: Sequence[Waiting]) -> Waiting:
    """Merge one call: its owners are the holders of the rows that it waits for, else all who were named."""
    blamed = [part for part in parts if part.uids] or parts
    return replace(
        parts[0],
        since_s=max(part.since_s for part in parts),
        owners=tuple(sorted({owner for part in blamed for owner in part.owners})),
        uids=tuple(uid for part in parts for uid in part.uids),
    )
