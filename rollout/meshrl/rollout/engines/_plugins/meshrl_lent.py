"""Memory of this process's device that a receiver of weights may write: one piece for each bucket of a version.

It belongs to this process, which survives: the receiver opens a piece by its handle, while a bucket arrives, and can
be killed at any moment. By cudaMalloc, and none of torch's allocators: with expandable segments those have no handle,
and an engine that sleeps gives theirs up. Where torch has no GPU, a file in /dev/shm stands in, for tests.

This file runs inside inference servers too, where meshrl is not installed: it imports torch only.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

PIECE = 2 << 20
"""Pieces are of whole blocks of the driver's: a smaller one would lend its neighbours, too."""


class _DeviceMemory(Protocol):
    gpu: str
    """PCI address of the GPU."""

    def free(self) -> int:
        """Free bytes of the device."""
        ...

    def allocate(self, nbytes: int) -> tuple[torch.Tensor, str]:
        """uint8[nbytes], and its handle, hexadecimal. Raises OSError where there is none."""
        ...

    def close(self) -> None:
        """Free all of it."""
        ...


class LentMemory:
    """The memory of one version. Raises OSError where the device does not give it."""

    def __init__(self, kind: str, sizes: Sequence[int], device: torch.device) -> None:
        """`kind` is the receiver's: cuda, or stub."""
        self.sizes = tuple(sizes)
        self.buckets: list[torch.Tensor] = []
        """uint8[n] each."""
        self.handles: list[str] = []
        self._memory = memory(kind, device)
        self.gpu = self._memory.gpu
        try:
            for nbytes in sizes:
                bucket, handle = self._memory.allocate(nbytes)
                self.buckets.append(bucket)
                self.handles.append(handle)
        except BaseException:
            self.free()
            raise

    def free(self) -> None:
        """Free the memory; idempotent. No process may read or write it after this."""
        self.buckets = []
        self._memory.close()


def memory(kind: str, device: torch.device) -> _DeviceMemory:
    """Raises OSError for one that this process does not have."""
    if kind == "cuda" and device.type == "cuda":
        return _Cuda(device)
    if kind == "stub" and device.type == "cpu":
        return _Files()
    raise OSError(f"the receiver opens memory of {kind}, the engine computes on {device.type}")


class _Cuda:
    """CUDA's runtime, which torch has loaded."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        maps = Path("/proc/self/maps").read_text().splitlines()
        # Any of several: they share the device's primary context.
        found = sorted({line.split()[-1] for line in maps if "/libcudart.so" in line})
        if not found:
            raise OSError("no CUDA runtime is loaded here")
        self._runtime = ctypes.CDLL(found[0])
        self._runtime.cudaGetErrorString.restype = ctypes.c_char_p
        self._device = torch.cuda.current_device() if device.index is None else device.index
        self._pointers: list[ctypes.c_void_p] = []
        name = ctypes.create_string_buffer(32)
        self._call("cudaDeviceGetPCIBusId", name, len(name), self._device)
        self.gpu = name.value.decode()

    def free(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]

    def allocate(self, nbytes: int) -> tuple[torch.Tensor, str]:
        pointer, handle = ctypes.c_void_p(), ctypes.create_string_buffer(64)
        with torch.cuda.device(self._device):
            self._call("cudaSetDevice", self._device)
            self._call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(_whole(nbytes)))
            self._pointers.append(pointer)
            self._call("cudaIpcGetMemHandle", handle, pointer)
        view = _View(
            {
                "shape": (nbytes,),
                "typestr": "|u1",
                "data": (pointer.value, False),
                "version": 3,
            }
        )
        whole = torch.as_tensor(view, device=f"cuda:{self._device}")
        if whole.data_ptr() != pointer.value:
            raise OSError("torch copies memory that is not its own")
        return whole, handle.raw.hex()

    def close(self) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            while self._pointers:
                self._call("cudaFree", self._pointers.pop())

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._runtime, name)(*arguments):
            self._runtime.cudaGetLastError()  # torch must not meet it
            raise OSError(f"{name}: {self._runtime.cudaGetErrorString(status).decode()}")


class _View:
    """View of device memory (CUDA array interface), from which torch makes a tensor without a copy."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__cuda_array_interface__ = interface


class _Files:
    """Plays a device: a handle is the name of a file in /dev/shm, locked while this process lives."""

    gpu = "0000:00:00.0"

    def __init__(self, folder: Path = Path("/dev/shm")) -> None:
        self._folder = folder
        self._files: list[tuple[Path, int]] = []

    def free(self) -> int:
        return shutil.disk_usage(self._folder).free

    def allocate(self, nbytes: int) -> tuple[torch.Tensor, str]:
        path = self._folder / f"meshrl-{secrets.token_hex(8)}.device"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._files.append((path, descriptor))
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.truncate(descriptor, nbytes)
        whole = torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
        return whole, path.name.encode().hex()

    def close(self) -> None:
        while self._files:
            path, descriptor = self._files.pop()
            path.unlink(missing_ok=True)
            os.close(descriptor)


def _whole(nbytes: int) -> int:
    return -(-nbytes // PIECE) * PIECE
