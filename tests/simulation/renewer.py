"""Renews leases as the product's renewer does, as tasks instead of a thread."""

from __future__ import annotations

import asyncio

import grpc

from meshrl.contract.held_rows import Held, HeldLeases
from meshrl.rpc.clients.base import Connect
from meshrl.rpc.clients.queue import RENEW, REOPEN_S, Metadata, refusal, renewal
from meshrl.v1 import queue_pb2 as pb
from meshrl.v1 import queue_pb2_grpc as rpc


class SimulatedRenewer:
    """Keeps the rules of `LeaseRenewer`: a period, a deadline, an open stream, renewals when the stream breaks."""

    def __init__(self, connect: Connect, service: str, address: str, metadata: Metadata) -> None:
        self._service = service
        self._metadata = metadata
        self._channel = connect(address)
        self._stub = rpc.QueueStub(self._channel)

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close(None)

    async def renew_held(self, held_leases: HeldLeases) -> None:
        """Renew them until cancelled."""
        began, broke = asyncio.Event(), asyncio.Event()
        held_leases.began = began.set
        attending = asyncio.create_task(self._attend(held_leases.worker, broke), name="attend")
        try:
            while True:
                began.clear()
                if not held_leases.by_run():
                    await began.wait()
                try:
                    async with asyncio.timeout(held_leases.period_s):
                        await broke.wait()
                except TimeoutError:
                    pass
                broke.clear()
                for run, rows in held_leases.by_run().items():
                    await self._renew(held_leases, run, rows)
        finally:
            attending.cancel()

    async def _attend(self, worker: str, broke: asyncio.Event) -> None:
        while True:
            try:
                async for _ in self._stub.Attend(pb.AttendRequest(worker=worker)):
                    pass
            except grpc.aio.AioRpcError:
                broke.set()
            await asyncio.sleep(REOPEN_S)

    async def _renew(self, held_leases: HeldLeases, run: str, rows: Held) -> None:
        request, timeout = renewal(held_leases, run, rows)
        try:
            answer = await self._stub.Renew(request, timeout=timeout, metadata=self._metadata)
        except grpc.aio.AioRpcError as failure:
            error = refusal(failure, self._service)
            if error is not None:
                raise error from failure
            return
        if lost := RENEW.decode_answer(answer):
            held_leases.lost({uid: rows[uid] for uid in lost})
