"""Payload read back from the store: the rows of a lease with their tasks, the columns of a fetch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from meshrl.contract.errors import NotFoundError
from meshrl.contract.nouns import Columns, LeasedRow, Task, Uid
from meshrl.transferqueue.frames import unpack, unpack_task
from meshrl.transferqueue.leases import Granted
from meshrl.transferqueue.stages import Stage
from meshrl.transferqueue.store import Store

TASKS_CACHED = 4096
"""Decoded tasks kept in RAM: siblings and later stages read the same one."""


class PayloadReader:
    """Reads what is durable; it holds nothing that cannot be read again."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tasks: OrderedDict[bytes, Task] = OrderedDict()

    def forget(self) -> None:
        """The store was read back: what is cached may never have been."""
        self._tasks.clear()

    async def leased_rows(self, granted: Sequence[Granted], stage: Stage) -> tuple[LeasedRow, ...]:
        """The rows with task and columns; one that left in the meantime is left out."""
        missing = {row.task_key for row in granted if row.task_key not in self._tasks}
        keys = [*missing, *(key for row in granted for key in row.frame_keys)]
        stored = dict(zip(keys, await self._store.read(keys), strict=True))
        rows: list[LeasedRow] = []
        for row in granted:
            task = self._task(row, stored.get(row.task_key))
            columns = _merged([stored[key] for key in row.frame_keys], row.uid, stage.reads)
            if task is not None and len(columns) == len(stage.reads):
                rows.append(
                    LeasedRow(
                        uid=row.uid,
                        token=row.token,
                        task=task,
                        columns=columns,
                        delivery=row.delivery,
                    )
                )
        return tuple(rows)

    async def columns(
        self, uids: Sequence[Uid], keys: Sequence[Sequence[bytes]], names: Sequence[str]
    ) -> list[Columns]:
        """The columns `names` of each row, whose frames are under `keys`.

        Raises:
            NotFoundError: with `uid`; a column is not there.
        """
        values = iter(await self._store.read([key for row in keys for key in row]))
        rows: list[Columns] = []
        for uid, row_keys in zip(uids, keys, strict=True):
            columns = _merged([next(values) for _ in row_keys], uid, names)
            missing = [name for name in names if name not in columns]
            if missing:
                raise NotFoundError(f"row {uid} has no column {missing[0]} yet", uid=uid)
            rows.append(columns)
        return rows

    def _task(self, row: Granted, value: bytes | None) -> Task | None:
        task = self._tasks.get(row.task_key)
        if task is None and value is not None:
            task = unpack_task(value, f"task of row {row.uid}")
            self._tasks[row.task_key] = task
            if len(self._tasks) > TASKS_CACHED:
                self._tasks.popitem(last=False)
        return task


def _merged(frames: Sequence[bytes | None], uid: Uid, names: Sequence[str]) -> Columns:
    columns: dict[str, npt.NDArray[Any]] = {}
    for frame in frames:
        if frame is not None:
            columns |= unpack(frame, f"columns of row {uid}", names)
    return columns
