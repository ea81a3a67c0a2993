"""The real NCCL, through cupy: `NcclCommunicator` on raw pointers, uint8 on the wire.

Memory that an engine has lent is opened by CUDA IPC, and NCCL writes there. torch is imported first, where there is
one, so that both use its libnccl; one each is refused. Memory is cudaMalloc's, never torch's:
`expandable_segments:True` does not touch it. API: cupy 14.2, NCCL 2.30.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from meshrl.common.chunk_digest import CHUNK_WORDS, digest, factors, of_chunks
from meshrl.contract.errors import ConfigError
from meshrl.weights.nccl.library import Buffer as AnyBuffer
from meshrl.weights.nccl.library import Host as AnyHost
from meshrl.weights.nccl.library import dotted, loaded_nccl

if importlib.util.find_spec("torch") is not None:
    importlib.import_module("torch")  # before cupy: the libnccl that is loaded first serves both

import cupy
import cupy.cuda.nccl
import numpy as np
from cupy.cuda import runtime

REQUIRES = ("cupy",)
logger = logging.getLogger(__name__)

nccl: Any = cupy.cuda.nccl
_CUDA_NOT_READY = 600
_FLOAT_BYTES = 4
_SLAB_CHUNKS = 256
"""Chunks that are digested at once: 64 MiB."""


class Library:
    """One CUDA device and its stream."""

    memory = "cuda"

    def __init__(self, device: int) -> None:
        _check_one_nccl()
        try:
            count = runtime.getDeviceCount()
        except runtime.CUDARuntimeError as error:
            raise ConfigError(f"no CUDA device can be used here ({error})") from error
        if device >= count:
            raise ConfigError(
                f"CUDA device {device} is asked for, and this process sees {count} devices"
            )
        self.version = dotted(nccl.get_version())
        self._device = device
        self._stream = self._event = 0

    def unique_id(self) -> bytes:
        """A new id, with an address of this process: NCCL_SOCKET_IFNAME chooses the interface."""
        return bytes(nccl.get_unique_id())

    def join(self, size: int, unique_id: bytes, rank: int) -> Communicator:
        """Calls ncclCommInitRank; until then nothing lies on the device, not even a context."""
        runtime.setDevice(self._device)
        self._stream = runtime.streamCreateWithFlags(runtime.streamNonBlocking)
        self._event = runtime.eventCreateWithFlags(runtime.eventDisableTiming)
        return Communicator(nccl.NcclCommunicator(size, unique_id, rank), self._stream)

    def host(self, memory: mmap.mmap) -> Host:
        """Page-locked, so that copies run beside the host."""
        return Host(memory)

    def buffer(self, nbytes: int) -> Buffer:
        """Calls cudaMalloc."""
        return Buffer(nbytes, self._stream)

    def gpu(self) -> str:
        """Tries a digest first: cupy compiles its kernels, and may lack what that takes."""
        sample = np.arange(3 * CHUNK_WORDS * 8 + 5, dtype=np.uint32).astype(np.uint8)
        try:
            if _digest(cupy.asarray(sample)) != digest(sample):
                raise RuntimeError("they differ from a processor's")
        except Exception as error:  # of cupy, CUDA or a compiler
            logger.warning("versions are received on the host: cupy makes no digests: %s", error)
            return ""
        return str(runtime.deviceGetPCIBusId(self._device))

    def lent(self, handle: bytes, nbytes: int) -> LentBuffer:
        """Calls cudaIpcOpenMemHandle."""
        return LentBuffer(handle, self._stream)

    def digest(self, buffer: AnyBuffer, nbytes: int) -> str:
        """Digest by cupy on its own stream; all work on ours must have ended."""
        pointer = cast(Buffer | LentBuffer, buffer).pointer
        memory = cupy.cuda.UnownedMemory(pointer, nbytes, buffer, self._device)
        return _digest(cupy.ndarray(nbytes, cupy.uint8, cupy.cuda.MemoryPointer(memory, 0)))

    def mark(self) -> Callable[[], bool]:
        """Asks cudaEventQuery behind the stream's last work; raises RuntimeError for a fault of the device."""
        runtime.eventRecord(self._event, self._stream)
        return self._passed

    def _passed(self) -> bool:
        status = runtime.eventQuery(self._event)
        if status not in (0, _CUDA_NOT_READY):
            raise runtime.CUDARuntimeError(status)
        return bool(status == 0)


class Host:
    """Pinned shared memory."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._view = (ctypes.c_uint8 * len(memory)).from_buffer(memory)
        self.address = ctypes.addressof(self._view)
        runtime.hostRegister(self.address, len(memory), 0)

    def close(self) -> None:
        """Calls cudaHostUnregister."""
        runtime.hostUnregister(self.address)
        del self._view


class Buffer:
    """Memory of cudaMalloc."""

    def __init__(self, nbytes: int, stream: int) -> None:
        self._stream = stream
        self.pointer: int = runtime.malloc(nbytes)

    def load(self, host: AnyHost, at: int, nbytes: int) -> None:
        """Calls cudaMemcpyAsync."""
        source = cast(Host, host).address + at
        self._copy(self.pointer, source, nbytes, runtime.memcpyHostToDevice)

    def store(self, host: AnyHost, at: int, nbytes: int) -> None:
        """Calls cudaMemcpyAsync."""
        to = cast(Host, host).address + at
        self._copy(to, self.pointer, nbytes, runtime.memcpyDeviceToHost)

    def close(self) -> None:
        """Calls cudaFree, which waits for the device, so this is for a healthy one."""
        runtime.free(self.pointer)

    def _copy(self, to: int, source: int, nbytes: int, kind: int) -> None:
        runtime.memcpyAsync(to, source, nbytes, kind, self._stream)


class LentBuffer(Buffer):
    """Memory of another process. One piece of cudaMalloc's, so that the handle names its first byte."""

    def __init__(self, handle: bytes, stream: int) -> None:
        self._stream = stream
        self.pointer = runtime.ipcOpenMemHandle(handle)

    def close(self) -> None:
        """Calls cudaIpcCloseMemHandle."""
        runtime.ipcCloseMemHandle(self.pointer)


class Communicator:
    """ncclComm_t. It is aborted or its process ends: cupy's destructor would call ncclCommDestroy."""

    def __init__(self, communicator: Any, stream: int) -> None:
        self._communicator = communicator
        self._stream = stream
        self._one: int = runtime.malloc(_FLOAT_BYTES)

    def warm_up(self) -> None:
        """Do the all-reduce that vLLM's communicator does after its init; without it all ranks would hang."""
        runtime.memsetAsync(self._one, 0, _FLOAT_BYTES, self._stream)
        self._communicator.allReduce(
            self._one, self._one, 1, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, self._stream
        )

    def broadcast(self, buffer: AnyBuffer, nbytes: int, root: int) -> None:
        """In place; NCCL turns every type into bytes, so a receiver of bf16 matches."""
        pointer = cast(Buffer, buffer).pointer
        self._communicator.broadcast(pointer, pointer, nbytes, nccl.NCCL_UINT8, root, self._stream)

    def check(self) -> None:
        """Calls ncclCommGetAsyncError."""
        self._communicator.check_async_error()

    def abort(self) -> None:
        """Calls ncclCommAbort; the handle is null afterwards, and the destructor does nothing."""
        self._communicator.abort()


def _digest(data: Any) -> str:
    """Digest of a cupy.ndarray uint8[n]."""
    slab = _SLAB_CHUNKS * CHUNK_WORDS * 8
    return of_chunks(len(data), (_sums(data[at : at + slab]) for at in range(0, len(data), slab)))


def _sums(data: Any) -> bytes:
    """Sum of each chunk, as uint64."""
    padded = cupy.pad(data, (0, -len(data) % (CHUNK_WORDS * 8)))
    words = padded.view(cupy.uint64).reshape(-1, CHUNK_WORDS)
    mixed = (words ^ (words >> cupy.uint64(32))) * cupy.asarray(factors())
    return bytes(mixed.sum(axis=1, dtype=cupy.uint64).get().tobytes())


def _check_one_nccl() -> None:
    """Raises ConfigError where torch and cupy use one each: neither stands before the other for everybody.

    One that LD_PRELOAD names does, and torch's may then lie in memory unused.
    """
    files = loaded_nccl(Path("/proc/self/maps").read_text())
    if len(files) > 1 and not hasattr(ctypes.CDLL(None), "ncclGetVersion"):
        raise ConfigError(
            f"torch and cupy load different files of NCCL ({', '.join(sorted(files))}); "
            "name one in weights.nccl.env: LD_PRELOAD"
        )
