"""A lease that is renewed while its `async with` block runs.

    async with run.lease("reward", limit=64) as lease:     waits for rows
        ...                                                a thread renews them, even if the event loop is busy
        await lease.write(rows)                            durable on return
                                                           the other rows are released, or failed if the block raised

When every row is lost (a pause longer than the time to live, or a step that needs them no more), the block is
cancelled and ends with LeaseLostError.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Self

from meshrl.contract.errors import FencedError, MeshError, UserError
from meshrl.contract.held_rows import Held, HeldLeases
from meshrl.contract.ports import Queue
from meshrl.contract.types import Lease, LeasedRow, Outcome, RowWrite, Uid

log = logging.getLogger(__name__)

GIVE_BACK_S: Final = 10.0
"""Seconds to give rows back at the end of a block. After that their leases expire."""


class LeaseLostError(FencedError):
    """This process holds no row of the lease any more: others hold them, or the run needs them no more."""


class HeldLease:
    """Rows of one stage, held while its `async with` block runs."""

    def __init__(self, port: Queue, ask: Callable[[], Coroutine[Any, Any, Lease]]) -> None:
        self._port = port
        self._ask = ask
        self._lease: Lease | None = None
        self._rows: dict[Uid, LeasedRow] = {}
        """All granted rows."""
        self._held: dict[Uid, int] = {}
        self._writing: set[Uid] = set()
        self._lost: LeaseLostError | None = None
        self._body: asyncio.Task[Any] | None = None
        self._cancelled_body = False

    @property
    def rows(self) -> tuple[LeasedRow, ...]:
        """The granted rows; rows of one group are adjacent."""
        return self._granted.rows

    @property
    def held(self) -> tuple[Uid, ...]:
        """The rows that are still held and not written yet."""
        return tuple(self._held)

    @property
    def _granted(self) -> Lease:
        if self._lease is None:
            raise UserError("a lease holds rows only inside its `with` block")
        return self._lease

    async def __aenter__(self) -> Self:
        """Wait for rows. Raises WaitTimeoutError, or EndOfDataError when the feed is closed and no row is left."""
        if self._lease is not None:
            raise UserError("a lease is entered only once; ask the run for another one")
        self._lease = await self._ask()
        self._rows = {row.uid: row for row in self._lease.rows}
        self._held = {uid: row.token for uid, row in self._rows.items()}
        self._body = asyncio.current_task()
        self._cancelling = self._body.cancelling() if self._body else 0
        self._held_leases = HeldLeases(self._lease.stage, self._lease.worker, self._forget)
        self._renewing = asyncio.create_task(
            self._port.renew_held(self._held_leases), name=f"{self._lease.stage}-renew"
        )
        self._renewing.add_done_callback(self._refused)
        self._held_leases.add(self._lease.rows, self._lease.ttl_s)
        return self

    async def write(self, rows: Sequence[RowWrite]) -> tuple[Uid, ...]:
        """Write columns of leased rows. Returns the rows that were not written because another worker holds them now.

        Raises:
            LeaseLostError: every row of the lease is lost.
            UserError: a column does not belong to the stage, or a row to this lease.
        """
        if self._lost is not None:
            raise self._lost
        stage = self._granted.stage
        for row in rows:
            if row.uid not in self._rows:
                raise UserError(f"row {row.uid} is not in this lease", uid=row.uid)
        still_held = {row.uid: row for row in rows if row.uid in self._held}
        self._writing |= still_held.keys()

        async def write(tokens: Mapping[Uid, int]) -> None:
            chosen = [still_held[uid] for uid in tokens]
            await self._port.write_rows(chosen[0].uid.run, stage, tokens, chosen)

        try:
            written = await _without_fenced({uid: self._held[uid] for uid in still_held}, write)
        finally:
            self._writing -= still_held.keys()
        for uid in still_held:
            self._held.pop(uid, None)
        self._held_leases.drop(self._rows[uid] for uid in still_held)
        return tuple(row.uid for row in rows if row.uid not in written)

    async def fail(
        self,
        uid: Uid,
        reason: str,
        *,
        outcome: Outcome = Outcome.INFRA_FAULT,
        lasting: bool = False,
    ) -> None:
        """Give one row back as failed. Another worker tries it again, up to the run's `max_attempts`.

        Fewer times if the fault is `lasting`: another try would fail again (`Queue.fail`).
        """
        token = self._held.pop(uid, None)
        if token is not None:
            await self._port.fail(
                uid.run, self._granted.stage, uid, token, outcome, reason, lasting
            )

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            async with asyncio.timeout(GIVE_BACK_S):
                await self._give_back(error)
        except (MeshError, TimeoutError) as failure:
            log.warning("rows were not given back, their leases will expire: %s", failure)
        self._renewing.cancel()
        await asyncio.gather(self._renewing, return_exceptions=True)
        # As in asyncio.timeout: a cancellation of our own becomes our error, any other one is passed on.
        cancelled = self._body if self._cancelled_body else None
        if cancelled is not None and cancelled.uncancel() > self._cancelling:
            return
        if self._lost is not None and (error is None or isinstance(error, asyncio.CancelledError)):
            raise self._lost from error

    async def _give_back(self, error: BaseException | None) -> None:
        held, self._held = self._held, {}
        if not held:
            return
        stage, run = self._granted.stage, next(iter(held)).run
        if not isinstance(error, Exception):
            await _without_fenced(held, lambda tokens: self._port.release(run, stage, tokens))
            return
        reason = f"{type(error).__name__}: {error}"
        for uid, token in held.items():
            with suppress(
                FencedError
            ):  # the failure of a row of its group may have ended the group
                await self._port.fail(run, stage, uid, token, Outcome.INFRA_FAULT, reason)

    def _forget(self, lost: Held) -> None:
        """Called with lost rows. A row that is being written may be lost because its write has arrived."""
        gone = [uid for uid in lost if uid not in self._writing and self._held.pop(uid, 0)]
        if gone and not self._held:
            self._lose(f"every row of the lease is lost, {gone[0]} among them")

    def _refused(self, renewing: asyncio.Task[None]) -> None:
        if not renewing.cancelled() and (error := renewing.exception()) is not None:
            self._lose(f"the lease could not be renewed: {error}")

    def _lose(self, why: str) -> None:
        self._held.clear()
        self._lost = LeaseLostError(f"{self._granted.worker}, stage {self._granted.stage}: {why}")
        if self._body is not None and self._body is not asyncio.current_task():
            self._cancelled_body = self._body.cancel()


async def _without_fenced(
    token_of: Mapping[Uid, int], call: Callable[[Mapping[Uid, int]], Awaitable[None]]
) -> set[Uid]:
    """Repeat `call`, each time without the row that the queue says is not held. Returns the rows of the last call."""
    left = dict(token_of)
    while left:
        try:
            await call(left)
        except FencedError as error:
            del left[Uid.parse(error.details["uid"])]
        else:
            break
    return set(left)
