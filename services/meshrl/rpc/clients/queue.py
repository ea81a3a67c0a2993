"""The Queue port over gRPC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypedDict, Unpack

from typing_extensions import override

from meshrl.contract import codec
from meshrl.contract.codec.compression import TAKES_COMPRESSED, Mode, wanted
from meshrl.contract.held_rows import HeldLeases
from meshrl.contract.types import (
    RowBlock,
    Task,
)
from meshrl.rpc.clients.base import SERVICE_RETRY_S, Connect, GrpcClient, connect, discard
from meshrl.rpc.clients.lease_renewer import LeaseRenewer, Metadata
from meshrl.rpc.clients.patience import Patience
from meshrl.rpc.credentials import Credential
from meshrl.rpc.tables.queue import QueueTable
from meshrl.v1 import queue_pb2 as pb


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
        call = codec.AdmitCall(run=run, tasks=tuple(tasks), cursor=cursor, wait_s=wait_s)
        requests = codec.encode_admit(call)
        attempt = partial(
            self._connection.call_with_stream,
            self.remote("Admit"),
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
        call = codec.WriteCall(run=run, stage=stage, blocks=tuple(blocks))
        messages = codec.encode_write(call)
        if self._compresses:
            messages = [message.compressed() for message in messages]
        await self._connection.call_with_stream(self.remote(name), messages, discard)

    @override
    async def fetch(
        self, run: str, blocks: Sequence[RowBlock], columns: Sequence[str]
    ) -> Sequence[RowBlock]:
        request = pb.FetchRowsRequest(run=run, rows=codec.encode_rows(blocks), columns=columns)
        return await self._connection.call_for_stream(
            self.remote("Fetch"),
            request,
            lambda answer: codec.decode_fetched(answer, blocks),
        )
