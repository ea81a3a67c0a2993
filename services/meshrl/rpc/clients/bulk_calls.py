"""Bulk calls to a queue: inline, perhaps squeezed, or around gRPC through memory lent to a queue on this host."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import grpc

from meshrl.contract.codec.arena import Arena
from meshrl.contract.codec.bulk import Bulk, Frame
from meshrl.contract.codec.compression import FrameCompressor
from meshrl.contract.codec.lending import Lender
from meshrl.contract.errors import CapacityError, UserError
from meshrl.rpc.clients.peer import Peer, nothing
from meshrl.v1 import queue_pb2 as pb
from meshrl.v1 import queue_pb2_grpc as rpc

log = logging.getLogger(__name__)

Noun = TypeVar("Noun")
Request = TypeVar("Request", pb.LeaseRequest, pb.FetchRowsRequest)


class BulkCalls:
    """How one wire sends and gets frames. Its arena is made at the first call, if the queue proves that it reads it.

    An arena lost to calls without an end is replaced. A queue that cannot read it (any more) ends the lending.

    Where frames are squeezed, the queue is asked once for its dictionary. A queue that came back with another one
    does not understand what was squeezed with the old: that is sent again without, and the queue asked anew. Until it
    answers the old one stays: answers that are on their way were squeezed with it.
    """

    def __init__(self, peer: Peer, *, squeezes: bool, lends_bytes: int) -> None:
        self._peer = peer
        self._stub = rpc.QueueStub(peer.channel)
        self._metadata = peer.metadata
        self._compressor: FrameCompressor | None = None
        """With the queue's dictionary; None until that is known, and where nothing is squeezed."""
        self._asks_dictionary = squeezes
        self._lends_bytes = lends_bytes
        self._lender: Lender | None = None

    def fields(self, frame: Frame) -> bytes | None:
        """For the parsers of answers: what a reference stands for."""
        return None if self._lender is None else self._lender.fields(frame)

    def expander(self) -> FrameCompressor | None:
        """For the parsers of answers: what has the queue's dictionary."""
        return self._compressor

    async def tell(
        self,
        method: grpc.aio.StreamUnaryMultiCallable[Bulk[pb.WriteRequest], Any],
        messages: Sequence[Bulk[pb.WriteRequest]],
    ) -> None:
        """As `Peer.tell_stream`."""
        lender = await self._lending()
        if lender is not None:
            try:
                with lender.sending(messages) as referred:
                    await self._peer.tell_stream(method, referred, nothing)
                return
            except UserError as error:
                log.debug("%s did not take what was lent: %s", self._peer.name, error)
        await self._tell_inline(method, messages)
        if lender is not None:  # it was not the rows: a queue on another host has taken over
            self._stop_lending()

    async def _tell_inline(
        self,
        method: grpc.aio.StreamUnaryMultiCallable[Bulk[pb.WriteRequest], Any],
        messages: Sequence[Bulk[pb.WriteRequest]],
    ) -> None:
        compressor = await self._learned()
        if compressor is None:
            await self._peer.tell_stream(method, messages, nothing)
            return
        squeezed = [message.squeezed(compressor) for message in messages]
        try:
            await self._peer.tell_stream(method, squeezed, nothing)
        except UserError:
            if not compressor.number:
                raise
            self._asks_dictionary = True
            plainly = [message.squeezed() for message in messages]
            await self._peer.tell_stream(method, plainly, nothing)

    async def _learned(self) -> FrameCompressor | None:
        """With the queue's dictionary; None where nothing is squeezed."""
        if self._asks_dictionary:
            data = await self._peer.ask(
                self._stub.GetDictionary, pb.DictionaryRequest(), lambda answer: answer.data
            )
            self._compressor = FrameCompressor(dictionary=data)
            self._asks_dictionary = False
            self._peer.metadata = (*self._metadata, *self._compressor.known)
        return self._compressor

    async def ask(
        self,
        method: grpc.aio.UnaryStreamMultiCallable[Request, Any],
        request: Request,
        decode: Callable[[Sequence[Any]], Noun],
        *,
        wait_s: float | None = None,
    ) -> Noun:
        """As `Peer.ask_for_stream`."""
        lender = await self._lending()
        if lender is None:
            await self._learned()
            return await self._peer.ask_for_stream(method, request, decode, wait_s=wait_s)
        with lender.answered() as region:
            if region is not None:
                lent = pb.Region(arena=lender.arena, offset=region.offset, size=region.size)
                request.lent.CopyFrom(lent)
            return await self._peer.ask_for_stream(method, request, decode, wait_s=wait_s)

    def close(self) -> None:
        """Unlink the arena; idempotent."""
        if self._lender is not None:
            self._lender.close()
            self._lender = None

    async def _lending(self) -> Lender | None:
        if self._lender is not None and self._lender.worn:
            self.close()
        if self._lender is None and self._lends_bytes:
            await self._begin_lending()
        return self._lender

    async def _begin_lending(self) -> None:
        try:
            arena = Arena.create(self._lends_bytes)
        except CapacityError as error:
            log.warning("%s: payload goes through gRPC: %s", self._peer.name, error)
            self._stop_lending()
            return
        try:
            request = pb.LendRequest(boot_id=arena.offer.boot_id, arena=arena.offer.name)
            proof = await self._peer.ask(self._stub.Lend, request, lambda answer: answer.proof)
        except BaseException:
            arena.close()
            raise
        if self._lender is None and self._lends_bytes and arena.is_proved_by(proof):
            self._lender = Lender(arena)
            return
        arena.close()
        if self._lender is None:
            self._stop_lending()

    def _stop_lending(self) -> None:
        self._lends_bytes = 0
        self.close()
