"""The Queue port over gRPC."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypedDict, Unpack

from google.protobuf.message import Message
from typing_extensions import override

from meshrl.contract import codec
from meshrl.contract.codec.compression import TAKES_COMPRESSED, Mode, wanted
from meshrl.contract.held_rows import HeldLeases
from meshrl.contract.ports import Queue
from meshrl.contract.types import (
    Batch,
    DeadLetter,
    Lease,
    Ledger,
    Outcome,
    RowBlock,
    RunSpec,
    RunState,
    Task,
    Uid,
    Version,
    Waiting,
)
from meshrl.rpc.clients.base import SERVICE_RETRY_S, Connect, GrpcClient, connect, discard
from meshrl.rpc.clients.lease_renewer import LeaseRenewer, Metadata
from meshrl.rpc.clients.patience import Patience
from meshrl.rpc.credentials import Credential
from meshrl.v1 import queue_pb2 as pb
from meshrl.v1 import queue_pb2_grpc as rpc
from meshrl.v1.trajectory_pb2 import Ack


class Renewer(Protocol):
    """Renews what workers of this process hold; see lease_renewer.py."""

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
    """Of payload sent over the network."""
    patience: Patience | None
    """With it calls wait while the queue's disk is full, and not for long in a process that is about to end; without
    it they raise CapacityError."""
    connect: Connect
    """Opens the channel."""
    credential: Credential | None
    """What calls present; without it that of the process. Without effect where `connect` and `renewer` are given."""
    renewer: Callable[[str, str, Metadata], Renewer]
    """From the queue's name in messages, its address and the metadata of calls."""


class QueueClient(GrpcClient, Queue):
    """A remote Queue. Calls survive a restart of the queue that takes no longer than `retry_s`.

    Every call but `replay` is repeated if the queue goes away before it answers. A lease whose answer was lost is not
    taken twice: nobody renews it, so its rows return to the queue after their time to live.
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
        self._stub = rpc.QueueStub(self._connection.channel)
        renewer = options.get("renewer", partial(LeaseRenewer, credential=credential))
        self._renewer = renewer(self._connection.name, address, self._connection.metadata)
        self._lease = self._streamed("Lease", pb.LeaseRequest, pb.LeaseResponse)
        self._fetch = self._streamed("Fetch", pb.FetchRowsRequest, pb.FetchRowsResponse)
        self._write = self._streaming("Write")
        self._append = self._streaming("Append")

    def _streamed(self, name: str, request: type[Message], answer: type[Message]) -> Any:
        """A method that answers with payload."""
        return self._connection.channel.unary_stream(
            f"/meshrl.v1.Queue/{name}", request.SerializeToString, codec.parser(answer)
        )

    def _streaming(self, name: str) -> Any:
        """A method that is given payload."""
        return self._connection.channel.stream_unary(
            f"/meshrl.v1.Queue/{name}", codec.Bulk.SerializeToString, Ack.FromString
        )

    @override
    async def close(self) -> None:
        await self._renewer.close()
        await super().close()

    @override
    async def open_run(self, spec: RunSpec) -> RunState:
        request = pb.OpenRunRequest(spec=codec.RUN_SPEC.encode(spec))
        return await self._connection.call(self._stub.OpenRun, request, codec.RUN_STATE.decode)

    @override
    async def run_state(self, run: str) -> RunState:
        request = pb.RunRequest(run=run)
        return await self._connection.call(self._stub.GetRunState, request, codec.RUN_STATE.decode)

    @override
    async def acquire(self, run: str, owner: str) -> RunState:
        """Repeated after a lost answer, it makes one more epoch, which fences no other trainer."""
        request = pb.AcquireRequest(run=run, owner=owner)
        return await self._connection.call(self._stub.Acquire, request, codec.RUN_STATE.decode)

    @override
    async def admit(self, run: str, tasks: Sequence[Task], *, cursor: str, wait_s: float) -> int:
        call = codec.AdmitCall(run=run, tasks=tuple(tasks), cursor=cursor, wait_s=wait_s)
        requests = codec.encode_admit(call)
        attempt = partial(
            self._connection.call_with_stream,
            self._stub.Admit,
            requests,
            lambda answer: answer.admitted,
        )
        return await self._connection.poll(requests[0].header, attempt, wait_s)

    @override
    async def close_feed(self, run: str) -> None:
        await self._connection.call(self._stub.CloseFeed, pb.RunRequest(run=run), discard)

    @override
    async def lease(
        self,
        runs: Sequence[str],
        stage: str,
        *,
        worker: str,
        limit: int,
        at_least: int = 1,
        version: Version | None = None,
        wait_s: float,
    ) -> Lease:
        request = pb.LeaseRequest(
            runs=runs,
            stage=stage,
            worker=worker,
            limit=limit,
            at_least=at_least,
            version=codec.VERSION.encode(version) if version else None,
        )
        attempt = partial(
            self._connection.call_for_stream, self._lease, request, codec.decode_lease
        )
        return await self._connection.poll(request, attempt, wait_s)

    @override
    async def renew(self, run: str, stage: str, worker: str, uids: Sequence[Uid]) -> Sequence[Uid]:
        request = pb.RenewRequest(run=run, stage=stage, worker=worker, uids=codec.encode_uids(uids))
        return await self._connection.call(
            self._stub.Renew, request, lambda answer: codec.decode_uids(answer.lost)
        )

    @override
    async def renew_held(self, held_leases: HeldLeases) -> None:
        await self._renewer.renew_held(held_leases)

    @override
    async def write(self, run: str, stage: str, blocks: Sequence[RowBlock]) -> None:
        call = codec.WriteCall(run=run, stage=stage, blocks=tuple(blocks))
        await self._connection.call_with_stream(self._write, self._bulk(call), discard)

    @override
    async def append(self, run: str, stage: str, blocks: Sequence[RowBlock]) -> None:
        call = codec.WriteCall(run=run, stage=stage, blocks=tuple(blocks))
        await self._connection.call_with_stream(self._append, self._bulk(call), discard)

    def _bulk(self, call: codec.WriteCall) -> Sequence[codec.Bulk[pb.WriteRequest]]:
        messages = codec.encode_write(call)
        return [message.compressed() for message in messages] if self._compresses else messages

    @override
    async def redo(self, run: str, stage: str, uids: Sequence[Uid]) -> int:
        """Repeated after a lost answer, it finds fewer rows and returns a smaller number."""
        request = pb.RedoRequest(run=run, stage=stage, uids=codec.encode_uids(uids))
        return await self._connection.call(self._stub.Redo, request, lambda answer: answer.rows)

    @override
    async def fail(
        self, run: str, stage: str, uid: Uid, token: int, outcome: Outcome, reason: str
    ) -> None:
        request = pb.FailRequest(
            run=run,
            stage=stage,
            row=codec.encode_held_rows({uid: token})[0],
            outcome=codec.encode_outcome(outcome),
            reason=codec.printable(reason),
        )
        await self._connection.call(self._stub.Fail, request, discard)

    @override
    async def release(self, run: str, stage: str, token_of: Mapping[Uid, int]) -> None:
        rows = codec.encode_held_rows(token_of)
        request = pb.ReleaseRequest(run=run, stage=stage, rows=rows)
        await self._connection.call(self._stub.Release, request, discard)

    @override
    async def take(
        self, run: str, *, epoch: int, step: int, groups: int, batch_id: str, wait_s: float
    ) -> Batch:
        request = pb.TakeRequest(
            run=run,
            epoch=epoch,
            step=step,
            groups=groups,
            batch_id=batch_id,
        )
        attempt = partial(self._connection.call, self._stub.Take, request, codec.decode_batch)
        return await self._connection.poll(request, attempt, wait_s)

    @override
    async def fetch(
        self, run: str, blocks: Sequence[RowBlock], columns: Sequence[str]
    ) -> Sequence[RowBlock]:
        request = pb.FetchRowsRequest(run=run, rows=codec.encode_rows(blocks), columns=columns)
        return await self._connection.call_for_stream(
            self._fetch, request, lambda answer: codec.decode_fetched(answer, blocks)
        )

    @override
    async def filter(self, run: str, *, epoch: int, uids: Sequence[Uid], reason: str) -> None:
        request = pb.FilterRowsRequest(
            run=run,
            epoch=epoch,
            uids=codec.encode_uids(uids),
            reason=codec.printable(reason),
        )
        await self._connection.call(self._stub.Filter, request, discard)

    @override
    async def settle(self, run: str, *, epoch: int, step: int, batch_id: str) -> None:
        request = pb.SettleRequest(run=run, epoch=epoch, step=step, batch_id=batch_id)
        await self._connection.call(self._stub.Settle, request, discard)

    @override
    async def publish(self, run: str, version: Version) -> None:
        request = pb.PublishVersionRequest(run=run, version=codec.VERSION.encode(version))
        await self._connection.call(self._stub.Publish, request, discard)

    @override
    async def commit(self, run: str, *, epoch: int, step: int) -> None:
        request = pb.CommitStepRequest(run=run, epoch=epoch, step=step)
        await self._connection.call(self._stub.Commit, request, discard)

    @override
    async def rewind(self, run: str, *, epoch: int, step: int) -> int:
        """Repeated after a lost answer, it finds nothing to rewind and returns 0."""
        request = pb.RewindRequest(run=run, epoch=epoch, step=step)
        return await self._connection.call(self._stub.Rewind, request, lambda answer: answer.rows)

    @override
    async def ledger(self, run: str) -> Ledger:
        request = pb.RunRequest(run=run)
        return await self._connection.call(self._stub.GetLedger, request, codec.LEDGER.decode)

    @override
    async def dead_letters(self, run: str) -> Sequence[DeadLetter]:
        return await self._connection.call(
            self._stub.ListDeadLetters,
            pb.RunRequest(run=run),
            lambda answer: [codec.DEAD_LETTER.decode(letter) for letter in answer.letters],
        )

    @override
    async def replay(self, run: str, uids: Sequence[Uid]) -> int:
        """Never repeated automatically: rows that failed again meanwhile would be replayed too."""
        request = pb.ReplayRequest(run=run, uids=codec.encode_uids(uids))
        return await self._connection.call(
            self._stub.Replay, request, lambda answer: answer.rows, repeatable=False
        )

    @override
    async def why_waiting(self, run: str) -> Sequence[Waiting]:
        return await self._connection.call(
            self._stub.WhyWaiting,
            pb.RunRequest(run=run),
            lambda answer: [codec.WAITING.decode(wait) for wait in answer.waits],
        )
