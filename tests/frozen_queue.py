"""Contents of `fixtures/frozen` as a queue, and what a successor of its trainer and workers finds in it.

`fixtures/frozen/README.md` says how each file was made.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from meshrl.contract.errors import WaitTimeoutError
from meshrl.contract.ports import Queue
from meshrl.contract.types import Columns, LeasedRow, RunState, Version
from meshrl.testing.contract.queue_actors import WAIT_S

FROZEN = Path(__file__).parent / "fixtures" / "frozen"
MADE_AT = "/frozen"
"""Stands in the recipes of the frozen run for the folder in which it was made."""


def unpacked(name: str, folder: Path) -> Path:
    """The one folder of the archive `name`, under `folder`, with recipes that say where it lies now."""
    shutil.unpack_archive(FROZEN / f"{name}.tar.xz", folder, filter="data")
    (found,) = folder.iterdir()
    for path in [*found.glob("run/*.yaml"), *found.glob("run/*.json")]:
        path.write_text(path.read_text().replace(MADE_AT, str(folder)))
    return found


def expected(run: str) -> Mapping[str, Any]:
    """The result of `content` for the run when it was frozen."""
    found: Mapping[str, Any] = json.loads((FROZEN / "rows.json").read_text())[run]
    return found


async def content(queue: Queue, run: str, *, groups: int, leases: bool) -> Mapping[str, Any]:
    """The queue's report of a run, a new trainer's batches and, with `leases`, new workers' rows."""
    state = await queue.run_state(run)
    ledger = await queue.ledger(run)
    resident = {name: count for name, count in ledger.resident.items() if count}
    letters = await queue.dead_letters(run)
    found: dict[str, Any] = {
        "state": [state.epoch, *state.published, state.cursor, state.feed_closed],
        "committed": state.committed_step,
        "stages": [[stage.name, stage.reads, stage.writes] for stage in state.spec.stages],
        "left": [ledger.admitted, ledger.trained, ledger.filtered, ledger.stale],
        "resident": resident,
        "dead": [
            [str(one.uid), one.stage, one.outcome, one.reason, one.attempts] for one in letters
        ],
    }
    epoch = (await queue.acquire(run, "heir")).epoch
    version = Version(epoch, state.committed_step)
    found["rewound"] = await queue.rewind(run, epoch=epoch, step=version.step)
    await queue.publish(run, version)
    found["batches"] = await _batches(queue, state, version, groups)
    if leases:
        found["reward"] = await _leased(queue, run, "reward", resident["pending"])
        waiting = resident["queued"] + resident["leased"]
        found["rollout"] = await _leased(queue, run, "rollout", waiting, version)
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


async def _batches(queue: Queue, state: RunState, version: Version, groups: int) -> list[Any]:
    """Every row that can be trained, in order, with all its columns."""
    run, (epoch, step) = state.spec.run, version
    columns = [name for stage in state.spec.stages for name in stage.writes]
    found: list[dict[str, str]] = []
    while True:
        try:
            batch = await queue.take(
                run,
                epoch=epoch,
                step=step,
                groups=groups,
                batch_id=f"b{step}",
                wait_s=0,
            )
        except WaitTimeoutError:
            return found
        uids = [row.uid for row in batch.rows]
        rows = await queue.fetch_rows(run, uids, columns)
        found.append({str(uid): digest(row) for uid, row in zip(uids, rows, strict=True)})
        step += 1


async def _leased(
    queue: Queue, run: str, stage: str, count: int, version: Version | None = None
) -> dict[str, list[str]]:
    """The `count` rows that `stage` has to work on: task, columns, and what a former holder appended."""
    rows: dict[str, LeasedRow] = {}
    while len(rows) < count:  # those of the holder that is gone come when its time to live is over
        lease = await queue.lease(
            [run], stage, worker="heir", limit=count, version=version, wait_s=WAIT_S
        )
        rows |= {str(row.uid): row for row in lease.rows}
    return {
        uid: [_said(row), digest(row.columns), digest(row.prefix)]
        for uid, row in sorted(rows.items())
    }


def _said(row: LeasedRow) -> str:
    task = row.task
    facts = (task.data_source, task.ground_truth, task.extra_info, task.sampling.temperature)
    return f"{task.prompt_ids.tolist()} {json.dumps(facts, sort_keys=True)}"


def digest(columns: Columns) -> str:
    """The number of columns, and a hash over names, dtypes, shapes and bytes."""
    found = hashlib.sha256()
    for name, values in sorted(columns.items()):
        array = np.ascontiguousarray(values)
        found.update(f"{name} {array.dtype} {array.shape} ".encode() + array.tobytes())
    return f"{len(columns)} {found.hexdigest()[:16]}"
