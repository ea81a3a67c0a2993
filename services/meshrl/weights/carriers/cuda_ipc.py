"""Weights through the memory of a GPU that trainer and rollout process share: two slots per replica, by CUDA IPC.

    trainer   bucket ─H2D─▶ slot 0 | slot 1   ◀── {"done": 0} ──────────────────────   replica
              {"bucket": 3, "slot": 1, "handle": "…"} ── JSON over loopback ──▶ opened once per slot ─D2H─▶ bucket

**When to use it.** Only where `/dev/shm` is too small for the weights (64 MiB is a common default of containers): it
needs two buckets of device memory per replica, and no more. Otherwise `shm` copies less and needs no GPU, because a
WeightSource and a WeightSink hold host memory, so bytes begin and end there; `auto` never takes it.

**When a process dies.** Messages travel over a socket, so the other end notices a death, and the driver frees all
device memory of a killed process. A channel that is aborted does not free its slots, since the other side may still
read them: they are kept for the next channel, and freed when the carrier closes.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import secrets
from collections.abc import Callable
from typing import Any, TypeVar

from typing_extensions import override

from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import CapacityError, ConfigError, CorruptError, UnavailableError
from meshrl.contract.types import Uint8, WeightManifest
from meshrl.weights.carrier import Channel, Link, RunPaths
from meshrl.weights.ipc import Device, load_device
from meshrl.weights.messages import Peer
from meshrl.weights.nccl import messages
from meshrl.weights.transport import Pairs
from meshrl.weights.waiting import WorkerThread, within

SLOTS = 2
_T = TypeVar("_T")
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Carrier(Pairs):
    """The trainer's device, its slots, and the socket where replicas ask for channels."""

    def __init__(self, config: WeightsConfig, paths: RunPaths) -> None:
        super().__init__(config)
        self._token = secrets.token_hex(16)
        self._server: asyncio.Server | None = None
        self._callers: dict[str, asyncio.Future[_Streams]] = {}
        self._device: Device | None = None
        self._pool: list[Slot] = []
        self._all: list[Slot] = []

    @override
    def reaches(self, peer: Peer) -> bool:
        return peer.shares_memory and super().reaches(peer)

    @override
    async def listen(self) -> str:
        """Find the device, open the socket; returns `port/token/gpu`. Raises ConfigError."""
        self._device = load_device(self.config.ipc)
        try:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.config.port)
        except OSError as error:
            raise ConfigError(
                f"weights.port: cannot listen on {self.config.port} ({error.strerror})"
            ) from error
        port = self._server.sockets[0].getsockname()[1]
        return f"{port}/{self._token}/{self._device.gpu}"

    @override
    def channel(self, link: Link) -> Channel:
        return IpcSender(self, link) if link.rank == 0 else IpcReceiver(self.config, link)

    @override
    async def close(self) -> None:
        """Free the slots; idempotent. The channels are closed by now."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for slot in self._all:
            with contextlib.suppress(RuntimeError):
                slot.device.free(slot.pointer)
        self._all, self._pool = [], []

    def expect(self, prefix: str) -> asyncio.Future[_Streams]:
        """The socket of the other end of a channel, once it connects; it may connect before this end exists."""
        if prefix not in self._callers:
            self._callers[prefix] = asyncio.get_running_loop().create_future()
        return self._callers[prefix]

    def forget(self, prefix: str) -> None:
        """Stop expecting the other end; if it connects later, it is refused."""
        caller = self._callers.pop(prefix, None)
        if caller is not None and not caller.cancel() and not caller.cancelled():
            caller.result()[1].close()

    async def borrow(self, nbytes: int, thread: WorkerThread) -> Slot:
        """Device memory for one bucket. Raises CapacityError."""
        for slot in self._pool:
            if slot.nbytes >= nbytes:
                self._pool.remove(slot)
                return slot
        assert self._device is not None
        try:
            slot = await thread.run(Slot, self._device, nbytes)
        except RuntimeError as error:
            raise CapacityError(f"no {nbytes} bytes on GPU {self._device.gpu}: {error}") from error
        self._all.append(slot)
        return slot

    def give_back(self, *slots: Slot) -> None:
        """Return the slots of a channel that ended."""
        self._pool.extend(slots)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hello = await messages.greeting(reader, self._token)
        except UnavailableError:
            writer.close()
            return
        caller = self.expect(str(hello.get("channel", "")))
        if caller.done():
            writer.close()
        else:
            caller.set_result((reader, writer))


class Slot:
    """Device memory for one bucket, and the handle by which it is opened."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.device = device
        self.nbytes = nbytes
        self.pointer = device.allocate(nbytes)
        self.handle = base64.b64encode(device.export(self.pointer)).decode()


class _End(Channel):
    """Shared part of both ends of a channel."""

    def __init__(self, link: Link) -> None:
        self._prefix = link.prefix
        self._thread = WorkerThread(f"ipc-{link.generation}-{link.rank}")
        self._streams: _Streams | None = None

    async def _send_frame(self, **frame: Any) -> None:
        try:
            _, writer = self._open_streams()
            writer.write(messages.pack(frame))
            await writer.drain()
        except OSError as error:
            raise self._failed(str(error)) from error

    async def _receive_frame(self) -> messages.Frame:
        frame = await messages.read(self._open_streams()[0])
        if frame is None:
            raise self._failed("the other end closed the connection")
        return frame

    async def _on_device(self, call: Callable[..., _T], *args: Any) -> _T:
        try:
            return await self._thread.run(call, *args)
        except RuntimeError as error:  # CUDA's
            raise self._failed(str(error)) from error

    def _open_streams(self) -> _Streams:
        if self._streams is None:
            raise self._failed("not open")
        return self._streams

    def _failed(self, why: str) -> UnavailableError:
        return UnavailableError(f"weight channel {self._prefix} over CUDA IPC: {why}")

    def _disconnect(self, last: Callable[[], object]) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None
        self._thread.close(last)


class IpcSender(_End):
    """The trainer's end."""

    def __init__(self, carrier: Carrier, link: Link) -> None:
        super().__init__(link)
        self._carrier = carrier
        self._slots: list[Slot] = []
        self._free: list[int] = []

    @override
    async def open(self, deadline_s: float) -> None:
        caller = self._carrier.expect(self._prefix)
        self._streams = await within(caller, deadline_s, f"{self._prefix}: CUDA IPC")

    @override
    async def send(self, manifest: WeightManifest, index: int, bucket: Uint8) -> None:
        """Copy into the next free slot; returns when the bytes are there, not when they are read."""
        if not self._slots:
            longest = max(manifest.bucket_bytes)
            for _ in range(SLOTS):
                self._slots.append(await self._carrier.borrow(longest, self._thread))
            self._free = list(range(SLOTS))
        if not self._free:
            await self._wait_for_slot()
        number = self._free.pop(0)
        if self._slots[number].nbytes < bucket.nbytes:  # another layout than the first version's
            self._carrier.give_back(self._slots[number])
            self._slots[number] = await self._carrier.borrow(bucket.nbytes, self._thread)
        slot = self._slots[number]
        await self._on_device(slot.device.write, slot.pointer, bucket)
        await self._send_frame(bucket=index, slot=number, handle=slot.handle, nbytes=bucket.nbytes)

    @override
    def abort(self) -> None:
        """Disconnect; the slots go back to the carrier once nothing is written to them any more."""
        slots, self._slots = self._slots, []
        self._disconnect(lambda: self._carrier.give_back(*slots))
        self._carrier.forget(self._prefix)

    async def _wait_for_slot(self) -> None:
        number = (await self._receive_frame()).get("done")
        if not isinstance(number, int) or not 0 <= number < SLOTS or number in self._free:
            raise self._failed(f"slot {number} was given back")
        self._free.append(number)


class IpcReceiver(_End):
    """A replica's end."""

    def __init__(self, config: WeightsConfig, link: Link) -> None:
        super().__init__(link)
        self.config = config
        self._endpoint = link.endpoint
        self._device: Device | None = None
        self._opened: dict[str, int] = {}
        """Pointers by handle: each is opened once."""

    @override
    async def open(self, deadline_s: float) -> None:
        """Find the trainer's GPU, and the trainer. Raises ConfigError when this process does not see it."""
        try:
            port, token, gpu = self._endpoint.split("/", 2)
            number = int(port)
        except ValueError as error:
            raise self._failed(f"{self._endpoint!r} is not an endpoint") from error
        self._device = await self._on_device(load_device, self.config.ipc, gpu)
        try:
            async with asyncio.timeout(deadline_s):
                self._streams = await asyncio.open_connection("127.0.0.1", number)
        except (OSError, TimeoutError) as error:
            raise self._failed(f"the trainer does not answer on this host: {error}") from error
        await self._send_frame(token=token, channel=self._prefix)

    @override
    async def receive(self, manifest: WeightManifest, index: int, into: Uint8) -> None:
        frame = await self._receive_frame()
        if (frame.get("bucket"), frame.get("nbytes")) != (index, into.nbytes):
            raise CorruptError(
                f"bucket {frame.get('bucket')} of {frame.get('nbytes')} bytes came, "
                f"not {index} of {into.nbytes}"
            )
        await self._on_device(self._read, str(frame.get("handle")), into)
        await self._send_frame(done=frame.get("slot"))

    @override
    def abort(self) -> None:
        """Disconnect; the device's thread closes what was opened, after a read that is in progress."""
        self._disconnect(self._close_all)

    def _read(self, handle: str, into: Uint8) -> None:
        assert self._device is not None
        if handle not in self._opened:
            self._opened[handle] = self._device.open(base64.b64decode(handle))
        self._device.read(self._opened[handle], into)

    def _close_all(self) -> None:
        while self._device is not None and self._opened:
            self._device.close(self._opened.popitem()[1])
