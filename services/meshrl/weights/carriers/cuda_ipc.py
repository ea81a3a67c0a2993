"""Weights through the memory of a GPU that trainer and rollout process share: two slots per replica, by CUDA IPC.

    trainer   bucket ─H2D─▶ slot 0 | slot 1   ◀── {"done": 0} ──────────────────────   replica
              {"bucket": 3, "slot": 1, "handle": "…"} ── JSON over loopback ──▶ opened once per slot ─D2H─▶ bucket

**What it gains.** Where `/dev/shm` holds the weights, nothing: bytes begin and end in host memory here, since a
WeightSource and a WeightSink speak of host memory, so `shm` copies less and needs no GPU; its stated rate makes
`auto` prefer it. It is for hosts whose containers have a `/dev/shm` that is too small (64 MiB is a common default):
it wants two buckets of device memory per replica, and no more. It would spare both copies for a trainer and an
engine that hand over device memory; neither port says such a thing yet.

**Who dies.** Words travel over a socket, so a process that dies is noticed by the other's end of it, and everything
a killed process had on the device goes with it. A cell that is given up does not free its slots, since the other
side may be reading still: they are kept for the next cell, and freed when the carrier closes.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import secrets
from collections.abc import Callable
from typing import Any, TypeVar

from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import CapacityError, ConfigError, CorruptError, UnavailableError
from meshrl.contract.ports import WeightSource
from meshrl.contract.types import Uint8, Version, WeightManifest
from meshrl.weights.carrier import Cell, Link, Place
from meshrl.weights.deadlines import within
from meshrl.weights.ipc.device import Device, load_device
from meshrl.weights.nccl import messages
from meshrl.weights.worker_thread import WorkerThread

REACH = "host"
NEEDS = ("cupy", "cuda")
RATE = 2e9

SLOTS = 2
_HELLO_S = 10.0
_T = TypeVar("_T")
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Carrier:
    """The trainer's device, its slots, and the socket where replicas ask for cells."""

    def __init__(self, config: WeightsConfig, place: Place) -> None:
        self._config = config
        self._token = secrets.token_hex(16)
        self._server: asyncio.Server | None = None
        self._callers: dict[str, asyncio.Future[_Streams]] = {}
        self._device: Device | None = None
        self._pool: list[Slot] = []
        self._all: list[Slot] = []

    async def listen(self) -> str:
        """Find the device, open the socket; returns `port/token/gpu`. Raises ConfigError."""
        self._device = load_device(self._config.ipc)
        try:
            self._server = await asyncio.start_server(self._greet, "127.0.0.1", self._config.port)
        except OSError as error:
            raise ConfigError(
                f"weights.port: cannot listen on {self._config.port} ({error.strerror})"
            ) from error
        port = self._server.sockets[0].getsockname()[1]
        return f"{port}/{self._token}/{self._device.gpu}"

    async def stage(self, source: WeightSource) -> None:
        """Nothing: buckets are copied from where they lie, as slots become free."""

    def cell(self, link: Link) -> Cell:
        """One end of a cell."""
        return IpcSender(self, link) if link.rank == 0 else IpcReceiver(self._config, link)

    async def close(self) -> None:
        """Free the slots; idempotent. The cells are closed by now."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for slot in self._all:
            with contextlib.suppress(RuntimeError):
                slot.device.free(slot.pointer)
        self._all, self._pool = [], []

    def expect(self, prefix: str) -> asyncio.Future[_Streams]:
        """The socket of the other end of a cell, once it has come; it may come before this end is made."""
        if prefix not in self._callers:
            self._callers[prefix] = asyncio.get_running_loop().create_future()
        return self._callers[prefix]

    def forget(self, prefix: str) -> None:
        """Nobody waits for it any more; who comes is turned away."""
        caller = self._callers.pop(prefix, None)
        if caller is not None and not caller.cancel() and not caller.cancelled():
            caller.result()[1].close()

    async def borrow(self, nbytes: int, lane: WorkerThread) -> Slot:
        """Device memory for one bucket. Raises CapacityError."""
        for slot in self._pool:
            if slot.nbytes >= nbytes:
                self._pool.remove(slot)
                return slot
        assert self._device is not None
        try:
            slot = await lane.run(Slot, self._device, nbytes)
        except RuntimeError as error:
            raise CapacityError(f"no {nbytes} bytes on GPU {self._device.gpu}: {error}") from error
        self._all.append(slot)
        return slot

    def give_back(self, *slots: Slot) -> None:
        """Of a cell that ended."""
        self._pool.extend(slots)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_HELLO_S):
                hello = await messages.read(reader)
        except TimeoutError:
            hello = None
        token, cell = (str((hello or {}).get(key, "")) for key in ("token", "cell"))
        known = hmac.compare_digest(token.encode(), self._token.encode())
        if not known or self.expect(cell).done():
            writer.close()
        else:
            self.expect(cell).set_result((reader, writer))


class Slot:
    """Device memory for one bucket, and the handle by which it is opened."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.device = device
        self.nbytes = nbytes
        self.pointer = device.allocate(nbytes)
        self.handle = base64.b64encode(device.export(self.pointer)).decode()


class _End:
    """What both ends of a cell are."""

    def __init__(self, link: Link) -> None:
        self._prefix = link.prefix
        self._lane = WorkerThread(f"ipc-{link.generation}-{link.rank}")
        self._streams: _Streams | None = None

    def committed(self, version: Version) -> None:
        """Nothing: every version is sent whole."""

    async def _say(self, **frame: Any) -> None:
        try:
            _, writer = self._open_streams()
            writer.write(messages.pack(frame))
            await writer.drain()
        except OSError as error:
            raise self._gone(str(error)) from error

    async def _hear(self) -> messages.Frame:
        frame = await messages.read(self._open_streams()[0])
        if frame is None:
            raise self._gone("the other end hung up")
        return frame

    async def _on_device(self, call: Callable[..., _T], *args: Any) -> _T:
        try:
            return await self._lane.run(call, *args)
        except RuntimeError as error:  # CUDA's
            raise self._gone(str(error)) from error

    def _open_streams(self) -> _Streams:
        if self._streams is None:
            raise self._gone("not open")
        return self._streams

    def _gone(self, why: str) -> UnavailableError:
        return UnavailableError(f"weight cell {self._prefix} over CUDA IPC: {why}")

    def _hang_up(self, last: Callable[[], object]) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None
        self._lane.close(last)


class IpcSender(_End):
    """The trainer's end."""

    def __init__(self, carrier: Carrier, link: Link) -> None:
        super().__init__(link)
        self._carrier = carrier
        self._slots: list[Slot] = []
        self._free: list[int] = []

    async def open(self, deadline_s: float) -> None:
        """Wait for the replica to come."""
        caller = self._carrier.expect(self._prefix)
        self._streams = await within(_result(caller), deadline_s, f"{self._prefix}: CUDA IPC")

    async def send(self, manifest: WeightManifest, index: int, bucket: Uint8) -> None:
        """Into the next free slot; returns when the bytes are there, not when they are taken."""
        if not self._slots:
            longest = max(manifest.bucket_bytes)
            for _ in range(SLOTS):
                self._slots.append(await self._carrier.borrow(longest, self._lane))
            self._free = list(range(SLOTS))
        if not self._free:
            await self._wait_for_slot()
        number = self._free.pop(0)
        if self._slots[number].nbytes < bucket.nbytes:  # another plan than the first version's
            self._carrier.give_back(self._slots[number])
            self._slots[number] = await self._carrier.borrow(bucket.nbytes, self._lane)
        slot = self._slots[number]
        await self._on_device(slot.device.write, slot.pointer, bucket)
        await self._say(bucket=index, slot=number, handle=slot.handle, nbytes=bucket.nbytes)

    async def receive(self, manifest: WeightManifest, index: int, into: Uint8) -> None:
        """Only replicas receive."""
        raise self._gone("the trainer's end does not receive")

    def abort(self) -> None:
        """Hang up; the slots wait for the next cell, once nothing is written to them any more."""
        slots, self._slots = self._slots, []
        self._hang_up(lambda: self._carrier.give_back(*slots))
        self._carrier.forget(self._prefix)

    async def close(self) -> None:
        """The same."""
        self.abort()

    async def _wait_for_slot(self) -> None:
        number = (await self._hear()).get("done")
        if not isinstance(number, int) or not 0 <= number < SLOTS or number in self._free:
            raise self._gone(f"slot {number} was given back")
        self._free.append(number)


class IpcReceiver(_End):
    """A replica's end."""

    def __init__(self, config: WeightsConfig, link: Link) -> None:
        super().__init__(link)
        self._config = config
        self._endpoint = link.endpoint
        self._device: Device | None = None
        self._opened: dict[str, int] = {}
        """Pointers by handle: each is opened once."""

    async def open(self, deadline_s: float) -> None:
        """Find the trainer's GPU, and the trainer. Raises ConfigError when this process does not see it."""
        try:
            port, token, gpu = self._endpoint.split("/", 2)
            number = int(port)
        except ValueError as error:
            raise self._gone(f"{self._endpoint!r} is no endpoint") from error
        self._device = await self._on_device(load_device, self._config.ipc, gpu)
        try:
            async with asyncio.timeout(deadline_s):
                self._streams = await asyncio.open_connection("127.0.0.1", number)
        except (OSError, TimeoutError) as error:
            raise self._gone(f"the trainer does not answer on this host: {error}") from error
        await self._say(token=token, cell=self._prefix)

    async def send(self, manifest: WeightManifest, index: int, bucket: Uint8) -> None:
        """Only the trainer sends."""
        raise self._gone("a replica's end does not send")

    async def receive(self, manifest: WeightManifest, index: int, into: Uint8) -> None:
        """Copy one slot into host memory, and give it back."""
        frame = await self._hear()
        if (frame.get("bucket"), frame.get("nbytes")) != (index, into.nbytes):
            raise CorruptError(
                f"bucket {frame.get('bucket')} of {frame.get('nbytes')} bytes came, "
                f"not {index} of {into.nbytes}"
            )
        await self._on_device(self._read, str(frame.get("handle")), into)
        await self._say(done=frame.get("slot"))

    def abort(self) -> None:
        """Hang up; what was opened is closed by the device's own thread, behind a read that is under way."""
        self._hang_up(self._close_all)

    async def close(self) -> None:
        """The same."""
        self.abort()

    def _read(self, handle: str, into: Uint8) -> None:
        assert self._device is not None
        if handle not in self._opened:
            self._opened[handle] = self._device.open(base64.b64decode(handle))
        self._device.read(self._opened[handle], into)

    def _close_all(self) -> None:
        while self._device is not None and self._opened:
            self._device.close(self._opened.popitem()[1])


async def _result(future: asyncio.Future[_Streams]) -> _Streams:
    return await future
