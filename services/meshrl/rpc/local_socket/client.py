"""The caller's end: methods that go by the socket that their service named, and by gRPC where that is not reached."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, TypeAlias

import grpc
from google.protobuf.message import DecodeError, Message

from meshrl.contract.codec.bulk import Bulk, Frame
from meshrl.contract.frames import Shared
from meshrl.rpc import credentials
from meshrl.rpc.credentials import Credential
from meshrl.rpc.errors import DETAIL_KEY
from meshrl.rpc.local_socket.mapped_memory import Answer, MappedMemory
from meshrl.rpc.local_socket.shared_memory import LARGER, parsed, send_message
from meshrl.rpc.local_socket.wire import Kind, Wire, WireError, is_own
from meshrl.v1.local_socket_pb2 import CallEnd, CallHead

log = logging.getLogger(__name__)

Metadata: TypeAlias = Sequence[tuple[str, str]]
MAX_WIRES: Final = 256
"""Connections of one client, which keeps them. Calls beyond go by gRPC: a process often may open 1,024 files."""
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}


class LocalSocket:
    """The connections of one client to the socket of its service, each for one call at a time."""

    def __init__(self, credential: Credential | None = None) -> None:
        """Calls carry the credential, or the process's."""
        source = credential if credential is not None else credentials.in_use()
        self._credentials: Callable[[], Metadata] = source.metadata if source is not None else tuple
        self.name = ""
        """Empty: calls go by gRPC."""
        self._unreachable = ""
        self._wires: set[Wire] = set()
        self._idle: list[Wire] = []
        self._memory: MappedMemory | None = None
        self._shares = True
        """The service may share memory with this process."""

    def named(self, name: str) -> None:
        """What an answer says of the service's socket."""
        if name not in (self.name, self._unreachable):
            self.close()
            self.name = name
            self._shares = True

    def close(self) -> None:
        """End the calls that run, and go on by gRPC. Idempotent."""
        self.name = ""
        self._forget_memory()
        self._idle.clear()
        for wire in list(self._wires):
            wire.close()

    def room(self, size: int) -> Shared | None:
        """For a frame of `size` bytes that is to be `placed`; None where there is none."""
        return None if self._memory is None else self._memory.room(size)

    def placed(self, frames: Sequence[Frame]) -> Sequence[Frame]:
        """The frames, those copied into shared memory for which there is room."""
        return frames if self._memory is None else self._memory.placed(frames)

    def size_of(self, frame: Frame) -> int:
        """What a frame adds to a message, about."""
        return len(frame) if self.place(frame) is None else len(frame) // LARGER

    def place(self, frame: Frame) -> Shared | None:
        """A frame that lies in shared memory; None for others."""
        return None if self._memory is None else self._memory.place(frame)

    def _ask_for_memory(self) -> None:
        if self._memory is None and self._shares:
            try:
                self._memory = MappedMemory(self.name)
            except OSError:
                self._shares = False

    def _forget_memory(self) -> None:
        if self._memory is not None:
            self._memory.leave()
            self._memory = None

    async def free_wire(self) -> Wire | None:
        """A connection that nobody uses; None where there is no socket, or none that this process can reach now."""
        while self._idle:
            wire = self._idle.pop()
            if not wire.lost:
                self._ask_for_memory()
                return wire
        if not self.name or len(self._wires) >= MAX_WIRES:
            return None
        name = self.name
        try:
            wire = await self._connect(name)
        except BlockingIOError:  # more callers come than it lets in at the moment
            return None
        except OSError as error:
            self._give_up(name, error)
            return None
        self._ask_for_memory()
        return wire

    def _give_up(self, name: str, why: OSError) -> None:
        """Another process, as of the next start of the service, names another socket."""
        log.info("payload goes over gRPC, not by the service's local socket: %s", why)
        self._unreachable = name
        if self.name == name:
            self.name = ""

    async def _connect(self, name: str) -> Wire:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        wire = Wire(name)
        wire.on_lost = partial(self._wires.discard, wire)
        self._wires.add(wire)
        try:
            connection.connect(f"\0{name}")
            # Another user may take the name of a service that ended; root, too, shows it no credential.
            if not is_own(connection):
                raise PermissionError("it is another user's")
            loop = asyncio.get_running_loop()
            await loop.create_unix_connection(lambda: wire, sock=connection)
        except BaseException:
            self._wires.discard(wire)
            connection.close()
            raise
        return wire

    @asynccontextmanager
    async def call(self, wire: Wire, method: str, metadata: Metadata) -> AsyncIterator[Answer]:
        """Around the messages of one call. Afterwards the connection is free, or closed if the call was cut off.

        Raises:
            AioRpcError: UNAVAILABLE, the connection broke.
        """
        head = CallHead(method=method, metadata=dict((*self._credentials(), *metadata)))
        memory = self._memory
        if memory is not None:
            memory.receive()
            head.memory_key = memory.key
            if memory.ended:
                self._forget_memory()
        whole = False
        try:
            await wire.send(Kind.HEAD, [head.SerializeToString()])
            yield Answer(memory)
            whole = wire.has_served = True
        except grpc.aio.AioRpcError:
            whole = wire.has_served = True
            raise
        except (WireError, DecodeError) as error:
            self._forget_memory()
            if not wire.has_served:  # it takes no more callers, or is cut off
                self._give_up(wire.name, ConnectionError(str(error)))
            raise _failure(grpc.StatusCode.UNAVAILABLE, str(error)) from error
        finally:
            if whole:
                self._idle.append(wire)
            else:
                wire.close()


class LocalMethod:
    """A method of a stub: by gRPC until its service has named a socket, then by that."""

    def __init__(
        self, local: LocalSocket, name: str, by_grpc: Any, parse: Callable[[Any], Any]
    ) -> None:
        """`by_grpc`: the method as gRPC's channel has it. `parse`: of a message of the answer."""
        self._local = local
        self._name = name
        self._by_grpc = by_grpc
        self._parse = parse

    async def stream_unary(
        self, requests: Iterable[Bulk[Any]], *, timeout: float, metadata: Metadata
    ) -> Any:
        """As gRPC's method, and it raises the same; TimeoutError after `timeout` seconds."""
        async with asyncio.timeout(timeout):
            wire = await self._local.free_wire()
            if wire is None:
                return await self._by_grpc(requests, timeout=timeout, metadata=metadata)
            async with self._local.call(wire, self._name, metadata):
                for request in requests:
                    await send_message(wire, request, self._local.place)
                await wire.send(Kind.END)
                messages = [bytes(message) async for _, message in answer_of(wire)]
                return self._parse(b"".join(messages))

    def unary_stream(self, request: Message, *, metadata: Metadata) -> Any:
        """As gRPC's method: what it returns is iterated over, raises the same, and has `cancel`."""
        if not self._local.name:
            return self._by_grpc(request, metadata=metadata)
        return _Stream(self._streamed(request, metadata))

    async def _streamed(self, request: Message, metadata: Metadata) -> AsyncIterator[Any]:
        wire = await self._local.free_wire()
        if wire is None:
            async for answer in self._by_grpc(request, metadata=metadata):
                yield answer
            return
        async with self._local.call(wire, self._name, metadata) as answer:
            await wire.send(Kind.MESSAGE, [request.SerializeToString()])
            await wire.send(Kind.END)
            async for kind, message in answer_of(wire):
                if kind is Kind.REFERRING:
                    yield parsed(message, self._parse, answer.frame)
                else:
                    yield self._parse(message)
            answer.received(wire)


class _Stream:
    """The messages of a call."""

    def __init__(self, messages: AsyncIterator[Any]) -> None:
        self._messages = messages

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._messages

    def cancel(self) -> None:
        """Nothing: a wait that is cancelled has closed the connection already."""


async def answer_of(wire: Wire) -> AsyncIterator[tuple[Kind, memoryview]]:
    """The messages of an answer. Raises AioRpcError if it ends with an error, WireError."""
    while True:
        kind, data = await wire.receive()
        if kind is Kind.HEAD:
            raise WireError("an answer begins with a call")
        if kind is Kind.END:
            break
        yield kind, data
    end = CallEnd.FromString(bytes(data))
    if end.code:
        raise _failure(_CODES.get(end.code, grpc.StatusCode.UNKNOWN), end.message, end.detail)


def _failure(code: grpc.StatusCode, message: str, detail: bytes = b"") -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata(*(((DETAIL_KEY, detail),) if detail else ()))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, message, None)
