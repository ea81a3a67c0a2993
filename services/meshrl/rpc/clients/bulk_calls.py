"""Bulk calls to a queue: their payload as it is, or squeezed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import grpc

from meshrl.contract.codec.bulk import Bulk
from meshrl.contract.codec.compression import FrameCompressor
from meshrl.contract.errors import UserError
from meshrl.rpc.clients.peer import Peer, nothing
from meshrl.v1 import queue_pb2 as pb
from meshrl.v1 import queue_pb2_grpc as rpc

Noun = TypeVar("Noun")
Request = TypeVar("Request", pb.LeaseRequest, pb.FetchRowsRequest)


class BulkCalls:
    """How one client sends and gets frames.

    Where frames are squeezed, the queue is asked once for its dictionary. A queue that came back with another one
    does not understand what was squeezed with the old: that is sent again without, and the queue asked anew. Until it
    answers the old one stays: answers that are on their way were squeezed with it.
    """

    def __init__(self, peer: Peer, *, squeezes: bool) -> None:
        self._peer = peer
        self._stub = rpc.QueueStub(peer.channel)
        self._metadata = peer.metadata
        self._compressor: FrameCompressor | None = None
        """With the queue's dictionary; None until that is known, and where nothing is squeezed."""
        self._asks_dictionary = squeezes

    def expander(self) -> FrameCompressor | None:
        """For the parsers of answers: what has the queue's dictionary."""
        return self._compressor

    async def tell(
        self,
        method: grpc.aio.StreamUnaryMultiCallable[Bulk[pb.WriteRequest], Any],
        messages: Sequence[Bulk[pb.WriteRequest]],
    ) -> None:
        """As `Peer.tell_stream`."""
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
        await self._learned()
        return await self._peer.ask_for_stream(method, request, decode, wait_s=wait_s)
