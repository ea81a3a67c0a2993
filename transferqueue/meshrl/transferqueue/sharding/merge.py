"""What several shards tell, told as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshrl.contract.types import Ledger, Waiting

CALLS = ("admit waits", "lease waits", "take waits")


def total_ledger(ledgers: Sequence[Ledger]) -> Ledger:
    """The sum. Each shard's books balance at every instant, and no row is on two shards: so does the sum."""
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


def merged_waits(told: Sequence[Sequence[Waiting]]) -> list[Waiting]:
    """Everything that blocks, the longest wait first. A call that waits on several shards is told once."""
    calls: dict[tuple[str, str], list[Waiting]] = {}
    found: list[Waiting] = []
    for number, waits in enumerate(told):
        for one in waits:
            if one.what.startswith(CALLS):
                calls.setdefault((one.who, one.what), []).append(one)
            else:
                found.append(replace(one, what=f"{one.what} (shard {number})"))
    found += [_one(parts) for parts in calls.values()]
    return sorted(found, key=lambda one: -one.since_s)


def _one(parts: Sequence[Waiting]) -> Waiting:
    """One call. Whoever holds the rows that it waits for is to be asked, else whoever was named."""
    blamed = [part for part in parts if part.uids] or parts
    return replace(
        parts[0],
        since_s=max(part.since_s for part in parts),
        owners=tuple(sorted({owner for part in blamed for owner in part.owners})),
        uids=tuple(uid for part in parts for uid in part.uids),
    )
