"""The queue: its methods, the client with its port, and what renews leases.

Leases are renewed in a thread with its own connection, so that a busy event loop loses none:

    owner's loop ──HeldLeases──▶ renewer's thread ──Renew──▶ queue
         ▲  │ alive                 │    └──Attend── (a stream, open as long as this process lives)
         └──┴───────── lost ────────┘

The thread renews for an event loop that is late, but not for one that hangs (has run nothing for `hung_s`). The open
stream lets the queue notice the death of this process at once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, Protocol, TypeAlias, TypedDict, Unpack, cast

import grpc
from typing_extensions import override

from meshrl.contract import codec
from meshrl.contract.codec import (
    TEXT,
    UID,
    Field,
    decode_batch,
    decode_lease,
    encode_batch,
    encode_lease,
)
from meshrl.contract.codec.bulk import TAKES_COMPRESSED, Mode, wanted
from meshrl.contract.errors import MeshError, UnavailableError, WaitTimeoutError
from meshrl.contract.held_rows import Held, HeldLeases
from meshrl.contract.ports import Queue
from meshrl.contract.types import (
    RowBlock,
    Task,
    Uid,
)
from meshrl.rpc import tls
from meshrl.rpc.clients.base import SERVICE_RETRY_S, Connect, GrpcClient, Patience, connect, row
from meshrl.rpc.credentials import Credential, MeshRole
from meshrl.rpc.errors import from_rpc
from meshrl.rpc.methods import STAGES, MethodTable, bare_row, service
from meshrl.rpc.transport import CHANNEL_OPTIONS
from meshrl.v1 import queue_pb2 as pb

FEEDER, TRAINER, READER = MeshRole.FEEDER, MeshRole.TRAINER, MeshRole.READER
SERVICES: Final = (*STAGES, FEEDER, TRAINER)


def _encode_held(token_of: Mapping[Uid, int]) -> list[pb.HeldRow]:
    """Rows with their fencing tokens."""
    return [pb.HeldRow(uid=UID.encode(uid), token=token) for uid, token in token_of.items()]


def _decode_held(messages: Sequence[pb.HeldRow]) -> dict[Uid, int]:
    return {UID.decode(message.uid): message.token for message in messages}


class QueueTable(MethodTable, Queue, service=service(pb.DESCRIPTOR, "Queue")):
    """meshrl.v1.Queue."""

    by_hand = (bare_row("Attend", *STAGES, waits=True),)
    open_run = row("OpenRun", FEEDER, TRAINER)(Queue.open_run)
    run_state = row("GetRunState", *SERVICES, READER)(Queue.run_state)
    acquire = row("Acquire", TRAINER)(Queue.acquire)
    # The trainer admits the prompts of an evaluation.
    admit = row("Admit", FEEDER, TRAINER, waits=True)(Queue.admit)
    close_feed = row("CloseFeed", FEEDER, TRAINER)(Queue.close_feed)
    lease = row(
        "Lease", *STAGES, waits=True, payload=True, reply=Field(encode_lease, decode_lease)
    )(Queue.lease)
    renew = row("Renew", *STAGES)(Queue.renew)
    write = row("Write", *STAGES, payload=True)(Queue.write)
    append = row("Append", *STAGES, payload=True)(Queue.append)
    redo = row("Redo", TRAINER)(Queue.redo)
    fail = row(
        "Fail",
        *STAGES,
        given={"uid": Field(name="row.uid"), "token": Field(name="row.token"), "reason": TEXT},
    )(Queue.fail)
    release = row(
        "Release",
        *STAGES,
        given={"token_of": Field(_encode_held, _decode_held, name="rows")},
    )(Queue.release)
    take = row("Take", TRAINER, waits=True, reply=Field(encode_batch, decode_batch))(Queue.take)
    fetch = row("Fetch", *STAGES, TRAINER, payload=True)(Queue.fetch)
    filter = row("Filter", TRAINER, given={"reason": TEXT})(Queue.filter)
    settle = row("Settle", TRAINER)(Queue.settle)
    publish = row("Publish", TRAINER)(Queue.publish)
    commit = row("Commit", TRAINER)(Queue.commit)
    rewind = row("Rewind", TRAINER)(Queue.rewind)
    ledger = row("GetLedger", *SERVICES, READER)(Queue.ledger)
    dead_letters = row("ListDeadLetters", TRAINER, READER)(Queue.dead_letters)
    # Not repeated: rows that failed again meanwhile would be replayed too.
    replay = row("Replay", repeatable=False)(Queue.replay)
    why_waiting = row("WhyWaiting", *SERVICES, READER)(Queue.why_waiting)


log = logging.getLogger(__name__)

RENEW: Final = QueueTable.methods["Renew"]
ATTEND: Final = QueueTable.methods["Attend"]
HUNG_S: Final = 60.0
"""Seconds after which an event loop that has run nothing counts as hanging."""
REOPEN_S: Final = 0.2
"""Seconds until a broken stream is opened again."""
MIN_DEADLINE_S: Final = 1.0
"""The shortest deadline of a renewal."""

Metadata: TypeAlias = tuple[tuple[str, str], ...]


class EndingStream(Protocol):
    """The end of a stream of the synchronous API. gRPC's type stubs know a stream only as an iterator."""

    def add_done_callback(self, done: Callable[[EndingStream], None]) -> None:
        """Call `done` at the end, in a gRPC thread; at once if the stream has ended."""
        ...

    def code(self) -> grpc.StatusCode:
        """The final status."""
        ...


class _Owner:
    """One HeldLeases, the event loop of its owner, and when that loop last ran."""

    def __init__(self, held_leases: HeldLeases, hung_s: float) -> None:
        self.held_leases = held_leases
        self._hung_s = hung_s
        self.due = math.inf
        """When to renew next; never (inf) while nothing is held."""
        self.refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._alive_at = time.monotonic()

    def next_due(self) -> float:
        """One period from now, or inf if nothing is held."""
        held = self.held_leases.by_run()
        return time.monotonic() + self.held_leases.period_s if held else math.inf

    def alive(self) -> bool:
        """Returns False if the loop hangs. Schedules the next `mark_alive` in the loop."""
        self._call_in_loop(self.mark_alive)
        return time.monotonic() - self._alive_at < self._hung_s

    def lose(self, rows: Held) -> None:
        """Report rows that the queue says are held no longer."""
        self._call_in_loop(lambda: self.held_leases.lost(rows))

    def refuse(self, error: MeshError) -> None:
        """End `renew_held` with the error of a queue that refused to renew."""
        self._call_in_loop(partial(self._refuse, error))

    def _refuse(self, error: MeshError) -> None:
        if not self.refused.done():
            self.refused.set_exception(error)

    def mark_alive(self) -> None:
        """Note that the loop runs."""
        self._alive_at = time.monotonic()

    def _call_in_loop(self, call: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call)


class LeaseRenewer:
    """Renews leases in a thread that starts with the first `renew_held`."""

    def __init__(
        self,
        service: str,
        address: str,
        metadata: Metadata,
        credential: Credential | None = None,
        *,
        hung_s: float = HUNG_S,
    ) -> None:
        """`service` is the queue's name in error messages. A loop that has run nothing for `hung_s` hangs."""
        self._hung_s = hung_s
        self._credential = credential
        self._service = service
        self._address = address
        self._metadata = metadata
        self._changed = threading.Condition()
        self._owners: list[_Owner] = []
        self._streams: dict[str, EndingStream] = {}
        """Streams by worker. The renewer's thread opens them, a gRPC thread removes those that ended."""
        self._reopen_at = 0.0
        self._closing = False
        self._channel: grpc.Channel | None = None
        self._thread: threading.Thread | None = None

    async def renew_held(self, held_leases: HeldLeases) -> None:
        """Renew the rows of `held_leases` until cancelled.

        Raises the queue's error if it refuses to renew. While the queue is away, renewals are repeated.
        """
        owner = _Owner(held_leases, self._hung_s)
        held_leases.began = lambda: self._began(owner)
        with self._changed:
            self._owners.append(owner)
            if self._thread is None:
                self._start()
        self._began(owner)
        try:
            await owner.refused
        finally:
            with self._changed:
                self._owners.remove(owner)

    async def close(self) -> None:
        """Close the connection and end the thread. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._channel is not None and self._thread is not None:
            self._channel.close()
            await asyncio.to_thread(self._thread.join)
            self._channel = self._thread = None

    def _start(self) -> None:
        self._channel = channel = tls.blocking_channel(
            self._address, CHANNEL_OPTIONS, self._credential
        )
        self._renew_call = channel.unary_unary(RENEW.path, RENEW.ask.serialize, RENEW.answer.parse)
        self._open_stream = channel.unary_stream(
            ATTEND.path, ATTEND.ask.serialize, ATTEND.answer.parse
        )
        self._thread = threading.Thread(target=self._run, name="lease-renewer", daemon=True)
        self._thread.start()

    def _began(self, owner: _Owner) -> None:
        """Called in the owner's event loop when it begins to hold rows."""
        owner.mark_alive()
        with self._changed:
            owner.due = owner.next_due()
            self._changed.notify()

    # --- in the thread

    def _run(self) -> None:
        while not self._closing:
            try:
                due, unattended = self._wait()
                for worker in unattended:
                    self._attend(worker)
                self._renew(due)
            except Exception:
                # Without this thread all leases of the process would expire. A closed channel may raise any error.
                if not self._closing:
                    log.exception("leases were not renewed; trying again")

    def _wait(self) -> tuple[list[_Owner], set[str]]:
        """Sleep until something is due. Returns the owners to renew for, and the workers to open a stream for."""
        with self._changed:
            while not self._closing:
                now = time.monotonic()
                due = [owner for owner in self._owners if owner.due <= now]
                times = [owner.due for owner in self._owners]
                unattended: set[str] = set()
                if now < self._reopen_at:
                    times.append(self._reopen_at)
                else:
                    workers = {owner.held_leases.worker for owner in self._owners}
                    unattended = workers - self._streams.keys()
                if due or unattended:
                    return due, unattended
                next_at = min(times, default=math.inf)
                self._changed.wait(None if next_at == math.inf else next_at - now)
            return [], set()

    def _attend(self, worker: str) -> None:
        request = pb.AttendRequest(worker=worker)
        stream = cast(
            EndingStream,
            self._open_stream(request, wait_for_ready=True, metadata=self._metadata),
        )
        self._streams[worker] = stream
        stream.add_done_callback(partial(self._stream_ended, worker))

    def _stream_ended(self, worker: str, stream: EndingStream) -> None:
        """Reopen a broken stream and renew, before the queue decides that this process is dead."""
        if stream.code() is grpc.StatusCode.UNIMPLEMENTED:
            return  # a queue without this method knows this process only by its leases
        with self._changed:
            del self._streams[worker]
            now = time.monotonic()
            self._reopen_at = now + REOPEN_S
            for owner in self._owners:
                owner.due = min(owner.due, now)
            self._changed.notify()

    def _renew(self, due: Sequence[_Owner]) -> None:
        renewals = []
        for owner in due:
            with self._changed:
                owner.due = owner.next_due()
            held = owner.held_leases.by_run()
            if held and not owner.alive():  # nobody asked while it held nothing
                log.warning(
                    "the event loop of %s hangs: its leases are not renewed",
                    owner.held_leases.worker,
                )
                continue
            renewals += [
                (owner, rows, self._start_renewal(owner, run, rows)) for run, rows in held.items()
            ]
        for owner, rows, answer in renewals:
            try:
                lost = RENEW.decode_answer(answer.result())
            except grpc.RpcError as failure:
                self._failed(owner, failure)
            else:
                if lost:
                    owner.lose({uid: rows[uid] for uid in lost})

    def _start_renewal(self, owner: _Owner, run: str, rows: Held) -> grpc.Future[pb.RenewResponse]:
        request, timeout = renewal(owner.held_leases, run, rows)
        return self._renew_call.future(
            request, timeout=timeout, wait_for_ready=True, metadata=self._metadata
        )

    def _failed(self, owner: _Owner, failure: grpc.RpcError) -> None:
        """Passes a refusal on to the owner. A queue that is away is asked again later."""
        error = refusal(failure, self._service)
        if error is not None:
            owner.refuse(error)


def renewal(held_leases: HeldLeases, run: str, rows: Held) -> tuple[pb.RenewRequest, float]:
    """The request that renews `rows`, and its deadline in seconds."""
    request = RENEW.encode_arguments(run, held_leases.stage, held_leases.worker, list(rows))
    return request, max(MIN_DEADLINE_S, held_leases.period_s)


def refusal(failure: grpc.RpcError, service: str) -> MeshError | None:
    """The error of a queue that refuses to renew; None if it is away and is asked again later."""
    error = from_rpc(failure, service)
    return None if isinstance(error, UnavailableError | WaitTimeoutError) else error


class Renewer(Protocol):
    """Renews what workers of this process hold."""

    async def renew_held(self, held_leases: HeldLeases) -> None:
        """Renew them until cancelled."""
        ...

    async def close(self) -> None:
        """Close its connection; idempotent."""
        ...


class ClientOptions(TypedDict, total=False):
    """Options of a QueueClient."""

    retry_s: float
    """Seconds for which calls are repeated while the queue is away."""
    compression: Mode
    """Compression of payload sent over the network."""
    patience: Patience | None
    """Patience of calls while the queue's disk is full, short in a process that is about to end; without it they
    raise CapacityError."""
    connect: Connect
    """Opens the channel."""
    credential: Credential | None
    """Credential of calls; without it that of the process. Ignored where `connect` and `renewer` are given."""
    renewer: Callable[[str, str, Metadata], Renewer]
    """Factory of renewers, from the queue's name in messages, its address and the metadata of calls."""


class QueueClient(GrpcClient, QueueTable):
    """A remote Queue. Calls survive a restart of the queue that takes no longer than `retry_s`.

    Every call but `replay` is repeated if the queue goes away before it answers. A lease whose answer was lost is not
    taken twice: nobody renews it, so its rows return to the queue after their time to live. Repeated so, `acquire`
    makes one more epoch, which fences no other trainer, and `redo` and `rewind` find fewer rows or none.
    """

    def __init__(self, address: str, **options: Unpack[ClientOptions]) -> None:
        compression = options.get("compression", "auto")
        retry_s = options.get("retry_s", SERVICE_RETRY_S)
        self._compresses = wanted(compression, address)
        credential = options.get("credential")
        super().__init__(
            "queue",
            address,
            retry_s,
            (TAKES_COMPRESSED,) if self._compresses else (),
            patience=options.get("patience"),
            connect=options.get("connect", partial(connect, credential=credential)),
        )
        renewer = options.get("renewer", partial(LeaseRenewer, credential=credential))
        self._renewer = renewer(self._connection.name, address, self._connection.metadata)

    @override
    async def close(self) -> None:
        await self._renewer.close()
        await super().close()

    @override
    async def renew_held(self, held_leases: HeldLeases) -> None:
        await self._renewer.renew_held(held_leases)

    @override
    async def admit(self, run: str, tasks: Sequence[Task], *, cursor: str, wait_s: float) -> int:
        requests = codec.encode_admit(run, tasks, cursor=cursor, wait_s=wait_s)
        attempt = partial(
            self._connection.call,
            self.methods["Admit"],
            requests,
            lambda answer: answer.admitted,
        )
        return await self._connection.poll(requests[0].header, attempt, wait_s)

    @override
    async def write(self, run: str, stage: str, blocks: Sequence[RowBlock]) -> None:
        await self._send("Write", run, stage, blocks)

    @override
    async def append(self, run: str, stage: str, blocks: Sequence[RowBlock]) -> None:
        await self._send("Append", run, stage, blocks)

    async def _send(self, name: str, run: str, stage: str, blocks: Sequence[RowBlock]) -> None:
        messages = codec.encode_write(run, stage, blocks)
        if self._compresses:
            messages = [message.compressed() for message in messages]
        await self._connection.call(self.methods[name], messages, lambda _: None)

    @override
    async def fetch(
        self, run: str, blocks: Sequence[RowBlock], columns: Sequence[str]
    ) -> Sequence[RowBlock]:
        request = pb.FetchRowsRequest(run=run, rows=codec.encode_rows(blocks), columns=columns)
        return await self._connection.call(
            self.methods["Fetch"],
            request,
            lambda answer: codec.decode_fetched(answer, blocks),
        )
