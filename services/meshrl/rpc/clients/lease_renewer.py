"""Leases kept by a thread with a connection of its own: a busy event loop costs none.

    owner's loop ──Holding──▶ keeper's thread ──Renew──▶ queue
         ▲  │ beat                │    └──Attend── (open for as long as this process lives)
         └──┴──────── lost ───────┘

The thread renews in the name of an event loop that is late, but not of one that is dead: a loop that has run nothing
for HUNG_S is no longer spoken for. The open stream tells the queue at once of the death of this process.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, Protocol, TypeAlias, cast

import grpc

from meshrl.contract import codec
from meshrl.contract.errors import MeshError, UnavailableError, WaitTimeoutError
from meshrl.contract.held_leases import Held, HeldLeases
from meshrl.rpc import tls
from meshrl.rpc.errors import from_rpc
from meshrl.rpc.transport import CHANNEL_OPTIONS
from meshrl.v1 import queue_pb2 as pb
from meshrl.v1.trajectory_pb2 import Ack

log = logging.getLogger(__name__)

HUNG_S: Final = 60.0
"""An event loop that has run nothing for so long hangs."""
AGAIN_S: Final = 0.2
"""Until a stream that broke is opened again."""
SHORTEST_S: Final = 1.0
"""What any renewal may take."""

Metadata: TypeAlias = tuple[tuple[str, str], ...]


class Ending(Protocol):
    """A stream of the synchronous API, as far as it is looked at; the stubs know it as an iterator only."""

    def add_done_callback(self, done: Callable[[Ending], None]) -> None:
        """Called in a thread of gRPC's, or at once."""
        ...

    def code(self) -> grpc.StatusCode:
        """Why it ended."""
        ...


class _Seat:
    """One holding, its event loop, and when that last ran."""

    def __init__(self, holding: HeldLeases) -> None:
        self.holding = holding
        self.due = math.inf
        """When to renew; never while nothing is held."""
        self.refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._beat_at = time.monotonic()

    def next_due(self) -> float:
        """A period from now, or never."""
        held = self.holding.by_run()
        return time.monotonic() + self.holding.period_s if held else math.inf

    def alive(self) -> bool:
        """False when the loop hangs; asks it for its next sign of life."""
        self._tell(self.beat)
        return time.monotonic() - self._beat_at < HUNG_S

    def lose(self, rows: Held) -> None:
        """The queue says that these are held no longer."""
        self._tell(lambda: self.holding.lost(rows))

    def refuse(self, error: MeshError) -> None:
        """The queue does not renew."""
        self._tell(partial(self._refuse, error))

    def _refuse(self, error: MeshError) -> None:
        if not self.refused.done():
            self.refused.set_exception(error)

    def beat(self) -> None:
        """The loop runs."""
        self._beat_at = time.monotonic()

    def _tell(self, call: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call)


class LeaseRenewer:
    """The thread; it starts with the first holding."""

    def __init__(self, peer: str, address: str, metadata: Metadata) -> None:
        """`peer` is what errors call the queue."""
        self._peer = peer
        self._address = address
        self._metadata = metadata
        self._changed = threading.Condition()
        self._seats: list[_Seat] = []
        self._streams: dict[str, Ending] = {}
        """By worker. The thread opens them, gRPC's own thread forgets those that ended."""
        self._reopen_at = 0.0
        self._closing = False
        self._channel: grpc.Channel | None = None
        self._thread: threading.Thread | None = None

    async def keep(self, holding: HeldLeases) -> None:
        """Renew what it names until cancelled. Raises what the queue answers, but not that it is away."""
        seat = _Seat(holding)
        holding.began = lambda: self._began(seat)
        with self._changed:
            self._seats.append(seat)
            if self._thread is None:
                self._start()
        self._began(seat)
        try:
            await seat.refused
        finally:
            with self._changed:
                self._seats.remove(seat)

    async def close(self) -> None:
        """Hang up and end the thread; idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._channel is not None and self._thread is not None:
            self._channel.close()
            await asyncio.to_thread(self._thread.join)
            self._channel = self._thread = None

    def _start(self) -> None:
        self._channel = channel = tls.blocking_channel(self._address, CHANNEL_OPTIONS)
        self._renew_call = channel.unary_unary(
            "/meshrl.v1.Queue/Renew",
            pb.RenewRequest.SerializeToString,
            pb.RenewResponse.FromString,
        )
        self._attend_call = channel.unary_stream(
            "/meshrl.v1.Queue/Attend", pb.AttendRequest.SerializeToString, Ack.FromString
        )
        self._thread = threading.Thread(target=self._run, name="lease-keeper", daemon=True)
        self._thread.start()

    def _began(self, seat: _Seat) -> None:
        """It holds rows, and held none before; called by its event loop, which therefore runs."""
        seat.beat()
        with self._changed:
            seat.due = seat.next_due()
            self._changed.notify()

    # --- in the thread

    def _run(self) -> None:
        while not self._closing:
            try:
                self._attend()
                self._renew(self._wait())
            except Exception:
                # Without this thread all leases of the process would end. A closed channel raises what it likes.
                if not self._closing:
                    log.exception("leases were not renewed; trying again")

    def _wait(self) -> list[_Seat]:
        """Sleep until something is due: those to renew for, perhaps none."""
        with self._changed:
            next_at = min((seat.due for seat in self._seats), default=math.inf)
            if self._absent():
                next_at = min(next_at, self._reopen_at)
            wait_s = next_at - time.monotonic()
            if wait_s > 0 and not self._closing:
                self._changed.wait(None if wait_s == math.inf else wait_s)
            now = time.monotonic()
            return [seat for seat in self._seats if seat.due <= now and not self._closing]

    def _absent(self) -> set[str]:
        return {seat.holding.worker for seat in self._seats} - self._streams.keys()

    def _attend(self) -> None:
        with self._changed:
            if self._closing or time.monotonic() < self._reopen_at:
                return
            absent = self._absent()
        for worker in absent:
            request = pb.AttendRequest(worker=worker)
            stream = cast(
                Ending,
                self._attend_call(request, wait_for_ready=True, metadata=self._metadata),
            )
            self._streams[worker] = stream
            stream.add_done_callback(partial(self._hung_up, worker))

    def _hung_up(self, worker: str, stream: Ending) -> None:
        """The queue is away, or its network: be there again before it thinks us dead."""
        if stream.code() is grpc.StatusCode.UNIMPLEMENTED:
            return  # an older queue: leases are all that it knows of us
        with self._changed:
            del self._streams[worker]
            now = time.monotonic()
            self._reopen_at = now + AGAIN_S
            for seat in self._seats:
                seat.due = min(seat.due, now)
            self._changed.notify()

    def _renew(self, due: Sequence[_Seat]) -> None:
        asked = []
        for seat in due:
            with self._changed:
                seat.due = seat.next_due()
            if not seat.alive():
                log.warning("%s hangs: its leases are not renewed", seat.holding.worker)
                continue
            asked += [
                (seat, rows, self._ask(seat, run, rows))
                for run, rows in seat.holding.by_run().items()
            ]
        for seat, rows, answer in asked:
            try:
                lost = codec.decode_uids(answer.result().lost)
            except grpc.RpcError as failure:
                self._failed(seat, failure)
            else:
                if lost:
                    seat.lose({uid: rows[uid] for uid in lost})

    def _ask(self, seat: _Seat, run: str, rows: Held) -> grpc.Future[pb.RenewResponse]:
        holding = seat.holding
        request = pb.RenewRequest(
            run=run, stage=holding.stage, worker=holding.worker, uids=codec.encode_uids(list(rows))
        )
        return self._renew_call.future(
            request,
            timeout=max(SHORTEST_S, holding.period_s),
            wait_for_ready=True,
            metadata=self._metadata,
        )

    def _failed(self, seat: _Seat, failure: grpc.RpcError) -> None:
        """A queue that is away is asked again, a refusal is the owner's to deal with."""
        error = from_rpc(failure, self._peer)
        if not isinstance(error, UnavailableError | WaitTimeoutError):
            seat.refuse(error)
